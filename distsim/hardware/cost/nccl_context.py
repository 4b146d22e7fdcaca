"""The inputs of NCCL's choice of an algorithm: a group's shape and the links between its ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple

IntraLinkKind = Literal["nvlink", "pcie"]
#: Operations that NCCL has algorithms for, those that it makes of sends and receives, and the
#: message itself.
NcclOperation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send",
]
SEND_RECV_OPERATIONS: tuple[NcclOperation, ...] = ("all_to_all", "gather", "scatter", "send")


class NcclContext(NamedTuple):
    """A group of ``n`` ranks on ``nodes`` NVLink domains, with at most ``per_node`` ranks in each.

    Bandwidths are in GB/s, per direction. ``intra_gbs``: a rank's link inside the node, as NCCL
    counts it. ``inter_gbs``: all network cards of a node that the group's ranks can use together.
    ``nic_gbs``: one rank's share while all of the node's ranks send. ``sheet_*``: the same
    according to the data sheets; nothing can exceed these. ``switch``: links meet in a switch that
    can reduce (NVLS). ``driven``: GPUs that one process drives. ``reducing``: the network reduces
    (SHARP).
    """

    architecture: str
    n: int
    nodes: int
    per_node: int
    intra_gbs: float
    inter_gbs: float = 0.0
    nic_gbs: float = 0.0
    sheet_intra: float = float("inf")
    sheet_inter: float = float("inf")
    intra: IntraLinkKind = "nvlink"
    peer_access: bool = True
    switch: bool = True
    transport: str = "ib"
    driven: int = 1
    cpu: str = "intel"
    reducing: bool = False

    @property
    def link(self) -> str:
        """The class of the link inside a node: ``nvlink``, ``pcie``, or ``staged``.

        ``staged`` is PCIe without peer access, where data passes through host memory.
        """
        return self.intra if self.intra == "nvlink" or self.peer_access else "staged"

    @property
    def smaller(self) -> NcclContext | None:
        """A subgroup of this group: about half of its nodes, one node, or half of a node."""
        if self.nodes > 1:
            nodes = 1 << (self.nodes - 1).bit_length() - 1
            if nodes == 1 and self.per_node == 1:
                return None
            return self._replace(n=nodes * self.per_node, nodes=nodes)
        n = 1 << (self.n - 1).bit_length() - 1
        return None if n < 2 else self._replace(n=n, per_node=n)
