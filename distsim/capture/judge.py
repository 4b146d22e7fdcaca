"""From a captured run to what `simulate` says of it, and to what only the run itself knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.capture.launch import Captured
from distsim.capture.matching import fits
from distsim.capture.members import Member, Question
from distsim.capture.members import Place as Where
from distsim.capture.program import program_of, world_backend
from distsim.capture.recorded import BLOCKING
from distsim.capture.sites import NOWHERE, text_of
from distsim.capture.threads import Order, has_threads, lanes_of
from distsim.capture.words import of_backward, spoken
from distsim.check.verdict import Verdict
from distsim.cluster import PRESETS, Cluster, cluster_from
from distsim.findings.record import Finding, Place
from distsim.profiles import default_cluster
from distsim.program.records import Program
from distsim.records import no_collection
from distsim.scenario import Scenario
from distsim.simulation import Simulation, cluster_of_file, cost_model, simulate_program

#: Steps of a rank that it does not call.
_NO_CALLS = ("compute", "fail", "exit")
#: What a rank waits for that is no call.
KEY = "a key of the store"
#: Orders of calls of threads that are tried where the one in which they met does not come through.
_ROOMIER: tuple[Order, Order] = ("early", "apart")


@dataclass(frozen=True)
class Stand:
    """Where a rank is when all is over. ``state``: ended, raised, exited, killed, waits, runs."""

    rank: int
    state: str
    what: str
    place: Where

    @property
    def source(self) -> str:
        """The text of the line."""
        return text_of(self.place[0], self.place[1])


@dataclass(frozen=True)
class Judged:
    """``simulation``: the calls under the back end's rules. ``calls``: how many the ranks made.

    ``threaded``: ranks of which several threads made calls; one order of these was judged. ``worlds``: how many the script started, one
    after the other; this is the first that does not come through, or the last.
    """

    captured: Captured
    simulation: Simulation
    stands: tuple[Stand, ...]
    calls: int
    threaded: tuple[int, ...] = ()
    worlds: int = 1

    @property
    def outcome(self) -> str:
        return self.simulation.outcome


def _outcome(captured: Captured, simulation: Simulation) -> str:
    """The simulation's, unless the run came to no end for a reason that is no call."""
    if captured.ended == "late":
        return "undecided"
    if simulation.outcome != "completes":
        return simulation.outcome
    ends = {m.ended.how for m in (*captured.ranks.values(), *captured.others) if m.ended is not None}
    if "raised" in ends or "exited" in ends:  # outside of all calls, as on an import
        return "raises"
    stuck = captured.ended == "stalled" and not has_no_data(captured)
    return "crashes" if "killed" in ends else "hangs" if stuck else "completes"


def has_no_data(captured: Captured) -> bool:
    """Did the run stop where members of a collective made calls that do not fit? A back end may go on there with data that nobody knows."""
    waiting = (question.call for member in captured.ranks.values() for question in member.waiting.values())
    return any(
        not fits(call, other)
        for call in waiting
        if call is not None and call.gathering is not None
        for other in call.gathering.there.values()
    )


def _came_through(captured: Captured, outcome: str) -> bool:
    """Did every process come to its end by itself, or stand where the back end's refusal (`outcome`) had ended a rank before?"""
    ends = [m.ended for m in (*captured.ranks.values(), *captured.others)]
    refused = captured.ended == "stalled" and outcome == "raises"
    return (captured.ended == "ended" or refused) and all(end is None or end.how == "ended" for end in ends)


def judge(
    captured: Captured, *, backend: str | None = None, cluster: str | Mapping[str, object] | Cluster | None = None
) -> Judged:
    """What the back end makes of the captured calls. ``backend``: None takes the one that the script asked for."""
    for world in captured.past:
        judged = judge(world, backend=backend, cluster=cluster)
        if judged.outcome != "completes" or not _comes_through(judged.simulation):
            return replace(judged, worlds=len(captured.past) + 1)
    with no_collection():
        simulation = _simulated(captured, backend or world_backend(captured.ranks.values()), cluster)
    program = simulation.program
    made = sum(bool(program.sites[call.site].line) and call.op not in _NO_CALLS for code in program.codes for call in code.calls)
    found = replace(simulation, findings=spoken(simulation.findings))
    outcome, verdict = _outcome(captured, simulation), simulation.verdict
    if outcome != simulation.outcome or (
        not _came_through(captured, simulation.outcome) and verdict is not None and verdict.verdict == "ok"
    ):
        found = replace(found, outcome=outcome, verdict=None)  # what no rule knows of ended a rank or held it, or time ran out
    where = stands(captured, program)
    found = replace(found, findings=of_backward(found.findings, where))
    if outcome == "hangs":
        found = with_keys(found, where)
    return Judged(captured, found, where, made, _threaded(captured), len(captured.past) + 1)


def _simulated(captured: Captured, backend: str, cluster: str | Mapping[str, object] | Cluster | None) -> Simulation:
    """The calls of each rank in the order in which they met. Where that does not come through, but the run did and threads made them:
    in one that does, unless some thread would stand even if no other ever waited."""
    first = _ordered(captured, backend, cluster, "met")
    if captured.ended != "ended" or _comes_through(first) or not _threaded(captured):
        return first
    early, apart = (_ordered(captured, backend, cluster, order) for order in _ROOMIER)
    if _comes_through(early) or not _comes_through(apart):
        return early if _comes_through(early) else first
    alone = (_ordered(captured, backend, cluster, lane) for lane in lanes_of(captured.judged_ranks.values()))
    return apart if all(_comes_through(one) for one in alone) else first


