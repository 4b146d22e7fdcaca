"""A tensor that the script changes while a call uses it is told, with the line that does it; what
torch counts besides is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.result.evaluation import evaluate_capture

CHANGES = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
x, flat, kept = torch.ones(8) + rank, torch.ones(10000), torch.ones(4)
if rank == 0:
    work = dist.isend(x, 1)
    x.zero_()
    work.wait()
    polled = dist.isend(kept, 1)
    assert polled.is_completed()
    kept.add_(1)
    polled.wait()
else:
    work = dist.irecv(x, 0)
    x[2] += 1
    work.wait()
    assert x.tolist() == [1] * 8
    dist.recv(kept, 0)
for _ in range(3):
    work = dist.all_reduce(flat[:5000], async_op=True)
    flat[5000:].add_(1)
    kept.mul_(1)
    work.wait()
for _ in range(2):
    work = dist.all_reduce(flat, async_op=True)
    torch.mul(flat, 0.5, out=flat)
    work.wait()
a, b = torch.ones(4), torch.empty(4)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, a, 1 - rank), dist.P2POp(dist.irecv, b, 1 - rank)]):
    a += 1
    work.wait()
"""


def test_modifying_a_buffer_of_an_open_call_in_place_is_a_race_at_that_line(
    tmp_path: Path,
) -> None:
    """A send, a receive, a collective, a batch. Not another part of a flat buffer, nor a
    tensor that no call uses, nor one whose request was found done."""
    script = tmp_path / "train.py"
    script.write_text(CHANGES, encoding="utf-8")

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), 2, keep_output=True))
    )

    verdict = judged.simulation.verdict
    assert verdict is not None
    assert (judged.outcome, verdict.verdict) == ("completes", "race")
    found = [
        (f.code, [p.line for p in f.places], f.ranks)
        for f in judged.simulation.findings
        if f.code.startswith("DS4")
    ]
    assert sorted(found) == [
        ("DS402", [6, 7], (0,)),
        ("DS402", [14, 15], (1,)),
        ("DS402", [25, 26], (0, 1)),
        ("DS402", [29, 30], (0, 1)),
    ]
    words = next(f.message for f in judged.simulation.findings if f.ranks == (1,))
    assert "the script, on rank 1" in words
    assert ", changes x in place while irecv" in words
