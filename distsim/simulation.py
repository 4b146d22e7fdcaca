"""The main job, in one call: a scenario in, everything that `distsim simulate` tells out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from distsim.check.schedule import Schedule
from distsim.check.verdict import Subject, Verdict, made_all_calls, verdict_of
from distsim.cluster import PRESETS, Cluster, cluster_from
from distsim.cost import CostModel
from distsim.critical_path import critical_path
from distsim.engine import Run, may_share, run
from distsim.engine.folded import whole_run, whole_standstill
from distsim.errors import UsageError
from distsim.findings.record import Finding
from distsim.ops.table import OPS
from distsim.profiles import PROFILES, default_cluster
from distsim.program.features import FOLDED_CALLS, bounded_program, bounded_world, fits
from distsim.program.lower import lower
from distsim.program.records import Program
from distsim.records import dataclass, no_collection
from distsim.scenario import Scenario
from distsim.semantics.section import Unfold, alike_groups, section, standing
from distsim.standstill import Standstill
from distsim.timeline import RankTimes, Timeline, collective, iteration_ns, meetings, rank_times, timeline
from distsim.trace import Trace

if TYPE_CHECKING:
    from distsim.values import Values

#: Values are worked out for programs of at most so many calls, unless asked for.
VALUES_CALLS = 20_000
#: Tensors of up to so many elements that differ are written out to be compared.
WIDE_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class Simulation:
    """What came of a scenario. ``verdict`` and `values` are None where they were not asked for."""

    scenario: Scenario
    program: Program
    run: Run
    verdict: Verdict | None
    has_values: bool
    cost: CostModel
    findings: tuple[Finding, ...]
    outcome: str

    @cached_property
    def timeline(self) -> Timeline:
        """Where the time went."""
        part = self.run.section
        return timeline(self.run.trace) if part is None else timeline_by_classes(part.trace, part.program, self.program)

    @property
    def makespan_ns(self) -> int:
        return self.run.makespan_ns

    @cached_property
    def values(self) -> Values | None:
        """What tensors hold, worked out when it is first asked for. Raises UsageError where a tensor's value has none."""
        return _values_of(self.program, self.run.trace) if self.has_values else None

    @cached_property
    def wide_values(self) -> Values | None:
        """The values with more numbers written out than a report needs, to be compared; None where there are none."""
        return _values_of(self.program, self.run.trace, limit_elements=WIDE_ELEMENTS) if self.has_values else None

    @property
    def iteration_ns(self) -> int | None:
        """Median duration of an iteration after the first; None with a single one."""
        return self.timeline.iteration_ns


def _untold(_: str) -> None:
    """Nobody watches."""


class How(TypedDict, total=False):
    """What `simulate` may be told besides the scenario."""

    backend: str | None
    cluster: str | Mapping[str, Any] | Cluster | None
    with_verdict: bool
    with_values: bool | None
    ordered: bool
    schedule: Schedule | None
    max_calls: int | None
    fold: bool | None
    tell: Callable[[str], None]


def simulate(scenario: Scenario, **how: Unpack[How]) -> Simulation:
    """Simulate a scenario under the file's back end and cluster, or under others.

    ``with_verdict``: True where nothing is said. ``with_values``: None has them where the program is small. ``ordered`` runs the
    time-ordered engine even where the fast one is exact. ``schedule``: the order of events that a check wrote; receives from any source
    take the messages it names. ``max_calls``: calls that may be simulated, in place of the limits of `distsim.program.features`.
    ``fold``: ranks that do the same are simulated once; None: where the program is large. It changes no figure.
    ``tell`` is called with what is done next, in words. Raises ScenarioErrors and UsageError.
    """
    with no_collection():
        bounded_world(scenario, how.get("max_calls"))
        return _simulate(scenario, how)


def _simulate(scenario: Scenario, how: How) -> Simulation:
    tell, backend, schedule = how.get("tell", _untold), how.get("backend"), how.get("schedule")
    tell("every rank's calls")
    if backend is not None and backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": str(backend)})
    program = lower(scenario)
    cost = cost_model(scenario, program, how.get("cluster"))
    follow = {(*r[:2], r[2]): (*s[:2], s[2]) for r, s in schedule.sender_of.items()} if schedule is not None else None
    return simulate_program(
        scenario, program, cost, with_verdict=how.get("with_verdict", True), with_values=how.get("with_values"),
        ordered=how.get("ordered", False), follow=follow, tell=tell, fold=how.get("fold"), max_calls=how.get("max_calls"),
        bounded=True,
    )  # fmt: skip


