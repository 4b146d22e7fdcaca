"""From a captured run to what `simulate` says of it, and to what only the run itself knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.backends import default_cluster
from distsim.checker.verdict import Verdict
from distsim.common.records import gc_paused
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.hardware.cluster import PRESETS, Cluster, cluster_from
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.script_capture.hub.matching import calls_agree
from distsim.script_capture.hub.state import PendingReply, RankProcess
from distsim.script_capture.hub.state import Place as Where
from distsim.script_capture.launch.parent_process import CapturedRun
from distsim.script_capture.rank.call_sites import NO_CALL_SITE, source_text
from distsim.script_capture.result.build_program import build_program, world_backend
from distsim.script_capture.result.recorded_calls import BLOCKING_NAMES
from distsim.script_capture.result.thread_order import (
    ThreadOrder,
    calling_threads,
    is_multithreaded,
)
from distsim.script_capture.result.torch_messages import in_torch_terms, with_backward_explanation
from distsim.simulation.simulate_scenario import (
    Simulation,
    cost_model,
    load_cluster,
    simulate_program,
)

#: Steps of a rank that it does not call.
_UNCALLED_OPS = ("compute", "fail", "exit")
#: What a rank waits for that is no call.
STORE_KEY = "a key of the store"
#: Orders of calls of threads that are tried where the one in which they met does not come through.
_RELAXED_ORDERS: tuple[ThreadOrder, ThreadOrder] = ("early", "apart")


@dataclass(frozen=True)
class CapturedRankStatus:
    """Where a rank is when all is over. ``state``: ended, raised, exited, killed, waits, runs."""

    rank: int
    state: str
    what: str
    place: Where

    @property
    def source(self) -> str:
        """The text of the line."""
        return source_text(self.place[0], self.place[1])


@dataclass(frozen=True)
class CaptureResult:
    """``simulation``: the calls under the back end's rules. ``calls``: how many the ranks made.

    ``threaded``: ranks of which several threads made calls; one order of these was judged.
    ``worlds``: how many the script started, one after the other; this is the first that does not
    come through, or the last.
    """

    captured: CapturedRun
    simulation: Simulation
    stands: tuple[CapturedRankStatus, ...]
    calls: int
    threaded: tuple[int, ...] = ()
    worlds: int = 1

    @property
    def outcome(self) -> str:
        return self.simulation.outcome


def _capture_outcome(captured: CapturedRun, simulation: Simulation) -> str:
    """The simulation's, unless the run came to no end for a reason that is no call."""
    if captured.ended == "late":
        return "undecided"
    if simulation.outcome != "completes":
        return simulation.outcome
    ends = {
        m.ended.how for m in (*captured.ranks.values(), *captured.others) if m.ended is not None
    }
    if "raised" in ends or "exited" in ends:  # outside of all calls, as on an import
        return "raises"
    stuck = captured.ended == "stalled" and not has_mismatched_collective(captured)
    return "crashes" if "killed" in ends else "hangs" if stuck else "completes"


def has_mismatched_collective(captured: CapturedRun) -> bool:
    """Did the run stop where members of a collective made calls that do not fit? A back end may go
    on there with data that nobody knows.
    """
    waiting = (
        question.call for member in captured.ranks.values() for question in member.waiting.values()
    )
    return any(
        not calls_agree(call, other)
        for call in waiting
        if call is not None and call.gathering is not None
        for other in call.gathering.there.values()
    )


def _all_exited_normally(captured: CapturedRun, outcome: str) -> bool:
    """Did every process come to its end by itself, or stand where the back end's refusal
    (`outcome`) had ended a rank before?
    """
    ends = [m.ended for m in (*captured.ranks.values(), *captured.others)]
    refused = captured.ended == "stalled" and outcome == "raises"
    return (captured.ended == "ended" or refused) and all(
        end is None or end.how == "ended" for end in ends
    )


