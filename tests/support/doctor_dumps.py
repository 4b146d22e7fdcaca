"""Flight Recorder dumps of NCCL, made here in the form in which PyTorch writes them (version 2.10),
and the files of hostile people.
"""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

WORLD = "0"
#: A member's place in the code, innermost frame first, as torch records it.
TORCH = {
    "name": "all_reduce",
    "filename": "/site-packages/torch/distributed/distributed_c10d.py",
    "line": 3245,
}


def entry(
    number: int,
    op: str,
    line: int = 0,
    state: str = "completed",
    group: tuple[str, str] = (WORLD, "default_pg"),
    **more: Any,
) -> dict[str, Any]:
    """A collective, or with ``op`` as ``send 0->1`` a message."""
    p2p = op.startswith(("send", "recv"))
    frames = [TORCH, {"name": "train", "filename": "/job/train.py", "line": line}] if line else []
    size = more.pop("size", 8)
    return {
        "record_id": more.pop("record_id", 0),
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 10**9 * number,
        "input_sizes": [[size]],
        "input_dtypes": [more.pop("dtype", "Float")],
        "output_sizes": [[size]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
        "frames": frames,
        **more,
    }


def batch(
    ops: list[str], numbers: tuple[int, int], line: int = 0, state: str = "completed", **more: Any
) -> list[dict[str, Any]]:
    """A batch as NCCL's group records it. ``numbers``: of collectives and of messages, the same in
    all its entries. The operations have no state that changes; the last entry has it, and is no
    message even where all operations are.
    """
    both = {"collective_seq_id": numbers[0], "p2p_seq_id": numbers[1]}
    found = [entry(0, op, line, "scheduled", **both, **more) for op in ops]
    return [
        *found,
        entry(0, "coalesced", line, state, **both, **more)
        | {"input_sizes": [], "input_dtypes": [], "output_sizes": []},
    ]


def dump(
    entries: list[dict[str, Any]],
    groups: dict[str, tuple[str, list[int]]] | None = None,
    version: str = "2.10",
) -> dict[str, Any]:
    """A rank's dump. ``groups``: name -> (description, ranks); the default group has ranks 0 to 3
    where nothing is said.

    Its status has the number of the last work, be it of a message or of a collective, as
    ProcessGroupNCCL counts.
    """
    named = groups or {WORLD: ("default_pg", [0, 1, 2, 3])}
    status: dict[str, dict[str, int]] = {}
    for before, e in pairwise([{}, *entries]):
        at = status.setdefault(
            str(e["pg_id"]),
            {
                "last_enqueued_collective": 0,
                "last_started_collective": 0,
                "last_completed_collective": 0,
            },
        )
        of_messages = e["is_p2p"] or (
            e["profiling_name"] == "nccl:coalesced" and before.get("is_p2p")
        )
        number = e["p2p_seq_id"] if of_messages else e.get("collective_seq_id", e.get("seq_id", 0))
        at["last_enqueued_collective"] = number
        if e["state"] == "completed":
            at["last_completed_collective"] = number
    config = {
        name: {"name": name, "desc": desc, "ranks": str(ranks)}
        for name, (desc, ranks) in named.items()
    }
    return {
        "version": version,
        "comm_lib_version": "2.27",
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
    }


def write(folder: Path, dumps: dict[int, dict[str, Any]], as_json: bool = False) -> Path:
    """A file per rank, as torch names them."""
    for rank, data in dumps.items():
        path = folder / f"nccl_trace_rank_{rank}"
        if as_json:
            path.with_suffix(".json").write_text(json.dumps(data))
        else:
            path.write_bytes(pickle.dumps(data, protocol=2))
    return folder
