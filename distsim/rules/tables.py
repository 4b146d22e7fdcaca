"""The static half of the rules: a program compiled under a profile, and what its rows are."""

from __future__ import annotations

from itertools import accumulate

from distsim.match import ANY
from distsim.ops.records import Call
from distsim.profiles.record import Profile
from distsim.program.records import CodeCall, Program
from distsim.rules.code import Instruction, Launch, Part, PartKind
from distsim.rules.creation import unlike_groups
from distsim.rules.device import DeviceCompiler
from distsim.rules.host import Compiler, Shared, iter_launches
from distsim.rules.state import Phase, State


class Tables:
    """A program under a profile.

    ``code``: the instructions of each rank. ``parts``, ``launches``: by row. ``unit_of``: the launch of a batch's part, where the
    batch is one. ``followers``: launches that start only after a row. ``base``: the first row of each rank; ``rows``: how many.
    """

    def __init__(self, program: Program, profile: Profile) -> None:
        self.program, self.profile = program, profile
        sizes = [program.code(rank).offsets[-1] for rank in range(program.world_size)]
        *self.base, self.rows = accumulate(sizes, initial=0)
        compiler = DeviceCompiler if profile.device else Compiler
        self.unlike = unlike_groups(program, profile)
        shared = Shared(self.unlike)
        self.code: list[list[Instruction]] = [
            compiler(program, profile, rank, self.base[rank], shared).run() for rank in range(program.world_size)
        ]
        self.launches: dict[int, Launch] = {launch.row: launch for code in self.code for launch in iter_launches(code)}
        self.parts: dict[int, Part] = {part.row: part for launch in self.launches.values() for part in launch.parts}
        self.unit_of: dict[int, int] = {p.row: la.row for la in self.launches.values() if la.is_unit for p in la.parts}
        self._plain_of: dict[str, dict[tuple[int, int], bool]] = {}
        self.followers: dict[int, list[int]] = {}
        for launch in self.launches.values():
            for row in launch.after:
                self.followers.setdefault(row, []).append(launch.row)

    def rank_of(self, row: int) -> int:
        launch = self.launches.get(row)
        return launch.rank if launch is not None else self.parts[row].rank

    def position(self, state: State, rank: int) -> int:
        """The call that a rank's host is in, or its end."""
        end = state.ends[rank]
        return end.position if end is not None else self.code[rank][state.pc[rank]].position

    def code_call(self, row: int) -> CodeCall:
        part = self.parts[row]
        call = self.program.code_call(part.rank, part.position)
        return call if part.part < 0 else call.parts[part.part]

    def call(self, row: int) -> Call:
        return self.program.resolve(self.parts[row].rank, self.code_call(row))

    def lacking(self, state: State, row: int) -> tuple[tuple[int, ...], bool]:
        """Whom a running row waits for: (global ranks, whether any one of them is enough)."""
        part = self.parts[row]
        if row in state.jams:
            return state.jams[row], False
        if part.kind is PartKind.RECEIVE and part.peer == ANY:
            return tuple(r for r in part.members if r != part.rank), True
        if part.kind is not PartKind.COLLECTIVE:
            return (part.peer,), False
        there = state.matcher.collectives.get(part.box, {})
        return tuple(r for r in self.needs(part) if r not in there), False

    def needs(self, part: Part) -> tuple[int, ...]:
        members = part.members
        needed = self.profile.needs(part.op, len(members), part.root, members.index(part.rank))
        return members if needed is None else tuple(members[i] for i in sorted(needed))

    def broken(self, state: State, row: int) -> bool:
        """G13: the back end sees that a transfer of this row is with a dead rank. G10: or on a group that either side has closed."""
        if self.profile.peer_death != "raises" or not (state.closed or any(end is not None and end.gone for end in state.ends)):
            return False
        phase = state.phase.get(row)
        if phase is None or phase is Phase.DUE:
            return False
        part = self.parts.get(row)
        if part is not None and (part.rank, part.group) in state.closed:
            return True
        if phase is Phase.QUEUED:
            workers = self.launches[row].workers
            ahead = state.workers[workers.key] if workers is not None else []
            return any(self.broken(state, other) for other in ahead if state.phase[other] is not Phase.QUEUED)
        ranks, any_one = self.lacking(state, row)
        group = self.parts[row].group
        gone = [((end := state.ends[r]) is not None and end.gone) or (r, group) in state.closed for r in ranks]
        return all(gone) and bool(gone) if any_one else any(gone)

    def plain(self, part: Part) -> bool:
        """All members wait for all, whatever each says the operation is."""
        key = (len(part.members), part.root)
        if key not in self._plain_of.setdefault(part.op, {}):
            n = len(part.members)
            self._plain_of[part.op][key] = all(self.profile.needs(part.op, n, part.root, me) is None for me in range(n))
        return self._plain_of[part.op][key]
