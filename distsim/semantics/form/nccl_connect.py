"""N9: launches of two ranks that connect different directions of an nccl communicator.

This module only looks for such mismatches. `DeviceCompiler.connect_messages` and
`connect_collective` (`distsim.semantics.form.device_compiler`) decide where a call waits for a
connection.

Key idea: the first message in a direction between two ranks creates a connection, on the hosts of
both. So the k-th launch of one rank that connects anything to the other must mirror the k-th launch
of the other. All this is fixed by the program, and no run is needed.

Source: NCCL ``transport.cc``, ``ncclTransportP2pSetup``. Both sides exchange connection data over
the bootstrap network, the sender what its receiver needs and vice versa, for all directions of a
launch at once. If the two launches do not mirror each other, data are mistaken for other data: two
sends first raise on sockets and hang on one machine; a batch of both directions against a single
receive raises "Message truncated" on one rank and leaves the other waiting (run on an H100, NCCL
2.28.9 and 2.32.3).
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
    """A launch that creates connections between two ranks.

    ``position``: the call; ``ways``: the directions that it connects ("send", "recv").
    """

    position: int
    ways: frozenset[str]


class ConnectionMismatch(NamedTuple):
    """Two launches of a pair of ranks, the lower rank first, that do not mirror each other."""

    pair: tuple[int, int]
    launches: tuple[ConnectingLaunch, ConnectingLaunch]


#: (communicator, peer) -> the launches that create connections between the two.
_LaunchesByPeer = dict[tuple[Hashable, int], list[ConnectingLaunch]]
_MIRRORED = {"send": "recv", "recv": "send"}
_RECEIVES = frozenset({"recv"})


def connection_mismatches(
    program: Program, profile: BackendProfile
) -> tuple[ConnectionMismatch, ...]:
    """For each pair of ranks whose launches do not mirror each other, the first such launches."""
    calls = [_connecting_calls(code, profile) for code in program.codes]
    launches_of = {
        rank: _RankConnections(program, profile, rank, calls[program.code_of[rank]]).launches
        for rank in program.present
    }
    found: dict[tuple[int, int], ConnectionMismatch] = {}
    for rank, launches_by_peer in launches_of.items():
        for (comm, peer), launches in launches_by_peer.items():
            if rank >= peer or peer not in launches_of or (rank, peer) in found:
                continue
            mismatch = _first_mismatch(launches, launches_of[peer].get((comm, rank), []))
            if mismatch is not None:
                found[rank, peer] = ConnectionMismatch((rank, peer), mismatch)
    return tuple(found[pair] for pair in sorted(found))


def _first_mismatch(
    launches: list[ConnectingLaunch], peer_launches: list[ConnectingLaunch]
) -> tuple[ConnectingLaunch, ConnectingLaunch] | None:
    """The first two launches with the same number that do not mirror each other.

    Two launches that only receive wait for each other, and a launch without a partner waits too.
    Both are ordinary hangs, so the search ends there.
    """
    for launch, peer_launch in zip_longest(launches, peer_launches):
        if launch is None or peer_launch is None:
            return None
        if launch.ways == peer_launch.ways == _RECEIVES:
            return None
        if {_MIRRORED[way] for way in launch.ways} != peer_launch.ways:
            return launch, peer_launch
    return None


def _connecting_calls(code: SharedCode, profile: BackendProfile) -> list[tuple[int, CodeCall]]:
    """Calls that connect pairs of ranks, with their positions.

    These are messages, batches, and collectives that are sent as messages. If all ranks of the code
    make all calls, only the first of repeated calls is returned: the others connect nothing.
    """
    calls = []
    for position, call in enumerate(code.calls):
        if OPERATIONS[call.op].kind in ("p2p", "batch") or call.op in profile.by_messages:
            calls.append((position, call))
    if code.guards is not None:
        return calls
    first_by_id: dict[int, tuple[int, CodeCall]] = {}
    for position, call in calls:
        # The order of first occurrences is the order in which connections are created. A later
        # repetition must not move a call behind the calls that follow its first occurrence.
        first_by_id.setdefault(id(call), (position, call))
    return list(first_by_id.values())


class _RankConnections:
    """The launches of one rank that create connections.

    ``calls``: the calls of its code that may. ``joined``: what collectives have connected: (group,
    pattern of the connections, root).
    """

    def __init__(
        self,
        program: Program,
        profile: BackendProfile,
        rank: int,
        calls: list[tuple[int, CodeCall]],
    ) -> None:
        self.code, self.row, self.rank = program.code(rank), program.row_of[rank], rank
        self.eager = program.options.get("init") == "eager"
        self.launches: _LaunchesByPeer = {}
        self.joined: set[tuple[int, str, int]] = set()
        for position, call in calls:
            if not self._is_made(position):
                continue
            pattern = profile.by_messages.get(call.op)
            if pattern is not None:
                root = self._at(call.fields.get("root", -1))
                self.joined.add((self._group(call.group), pattern, root))
            else:
                self._add_launch(position, call.parts or (call,), batched=bool(call.parts))

    def _is_made(self, position: int) -> bool:
        """Whether the rank makes the call at a position of its code."""
        guard = None if self.code.guards is None else self.code.guards[position]
        return guard is None or bool(guard[self.row])

    def _add_launch(self, position: int, parts: tuple[CodeCall, ...], batched: bool) -> None:
        ways_by_peer: dict[tuple[Hashable, int], set[str]] = {}
        for part in parts:
            if OPERATIONS[part.op].signals:
                continue
            if part.endpoint < 0:  # no group: the call is refused before it reaches a peer
                continue
            endpoint, way = self.code.endpoints[part.endpoint], OPERATIONS[part.op].direction or ""
            group, peer = self._group(endpoint.group), self._at(endpoint.peer)
            on_group = batched or self.eager  # else on a communicator of the pair
            if on_group and self._is_joined(group, way, peer):
                continue
            communicator: Hashable = group if on_group else ("pair", group)
            ways_by_peer.setdefault((communicator, peer), set()).add(way)
        for key, ways in ways_by_peer.items():
            connected = (launch.ways for launch in self.launches.get(key, ()))
            new_ways = frozenset(ways.difference(*connected))
            if new_ways:
                self.launches.setdefault(key, []).append(ConnectingLaunch(position, new_ways))

    def _is_joined(self, group: int, way: str, peer: int) -> bool:
        """Whether a collective has connected a direction before."""
        receiver, sender = (self.rank, peer) if way == "recv" else (peer, self.rank)
        patterns = (
            (group, ALL_PAIRS, -1),
            (group, TO_ROOT, receiver),
            (group, FROM_ROOT, sender),
        )
        return not self.joined.isdisjoint(patterns)

    def _group(self, slot: int) -> int:
        return self._at(self.code.groups[slot]) if slot >= 0 else -1

    def _at(self, value: Vec) -> int:
        return int(at_row(value, self.row))
