"""The work of evaluating a capture grows in proportion to the number of captured calls."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CapturedRun, CaptureRunOptions, run_capture
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.result.evaluation import evaluate_capture
from tests.simulation.test_growth import MAX_EXPONENT, counts_of, exponent

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")

_SCRIPT = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range({repeats}):
    dist.all_reduce(torch.ones(4))
"""


def captured(folder: Path, repeats: int) -> CapturedRun:
    script = folder / f"{repeats}.py"
    script.write_text(_SCRIPT.format(repeats=repeats))
    return run_capture(CaptureRunOptions(CaptureTarget(str(script)), 2, keep_output=True))


def test_work_grows_linearly_with_the_calls_of_a_capture(tmp_path: Path) -> None:
    sizes = (50, 100, 200)

    counts = counts_of(evaluate_capture, [captured(tmp_path, repeats) for repeats in sizes])

    assert exponent(counts, sizes) <= MAX_EXPONENT, counts
