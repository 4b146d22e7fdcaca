"""Sends and receives as NCCL schedules them: without a tuning table, with channels for each peer.

A message gets few channels until each of them would carry more than a fixed part, then twice as
many, and so on. So the time grows with the bytes up to one part, stays constant while channels are
added, and grows again once the link is saturated. LL is used up to 16 KiB per channel.

Source: NCCL v2.30.7, src/enqueue.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from distsim.hardware.cost.nccl_context import NcclContext, NcclOperation
from distsim.hardware.cost.nccl_tuning import Array, LatencyTerm, NcclForm

#: (GB/s of the channels that a peer starts with, bytes beyond which it gets more channels).
#: Measured: 12 to 18 GB/s up to 3 MiB on 2, 4 and 8 A100, 82 GB/s up to 64 MiB on 8 H100 (open
#: nccl-tests tables). On H100, a peer of an all_to_all starts with half of these channels.
_PEER_CHANNELS: Final = {"volta": (17.5, 3 << 20), "ampere": (17.5, 3 << 20)}
_DEFAULT_PEER_CHANNELS: Final = (82.0, 64 << 20)
_LL_EFFICIENCY: Final = 0.5  # half of the bytes that LL sends are flags


def _peers(kind: NcclOperation, at: NcclContext) -> tuple[int, int]:
    """The number of peers that a rank sends to: on its own node, and on other nodes."""
    if kind != "send":
        return at.per_node - 1, at.n - at.per_node
    return (0, 1) if at.nodes > 1 else (1, 0)


def message_forms(kind: NcclOperation, at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """LL and Simple for one message, or for the messages that make up an exchange."""
    local, remote = _peers(kind, at)
    share = 1.0 if kind == "send" else 1.0 / at.n  # of the bytes, to each peer
    seconds_inside = local * share / at.intra_gbs
    seconds_between = remote * share / at.nic_gbs if remote else 0.0
    wide = 1.0 / max(seconds_inside, seconds_between)
    narrow = "x" if seconds_between > seconds_inside else ""
    common = (
        LatencyTerm("message", 1.0, "a group of sends and receives"),
        LatencyTerm("message between", min(remote, 1), "network path"),
        LatencyTerm("peer inside", max(local - 1, 0), f"{local} peers inside"),
        LatencyTerm("peer between", max(remote - 1, 0), f"{remote} peers between nodes"),
    )
    for protocol, inside, between in (("LL", 0.6, 2.7), ("Simple", 3.4, 14.0)):
        hop = (
            LatencyTerm(f"hop between, {protocol}", between, "a hop between nodes")
            if remote
            else LatencyTerm(f"hop inside, {protocol}", inside, "a hop")
        )
        start = (
            (LatencyTerm("start, Simple", 1.0, "start of Simple"),) if protocol == "Simple" else ()
        )
        gbs = wide * np.ones_like(nbytes)
        if (kind == "send" or not remote) and at.link == "nvlink":
            gbs = np.minimum(gbs, _peer_gbs(kind, at, nbytes * share) / share)
        gbs = gbs * (_LL_EFFICIENCY if protocol == "LL" else 1.0)
        power = "bandwidth, message LL" if protocol == "LL" else f"bandwidth, message{narrow}"
        yield NcclForm(
            "pairs" if kind != "send" else "message",
            protocol,
            (*common, hop, *start),
            gbs,
            ((power, 1.0),),
        )


def _peer_gbs(kind: NcclOperation, at: NcclContext, nbytes: Array) -> Array:
    """GB/s that the channels of one peer carry at these sizes."""
    rate, part = _PEER_CHANNELS.get(at.architecture, _DEFAULT_PEER_CHANNELS)
    if kind != "send" and at.architecture not in _PEER_CHANNELS:
        rate, part = rate / 2, part // 2
    return rate * np.maximum(nbytes / part, 1.0)
