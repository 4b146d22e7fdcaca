"""Who is blocked, on whom: a state in which nothing can happen any more, told as a `Standstill`."""

from __future__ import annotations

from distsim.match import ANY
from distsim.rules.code import Lock, Meet, PartKind, Post, Stuck, Sync, Wait
from distsim.rules.state import Phase, State
from distsim.rules.step import Rules
from distsim.standstill import Blocked, Need, RankEnd, Standstill


def standstill(rules: Rules, state: State) -> Standstill:
    """What a state that has stopped leaves behind. Ranks that have not ended are blocked at their present call."""
    rows = _begun(rules, state)
    blocked = tuple(_blocked(rules, state, rank, rows.get(rank, [])) for rank, end in enumerate(state.ends) if end is None)
    ends = []
    for rank, end in enumerate(state.ends):
        position = rules.position(state, rank)
        ends.append(RankEnd(rank, "blocked", position) if end is None else RankEnd(rank, end.status, position, 0, end.message))
    return Standstill(tuple(ends), blocked, tuple(_unreceived(rules, state)))


def _unreceived(rules: Rules, state: State) -> list[tuple[int, int, int]]:
    """Messages that no receive has met, sent or still being sent."""
    parts = [rules.parts[row] for row in sorted(state.matcher.open_sends())]
    return [(part.rank, part.position, part.part) for part in parts]


def _begun(rules: Rules, state: State) -> dict[int, list[int]]:
    """The launches that have begun, by rank: whatever queues stands behind one of these."""
    found: dict[int, list[int]] = {}
    for row in sorted(state.phase):
        if state.phase[row] is not Phase.QUEUED and row in rules.launches:
            found.setdefault(rules.launches[row].rank, []).append(row)
    return found


def _waited_for(rules: Rules, state: State, rank: int, begun: list[int]) -> list[int]:
    """Open rows that the rank's host waits for, batches by their parts."""
    instruction = rules.code[rank][state.pc[rank]]
    if isinstance(instruction, Sync):
        rows = begun
    elif isinstance(instruction, (Lock, Post)):  # the lock is with a collective of the rank's worker
        rows = [row for row in begun if rules.launches[row].workers is not None]
    else:
        rows = [row for row in instruction.rows if row in state.phase] if isinstance(instruction, Wait) else []
    return [part.row for row in rows for part in rules.launches[row].parts if part.row in state.phase]


def _blocked(rules: Rules, state: State, rank: int, begun: list[int]) -> Blocked:
    instruction = rules.code[rank][state.pc[rank]]
    if isinstance(instruction, Meet):
        there = state.meets.get(instruction.key, [])
        missing = tuple(r for r in instruction.members if r >= 0 and r != rank and (instruction.lost or r not in there))
        return Blocked(rank, instruction.position, (Need(instruction.position, -1, missing),))
    if isinstance(instruction, Stuck):
        return Blocked(rank, instruction.position, (Need(instruction.position, -1, instruction.ranks),))
    found: dict[Need, None] = {}
    for row in _waited_for(rules, state, rank, begun):
        for need in _needs(rules, state, row):
            found[need] = None
    return Blocked(rank, instruction.position, tuple(found), device=rules.profile.device)


def _needs(rules: Rules, state: State, row: int) -> list[Need]:
    """What must come before a row can finish: its own partners, or, while it queues, those of the rows ahead of it."""
    if state.phase[row] is not Phase.QUEUED:
        return [_need(rules, state, row)]
    launch = rules.launches[rules.unit_of.get(row, row)]
    if launch.workers is not None:
        ahead = [_need(rules, state, other) for other in state.workers[launch.workers.key][: launch.workers.width]]
        if len(ahead) == 1:
            return ahead
        ranks = tuple(sorted({rank for need in ahead for rank in need.ranks}))
        return [Need(ahead[0].position, ahead[0].part, ranks, any=True)]
    return [need for other in _ahead(rules, state, launch.after) for need in _needs(rules, state, other)]


def _ahead(rules: Rules, state: State, after: tuple[int, ...]) -> list[int]:
    """The running parts that stand before a launch, over all launches between."""
    seen: set[int] = set()
    found: list[int] = []
    todo = list(after)
    while todo:
        row = todo.pop()
        if row in seen or row not in state.phase:
            continue
        seen.add(row)
        launch = rules.launches[row]
        if state.phase[row] is Phase.QUEUED:
            todo.extend(launch.after)
        else:
            found.extend(part.row for part in launch.parts if part.row in state.phase)
    return sorted(found)


def _need(rules: Rules, state: State, row: int) -> Need:
    part = rules.parts[row]
    ranks, any_one = rules.lacking(state, row)
    return Need(part.position, part.part, ranks, any_one)


def choice_of(rules: Rules, state: State) -> list[tuple[int, tuple[int, ...]]]:
    """Any-source receives that have a choice now: (row of the receive, ranks of the senders it may take)."""
    takes: dict[int, list[int]] = {}
    for take in state.matcher.takes():
        takes.setdefault(take.receive, []).append(rules.parts[take.send].rank)
    return [(row, tuple(senders)) for row, senders in takes.items()
            if rules.parts[row].kind is PartKind.RECEIVE and rules.parts[row].peer == ANY]  # fmt: skip