def evaluate_capture(
    captured: CapturedRun,
    *,
    backend: str | None = None,
    cluster: str | Mapping[str, object] | Cluster | None = None,
) -> CaptureResult:
    """What the back end makes of the captured calls. ``backend``: None takes the one that the
    script asked for.
    """
    for world in captured.past:
        judged = evaluate_capture(world, backend=backend, cluster=cluster)
        if judged.outcome != "completes" or not _completes(judged.simulation):
            return replace(judged, worlds=len(captured.past) + 1)
    with gc_paused():
        simulation = _simulate_capture(
            captured, backend or world_backend(captured.ranks.values()), cluster
        )
    program = simulation.program
    made = sum(
        bool(program.sites[call.site].line) and call.op not in _UNCALLED_OPS
        for code in program.codes
        for call in code.calls
    )
    found = replace(simulation, findings=in_torch_terms(simulation.findings))
    outcome, verdict = _capture_outcome(captured, simulation), simulation.verdict
    if outcome != simulation.outcome or (
        not _all_exited_normally(captured, simulation.outcome)
        and verdict is not None
        and verdict.verdict == "ok"
    ):
        found = replace(
            found, outcome=outcome, verdict=None
        )  # what no rule knows of ended a rank or held it, or time ran out
    where = rank_statuses(captured, program)
    found = replace(found, findings=with_backward_explanation(found.findings, where))
    if outcome == "hangs":
        found = with_store_key_findings(found, where)
    return CaptureResult(
        captured, found, where, made, _multithreaded_ranks(captured), len(captured.past) + 1
    )


def _simulate_capture(
    captured: CapturedRun, backend: str, cluster: str | Mapping[str, object] | Cluster | None
) -> Simulation:
    """The calls of each rank in the order in which they met. Where that does not come through, but
    the run did and threads made them: in one that does, unless some thread would stand even if no
    other ever waited."""
    first = _simulate_in_order(captured, backend, cluster, "met")
    if captured.ended != "ended" or _completes(first) or not _multithreaded_ranks(captured):
        return first
    early, apart = (
        _simulate_in_order(captured, backend, cluster, order) for order in _RELAXED_ORDERS
    )
    if _completes(early) or not _completes(apart):
        return early if _completes(early) else first
    alone = (
        _simulate_in_order(captured, backend, cluster, lane)
        for lane in calling_threads(captured.evaluated_ranks.values())
    )
    return apart if all(_completes(one) for one in alone) else first


def _completes(simulation: Simulation) -> bool:
    return simulation.outcome != "hangs" and (
        simulation.verdict is None or simulation.verdict.verdict != "deadlock"
    )


def _multithreaded_ranks(captured: CapturedRun) -> tuple[int, ...]:
    return tuple(
        rank for rank, member in captured.evaluated_ranks.items() if is_multithreaded(member)
    )


def _simulate_in_order(
    captured: CapturedRun,
    backend: str,
    cluster: str | Mapping[str, object] | Cluster | None,
    threads: ThreadOrder,
) -> Simulation:
    file, nodes = script_name(captured), captured.capture_options.nodes
    priced = (
        _compute_cluster(backend, cluster)
        if captured.capture_options.child_options.counts
        else None
    )
    program = build_program(captured, backend, os.path.basename(file), file, priced, threads)
    world: object = (
        {"nodes": nodes, "ranks_per_node": program.local_size} if nodes > 1 else program.world_size
    )
    scenario = Scenario(name=program.name, world=world, backend=backend, program=[], file=file)
    return simulate_program(
        scenario, program, cost_model(scenario, program, cluster), with_values=False
    )


def with_store_key_findings(
    simulation: Simulation, where: Sequence[CapturedRankStatus]
) -> Simulation:
    """With a finding for each line on which ranks wait for a key that nobody sets. They are the
    cause: others stand behind them.
    """
    groups: dict[tuple[str, Where], list[int]] = {}
    for stand in where:
        if stand.state == "waits" and stand.what.startswith(STORE_KEY):
            groups.setdefault((stand.what.removeprefix(f"{STORE_KEY}: "), stand.place), []).append(
                stand.rank
            )
    if not groups:
        return simulation
    held = tuple(dict.fromkeys(s.rank for s in where if s.state == "waits"))
    found = tuple(
        _store_key_finding(keys, place, tuple(ranks), held)
        for (keys, place), ranks in groups.items()
    )
    core = tuple(sorted({r for ranks in groups.values() for r in ranks}))
    verdict = simulation.verdict or Verdict("deadlock", ranks=held, core=core)
    return replace(simulation, findings=(*found, *simulation.findings), verdict=verdict)