def timeline_by_classes(trace: Trace, section: Program, program: Program) -> Timeline:
    """The timeline of a whole program, from the trace of the ranks that stand for all (`distsim.semantics.section`)."""
    end = trace.makespan_ns
    times, alike = {one.rank: one for one in rank_times(trace, end)}, alike_groups(section, program)
    said = {of: one[1:] for of, one in times.items()}
    ranks = tuple([RankTimes(rank, *said[of]) for rank, of in enumerate(standing(section))])
    told = [(one.began_ns, rank, i, one._replace(group=group))
            for i, one in enumerate(meetings(trace)) for rank, group in alike.get(one.group, ())]  # fmt: skip
    found = tuple(collective(trace, *one[3][:6]) for one in sorted(told, key=lambda one: one[:3]))
    return Timeline(end, iteration_ns(trace), ranks, found, critical_path(trace, end))


class More(TypedDict, total=False):
    """What `simulate_program` may be told besides; see `How`."""

    with_verdict: bool
    with_values: bool | None
    ordered: bool
    follow: Mapping[Any, Any] | None
    fold: bool | None
    max_calls: int | None
    bounded: bool
    tell: Callable[[str], None]


def simulate_program(scenario: Scenario, program: Program, cost: CostModel, **more: Unpack[More]) -> Simulation:
    """The same for a program that is there already: lowered from ``scenario``, or made of a trace, with what its file would say of it.

    ``follow``: whose message receives from any source take. ``bounded``: refuse more calls than `distsim.program.features` allows, or
    ``max_calls``. See `simulate` for the rest.
    """
    tell, most = more.get("tell", _untold), more.get("max_calls")
    folded = _folded(scenario, program, cost, more)
    if folded is not None and (_is_clear(folded, program) or not fits(program, most)):
        return folded
    if more.get("bounded"):
        bounded_program(program, most)
    tell(f"{program.call_count:,} calls on {program.world_size:,} ranks in simulated time")
    result = run(program, PROFILES[program.backend], cost, ordered=more.get("ordered", False), follow=more.get("follow"))
    return _with_values(_judged(scenario, program, cost, result, more), more)


def _with_values(found: Simulation, more: More) -> Simulation:
    """The same with its values, where they are wanted. Those that have numbers are worked out at once, for they may be wrong."""
    has = more.get("with_values") is not False and found.program.call_count <= VALUES_CALLS
    found = replace(found, has_values=has)
    if has and "numbers" in found.program.features:
        more.get("tell", _untold)("values")
        assert found.values is not None
    return found


def _folded(scenario: Scenario, program: Program, cost: CostModel, more: More) -> Simulation | None:
    """The simulation of ranks that stand for all; None where that does not pay, is not wanted, or where order decides."""
    wanted = more.get("fold")
    if wanted is False or more.get("ordered") or more.get("follow") or (wanted is None and program.call_count <= FOLDED_CALLS):
        return None
    tell = more.get("tell", _untold)
    tell(f"which of {program.world_size:,} ranks do the same")
    profile = PROFILES[program.backend]
    shared = may_share(program, cost)
    part = section(program, [cost], [profile], shared=shared)
    if part is None:
        return None
    if more.get("bounded"):
        bounded_program(part, more.get("max_calls"))
    tell(
        f"{part.present_calls:,} calls on {len(part.present):,} ranks, which stand for {program.world_size:,}, in simulated time"
    )
    try:
        result = run(part, profile, cost, shared=shared)
        found = _judged(scenario, part, cost, result, more)
    except Unfold:
        return None

    def every_call() -> Trace:
        bounded_program(program, more.get("max_calls"))
        return run(program, profile, cost).trace

    whole = whole_run(result, program, every_call)
    left = found.verdict.standstill if found.verdict is not None else None
    left = whole.standstill if left is result.standstill else whole_standstill(part, left)
    verdict = found.verdict and replace(found.verdict, standstill=left)
    wide = tuple(replace(f, ranks=part.alike(f.ranks)) for f in found.findings)
    return _with_values(replace(found, program=program, run=whole, verdict=verdict, findings=wide), more)


def _is_clear(found: Simulation, program: Program) -> bool:
    """All is well, and nothing is said that names single ranks of the section."""
    well = found.outcome == "completes" and (found.verdict is None or found.verdict.verdict == "ok")
    of_all = {*program.findings, *_of_memory(found.scenario, program, found.cost)}
    return well and all(finding in of_all for finding in found.findings)


def _judged(scenario: Scenario, program: Program, cost: CostModel, result: Run, more: More) -> Simulation:
    """A run with its verdict and all that there is to say of it, but the values."""
    more.get("tell", _untold)("the verdict")
    subject = Subject(program)
    verdict = verdict_of(program, subject=subject, ended=_ended(program, result)) if more.get("with_verdict", True) else None
    swaps = swaps_of(subject, result.trace)
    outcome = "wrong-data" if swaps and result.outcome == "completes" else result.outcome
    if outcome == "completes" and PROFILES[program.backend].device:
        from distsim.engine.outcomes import left_open

        outcome = "completes" if left_open(program, PROFILES[program.backend], cost) is None else "undefined"
    of_contract = (*program.findings, *_of_memory(scenario, program, cost), *(verdict.findings if verdict else ()))
    found = _told_once((*of_contract, *result.findings, *swaps), _of_backend(subject, result, verdict))
    return Simulation(scenario, program, result, verdict, False, cost, found, outcome)


