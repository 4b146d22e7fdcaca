"""Traces of PyTorch's profiler (Kineto): which collectives a rank has called, in order.

A profile shows what was called, but never what hangs: all its calls are finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    EvidenceCall,
    non_negative_int,
)
from distsim.hang_doctor.model.operation_names import P2P_OPS, operation_family

#: Later events of a trace are ignored.
_MAX_EVENTS = 2_000_000


def is_kineto(data: object) -> bool:
    """Whether this looks like a trace of PyTorch's profiler."""
    return isinstance(data, dict) and isinstance(data.get("traceEvents"), list)


def read_kineto(
    evidence: Evidence, data: Mapping[str, Any], rank: int | None, source: str
) -> int | None:
    """Enter the collectives of a profile; return its rank, None if that is unknown.

    ``rank``: the rank by the file's name, in case the profile has none.
    """
    info = data.get("distributedInfo")
    if isinstance(info, dict):
        recorded_rank = non_negative_int(info.get("rank"), UNKNOWN_NUMBER)
        if 0 <= recorded_rank < MAX_RANKS:
            rank = recorded_rank
    if rank is None:
        return None
    if isinstance(info, dict):
        world = min(non_negative_int(info.get("world_size")), MAX_RANKS)
        evidence.world = max(evidence.world, world)
    evidence.records_of(rank, source)

    order = 0
    for event in data["traceEvents"][:_MAX_EVENTS]:
        if not isinstance(event, dict) or event.get("name") != "record_param_comms":
            continue
        args = event.get("args")
        if not isinstance(args, dict):
            continue
        name = args.get("Collective name")
        if isinstance(name, str) and name not in ("wait", "init"):
            evidence.add_call(_call(evidence, args, name, rank, order, source))
            order += 1
    return rank


def _call(
    evidence: Evidence,
    args: Mapping[str, object],
    name: str,
    rank: int,
    order: int,
    source: str,
) -> EvidenceCall:
    op = operation_family(name)
    return EvidenceCall(
        rank,
        _group_key(evidence, args),
        non_negative_int(args.get("Seq"), UNKNOWN_NUMBER),
        op,
        "done",
        p2p=op in P2P_OPS,
        started=True,
        elements_in=non_negative_int(args.get("In msg nelems"), UNKNOWN_NUMBER),
        elements_out=non_negative_int(args.get("Out msg nelems"), UNKNOWN_NUMBER),
        dtype=str(args.get("dtype") or ""),
        order=order,
        source=source,
    )


def _group_key(evidence: Evidence, args: Mapping[str, object]) -> str:
    name = args.get("Process Group Name")
    if name is None:
        return evidence.add_group("", sure=False)
    return evidence.add_group(str(name), str(args.get("Process Group Description") or ""))
