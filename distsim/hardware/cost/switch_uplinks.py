"""Uplinks that several ranks share: those of leaf switches and of PCIe switches.

A *block* is the set of ranks behind one such switch. It has one port out and one port in. Traffic
inside a block uses neither. For a collective, only the bytes count that must leave and enter a
block (`distsim.hardware.cost.cut_traffic`).
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.hardware.cluster.description import Cluster
from distsim.hardware.cost.cut_traffic import EXCHANGE_COLLECTIVES, traffic_across_cuts
from distsim.hardware.cost.link_loads import CostedOperation, implemented_collective

#: Operations whose traffic through a block does not depend on whether the other blocks are behind
#: the same switch of the next level.
_LEVEL_INDEPENDENT = (*EXCHANGE_COLLECTIVES, "all_gather", "reduce_scatter")


class SwitchLevel(NamedTuple):
    """Switches of one kind.

    ``size`` ranks are behind each switch, counted from the start of every ``outer`` ranks.
    ``capacity`` is the uplink's bandwidth in bytes per ns.
    """

    word: str
    size: int
    outer: int
    capacity: float

    def block(self, rank: int) -> int:
        """The number of the block that contains a rank."""
        within, rest = divmod(rank, self.outer)
        return within * -(-self.outer // self.size) + rest // self.size


class SwitchUplinks:
    """The blocks of a cluster whose file describes switches.

    Ports are numbered level by level; a block's port in follows its port out.
    """

    def __init__(self, cluster: Cluster, machine_size: int, world_size: int) -> None:
        network, intra, nics, world = (
            cluster.network,
            cluster.intra,
            cluster.nics,
            max(world_size, 1),
        )
        self.machine_size, found = machine_size, list[SwitchLevel]()
        if network.leaf is not None and network.leaf * machine_size < world:
            up = network.leaf * nics.count * nics.attained_bytes_per_ns / network.oversubscription
            found.append(SwitchLevel("leaf", network.leaf * machine_size, world, up))
        if intra.per_switch is not None and intra.per_switch < min(machine_size, world):
            found.append(
                SwitchLevel(
                    "pcie switch", intra.per_switch, machine_size, intra.attained_bytes_per_ns
                )
            )
        self.levels, self.capacity = tuple(found), list[float]()
        self._first: list[int] = []
        for level in self.levels:
            self._first.append(len(self.capacity))
            self.capacity += [level.capacity] * (2 * (level.block(world - 1) + 1))

    def name(self, port: int) -> str:
        """A readable name for a port."""
        at = max(k for k, first in enumerate(self._first) if first <= port)
        block, way = divmod(port - self._first[at], 2)
        return f"{self.levels[at].word} {block} {'in' if way else 'out'}"

    def _port(self, at: int, rank: int) -> int:
        """The port out of a rank's block; the next number is its port in."""
        return self._first[at] + 2 * self.levels[at].block(rank)

    def of_message(self, src: int, dst: int) -> list[int]:
        """The ports that a message uses."""
        found: list[int] = []
        for at in range(len(self.levels)):
            out, into = self._port(at, src), self._port(at, dst)
            found += [out, into + 1] if out != into else []
        return found

    def of_collective(
        self, row: type[CostedOperation], ranks: tuple[int, ...], root: int | None = None
    ) -> dict[int, float]:
        """Bytes per port, relative to the operation's buffer.

        ``root`` is a global rank; by default the first of ``ranks``.
        """
        asked = dict[int, float]()
        for at, level in enumerate(self.levels):
            if implemented_collective(row) in _LEVEL_INDEPENDENT:
                blocks = self._blocks(at, ranks)
                at_root = list(blocks).index(self._port(at, ranks[0] if root is None else root))
                for port, own in zip(
                    blocks, traffic_across_cuts(row, list(blocks.values()), at_root), strict=True
                ):
                    asked |= {port: own.out, port + 1: own.into}
                continue
            whole = (
                (ranks,) if level.word == "leaf" else _ranks_by_machine(ranks, self.machine_size)
            )
            for part in whole:
                self._add(asked, self._blocks(at, part), row, len(whole))
        return {port: nbytes for port, nbytes in asked.items() if nbytes > 0}

    def _blocks(self, at: int, ranks: tuple[int, ...]) -> dict[int, int]:
        """The number of these ranks in each block, by the block's port out."""
        found: dict[int, int] = {}
        for rank in ranks:
            port = self._port(at, rank)
            found[port] = found.get(port, 0) + 1
        return found

    def _add(
        self,
        asked: dict[int, float],
        blocks: dict[int, int],
        row: type[CostedOperation],
        switches: int,
    ) -> None:
        """Add the traffic of blocks below one of ``switches`` switches of the next level.

        Traffic out of a block equals traffic into it.
        """
        inside = row.busbw_factor(len(blocks)) if len(blocks) > 1 else 0.0
        across = row.busbw_factor(switches) / sum(blocks.values()) if switches > 1 else 0.0
        for port, mates in blocks.items():
            asked[port] = asked[port + 1] = inside + across * mates

    def ns_per_byte(
        self, row: type[CostedOperation], ranks: tuple[int, ...], root: int | None = None
    ) -> float:
        """Lower bound for every schedule: ns per byte of the buffer at the slowest uplink."""
        return max(
            (
                asked / self.capacity[port]
                for port, asked in self.of_collective(row, ranks, root).items()
            ),
            default=0.0,
        )


def _ranks_by_machine(ranks: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks, grouped by machine."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // size, []).append(rank)
    return tuple(tuple(part) for part in found.values())
