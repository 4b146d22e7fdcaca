"""Does capture name the rank and the line of ten mistakes, planted in the drivers of
`capture_programs.py`?

    python benchmarks/capture_faults.py [pattern]

Each mistake replaces text of a driver. It counts as named if a finding, or the position of a rank
that did not finish, has the planted line and the rank. If the planted line makes no call, the line
of the call that fails because of it counts instead.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from capture_programs import DRIVERS, ENVIRONMENT, report_in


class Fault(NamedTuple):
    """``old`` of a driver becomes ``new``; ``line``: what the named line holds, ``rank``: who is
    named there.
    """

    name: str
    words: tuple[str, ...]
    ranks: int
    old: str
    new: str
    rank: int
    line: str


ZERO = ("deepspeed_zero.py", "1")
END = "torch.distributed.destroy_process_group()"
FAULTS = (
    Fault(
        "a rank skips backward",
        ZERO,
        2,
        "    engine.backward(loss)\n",
        "    if torch.distributed.get_rank() == 0 or _ != 1:\n        engine.backward(loss)\n",
        0,
        "engine.backward(loss)",
    ),
    Fault(
        "save behind rank 0",
        ZERO,
        2,
        END,
        f"if torch.distributed.get_rank() == 0:\n    engine.save_checkpoint('saved')\n{END}",
        0,
        "engine.save_checkpoint",
    ),
    Fault(
        "wrong group",
        ("megatron_gpt.py",),
        4,
        END,
        "group = parallel_state.get_tensor_model_parallel_group() if torch.distributed.get_rank() != 3 else None\n"
        f"torch.distributed.all_reduce(torch.ones(4, device='cuda'), group=group)\n{END}",
        3,
        "group=group",
    ),
    Fault(
        "swapped pipeline order",
        ("megatron_gpt.py",),
        4,
        END,
        "other = (torch.distributed.get_rank() + 2) % 4\n"
        "torch.distributed.recv(torch.ones(4, device='cuda'), other)\n"
        f"torch.distributed.send(torch.ones(4, device='cuda'), other)\n{END}",
        0,
        "torch.distributed.recv(",
    ),
    Fault(
        "uneven batches without join",
        ("ignite_engine.py",),
        2,
        "loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)",
        "loader = torch.utils.data.DataLoader(data, batch_size=8 * (1 + idist.get_rank()))",
        0,
        "loss.backward()",
    ),
    Fault(
        "new_group by members only",
        ZERO,
        2,
        END,
        "if torch.distributed.get_rank() == 0:\n    torch.distributed.new_group([0])\n"
        "pair = torch.distributed.new_group([0, 1])\n"
        f"torch.distributed.barrier(pair)\n{END}",
        0,
        "torch.distributed.new_group([0])",
    ),
    Fault(
        "an early break on one rank",
        ZERO,
        2,
        "    engine.step()\n",
        "    engine.step()\n    if torch.distributed.get_rank() == 1:\n        break\n",
        0,
        "engine",
    ),
    Fault(
        "a tag without its like",
        ("ignite_engine.py",),
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    trainer.run(loader, max_epochs=1)\n    x = torch.ones(4, device=device)\n"
        "    torch.distributed.send(x, 1, tag=1) if idist.get_rank() == 0 else torch.distributed.recv(x, 0, tag=2)",
        1,
        "torch.distributed.recv(x, 0, tag=2)",
    ),
    Fault(
        "a dtype that differs",
        ("ignite_engine.py",),
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    trainer.run(loader, max_epochs=1)\n    kind = torch.float64 if idist.get_rank() else torch.float32\n"
        "    torch.distributed.all_reduce(torch.ones(4, dtype=kind, device=device))",
        0,
        "torch.distributed.all_reduce(",
    ),
    Fault(
        "a forgotten wait",
        ("ignite_engine.py",),
        2,
        "    trainer.run(loader, max_epochs=2)",
        "    trainer.run(loader, max_epochs=1)\n    torch.distributed.all_reduce(torch.ones(4, device=device), async_op=True)",
        0,
        "async_op=True",
    ),
)


def report_of(fault: Fault, folder: Path) -> dict:  # type: ignore[type-arg]
    """What capture says of the driver with the mistake in it."""
    text = (DRIVERS / fault.words[0]).read_text()
    assert text.count(fault.old) == 1, fault.name
    script = folder / fault.words[0]
    script.write_text(text.replace(fault.old, fault.new))
    backend = ("--backend", "gloo") if "tag" in fault.name else ()  # nccl has no tags
    command = [
        sys.executable,
        "-m",
        "distsim",
        "capture",
        "--cuda",
        *backend,
        "--nproc",
        str(fault.ranks),
        "--timeout",
        "900s",
        "--format",
        "json",
        "--",
        "python",
        script.name,
        *fault.words[1:],
    ]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    return report_in(ended.stdout) or {
        "outcome": f"no report: {ended.stderr[-300:]}",
        "findings": [],
        "captured": {"ranks": []},
    }


def is_named(fault: Fault, told: dict, folder: Path) -> bool:  # type: ignore[type-arg]
    """Has the line that was planted a finding, or the place of a rank that stands, with the
    rank?
    """
    lines = (folder / fault.words[0]).read_text().splitlines()
    seen = {(p["rank"], p["line"]) for f in told["findings"] for p in f["places"]}
    seen |= {
        (r, p["line"])
        for f in told["findings"]
        for p in f["places"]
        for r in f["ranks"]
        if p["rank"] is None
    }
    seen |= {(r["rank"], r["line"]) for r in told["captured"]["ranks"] if r["state"] == "waits"}
    return any(rank == fault.rank and line and fault.line in lines[line - 1] for rank, line in seen)


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    named = 0
    chosen = [fault for fault in FAULTS if re.search(pattern, fault.name)]
    for fault in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            told = report_of(fault, Path(scratch))
            good = is_named(fault, told, Path(scratch))
        named += good
        codes = sorted({f["code"] for f in told["findings"]})
        print(
            f"{'named ' if good else 'MISSED'}  {fault.name}, in {fault.words[0]}: {told['outcome']} {' '.join(codes)}",
            flush=True,
        )
        if not good:
            print(
                json.dumps([told["findings"], told["captured"]])[:1500], file=sys.stderr, flush=True
            )
    print(f"{named} of {len(chosen)} named")


if __name__ == "__main__":
    main()
