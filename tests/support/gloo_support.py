"""Tests which calls real gloo accepts: every operation of the table with every dtype and reduce op,
on two ranks of one machine. The argument ``shapes`` tests shapes of inputs and outputs instead.

``python -m tests.support.gloo_support`` prints a line per call as JSON: operation, dtype, reduce
op, and the error's text or null. Both ranks refuse a call before they send anything, so the
group remains usable. tests/backends/test_backend_support.py holds the project's table to it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)
REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_reduce_coalesced",
    "reduce_scatter_tensor_coalesced",
)
MOVING = (
    "send",
    "recv",
    "isend",
    "irecv",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_gather_into_tensor_coalesced",
)
RANKS = 2
#: Shapes of a rank's share and of all shares in one tensor.
SHAPES = (
    ((3, 2), (6, 2)),
    ((3, 2), (12,)),
    ((6,), (2, 6)),
    ((6,), (12,)),
    ((3, 2), (2, 3, 2)),
    ((0,), (0,)),
)
SHAPED = ("all_gather_into_tensor", "reduce_scatter_tensor")


def asked() -> Iterator[tuple[str, str, str | None]]:
    yield from (
        (op, dtype, reduce_op) for op in REDUCING for dtype in DTYPES for reduce_op in REDUCE_OPS
    )
    yield from ((op, dtype, None) for op in MOVING for dtype in DTYPES)


def make_call(dist: Any, rank: int, op: str, whole: Any, part: Any, reduce_op: Any) -> None:
    """``whole`` has an element for each rank, ``part`` one."""
    if op.endswith("_coalesced"):
        with dist._coalescing_manager():
            make_call(dist, rank, op.removesuffix("_coalesced"), whole, part, reduce_op)
        return
    parts = [part.clone() for _ in range(RANKS)]
    if op in ("send", "recv"):
        dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)
    elif op in ("isend", "irecv"):
        (dist.isend(whole, 1) if rank == 0 else dist.irecv(whole, 0)).wait()
    elif op == "broadcast":
        dist.broadcast(whole, 0)
    elif op in ("all_reduce", "reduce"):
        dist.all_reduce(whole, reduce_op) if op == "all_reduce" else dist.reduce(
            whole, 0, reduce_op
        )
    elif op in ("all_gather", "gather", "scatter", "all_to_all"):
        at_root = parts if rank == 0 else None
        {
            "all_gather": lambda: dist.all_gather(parts, part),
            "gather": lambda: dist.gather(part, at_root, 0),
            "scatter": lambda: dist.scatter(part, at_root, 0),
            "all_to_all": lambda: dist.all_to_all(parts, [part.clone() for _ in parts]),
        }[op]()
    elif op == "reduce_scatter":
        dist.reduce_scatter(part, parts, reduce_op)
    elif op == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(part, whole, reduce_op)
    elif op == "all_gather_into_tensor":
        dist.all_gather_into_tensor(whole, part)
    else:
        dist.all_to_all_single(whole, whole.clone())


def ask_shapes(rank: int, store: str) -> Iterator[tuple[str, Any, Any, str | None]]:
    """(operation, shape of a share, of all shares, error's text)"""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    for op in (f"{op}{launch}" for op in SHAPED for launch in ("", "_coalesced")):
        for share, shares in SHAPES:
            try:
                make_call(dist, rank, op, torch.ones(shares), torch.ones(share), dist.ReduceOp.SUM)
                text = None
            except (RuntimeError, ValueError, TypeError) as error:
                text = str(error)
            yield op, share, shares, text
    dist.destroy_process_group()


def ask(rank: int, store: str) -> Iterator[tuple[str, str, str | None, str | None]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    for op, dtype, reduce_op in asked():
        whole = torch.ones(RANKS).to(getattr(torch, dtype))
        try:
            make_call(
                dist,
                rank,
                op,
                whole,
                whole[:1].clone(),
                reduce_op and getattr(dist.ReduceOp, reduce_op.upper()),
            )
            text = None
        except (RuntimeError, ValueError, TypeError) as error:
            text = str(error)
            dist.distributed_c10d._world.pg_coalesce_state.clear()  # an error inside the context leaves the group collecting
        yield op, dtype, reduce_op, text
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["shapes"], help="Test shapes, not dtypes.")
    asked = ask if parser.parse_args().what is None else ask_shapes
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    store = os.path.join(tempfile.mkdtemp(), "store")
    child = os.fork()
    rank = 1 if child == 0 else 0
    status = 1
    try:
        for line in asked(rank, store):
            if rank == 0:
                sys.stdout.write(json.dumps(line) + "\n")
        status = 0
    finally:
        sys.stdout.flush()
        if rank == 1:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
