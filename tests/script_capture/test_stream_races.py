"""A tensor is used by one stream while another may still write it: values are right on the CPU, and
wrong on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distsim import testing
from distsim.script_capture.cuda.stream_clocks import HOST, StreamClocks, stream_actor
from distsim.script_capture.cuda.stream_log import StreamStep
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not is_supported(), reason="hangs are detected from Linux's /proc")

SIDE, DEFAULT = stream_actor("side"), stream_actor("")


def test_an_event_covers_the_work_before_it_and_no_later_work() -> None:
    clocks = StreamClocks()
    first = clocks.launch(SIDE)
    clocks.observe(StreamStep("record", 1, "side"))
    second = clocks.launch(SIDE)
    clocks.observe(StreamStep("block", 1, ""))

    assert clocks.is_over(SIDE, first, DEFAULT)
    assert not clocks.is_over(SIDE, second, DEFAULT)
    assert not clocks.is_over(SIDE, first, HOST)


def test_what_the_host_waited_for_is_over_for_all_later_work() -> None:
    clocks = StreamClocks()
    number = clocks.launch(SIDE)
    clocks.observe(StreamStep("sync stream", 0, "side"))
    clocks.launch(DEFAULT)

    assert clocks.is_over(SIDE, number, HOST)
    assert clocks.is_over(SIDE, number, DEFAULT)


def test_a_stream_passes_on_what_it_waited_for() -> None:
    clocks = StreamClocks()
    number = clocks.launch("group world")
    clocks.wait(SIDE, clocks.covered_by("group world"))
    clocks.wait(DEFAULT, clocks.covered_by(SIDE))

    assert clocks.is_over("group world", number, DEFAULT)


def reads_before_the_wait() -> None:
    x, halves = torch.ones(4), torch.ones(8)
    work = dist.all_reduce(x, async_op=True)
    y = x + 1
    work.wait()
    y += x
    work = dist.all_reduce(halves[:4], async_op=True)
    halves[4:].add_(1)  # the other half
    work.wait()


def test_a_read_before_the_wait_is_found_at_both_lines() -> None:
    judged = testing.run(reads_before_the_wait, 2, check=False, check_values=True)

    (finding,) = [f for f in judged.simulation.findings if f.code == "DS403"]
    lines = [source_text(place.file, place.line) for place in finding.places]
    assert judged.outcome == "wrong-data"
    assert lines == ["y = x + 1", "work = dist.all_reduce(x, async_op=True)"]
    assert finding.help[0].startswith("call wait() on the Work before line ")


CUDA_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
side = torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x.mul_(2)  # one
x.sum()  # two
torch.cuda.current_stream().wait_stream(side)
x.sum()
host = torch.empty(1000, pin_memory=True)
host.copy_(x, non_blocking=True)  # three
host[0].item()  # four
torch.cuda.synchronize()
host[0].item()
dist.all_reduce(x)
"""


@pytest.mark.slow
def test_missing_waits_between_streams_and_of_the_host_are_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CUDA_SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "distsim", "capture", "--nproc", "2", "--format", "json"]

    done = subprocess.run(
        [*command, "--check-values", "--", "python", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    found = json.loads(done.stdout)["findings"]
    texts = CUDA_SCRIPT.splitlines()
    pairs = [
        tuple(texts[place["line"] - 1].rpartition("# ")[2] for place in finding["places"])
        for finding in found
        if finding["code"] == "DS403"
    ]
    assert pairs == [("two", "one"), ("four", "three")], done.stderr
