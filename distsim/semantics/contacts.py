"""N9: the first message between two ranks on an nccl communicator also makes their connection, and expects the other direction there.

Source: NCCL ``transport.cc``, ``ncclTransportP2pSetup``: both sides exchange connection data over the bootstrap network, the sender
what its receiver needs and the other way round. A send that is the first contact on both sides pairs send data with send data; what
follows is open (inferred). Receives first on both sides stand still in any case.
"""

from __future__ import annotations

from collections.abc import Hashable

from distsim.ops.table import OPS
from distsim.program.records import Code, CodeCall, Program, Vec, at

#: (communicator, peer) -> the directions of the first launch between the two.
_First = dict[tuple[Hashable, int], frozenset[str]]


def bad_contacts(program: Program, eager: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks whose first contact on some communicator is a send on both sides, the lower rank first."""
    calls = [_messages(code) for code in program.codes]
    first = {
        r: _Contacts(program, program.code(r), program.row_of[r], eager, calls[program.code_of[r]]).found for r in program.present
    }
    sends = frozenset({"send"})
    found = {
        (rank, peer)
        for rank, contacts in first.items()
        for (comm, peer), ways in contacts.items()
        if rank < peer and peer in first and ways == sends and first[peer].get((comm, rank)) == sends
    }
    return tuple(sorted(found))


def _messages(code: Code) -> list[tuple[int, CodeCall]]:
    """Messages and batches with their positions; of a repeated one the first, where all ranks of the code make it."""
    found = [(k, call) for k, call in enumerate(code.calls) if OPS[call.op].kind in ("p2p", "batch")]
    return found if code.guards is not None else list({id(call): (k, call) for k, call in reversed(found)}.values())[::-1]


class _Contacts:
    """The first contacts of one rank, ``calls`` being its code's messages and batches."""

    def __init__(self, program: Program, code: Code, row: int, eager: bool, calls: list[tuple[int, CodeCall]]) -> None:
        self.program, self.code, self.row, self.eager = program, code, row, eager
        self.rank = code.ranks[row]
        self.found: _First = {}
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
            self.found.setdefault(key, frozenset(way))

    def _at(self, value: Vec) -> int:
        return int(at(value, self.row))
