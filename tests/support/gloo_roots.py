"""Runs collectives with different roots or tensor sizes on real gloo, to see which ranks complete:
four ranks on one machine, one group per case.

``python -m tests.support.gloo_roots SECONDS`` reads cases as JSON, [operation, members, elements
(of each member, if a list), root of each member], and prints whether the call of each member
completed or timed out. tests/backends/test_gloo_roots.py and tests/backends/test_gloo_rings.py
hold the rules to it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

RANKS = 4

Case = tuple[str, list[int], int | list[int], list[int]]


def start(dist: Any, torch: Any, case: Case, group: Any, rank: int) -> Any:
    op, members, numel, roots = case
    me = members.index(rank)
    root, tensor = roots[me], torch.ones(numel[me] if isinstance(numel, list) else numel)
    parts = [tensor.clone() for _ in members] if root == rank else None
    if op == "all_reduce":
        return dist.all_reduce(tensor, group=group, async_op=True)
    if op == "all_gather":
        return dist.all_gather(
            [tensor.clone() for _ in members], tensor, group=group, async_op=True
        )
    if op == "gather":
        return dist.gather(tensor, parts, root, group=group, async_op=True)
    if op == "scatter":
        return dist.scatter(tensor, parts, root, group=group, async_op=True)
    return getattr(dist, op)(tensor, root, group=group, async_op=True)


def ask(rank: int, store: str, cases: list[Case], timeout_s: int) -> list[bool | None]:
    """Of each case: this rank got through; None where it is no member."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    groups = [
        dist.new_group(members, timeout=timedelta(seconds=timeout_s)) for _, members, _, _ in cases
    ]
    dist.barrier()
    works = [
        start(dist, torch, case, group, rank) if rank in case[1] else None
        for case, group in zip(cases, groups, strict=True)
    ]
    found: list[bool | None] = []
    for work in works:
        try:
            found.append(None if work is None else bool(work.wait()) or True)
        except RuntimeError:
            found.append(False)
    dist.barrier()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", type=int, help="Timeout of each group.")
    timeout_s = parser.parse_args().seconds
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    cases = json.load(sys.stdin)
    importlib.import_module("torch.distributed")  # once, before the ranks part
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
                        json.dump(ask(rank, f"{folder}/store", cases, timeout_s), file)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        said = []
        for rank in range(RANKS):
            with open(f"{folder}/{rank}", encoding="utf-8") as file:
                said.append(json.load(file))
    sys.stdout.write(json.dumps([[said[r][i] for r in case[1]] for i, case in enumerate(cases)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
