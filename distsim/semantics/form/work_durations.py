"""How long a rank's own work takes: the time of the scenario or the device's cost, slowed by faults
and varied by jitter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, RankValues, SharedCode, Vec, at_row
from distsim.program.model import Program


def durations_ns(program: Program, cost: CostModel, code: SharedCode, position: int) -> Vec:
    """The durations of a call for all ranks of a code: one number if they are equal."""
    call = code.calls[position]
    if OPERATIONS[call.op].kind == "remote":
        return _one_sided_ns(cost, code, call)
    slow_ranks = [fault.rank for fault in program.faults if fault.kind == "slow"]
    varies = bool(program.jitter) or bool(slow_ranks)
    if call.op != "compute" or not varies:
        return _base_ns(cost, call, len(code.ranks))
    return np.array(
        [_varied_ns(program, cost, rank, position) for rank in code.ranks], dtype=np.int64
    )


def _varied_ns(program: Program, cost: CostModel, rank: int, position: int) -> int:
    """The duration of a compute of one rank that faults or chance vary.

    ``faults: {kind: slow, factor}`` multiplies compute. ``jitter: j`` multiplies it by a factor
    drawn evenly from [1, 1 + j]. The generator is seeded with the scenario's seed, the rank and the
    call's position, so that every engine draws the same numbers.
    """
    code, call = program.code(rank), program.code_call(rank, position)
    base = int(at_row(_base_ns(cost, call, len(code.ranks)), program.row_of[rank]))
    factor = 1.0
    for fault in program.faults:
        if fault.kind == "slow" and fault.rank == rank:
            factor *= fault.factor
    if program.jitter:
        factor *= 1 + program.jitter * random.Random(f"{program.seed} {rank} {position}").random()
    return base if factor == 1.0 else round(base * factor)


def _one_sided_ns(cost: CostModel, code: SharedCode, call: CodeCall) -> Vec:
    """The duration of a put or get: from the memory that is read to the one that is written."""
    is_put = OPERATIONS[call.op].gives == "all"
    peers = np.broadcast_to(np.asarray(code.endpoints[call.endpoint].peer), len(code.ranks))
    sizes = np.broadcast_to(np.asarray(call.nbytes), len(code.ranks))
    durations = []
    for rank, peer, size in zip(code.ranks, peers.tolist(), sizes.tolist(), strict=True):
        src, dst = (rank, peer) if is_put else (peer, rank)
        # A rank outside the world belongs to a call that is invalid, or that its rank never makes.
        exists = min(src, dst) >= 0 and max(src, dst) < cost.world_size
        durations.append(cost.one_sided_ns(src, dst, size) if exists else 0)
    return np.array(durations, dtype=np.int64)


def _base_ns(cost: CostModel, call: CodeCall, ranks: int) -> Vec:
    """The time given by the scenario, or predicted by the device's roofline."""
    fields = call.fields
    work = fields.get("work", ())
    if not work:
        amounts = [fields.get(name, 0) for name in ("time_ns", "flops", "mem_bytes")]
        dtype, kernels = fields.get("dtype") or "float32", fields.get("kernels", 1)
        return _roofline_ns(cost, amounts, dtype, kernels, ranks)
    total: Vec = 0
    for flops, nbytes, kernels, dtype in work:
        total = total + _roofline_ns(cost, [0, flops, nbytes], dtype, kernels, ranks)
    return total


def _roofline_ns(
    cost: CostModel, amounts: Sequence[RankValues], dtype: str, kernels: int, ranks: int
) -> Vec:
    """`CostModel.compute_ns` for a time, FLOP and bytes, each of which may differ by rank."""
    if not any(isinstance(amount, np.ndarray) for amount in amounts):
        time, flops, nbytes = amounts
        return cost.compute_ns(int(time), float(flops), float(nbytes), dtype, kernels)
    by_rank = [np.broadcast_to(amount, ranks).tolist() for amount in amounts]
    durations = [
        cost.compute_ns(int(time), float(flops), float(nbytes), dtype, kernels)
        for time, flops, nbytes in zip(*by_rank, strict=True)
    ]
    return np.array(durations, dtype=np.int64)