def _comes_through(simulation: Simulation) -> bool:
    return simulation.outcome != "hangs" and (simulation.verdict is None or simulation.verdict.verdict != "deadlock")


def _threaded(captured: Captured) -> tuple[int, ...]:
    return tuple(rank for rank, member in captured.judged_ranks.items() if has_threads(member))


def _ordered(
    captured: Captured, backend: str, cluster: str | Mapping[str, object] | Cluster | None, threads: Order
) -> Simulation:
    file, nodes = shown(captured), captured.wish.nodes
    priced = _cluster(backend, cluster) if captured.wish.ways.counts else None
    program = program_of(captured, backend, os.path.basename(file), file, priced, threads)
    world: object = {"nodes": nodes, "ranks_per_node": program.local_size} if nodes > 1 else program.world_size
    scenario = Scenario(name=program.name, world=world, backend=backend, program=[], file=file)
    return simulate_program(scenario, program, cost_model(scenario, program, cluster), with_values=False)


def with_keys(simulation: Simulation, where: Sequence[Stand]) -> Simulation:
    """With a finding for each line on which ranks wait for a key that nobody sets. They are the cause: others stand behind them."""
    groups: dict[tuple[str, Where], list[int]] = {}
    for stand in where:
        if stand.state == "waits" and stand.what.startswith(KEY):
            groups.setdefault((stand.what.removeprefix(f"{KEY}: "), stand.place), []).append(stand.rank)
    if not groups:
        return simulation
    held = tuple(dict.fromkeys(s.rank for s in where if s.state == "waits"))
    found = tuple(_key_finding(keys, place, tuple(ranks), held) for (keys, place), ranks in groups.items())
    core = tuple(sorted({r for ranks in groups.values() for r in ranks}))
    verdict = simulation.verdict or Verdict("deadlock", ranks=held, core=core)
    return replace(simulation, findings=(*found, *simulation.findings), verdict=verdict)


def _key_finding(keys: str, place: Where, ranks: tuple[int, ...], held: tuple[int, ...]) -> Finding:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)}"
    behind = sorted(set(held) - set(ranks))
    more = (
        f"\n  behind {'them' if len(ranks) > 1 else 'it'}: rank{'s' * (len(behind) > 1)} {', '.join(map(str, behind))}"
        if behind
        else ""
    )
    return Finding(
        "DS306", "error", f"{who} for the store's key {keys}, which nobody sets{more}", held, ranks,
        ("set it before anything that waits for the rank that reads it",),
        tuple(Place(place[0], place[1], 1, "store", rank) for rank in ranks[:1] if place[1]),
    )  # fmt: skip


def _cluster(backend: str, asked: str | Mapping[str, object] | Cluster | None) -> Cluster:
    """Whose devices compute: those of the cluster that the calls are priced by."""
    if isinstance(asked, str) and asked not in PRESETS and asked.endswith((".yaml", ".yml")):
        return cluster_of_file(asked)
    return default_cluster(backend) if asked is None else cluster_from(asked)


def shown(captured: Captured) -> str:
    return captured.wish.target.name


def stands(captured: Captured, program: Program) -> tuple[Stand, ...]:
    """Where each rank came to."""
    planned = {m.planned: m for m in captured.others if m.planned >= 0}
    found = []
    for rank in range(program.world_size):
        member = captured.ranks.get(rank) or planned.get(rank)
        found += _threads_of(rank, member) if member is not None and member.ended is None else [_stand(rank, member)]
    return tuple(found)


def _threads_of(rank: int, member: Member) -> list[Stand]:
    """One for each place at which a thread of it waits."""
    waits = [_waits(rank, member, member.waiting[number]) for number in sorted(member.waiting)]
    return list(dict.fromkeys(waits)) or [_stand(rank, member)]


def _waits(rank: int, member: Member, question: Question) -> Stand:
    place = member.sites.get(question.site, NOWHERE)
    if question.keys is not None:
        return Stand(rank, "waits", f"{KEY}: {', '.join(question.keys)}", place)
    call = question.call or question.poll
    return Stand(rank, "waits", BLOCKING.get(call.op, call.op) if call is not None else question.meeting, place)


def _stand(rank: int, member: Member | None) -> Stand:
    if member is None:
        return Stand(rank, "absent", "never called init_process_group", NOWHERE)
    if member.ended is not None:
        code = f"with code {member.ended.code}" if member.ended.how == "exited" else ""
        return Stand(rank, member.ended.how, member.ended.text or code, member.ended.place)
    if member.futures:
        number = min(member.futures)
        return Stand(rank, "waits", BLOCKING.get(member.calls[number].op, member.calls[number].op), _place_of(member, number))
    last = member.events[-1] if member.events else None
    return Stand(rank, "runs", "its own code", member.sites.get(last.site, NOWHERE) if last is not None else NOWHERE)


def _place_of(member: Member, number: int) -> Where:
    return next((member.sites.get(e.site, NOWHERE) for e in member.events if e.number == number), NOWHERE)