def swaps_of(subject: Subject, trace: Trace | None = None) -> tuple[Finding, ...]:
    """Equal calls, and equal messages, that met by their order although others were meant. ``trace``: of those that met in this run."""
    found = list[Finding]()
    if subject.concerns("names"):
        from distsim.check.names import name_swaps

        found += name_swaps(subject.program, trace, subject.layout)
    if subject.concerns("messages"):
        from distsim.check.messages import message_swaps

        found += message_swaps(subject.program, trace, subject.layout)
    return tuple(found)


def _of_memory(scenario: Scenario, program: Program, cost: CostModel) -> tuple[Finding, ...]:
    """What ranks hold, where the file says anything of it."""
    if not scenario.memory and not program.tensors:
        return ()
    from distsim.check.memory import memory_findings

    return memory_findings(scenario, program, cost.cluster)


def _told_once(found: tuple[Finding, ...], waits: tuple[Finding, ...]) -> tuple[Finding, ...]:
    if not found and not waits:
        return ()
    from distsim.check.judge import fold_waits, untold

    return untold(fold_waits(found, waits))


def _values_of(program: Program, trace: Trace, **more: Any) -> Values:
    from distsim.values import compute_values

    return compute_values(program, trace, **more)


def _ended(program: Program, result: Run) -> Standstill | None:
    """How a run ended that spares the verdict its first pass: it completed under rules at least as strict as the rendezvous reading.

    Those of gloo are: every send is a rendezvous (G1), and a collective that lets nobody leave early waits for all; a new_group need
    not meet there, by the contract it must. The fast engine has compared whatever met.
    """
    profile = PROFILES[program.backend]
    if profile.device or not profile.rendezvous or result.path != "fast" or result.outcome != "completes" or result.mismatches:
        return None
    if "new groups" in program.features:
        return None
    ops = {call.op for code in program.codes for call in code.distinct_calls() if OPS[call.op].kind == "collective"}
    waits_for_all = all(profile.needs(op, 4, 0, me) is None for op in sorted(ops) for me in range(4))
    return result.standstill if waits_for_all else None


def _may_refuse(program: Program, result: Run) -> bool:
    """Whether a back end may refuse a call: that would be the last one of its rank, and one that nobody makes is asked about, too."""
    return any(code.guards is not None for code in program.codes) or not made_all_calls(program, result.standstill)


def _of_backend(subject: Subject, result: Run, verdict: Verdict | None) -> tuple[Finding, ...]:
    """What the back end alone makes of the program: calls it refuses or reads otherwise, and a standstill that the contract has not."""
    program, profile, found = subject.program, PROFILES[subject.program.backend], tuple[Finding, ...]()
    if _may_refuse(program, result) or (subject.concerns("messages") and not profile.tags):
        from distsim.check.backends import backend_findings

        found = backend_findings(program, profile, subject.layout)
    if verdict is not None and subject.concerns("remarks"):
        from distsim.check.remarks import remarks

        found = (*found, *remarks(program, profile, subject.layout))
    if result.outcome == "undefined":
        from distsim.check.undefined import undefined_findings

        found = (*found, *undefined_findings(program, subject.layout, profile))
    told = verdict is not None and (verdict.verdict == "invalid" or bool(verdict.standstill and verdict.standstill.blocked))
    refused = any(f.severity == "error" for f in found)
    if told or refused or not result.standstill.blocked:
        return found
    from distsim.check.diagnose import diagnose
    from distsim.check.host_waits import with_host_waits

    left = result.standstill
    return (*found, *with_host_waits(diagnose(program, left, subject.layout), program, left, profile))


def cost_model(scenario: Scenario, program: Program, cluster: str | Mapping[str, object] | Cluster | None = None) -> CostModel:
    """The prices of a scenario's cluster: the one given, else the file's, else the back end's default."""
    chosen = cluster if cluster is not None else scenario.cluster
    if isinstance(chosen, str) and chosen not in PRESETS and Path(chosen).suffix in (".yaml", ".yml"):
        chosen = cluster_of_file(cluster_path(chosen, Path(scenario.file).parent))
    found = default_cluster(program.backend) if chosen is None else cluster_from(chosen)
    return CostModel(found, program.world_size, program.local_size, program.link_faults)


def cluster_path(name: str, folder: Path) -> Path:
    """A cluster's file: looked for beside the scenario, then here."""
    return folder / name if (folder / name).exists() else Path(name)


def cluster_of_file(path: str | Path) -> Cluster:
    """The cluster in a file of its own. Raises ScenarioErrors for what is no YAML, UsageError, with the file, for what is no cluster."""
    from distsim.scenario import load_mapping

    try:
        return cluster_from(load_mapping(path))
    except UsageError as error:
        raise UsageError("\n".join(f"{path}: {line}" for line in error.message.splitlines()), error.remedy) from None
