"""What ranks that stand still would have done later, and who is missing at a barrier that
counts.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import tests.support.capture_programs as programs
from distsim import testing
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.evaluation import evaluate_capture

pytestmark = pytest.mark.skipif(not is_supported(), reason="standstill is told from Linux's /proc")


def a_barrier_is_missed_by_who_is_elsewhere() -> None:
    """Rank 1 is in another call of the same number when rank 0 counts who came."""
    rank = dist.get_rank()
    if rank == 1:
        dist.broadcast(torch.zeros(2), src=0)
    else:
        with pytest.raises(
            RuntimeError,
            match="Ranks 1 failed to pass monitoredBarrier in 2000 ms"
            if rank == 0
            else "successfully",
        ):
            dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)


def sends_with_another_tag_and_goes_on() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = torch.zeros(4)
    asked = dist.irecv(got, (rank - 1) % size, tag=3)
    sent = dist.isend(
        torch.ones(4), (rank + 1) % size, tag=4 if rank == 2 else 3
    )  # kept, or gloo cancels it
    asked.wait()
    del sent
    dist.barrier()


def test_a_monitored_barrier_names_the_rank_that_is_in_another_call():
    judged = testing.run(a_barrier_is_missed_by_who_is_elsewhere, 3, check=False)

    assert [s.state for s in judged.stands] == ["ended", "waits", "ended"]


def test_a_message_with_another_tag_is_the_intended_one_even_if_its_sender_is_blocked_elsewhere():
    judged = testing.run(sends_with_another_tag_and_goes_on, 4, check=False)

    found = judged.simulation.findings[0]
    assert (judged.outcome, found.code) == ("hangs", "DS304")
    assert "it has another tag" in found.message
    lines = {source_text(p.file, p.line) for p in found.places}
    assert lines == {"asked.wait()", "sent = dist.isend("}


@pytest.mark.parametrize(("name", "told"), [("uneven batches", True), ("early break", False)])
def test_ranks_that_diverge_in_a_backward_pass_get_the_cause_of_the_divergence(name, told):
    fault = programs.FAULTS[name]

    judged = testing.run(fault.program, fault.ranks, check=False)

    assert ("find_unused_parameters" in " ".join(judged.simulation.findings[0].help)) is told


def names_another_root() -> None:
    dist.reduce(torch.ones(4), dst=0 if dist.get_rank() < 2 else 1)


def test_mismatched_calls_end_like_on_the_backend_even_without_data_to_continue():
    """Real gloo goes through where members of a reduce name different roots, with wrong sums."""
    judged = testing.run(names_another_root, 3, check=False)

    assert (judged.captured.ended, judged.outcome) == ("stalled", "completes")
    assert (judged.simulation.verdict.verdict, judged.simulation.findings[0].code) == (
        "mismatch",
        "DS205",
    )


def makes_local_groups_among_others() -> None:
    """Ranks 0 and 3 are in two groups each when they make theirs, the world among them; rank 3
    never was in ``some``.
    """
    rank = dist.get_rank()
    some = dist.new_group([0, 1, 2])
    halves = dist.new_subgroups(2)[0]
    dist.destroy_process_group(some)
    if rank in (0, 3):
        pair = dist.new_group([0, 3], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=pair)
    dist.all_reduce(torch.ones(1), group=halves)


def test_groups_have_the_names_of_the_run():
    judged = testing.run(makes_local_groups_among_others, 4)

    assert (judged.outcome, judged.simulation.verdict.verdict) == ("completes", "ok")


EARLY = """\
import os, sys, torch.distributed as dist
if os.environ["RANK"] == "1":
    {}
dist.init_process_group("gloo")
"""


@pytest.mark.parametrize(
    ("ends", "code", "word"),
    [
        ('raise ValueError("no data")', "DS303", "rank 1, which has raised an error"),
        ("sys.exit(0)", "DS302", "rank 1, which has exited early"),
        ("sys.exit(3)", "DS302", "rank 1, which has exited with code 3"),
        ("os.kill(os.getpid(), 9)", "DS303", "rank 1, which was killed"),
    ],
)
def test_a_rank_that_exits_before_init_is_the_cause_and_waits_for_no_rank(
    tmp_path: Path, ends: str, code: str, word: str
) -> None:
    """The others stand in init_process_group; no circle is told."""
    script = tmp_path / "train.py"
    script.write_text(EARLY.format(ends), encoding="utf-8")

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), 3, keep_output=True))
    )

    verdict = judged.simulation.verdict
    assert verdict is not None
    assert (verdict.verdict, verdict.ranks) == ("deadlock", (0, 2))
    first = next(f for f in judged.simulation.findings if f.severity == "error")
    assert first.code == code
    assert word in first.message
