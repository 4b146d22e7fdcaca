"""How long a rank's own work takes: the file's time or the device's price, slowed by faults and
varied by jitter.
"""

from __future__ import annotations

import random

import numpy as np

from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode, Vec, at_row
from distsim.program.model import Program


def _varied_ns(program: Program, cost: CostModel, rank: int, position: int) -> int:
    """The duration of a compute of one rank, where faults or chance vary it.

    ``faults: {kind: slow, factor}`` multiplies compute; ``jitter: j`` multiplies it by a factor
    drawn evenly from [1, 1 + j], by a generator seeded with the file's seed, the rank and the
    call's position, so that every engine draws the same.
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


def durations_ns(program: Program, cost: CostModel, code: SharedCode, position: int) -> Vec:
    """The durations of a call for all ranks of a code: one number where they are equal. Vec."""
    call = code.calls[position]
    if OPERATIONS[call.op].kind == "remote":
        return _one_sided_ns(cost, code, call)
    varied = call.op == "compute" and (
        program.jitter or any(f.kind == "slow" for f in program.faults)
    )
    if not varied:
        return _base_ns(cost, call, len(code.ranks))
    return np.array(
        [_varied_ns(program, cost, rank, position) for rank in code.ranks], dtype=np.int64
    )


def _one_sided_ns(cost: CostModel, code: SharedCode, call: CodeCall) -> Vec:
    """A put or a get: from whose memory is read to whose is written. Vec."""
    puts, peers = (
        OPERATIONS[call.op].gives == "all",
        np.broadcast_to(np.asarray(code.ports[call.port].peer), len(code.ranks)),
    )
    sizes = np.broadcast_to(np.asarray(call.nbytes), len(code.ranks))
    ways = zip(code.ranks, peers.tolist(), sizes.tolist(), strict=True)
    ends = [(rank, peer, size) if puts else (peer, rank, size) for rank, peer, size in ways]
    made = [min(src, dst) >= 0 and max(src, dst) < cost.world_size for src, dst, _ in ends]
    return np.array(
        [cost.one_sided_ns(*end) if good else 0 for end, good in zip(ends, made, strict=True)],
        dtype=np.int64,
    )


def _base_ns(cost: CostModel, call: CodeCall, ranks: int) -> Vec:
    """Time as the file says, or by the device's roofline. Vec."""
    time, flops, size = (call.fields.get(name, 0) for name in ("time_ns", "flops", "mem_bytes"))
    dtype, kernels = call.fields.get("dtype") or "float32", call.fields.get("kernels", 1)
    if not any(isinstance(v, np.ndarray) for v in (time, flops, size)):
        return cost.compute_ns(int(time), float(flops), float(size), dtype, kernels)
    rows = zip(*(np.broadcast_to(v, ranks).tolist() for v in (time, flops, size)), strict=True)
    return np.array(
        [cost.compute_ns(int(t), float(f), float(m), dtype, kernels) for t, f, m in rows],
        dtype=np.int64,
    )
