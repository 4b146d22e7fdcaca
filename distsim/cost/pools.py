"""Ways that ranks of several cards, or of several slots, have in common: the way up from a leaf switch, and from a PCIe switch.

A *block* is what lies behind such a switch, and has one port out and one in. What stays inside a block passes none. Of a collective those
bytes are counted that must leave a block, as `distsim.cost.sharing` counts those that must leave a machine.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.cluster.model import Cluster
from distsim.cost.loads import Row, brings_about

#: Operations of which a block sends what all its ranks send.
OF_EACH_RANK = ("all_to_all", "gather", "scatter")


class Level(NamedTuple):
    """Switches of a kind: ``size`` ranks behind each, counted from the first of every ``outer`` ranks; bytes per ns of its way up."""

    word: str
    size: int
    outer: int
    capacity: float

    def block(self, rank: int) -> int:
        """The number of the block that a rank is in."""
        within, rest = divmod(rank, self.outer)
        return within * -(-self.outer // self.size) + rest // self.size


class Pools:
    """The blocks of a cluster whose file names them; ports are numbered level by level, a block's way out and then its way in."""

    def __init__(self, cluster: Cluster, machine_size: int, world_size: int) -> None:
        network, intra, nics, world = cluster.network, cluster.intra, cluster.nics, max(world_size, 1)
        self.machine_size, found = machine_size, list[Level]()
        if network.leaf is not None and network.leaf * machine_size < world:
            up = network.leaf * nics.count * nics.attained / network.oversubscription
            found.append(Level("leaf", network.leaf * machine_size, world, up))
        if intra.per_switch is not None and intra.per_switch < min(machine_size, world):
            found.append(Level("pcie switch", intra.per_switch, machine_size, intra.attained))
        self.levels, self.capacity = tuple(found), list[float]()
        self._first: list[int] = []
        for level in self.levels:
            self._first.append(len(self.capacity))
            self.capacity += [level.capacity] * (2 * (level.block(world - 1) + 1))

    def name(self, port: int) -> str:
        """What a port is called."""
        at = max(k for k, first in enumerate(self._first) if first <= port)
        block, way = divmod(port - self._first[at], 2)
        return f"{self.levels[at].word} {block} {'in' if way else 'out'}"

    def _port(self, at: int, rank: int) -> int:
        """The way out of a rank's block; the next one goes in."""
        return self._first[at] + 2 * self.levels[at].block(rank)

    def of_message(self, src: int, dst: int) -> list[int]:
        """The ports that a message passes."""
        found: list[int] = []
        for at in range(len(self.levels)):
            out, into = self._port(at, src), self._port(at, dst)
            found += [out, into + 1] if out != into else []
        return found

    def of_collective(self, row: type[Row], ranks: tuple[int, ...]) -> dict[int, float]:
        """Bytes by port of each block that has ranks of it, for each byte of the buffer."""
        each, asked = brings_about(row) in OF_EACH_RANK, dict[int, float]()
        for at, level in enumerate(self.levels):
            whole = (ranks,) if level.word == "leaf" else _parts(ranks, self.machine_size)
            for part in whole:
                self._add(asked, at, part, row, each, (len(ranks), len(whole)))
        return asked

    def _add(
        self, asked: dict[int, float], at: int, part: tuple[int, ...], row: type[Row], each: bool, group: tuple[int, int]
    ) -> None:
        """What leaves the blocks of ranks that one switch above them joins; ``group``: ranks of all, and such switches."""
        blocks: dict[int, int] = {}
        for rank in part:
            port = self._port(at, rank)
            blocks[port] = blocks.get(port, 0) + 1
        inside = row.busbw_factor(len(blocks)) if len(blocks) > 1 else 0.0
        across = row.busbw_factor(group[1]) if group[1] > 1 else 0.0
        for port, mates in blocks.items():
            own = inside * mates * len(part) / group[0] if each else inside
            own += across * mates if each else across * mates / len(part)
            asked[port] = asked[port + 1] = own

    def ns_per_byte(self, row: type[Row], ranks: tuple[int, ...]) -> float:
        """What no schedule can spare: ns at the narrowest way for each byte of the buffer; where there are levels."""
        return max(asked / self.capacity[port] for port, asked in self.of_collective(row, ranks).items())


def _parts(ranks: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks by machine."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // size, []).append(rank)
    return tuple(tuple(part) for part in found.values())