def _store_key_finding(
    keys: str, place: Where, ranks: tuple[int, ...], held: tuple[int, ...]
) -> Finding:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)}"
    behind = sorted(set(held) - set(ranks))
    more = (
        f"\n  behind {'them' if len(ranks) > 1 else 'it'}: rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))}"
        if behind
        else ""
    )
    return Finding(
        "DS306",
        "error",
        f"{who} for the store's key {keys}, which nobody sets{more}",
        held,
        ranks,
        ("set it before anything that waits for the rank that reads it",),
        tuple(
            SourceLocation(place[0], place[1], 1, "store", rank) for rank in ranks[:1] if place[1]
        ),
    )


def _compute_cluster(backend: str, asked: str | Mapping[str, object] | Cluster | None) -> Cluster:
    """Whose devices compute: those of the cluster that the calls are priced by."""
    if isinstance(asked, str) and asked not in PRESETS and asked.endswith((".yaml", ".yml")):
        return load_cluster(asked)
    return default_cluster(backend) if asked is None else cluster_from(asked)


def script_name(captured: CapturedRun) -> str:
    return captured.capture_options.target.name


def rank_statuses(captured: CapturedRun, program: Program) -> tuple[CapturedRankStatus, ...]:
    """Where each rank came to."""
    planned = {m.planned: m for m in captured.others if m.planned >= 0}
    found = []
    for rank in range(program.world_size):
        member = captured.ranks.get(rank) or planned.get(rank)
        found += (
            _thread_statuses(rank, member)
            if member is not None and member.ended is None
            else [_process_status(rank, member)]
        )
    return tuple(found)


def _thread_statuses(rank: int, member: RankProcess) -> list[CapturedRankStatus]:
    """One for each place at which a thread of it waits."""
    waits = [
        _waiting_status(rank, member, member.waiting[number]) for number in sorted(member.waiting)
    ]
    return list(dict.fromkeys(waits)) or [_process_status(rank, member)]


def _waiting_status(rank: int, member: RankProcess, question: PendingReply) -> CapturedRankStatus:
    place = member.sites.get(question.site, NO_CALL_SITE)
    if question.keys is not None:
        return CapturedRankStatus(rank, "waits", f"{STORE_KEY}: {', '.join(question.keys)}", place)
    call = question.call or question.poll
    return CapturedRankStatus(
        rank,
        "waits",
        BLOCKING_NAMES.get(call.op, call.op) if call is not None else question.meeting,
        place,
    )


def _process_status(rank: int, member: RankProcess | None) -> CapturedRankStatus:
    if member is None:
        return CapturedRankStatus(rank, "absent", "never called init_process_group", NO_CALL_SITE)
    if member.ended is not None:
        code = f"with code {member.ended.code}" if member.ended.how == "exited" else ""
        return CapturedRankStatus(
            rank, member.ended.how, member.ended.text or code, member.ended.place
        )
    if member.futures:
        number = min(member.futures)
        return CapturedRankStatus(
            rank,
            "waits",
            BLOCKING_NAMES.get(member.calls[number].op, member.calls[number].op),
            _call_site_of(member, number),
        )
    last = member.events[-1] if member.events else None
    return CapturedRankStatus(
        rank,
        "runs",
        "its own code",
        member.sites.get(last.site, NO_CALL_SITE) if last is not None else NO_CALL_SITE,
    )


def _call_site_of(member: RankProcess, number: int) -> Where:
    return next(
        (member.sites.get(e.site, NO_CALL_SITE) for e in member.events if e.number == number),
        NO_CALL_SITE,
    )
