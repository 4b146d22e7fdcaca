"""The main job, in one call: a scenario in, everything that `distsim simulate` tells out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from distsim.analysis.critical_path import critical_path
from distsim.analysis.timeline import (
    RankTimes,
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

#: Values are worked out for programs of at most so many calls, unless asked for.
MAX_CALLS_WITH_VALUES = 20_000
#: Tensors of up to so many elements that differ are written out to be compared.
MAX_WIDE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Simulation:
    """What came of a scenario. ``verdict`` and `values` are None where they were not asked for."""

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
        """Where the time went."""
        part = self.run.section
        return (
            build_timeline(self.run.trace)
            if part is None
            else unfolded_timeline(part.trace, part.program, self.program)
        )

    @property
    def makespan_ns(self) -> int:
        return self.run.makespan_ns

    @cached_property
    def values(self) -> BufferValues | None:
        """What tensors hold, worked out when it is first asked for. Raises UsageError where a
        tensor's value has none.
        """
        return _compute_values(self.program, self.run.trace) if self.has_values else None

    @cached_property
    def wide_values(self) -> BufferValues | None:
        """The values with more numbers written out than a report needs, to be compared; None where
        there are none.
        """
        return (
            _compute_values(self.program, self.run.trace, limit_elements=MAX_WIDE_ELEMENTS)
            if self.has_values
            else None
        )

    @property
    def iteration_ns(self) -> int | None:
        """Median duration of an iteration after the first; None with a single one."""
        return self.timeline.iteration_ns


def _ignore_progress(_: str) -> None:
    """Nobody watches."""


class SimulateOptions(TypedDict, total=False):
    """What `simulate` may be told besides the scenario."""

    backend: str | None
    cluster: str | Mapping[str, Any] | Cluster | None
    with_verdict: bool
    with_values: bool | None
    ordered: bool
    schedule: ReplaySchedule | None
    max_calls: int | None
    fold: bool | None
    tell: Callable[[str], None]


def simulate(scenario: Scenario, **how: Unpack[SimulateOptions]) -> Simulation:
    """Simulate a scenario under the file's back end and cluster, or under others.

    ``with_verdict``: True where nothing is said. ``with_values``: None has them where the program
    is small. ``ordered`` runs the time-ordered engine even where the fast one is exact.
    ``schedule``: the order of events that a check wrote; receives from any source take the messages
    it names. ``max_calls``: calls that may be simulated, in place of the limits of
    `distsim.program.features`. ``fold``: ranks that do the same are simulated once; None: where the
    program is large. It changes no figure. ``tell`` is called with what is done next, in words.
    Raises ScenarioErrors and UsageError.
    """
    with gc_paused():
        check_world_size(scenario, how.get("max_calls"))
        return _simulate(scenario, how)


def _simulate(scenario: Scenario, how: SimulateOptions) -> Simulation:
    tell, backend, schedule = (
        how.get("tell", _ignore_progress),
        how.get("backend"),
        how.get("schedule"),
    )
    tell("every rank's calls")
    if backend is not None and backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": str(backend)})
    program = lower(scenario)
    cost = cost_model(scenario, program, how.get("cluster"))
    follow = (
        {(*r[:2], r[2]): (*s[:2], s[2]) for r, s in schedule.sender_of.items()}
        if schedule is not None
        else None
    )
    return simulate_program(
        scenario,
        program,
        cost,
        with_verdict=how.get("with_verdict", True),
        with_values=how.get("with_values"),
        ordered=how.get("ordered", False),
        follow=follow,
        tell=tell,
        fold=how.get("fold"),
        max_calls=how.get("max_calls"),
        bounded=True,
    )


def unfolded_timeline(trace: Trace, section: Program, program: Program) -> Timeline:
    """The timeline of a whole program, from the trace of the ranks that stand for all
    (`distsim.semantics.classes.representatives`).
    """
    end = trace.makespan_ns
    times, alike = (
        {one.rank: one for one in rank_times(trace, end)},
        equivalent_groups(section, program),
    )
    said = {of: one[1:] for of, one in times.items()}
    ranks = tuple(
        [RankTimes(rank, *said[of]) for rank, of in enumerate(representative_by_rank(section))]
    )
    told = [
        (one.began_ns, rank, i, one._replace(group=group))
        for i, one in enumerate(collective_totals(trace))
        for rank, group in alike.get(one.group, ())
    ]
    found = tuple(
        times_of_collective(trace, *one[3][:6]) for one in sorted(told, key=lambda one: one[:3])
    )
    return Timeline(end, iteration_ns(trace), ranks, found, critical_path(trace, end))


class SimulateProgramOptions(TypedDict, total=False):
    """What `simulate_program` may be told besides; see `SimulateOptions`."""

    with_verdict: bool
    with_values: bool | None
    ordered: bool
    follow: Mapping[Any, Any] | None
    fold: bool | None
    max_calls: int | None
    bounded: bool
    tell: Callable[[str], None]


def simulate_program(
    scenario: Scenario, program: Program, cost: CostModel, **more: Unpack[SimulateProgramOptions]
) -> Simulation:
    """The same for a program that is there already: lowered from ``scenario``, or made of a trace,
    with what its file would say of it.

    ``follow``: whose message receives from any source take. ``bounded``: refuse more calls than
    `distsim.program.features` allows, or ``max_calls``. See `simulate` for the rest.
    """
    tell, most = more.get("tell", _ignore_progress), more.get("max_calls")
    folded = _simulate_folded(scenario, program, cost, more)
    if folded is not None and (
        _has_no_findings(folded, program) or not is_within_size_limit(program, most)
    ):
        return folded
    if more.get("bounded"):
        check_program_size(program, most)
    tell(f"{program.call_count:,} calls on {program.world_size:,} ranks in simulated time")
    result = run_program(
        program,
        BACKEND_PROFILES[program.backend],
        cost,
        ordered=more.get("ordered", False),
        follow=more.get("follow"),
    )
    return _with_values(_with_verdict(scenario, program, cost, result, more), more)


def _with_values(found: Simulation, more: SimulateProgramOptions) -> Simulation:
    """The same with its values, where they are wanted. Those that have numbers are worked out at
    once, for they may be wrong.
    """
    has = more.get("with_values") is not False and found.program.call_count <= MAX_CALLS_WITH_VALUES
    found = replace(found, has_values=has)
    if has and "numbers" in found.program.features:
        more.get("tell", _ignore_progress)("values")
        assert found.values is not None
    return found


def _simulate_folded(
    scenario: Scenario, program: Program, cost: CostModel, more: SimulateProgramOptions
) -> Simulation | None:
    """The simulation of ranks that stand for all; None where that does not pay, is not wanted, or
    where order decides.
    """
    wanted = more.get("fold")
    if (
        wanted is False
        or more.get("ordered")
        or more.get("follow")
        or (wanted is None and program.call_count <= FOLDING_THRESHOLD_CALLS)
    ):
        return None
    tell = more.get("tell", _ignore_progress)
    tell(f"which of {program.world_size:,} ranks do the same")
    profile = BACKEND_PROFILES[program.backend]
    shared = may_fold_shared_links(program, cost)
    part = representative_program(program, [cost], [profile], shared=shared)
    if part is None:
        return None
    if more.get("bounded"):
        check_program_size(part, more.get("max_calls"))
    tell(
        f"{part.present_calls:,} calls on {len(part.present):,} ranks, which stand for {program.world_size:,}, in simulated time"
    )
    try:
        result = run_program(part, profile, cost, shared=shared)
        found = _with_verdict(scenario, part, cost, result, more)
    except FoldingError:
        return None

    def every_call() -> Trace:
        check_program_size(program, more.get("max_calls"))
        return run_program(program, profile, cost).trace

    whole = expand_run(result, program, every_call)
    left = found.verdict.final_state if found.verdict is not None else None
    left = whole.final_state if left is result.final_state else expand_blocked_state(part, left)
    verdict = found.verdict and replace(found.verdict, final_state=left)
    wide = tuple(replace(f, ranks=part.alike(f.ranks)) for f in found.findings)
    return _with_values(
        replace(found, program=program, run=whole, verdict=verdict, findings=wide), more
    )


def _has_no_findings(found: Simulation, program: Program) -> bool:
    """All is well, and nothing is said that names single ranks of the section."""
    well = found.outcome == "completes" and (found.verdict is None or found.verdict.verdict == "ok")
    of_all = {*program.findings, *_memory_findings(found.scenario, program, found.cost)}
    return well and all(finding in of_all for finding in found.findings)


def _with_verdict(
    scenario: Scenario,
    program: Program,
    cost: CostModel,
    result: SimulatedRun,
    more: SimulateProgramOptions,
) -> Simulation:
    """A run with its verdict and all that there is to say of it, but the values."""
    more.get("tell", _ignore_progress)("the verdict")
    subject = CheckedProgram(program)
    verdict = (
        verdict_of(program, subject=subject, ended=_strict_final_state(program, result))
        if more.get("with_verdict", True)
        else None
    )
    swaps = swap_findings(subject, result.trace)
    outcome = "wrong-data" if swaps and result.outcome == "completes" else result.outcome
    if outcome == "completes" and BACKEND_PROFILES[program.backend].device:
        from distsim.engine.backend_outcomes import undefined_behaviour

        outcome = (
            "completes"
            if undefined_behaviour(program, BACKEND_PROFILES[program.backend], cost) is None
            else "undefined"
        )
    of_contract = (
        *program.findings,
        *_memory_findings(scenario, program, cost),
        *(verdict.findings if verdict else ()),
    )
    found = _deduplicated_findings(
        (*of_contract, *result.findings, *swaps), _backend_findings(subject, result, verdict)
    )
    return Simulation(scenario, program, result, verdict, False, cost, found, outcome)


def swap_findings(subject: CheckedProgram, trace: Trace | None = None) -> tuple[Finding, ...]:
    """Equal calls, and equal messages, that met by their order although others were meant.
    ``trace``: of those that met in this run.
    """
    found = list[Finding]()
    if subject.concerns("swapped_collectives"):
        from distsim.checker.detectors.swapped_collectives import swapped_collective_findings

        found += swapped_collective_findings(subject.program, trace, subject.layout)
    if subject.concerns("swapped_messages"):
        from distsim.checker.detectors.swapped_messages import swapped_message_findings

        found += swapped_message_findings(subject.program, trace, subject.layout)
    return tuple(found)


def _memory_findings(scenario: Scenario, program: Program, cost: CostModel) -> tuple[Finding, ...]:
    """What ranks hold, where the file says anything of it."""
    if not scenario.memory and not program.tensors:
        return ()
    from distsim.checker.detectors.peak_memory import memory_findings

    return memory_findings(scenario, program, cost.cluster)


def _deduplicated_findings(
    found: tuple[Finding, ...], waits: tuple[Finding, ...]
) -> tuple[Finding, ...]:
    if not found and not waits:
        return ()
    from distsim.checker.diagnosis.match_findings import (
        attach_consequences,
        without_repeated_findings,
    )

    return without_repeated_findings(attach_consequences(found, waits))


def _compute_values(program: Program, trace: Trace, **more: Any) -> BufferValues:
    from distsim.values import compute_values

    return compute_values(program, trace, **more)


def _strict_final_state(program: Program, result: SimulatedRun) -> FinalState | None:
    """How a run ended that spares the verdict its first pass: it completed under rules at least as
    strict as the rendezvous reading.

    Those of gloo are: every send is a rendezvous (G1), and a collective that lets nobody leave
    early waits for all; a new_group need not meet there, by the contract it must. The fast engine
    has compared whatever met.
    """
    profile = BACKEND_PROFILES[program.backend]
    if (
        profile.device
        or not profile.rendezvous
        or result.path != "fast"
        or result.outcome != "completes"
        or result.mismatches
    ):
        return None
    if "new groups" in program.features:
        return None
    ops = {
        call.op
        for code in program.codes
        for call in code.distinct_calls()
        if OPERATIONS[call.op].kind == "collective"
    }
    waits_for_all = all(
        profile.needs(op, 4, 0, me) is None for op in sorted(ops) for me in range(4)
    )
    return result.final_state if waits_for_all else None


def _may_refuse(program: Program, result: SimulatedRun) -> bool:
    """Whether a back end may refuse a call: that would be the last one of its rank, and one that
    nobody makes is asked about, too.
    """
    return any(code.guards is not None for code in program.codes) or not made_all_calls(
        program, result.final_state
    )


def _backend_findings(
    subject: CheckedProgram, result: SimulatedRun, verdict: Verdict | None
) -> tuple[Finding, ...]:
    """What the back end alone makes of the program: calls it refuses or reads otherwise, and a
    standstill that the contract has not.
    """
    program, profile, found = (
        subject.program,
        BACKEND_PROFILES[subject.program.backend],
        tuple[Finding, ...](),
    )
    if _may_refuse(program, result) or (subject.concerns("swapped_messages") and not profile.tags):
        from distsim.checker.detectors.backend_support import backend_findings

        found = backend_findings(program, profile, subject.layout)
    if verdict is not None and subject.concerns("lint"):
        from distsim.checker.detectors.lint import lint_findings

        found = (*found, *lint_findings(program, profile, subject.layout))
    if result.outcome == "undefined":
        from distsim.checker.detectors.undefined_behavior import undefined_findings

        found = (*found, *undefined_findings(program, subject.layout, profile))
    told = verdict is not None and (
        verdict.verdict == "invalid" or bool(verdict.final_state and verdict.final_state.blocked)
    )
    refused = any(f.severity == "error" for f in found)
    if told or refused or not result.final_state.blocked:
        return found
    from distsim.checker.diagnosis.hang_findings import diagnose_hang
    from distsim.checker.diagnosis.host_waits import with_host_waits

    left = result.final_state
    return (
        *found,
        *with_host_waits(diagnose_hang(program, left, subject.layout), program, left, profile),
    )


def cost_model(
    scenario: Scenario,
    program: Program,
    cluster: str | Mapping[str, object] | Cluster | None = None,
) -> CostModel:
    """The prices of a scenario's cluster: the one given, else the file's, else the back end's
    default.
    """
    chosen = cluster if cluster is not None else scenario.cluster
    if (
        isinstance(chosen, str)
        and chosen not in PRESETS
        and Path(chosen).suffix in (".yaml", ".yml")
    ):
        chosen = load_cluster(cluster_path(chosen, Path(scenario.file).parent))
    found = default_cluster(program.backend) if chosen is None else cluster_from(chosen)
    return CostModel(found, program.world_size, program.local_size, program.link_faults)


def cluster_path(name: str, folder: Path) -> Path:
    """A cluster's file: looked for beside the scenario, then here."""
    return folder / name if (folder / name).exists() else Path(name)


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a file of its own. Raises ScenarioErrors for what is no YAML, UsageError, with
    the file, for what is no cluster.
    """
    from distsim.scenario import load_mapping

    try:
        return cluster_from(load_mapping(path))
    except UsageError as error:
        raise UsageError(
            "\n".join(f"{path}: {line}" for line in error.message.splitlines()), error.remedy
        ) from None
