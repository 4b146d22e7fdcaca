"""N9: the first message in a direction between two ranks of an nccl communicator makes its connection, on the hosts of both.

Source: NCCL ``transport.cc``, ``ncclTransportP2pSetup``: both sides exchange connection data over the bootstrap network, the sender
what its receiver needs and the other way round, for all directions of a launch at once. Where the two launches do not mirror each other
the data are taken for others: two sends first raise on sockets and stand still on one machine, a batch of both directions against a
receive alone raises "Message truncated" on one rank and leaves the other waiting (run on an H100, NCCL 2.28.9 and 2.32.3).
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import zip_longest

from distsim.ops.table import OPS
from distsim.program.records import Code, CodeCall, Program, Vec, at

#: (communicator, peer) -> of each launch that connects something between the two, the directions that it connects.
_Connected = dict[tuple[Hashable, int], list[frozenset[str]]]
_MIRRORED = {"send": "recv", "recv": "send"}
_RECEIVES = frozenset({"recv"})


def bad_contacts(program: Program, eager: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks, the lower one first, that connect other directions than each other in a launch on some communicator."""
    calls = [_messages(code) for code in program.codes]
    connects = {
        r: _Contacts(program, program.code(r), program.row_of[r], eager, calls[program.code_of[r]]).found for r in program.present
    }
    found = {
        (rank, peer)
        for rank, contacts in connects.items()
        for (comm, peer), ways in contacts.items()
        if rank < peer and peer in connects and _clash(ways, connects[peer].get((comm, rank), []))
    }
    return tuple(sorted(found))


def _clash(mine: list[frozenset[str]], theirs: list[frozenset[str]]) -> bool:
    """Do two launches meet that do not mirror each other? Receives alone on both sides wait for each other, as everywhere, and whose
    partner never comes waits."""
    for one, other in zip_longest(mine, theirs):
        if one is None or other is None or one == other == _RECEIVES:
            return False
        if {_MIRRORED[way] for way in one} != other:
            return True
    return False


def _messages(code: Code) -> list[tuple[int, CodeCall]]:
    """Messages and batches with their positions; of a repeated one the first, where all ranks of the code make it."""
    found = [(k, call) for k, call in enumerate(code.calls) if OPS[call.op].kind in ("p2p", "batch")]
    return found if code.guards is not None else list({id(call): (k, call) for k, call in reversed(found)}.values())[::-1]


class _Contacts:
    """What one rank connects, ``calls`` being its code's messages and batches."""

    def __init__(self, program: Program, code: Code, row: int, eager: bool, calls: list[tuple[int, CodeCall]]) -> None:
        self.program, self.code, self.row, self.eager = program, code, row, eager
        self.rank = code.ranks[row]
        self.found: _Connected = {}
        for position, call in calls:
            if self._made(position):
                self._look(call.parts or (call,), batched=bool(call.parts))

    def _made(self, position: int) -> bool:
        mask = None if self.code.guards is None else self.code.guards[position]
        return mask is None or bool(mask[self.row])

    def _look(self, parts: tuple[CodeCall, ...], batched: bool) -> None:
        ways: dict[tuple[Hashable, int], set[str]] = {}
        for part in parts:
            if OPS[part.op].signals:
                continue
            if part.port < 0:  # its group is not there: it is refused before it reaches anybody
                continue
            port = self.code.ports[part.port]
            group, peer = self._at(self.code.groups[port.group]), self._at(port.peer)
            comm: Hashable = group if batched or self.eager else ("pair", group)
            ways.setdefault((comm, peer), set()).add(OPS[part.op].direction or "")
        for key, way in ways.items():
            fresh = frozenset(way.difference(*self.found.get(key, ())))
            if fresh:
                self.found.setdefault(key, []).append(fresh)

    def _at(self, value: Vec) -> int:
        return int(at(value, self.row))
