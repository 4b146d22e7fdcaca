"""The first finding of a captured run names the cause: the failed peer, the odd rank, the wrong
group. It claims nothing about calls that an error prevented.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from distsim import testing
from distsim.cli.commands import capture
from distsim.findings.finding_types import Finding
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.evaluation import CaptureResult

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def run(function: Callable[[], object], ranks: int) -> CaptureResult:
    return testing.run(function, ranks, check=False)


def first_finding(function: Callable[[], object], ranks: int) -> Finding:
    return run(function, ranks).simulation.findings[0]


def lines_of(finding: Finding) -> set[tuple[int | None, str]]:
    return {(place.rank, source_text(place.file, place.line)) for place in finding.places}


# --- a peer that failed ---
def the_sender_raises() -> None:
    x = torch.ones(4)
    if dist.get_rank() == 0:
        dist.recv(x, 1)
    else:
        raise ValueError("corrupt sample")


def test_a_receive_from_a_rank_that_raised_names_the_error_and_its_line() -> None:
    found = run(the_sender_raises, 2).simulation.findings

    assert [finding.code for finding in found] == ["DS303"]
    assert "waits for rank 1, which has raised an error" in found[0].message
    assert "corrupt sample" in found[0].help[0]
    assert (1, 'raise ValueError("corrupt sample")') in lines_of(found[0])


def the_peer_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_the_kernel_killed_gets_the_advice_on_memory() -> None:
    finding = first_finding(the_peer_is_killed, 2)

    assert finding.code == "DS303"
    assert finding.help[0].startswith("find out what killed rank 1: SIGKILL often means that")


def all_raise_before_the_wait() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    raise ValueError("corrupt sample" if work else "")


def test_a_rank_that_raised_is_not_blamed_for_a_request_that_it_could_not_wait_for() -> None:
    result = run(all_raise_before_the_wait, 2)

    assert [finding.code for finding in result.simulation.findings] == ["DS802"]
    assert (result.outcome, result.simulation.verdict) == ("raises", None)


def the_last_stage_reduces_its_loss() -> None:
    rank, x = dist.get_rank(), torch.ones(4)
    for _ in range(2):
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)
            dist.all_reduce(x)


def test_a_rank_that_is_blocked_in_a_collective_is_not_reported_as_lacking_the_receive() -> None:
    finding = first_finding(the_last_stage_reduces_its_loss, 2)

    assert finding.code == "DS301"
    assert (1, "dist.all_reduce(x)") in lines_of(finding)
    assert "never" not in finding.message


# --- an object broadcast in a conditional expression ---
def only_the_root_broadcasts() -> None:
    rank, box = dist.get_rank(), ["a"]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    dist.broadcast_object_list(box, src=0) if rank == 0 else None
    for _ in range(2):
        model(torch.ones(4)).sum().backward()


def one_of_three_does_not_broadcast() -> None:
    rank, box = dist.get_rank(), ["a"]
    x = torch.ones(4)
    dist.broadcast_object_list(box, src=0) if rank != 1 else None
    for _ in range(2):
        dist.all_reduce(x)


@pytest.mark.parametrize(
    ("function", "ranks", "head"),
    [
        (only_the_root_broadcasts, 2, "rank 0 makes one extra broadcast"),
        (one_of_three_does_not_broadcast, 3, "rank 1 skips the broadcast"),
    ],
)
def test_a_skipped_object_broadcast_names_the_odd_rank_and_the_line_of_the_condition(
    function: Callable[[], object], ranks: int, head: str
) -> None:
    finding = first_finding(function, ranks)

    assert finding.message.startswith(head)
    assert any(text.startswith("dist.broadcast_object_list") for _, text in lines_of(finding))
    assert "already ended" not in finding.message


# --- a wrong group ---
def one_rank_uses_the_world() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2] if rank != 3 else None
    dist.all_reduce(torch.ones(4), group=group)


def one_rank_uses_the_other_axis() -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = columns[rank % 2] if rank != 1 else rows[0]
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "head", "used", "wanted"),
    [
        (one_rank_uses_the_world, "rank 3 calls all_reduce on world", "world", "ranks 2 and 3"),
        (
            one_rank_uses_the_other_axis,
            "rank 1 calls all_reduce on group 1",
            "ranks 0 and 1",
            "ranks 1 and 3",
        ),
    ],
)
def test_a_wrong_group_is_named_with_the_group_of_the_ranks_that_wait(
    function: Callable[[], object], head: str, used: str, wanted: str
) -> None:
    finding = first_finding(function, 4)

    assert finding.message.startswith(head)
    called, _, instead = finding.help[0].partition(" instead of ")
    assert wanted in called
    assert used in instead


def two_orders_of_two_groups() -> None:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = [rows[rank // 2], columns[rank % 2]]
    for group in groups if rank in (0, 3) else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group)


def test_groups_in_another_order_are_not_a_wrong_group() -> None:
    finding = first_finding(two_orders_of_two_groups, 4)

    assert finding.code == "DS301"
    assert finding.help[0].startswith("use the groups in the same order on all ranks")


# --- a second run that is not made ---
def test_a_long_run_that_is_not_repeated_says_how_to_repeat_it() -> None:
    assert capture._may_name_divergence(run(one_of_three_does_not_broadcast, 3))
    assert not capture._may_name_divergence(run(the_sender_raises, 2))
    note = capture._skipped_rerun_note(75.4)
    assert note.startswith("the run took 75 s, more than 60 s")
    assert "add --rerun" in note
