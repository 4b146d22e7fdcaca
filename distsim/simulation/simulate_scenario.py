"""Simulate a scenario: everything that `distsim simulate` reports, in one call.

A simulation lowers the scenario, runs the program under one backend, and adds the verdict (which
covers all backends), findings and values. Large programs are folded: ranks with equal roles are
simulated once, and the result is extended to all ranks. Imports of detectors and values are lazy,
because most programs need none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from distsim.analysis.critical_path import critical_path
from distsim.analysis.timeline import (
    Timeline,
    build_timeline,
    collective_totals,
    iteration_ns,
    rank_times,
    times_of_collective,
)
from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.checker.checked_program import CheckedProgram, made_all_calls
from distsim.checker.replay_schedule import ReplaySchedule
from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.errors import UsageError
from distsim.common.records import dataclass, gc_paused
from distsim.engine import SimulatedRun, may_fold_shared_links, run_program
from distsim.engine.expand_folded import expand_blocked_state, expand_run
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.hardware.cluster import PRESETS, Cluster, cluster_from
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.program.size_limits import (
    FOLDING_THRESHOLD_CALLS,
    check_program_size,
    check_world_size,
    is_within_size_limit,
)
from distsim.scenario import Scenario
from distsim.semantics.classes.representatives import (
    FoldingError,
    equivalent_groups,
    representative_by_rank,
    representative_program,
)
from distsim.trace.model import Trace

if TYPE_CHECKING:
    from distsim.values import BufferValues

#: By default, values are computed for programs of at most this many calls.
MAX_CALLS_WITH_VALUES = 20_000
#: The outcome of a captured script whose ranks never communicated.
EACH_RANK_RAN_ALONE = "each rank ran alone"
#: `Simulation.wide_values` writes out differing tensors of up to this many elements.
MAX_WIDE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Simulation:
    """The result of simulating a scenario.

    ``verdict`` and `values` are None if they were not asked for. After folding, ``program`` and
    ``run`` are those of all ranks.
    """

    scenario: Scenario
    program: Program
    run: SimulatedRun
    verdict: Verdict | None
    has_values: bool
    cost: CostModel
    findings: tuple[Finding, ...]
    outcome: str

    @cached_property
    def timeline(self) -> Timeline:
        """Where the time was spent."""
        section = self.run.section
        if section is None:
            return build_timeline(self.run.trace)
        return unfolded_timeline(section.trace, section.program, self.program)

    @property
    def makespan_ns(self) -> int:
        return self.run.makespan_ns

    @cached_property
    def possible_outcomes(self) -> tuple[str, ...]:
        """The outcome of this run, then those of other orders of events on the same backend."""
        if self.verdict is None or self.verdict.depends_on != "schedule":
            return (self.outcome,)
        from distsim.engine.backend_outcomes import backend_outcome

        found = backend_outcome(self.program, BACKEND_PROFILES[self.run.profile], self.cost)
        return tuple(dict.fromkeys((self.outcome, *found.possible)))

    @cached_property
    def values(self) -> BufferValues | None:
        """The contents of tensors, computed on first use.

        Raises UsageError if the value of a tensor cannot be computed.
        """
        return _compute_values(self.program, self.run.trace) if self.has_values else None

    @cached_property
    def wide_values(self) -> BufferValues | None:
        """The values with more elements written out than reports need, for comparisons."""
        if not self.has_values:
            return None
        return _compute_values(self.program, self.run.trace, limit_elements=MAX_WIDE_ELEMENTS)

    @property
    def iteration_ns(self) -> int | None:
        """Median duration of an iteration after the first; None with a single one."""
        return self.timeline.iteration_ns

    def status(self, strict: bool = False) -> int:
        """The exit status.

        0 if the outcome is `completes`, no finding is an error and the memory suffices; else 1.
        ``strict``: a leak, or a search that stopped at its bound, gives 1 as well. DS806 (the ranks
        need more memory than their device has) gives 1 whatever its severity.
        """
        if self.outcome != "completes":
            return 1
        if any(f.severity == "error" or f.code == "DS806" for f in self.findings):
            return 1
        if strict and self.verdict is not None:
            return int(self.verdict.verdict == "leak" or not self.verdict.complete)
        return 0


# --- options ---
class _RunOptions(TypedDict, total=False):
    """The options that `simulate` and `simulate_program` share."""

    with_verdict: bool
    with_values: bool | None
    ordered: bool
    max_calls: int | None
    fold: bool | None
    tell: Callable[[str], None]


class SimulateOptions(_RunOptions, total=False):
    """The options of `simulate`."""

    backend: str | None
    cluster: str | Mapping[str, Any] | Cluster | None
    schedule: ReplaySchedule | None


class SimulateProgramOptions(_RunOptions, total=False):
    """The options of `simulate_program`."""

    follow: Mapping[Any, Any] | None
    bounded: bool


def _ignore_progress(_: str) -> None:
    """The default of ``tell``."""


# --- simulating ---
def simulate(scenario: Scenario, **options: Unpack[SimulateOptions]) -> Simulation:
    """Simulate a scenario under its backend and cluster, or under others.

    ``with_verdict``: default True. ``with_values``: by default, values are computed if the program
    is small. ``ordered``: use the time-ordered engine even if the fast one is exact. ``schedule``:
    an event order that a check wrote; any-source receives take the messages it names.
    ``max_calls``: calls that may be simulated, instead of the limits of
    `distsim.program.features`. ``fold``: simulate ranks with equal roles once; by default, if the
    program is large. Folding changes no figure. ``tell`` is called with a description of each
    step.

    Raises ScenarioErrors and UsageError.
    """
    with gc_paused():
        check_world_size(scenario, options.get("max_calls"))
        return _simulate(scenario, options)


def _simulate(scenario: Scenario, options: SimulateOptions) -> Simulation:
    report_progress = options.get("tell", _ignore_progress)
    backend, schedule = options.get("backend"), options.get("schedule")
    report_progress("every rank's calls")
    if backend is not None and backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": str(backend)})
    program = lower(scenario)
    cost = cost_model(scenario, program, options.get("cluster"))
    follow = None
    if schedule is not None:
        follow = {tuple(receive): tuple(send) for receive, send in schedule.sender_of.items()}
    return simulate_program(
        scenario,
        program,
        cost,
        with_verdict=options.get("with_verdict", True),
        with_values=options.get("with_values"),
        ordered=options.get("ordered", False),
        follow=follow,
        tell=report_progress,
        fold=options.get("fold"),
        max_calls=options.get("max_calls"),
        bounded=True,
    )


def simulate_program(
    scenario: Scenario,
    program: Program,
    cost: CostModel,
    **options: Unpack[SimulateProgramOptions],
) -> Simulation:
    """Simulate a program that was lowered from ``scenario``, or made of a trace.

    In the latter case ``scenario`` has what a scenario file would say about it. ``follow``: which
    message each any-source receive takes. ``bounded``: refuse more calls than
    `distsim.program.features`, or ``max_calls``, allows. See `simulate` for the other options.
    """
    report_progress = options.get("tell", _ignore_progress)
    max_calls = options.get("max_calls")
    folded = _simulate_folded(scenario, program, cost, options)
    if folded is not None:
        # Findings of a folded program name only representative ranks, so a program with findings
        # is simulated with all ranks, if that is possible.
        is_too_large = not is_within_size_limit(program, max_calls)
        if is_too_large or _has_no_findings(folded, program):
            return folded
    if options.get("bounded"):
        check_program_size(program, max_calls)
    report_progress(
        f"{program.call_count:,} calls on {program.world_size:,} ranks in simulated time"
    )
    result = run_program(
        program,
        BACKEND_PROFILES[program.backend],
        cost,
        ordered=options.get("ordered", False),
        follow=options.get("follow"),
    )
    simulation = _with_verdict(scenario, program, cost, result, options)
    return _with_values(simulation, options)


def _with_values(simulation: Simulation, options: SimulateProgramOptions) -> Simulation:
    """The simulation with its values, if they are wanted.

    Values that are numbers are computed at once, because they may be invalid.
    """
    program = simulation.program
    is_small = program.call_count <= MAX_CALLS_WITH_VALUES
    has_values = options.get("with_values") is not False and is_small
    simulation = replace(simulation, has_values=has_values)
    if has_values and "numbers" in program.features:
        options.get("tell", _ignore_progress)("values")
        assert simulation.values is not None
    return simulation


# --- folding ---
def _is_folding_allowed(program: Program, options: SimulateProgramOptions) -> bool:
    if options.get("ordered") or options.get("follow"):
        return False
    wanted = options.get("fold")
    return program.call_count > FOLDING_THRESHOLD_CALLS if wanted is None else wanted


def _simulate_folded(
    scenario: Scenario, program: Program, cost: CostModel, options: SimulateProgramOptions
) -> Simulation | None:
    """The simulation of the representative ranks, extended to all ranks.

    None if folding does not pay, is not wanted, or cannot reproduce the result of all ranks.
    """
    if not _is_folding_allowed(program, options):
        return None
    report_progress = options.get("tell", _ignore_progress)
    report_progress(f"which of {program.world_size:,} ranks do the same")
    profile = BACKEND_PROFILES[program.backend]
    shared = may_fold_shared_links(program, cost)
    section = representative_program(program, [cost], [profile], shared=shared)
    if section is None:
        return None
    if options.get("bounded"):
        check_program_size(section, options.get("max_calls"))
    report_progress(
        f"{section.present_calls:,} calls on {len(section.present):,} ranks, which represent "
        f"{program.world_size:,}, in simulated time"
    )
    try:
        result = run_program(section, profile, cost, shared=shared)
        simulation = _with_verdict(scenario, section, cost, result, options)
    except FoldingError:
        return None

    def full_trace() -> Trace:
        check_program_size(program, options.get("max_calls"))
        return run_program(program, profile, cost).trace

    run = expand_run(result, program, full_trace)
    verdict = simulation.verdict
    if verdict is not None:
        final_state: FinalState | None = run.final_state
        if verdict.final_state is not result.final_state:
            final_state = expand_blocked_state(section, verdict.final_state)
        verdict = replace(verdict, final_state=final_state)
    findings = tuple(
        replace(finding, ranks=section.alike(finding.ranks)) for finding in simulation.findings
    )
    expanded = replace(simulation, program=program, run=run, verdict=verdict, findings=findings)
    return _with_values(expanded, options)


def _has_no_findings(simulation: Simulation, program: Program) -> bool:
    """Whether the program is correct, and no finding names single representative ranks."""
    verdict = simulation.verdict
    if simulation.outcome != "completes" or (verdict is not None and verdict.verdict != "ok"):
        return False
    memory = _memory_findings(simulation.scenario, program, simulation.cost)
    of_all_ranks = {*program.findings, *memory}
    return of_all_ranks.issuperset(simulation.findings)


def unfolded_timeline(trace: Trace, section: Program, program: Program) -> Timeline:
    """The timeline of a whole program, from the trace of its representative ranks.

    See `distsim.semantics.classes.representatives`.
    """
    end = trace.makespan_ns
    times_of = {times.rank: times for times in rank_times(trace, end)}
    ranks = tuple(
        times_of[representative]._replace(rank=rank)
        for rank, representative in enumerate(representative_by_rank(section))
    )
    groups_like = equivalent_groups(section, program)
    collectives = []
    for index, total in enumerate(collective_totals(trace)):
        for rank, group in groups_like.get(total.group, ()):
            order = (total.began_ns, rank, index)
            collectives.append((order, total._replace(group=group)))
    collectives.sort(key=lambda entry: entry[0])
    times = tuple(times_of_collective(trace, *total[:6]) for _, total in collectives)
    return Timeline(end, iteration_ns(trace), ranks, times, critical_path(trace, end))


# --- verdict and findings ---
def _with_verdict(
    scenario: Scenario,
    program: Program,
    cost: CostModel,
    result: SimulatedRun,
    options: SimulateProgramOptions,
) -> Simulation:
    """A run with its verdict, outcome and findings, but without values."""
    options.get("tell", _ignore_progress)("the verdict")
    subject = CheckedProgram(program)
    verdict = None
    if options.get("with_verdict", True):
        known_end = _strict_final_state(program, result)
        verdict = verdict_of(program, subject=subject, ended=known_end)
    swaps = swap_findings(subject, result.trace)
    found = (
        *program.findings,
        *_memory_findings(scenario, program, cost),
        *(verdict.findings if verdict else ()),
        *result.findings,
        *swaps,
    )
    outcome = _outcome(program, cost, result, bool(swaps))
    on_backend = _backend_findings(subject, result, verdict, outcome)
    findings = _deduplicated_findings(found, on_backend)
    return Simulation(scenario, program, result, verdict, False, cost, findings, outcome)


def _outcome(program: Program, cost: CostModel, result: SimulatedRun, has_swaps: bool) -> str:
    if result.outcome != "completes":
        return result.outcome
    if has_swaps:
        return "wrong-data"
    profile = BACKEND_PROFILES[program.backend]
    if not profile.device:
        return "completes"
    from distsim.engine.backend_outcomes import undefined_behaviour

    is_defined = undefined_behaviour(program, profile, cost) is None
    return "completes" if is_defined else "undefined"


def swap_findings(subject: CheckedProgram, trace: Trace | None = None) -> tuple[Finding, ...]:
    """Equal collectives and messages that met in an order other than the one meant.

    ``trace``: only those that met in this run.
    """
    found: list[Finding] = []
    if subject.concerns("swapped_collectives"):
        from distsim.checker.detectors.swapped_collectives import swapped_collective_findings

        found += swapped_collective_findings(subject.program, trace, subject.layout)
    if subject.concerns("swapped_messages"):
        from distsim.checker.detectors.swapped_messages import swapped_message_findings

        found += swapped_message_findings(subject.program, trace, subject.layout)
    return tuple(found)


def _memory_findings(scenario: Scenario, program: Program, cost: CostModel) -> tuple[Finding, ...]:
    """Findings on peak memory, if the scenario says anything about memory."""
    if not scenario.memory and not program.tensors:
        return ()
    from distsim.checker.detectors.peak_memory import memory_findings

    return memory_findings(scenario, program, cost.cluster)


def _deduplicated_findings(
    found: tuple[Finding, ...], hangs: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    if not found and not hangs:
        return ()
    from distsim.checker.diagnosis.match_findings import (
        attach_consequences,
        without_repeated_findings,
    )

    return without_repeated_findings(attach_consequences(found, hangs))


def _compute_values(program: Program, trace: Trace, **options: Any) -> BufferValues:
    from distsim.values import compute_values

    return compute_values(program, trace, **options)


def _strict_final_state(program: Program, result: SimulatedRun) -> FinalState | None:
    """The final state of a run that replaces the verdict's run under ``rendezvous``.

    The run must have completed under rules at least as strict. Those of gloo are: every send is a
    rendezvous (semantics G1), and a collective from which no rank returns early waits for all. But
    a new_group need not meet on gloo, while by the contract it must. Only the fast engine has
    compared everything that met.
    """
    profile = BACKEND_PROFILES[program.backend]
    if profile.device or not profile.rendezvous or "new groups" in program.features:
        return None
    if result.driver != "local clocks" or result.outcome != "completes" or result.mismatches:
        return None
    if "requests" in program.features:
        from distsim.checker.detectors.request_leaks import request_leaks

        # By the contract, a process may end before a request that it never waited for is done.
        ends = result.final_state.ends
        exits_early = any(end.position < len(program.code(end.rank).calls) for end in ends)
        if exits_early or request_leaks(program, result.final_state):
            return None
    for op in sorted(_collective_ops(program)):
        # A group of four ranks with root 0 shows whether any member may return early.
        if any(profile.needs(op, 4, 0, member) is not None for member in range(4)):
            return None
    return result.final_state


def _collective_ops(program: Program) -> set[str]:
    ops = {call.op for code in program.codes for call in code.distinct_calls()}
    return {op for op in ops if OPERATIONS[op].kind == "collective"}


def _may_refuse(program: Program, result: SimulatedRun) -> bool:
    """Whether the backend may refuse a call.

    A refused call is the last one of its rank. Calls that no rank makes are checked, too.
    """
    if any(code.guards is not None for code in program.codes):
        return True
    return not made_all_calls(program, result.final_state)


def _backend_findings(
    subject: CheckedProgram, result: SimulatedRun, verdict: Verdict | None, outcome: str
) -> tuple[Finding, ...]:
    """Findings on this backend: calls it refuses or treats differently, and hangs of its own.

    ``outcome``: that of the simulation, which may be "undefined" although the run completes.
    """
    program, profile = subject.program, BACKEND_PROFILES[subject.program.backend]
    found: tuple[Finding, ...] = ()
    ignores_tags = subject.concerns("swapped_messages") and not profile.tags
    if ignores_tags or _may_refuse(program, result):
        from distsim.checker.detectors.backend_support import backend_findings

        found = backend_findings(program, profile, subject.layout)
    if verdict is not None and subject.concerns("lint"):
        from distsim.checker.detectors.lint import lint_findings

        found = (*found, *lint_findings(program, profile, subject.layout))
    if outcome == "undefined":
        from distsim.checker.detectors.undefined_behavior import undefined_findings

        found = (*found, *undefined_findings(program, subject.layout, profile))
    final_state = result.final_state
    is_refused = any(finding.severity == "error" for finding in found)
    if is_refused or not final_state.blocked or _explains_hang(verdict):
        return found
    from distsim.checker.diagnosis.hang_findings import diagnose_hang
    from distsim.checker.diagnosis.host_waits import with_host_waits

    hangs = diagnose_hang(program, final_state, subject.layout)
    return (*found, *with_host_waits(hangs, program, final_state, profile))


def _explains_hang(verdict: Verdict | None) -> bool:
    """Whether the findings of the verdict already say why ranks are blocked."""
    if verdict is None:
        return False
    if verdict.verdict == "invalid":
        return True
    return verdict.final_state is not None and bool(verdict.final_state.blocked)


# --- clusters ---
def cost_model(
    scenario: Scenario,
    program: Program,
    cluster: str | Mapping[str, object] | Cluster | None = None,
) -> CostModel:
    """The costs of a cluster: the one given, or else the scenario's, or the backend's default."""
    chosen = cluster if cluster is not None else scenario.cluster
    if isinstance(chosen, str) and _is_cluster_file(chosen):
        chosen = load_cluster(cluster_path(chosen, Path(scenario.file).parent))
    found = default_cluster(program.backend) if chosen is None else cluster_from(chosen)
    return CostModel(found, program.world_size, program.local_size, program.link_faults)


def _is_cluster_file(name: str) -> bool:
    return name not in PRESETS and Path(name).suffix in (".yaml", ".yml")


def cluster_path(name: str, folder: Path) -> Path:
    """The path of a cluster file: next to the scenario if it exists there, else as given."""
    return folder / name if (folder / name).exists() else Path(name)


def load_cluster(path: str | Path) -> Cluster:
    """Load a cluster file.

    Raises ScenarioErrors if it is not YAML, and UsageError, with the file's name, if it is not a
    cluster.
    """
    from distsim.scenario import load_mapping

    try:
        return cluster_from(load_mapping(path))
    except UsageError as error:
        raise UsageError(
            "\n".join(f"{path}: {line}" for line in error.message.splitlines()), error.remedy
        ) from None
