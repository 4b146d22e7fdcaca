"""N9: the first message in a direction between two ranks of an nccl communicator makes its
connection, on the hosts of both.

Source: NCCL ``transport.cc``, ``ncclTransportP2pSetup``: both sides exchange connection data over
the bootstrap network, the sender what its receiver needs and the other way round, for all
directions of a launch at once. Where the two launches do not mirror each other the data are taken
for others: two sends first raise on sockets and stand still on one machine, a batch of both
directions against a receive alone raises "Message truncated" on one rank and leaves the other
waiting (run on an H100, NCCL 2.28.9 and 2.32.3).
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import zip_longest
from typing import NamedTuple

from distsim.backends.profile import ALL_PAIRS, FROM_ROOT, TO_ROOT, BackendProfile
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode, Vec, at_row
from distsim.program.model import Program


class ConnectingLaunch(NamedTuple):
    """A launch that connects something between two ranks: the call's position, and the directions
    that it connects.
    """

    position: int
    ways: frozenset[str]


class ConnectionMismatch(NamedTuple):
    """Two launches of a pair of ranks, the lower one first, that connect other directions than each
    other.
    """

    pair: tuple[int, int]
    launches: tuple[ConnectingLaunch, ConnectingLaunch]


#: (communicator, peer) -> the launches that connect something between the two.
_LaunchesByPeer = dict[tuple[Hashable, int], list[ConnectingLaunch]]
_MIRRORED = {"send": "recv", "recv": "send"}
_RECEIVES = frozenset({"recv"})


def connection_mismatches(
    program: Program, profile: BackendProfile
) -> tuple[ConnectionMismatch, ...]:
    """Of each pair of ranks that connects other directions than its partner in a launch on some
    communicator, the first such launches.
    """
    calls = [_connecting_calls(code, profile) for code in program.codes]
    connects = {
        r: _RankConnections(program, profile, r, calls[program.code_of[r]]).found
        for r in program.present
    }
    found: dict[tuple[int, int], ConnectionMismatch] = {}
    for rank, contacts in connects.items():
        for (comm, peer), mine in contacts.items():
            if rank < peer and peer in connects and (rank, peer) not in found:
                met = _first_mismatch(mine, connects[peer].get((comm, rank), []))
                if met is not None:
                    found[rank, peer] = ConnectionMismatch((rank, peer), met)
    return tuple(found[pair] for pair in sorted(found))


def _first_mismatch(
    mine: list[ConnectingLaunch], theirs: list[ConnectingLaunch]
) -> tuple[ConnectingLaunch, ConnectingLaunch] | None:
    """The first two launches that meet and do not mirror each other. Receives alone on both sides
    wait for each other, as everywhere, and whose partner never comes waits."""
    for one, other in zip_longest(mine, theirs):
        if one is None or other is None or one.ways == other.ways == _RECEIVES:
            return None
        if {_MIRRORED[way] for way in one.ways} != other.ways:
            return one, other
    return None


def _connecting_calls(code: SharedCode, profile: BackendProfile) -> list[tuple[int, CodeCall]]:
    """Messages, batches and collectives that travel as messages, with their positions; of a
    repeated one the first, where all ranks of the code make it."""
    found = [
        (k, call)
        for k, call in enumerate(code.calls)
        if OPERATIONS[call.op].kind in ("p2p", "batch") or call.op in profile.by_messages
    ]
    return (
        found
        if code.guards is not None
        else list({id(call): (k, call) for k, call in reversed(found)}.values())[::-1]
    )


class _RankConnections:
    """What one rank connects, ``calls`` being its code's that connect something."""

    def __init__(
        self,
        program: Program,
        profile: BackendProfile,
        rank: int,
        calls: list[tuple[int, CodeCall]],
    ) -> None:
        self.code, self.row, self.rank = program.code(rank), program.row_of[rank], rank
        self.eager = program.options.get("init") == "eager"
        self.found: _LaunchesByPeer = {}
        self.joined: set[tuple[int, str, int]] = (
            set()
        )  # what collectives have connected: group, how, root
        for position, call in calls:
            if not self._made(position):
                continue
            if call.op in profile.by_messages:
                self.joined.add(
                    (
                        self._group(call.group),
                        profile.by_messages[call.op],
                        self._at(call.fields.get("root", -1)),
                    )
                )
            else:
                self._look(position, call.parts or (call,), batched=bool(call.parts))

    def _made(self, position: int) -> bool:
        mask = None if self.code.guards is None else self.code.guards[position]
        return mask is None or bool(mask[self.row])

    def _look(self, position: int, parts: tuple[CodeCall, ...], batched: bool) -> None:
        ways: dict[tuple[Hashable, int], set[str]] = {}
        for part in parts:
            if OPERATIONS[part.op].signals:
                continue
            if part.port < 0:  # its group is not there: it is refused before it reaches anybody
                continue
            port, way = self.code.ports[part.port], OPERATIONS[part.op].direction or ""
            group, peer = self._group(port.group), self._at(port.peer)
            on_group = batched or self.eager
            if not (on_group and self._is_joined(group, way, peer)):
                ways.setdefault((group if on_group else ("pair", group), peer), set()).add(way)
        for key, way_set in ways.items():
            fresh = frozenset(way_set.difference(*(one.ways for one in self.found.get(key, ()))))
            if fresh:
                self.found.setdefault(key, []).append(ConnectingLaunch(position, fresh))

    def _is_joined(self, group: int, way: str, peer: int) -> bool:
        to_root, from_root = (self.rank, peer) if way == "recv" else (peer, self.rank)
        return not self.joined.isdisjoint(
            ((group, ALL_PAIRS, -1), (group, TO_ROOT, to_root), (group, FROM_ROOT, from_root))
        )

    def _group(self, slot: int) -> int:
        return self._at(self.code.groups[slot]) if slot >= 0 else -1

    def _at(self, value: Vec) -> int:
        return int(at_row(value, self.row))
