"""Blocking messages that come again and again take a shorter way through the hub. It changes
nothing but what they cost.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.overrides import BaseTorchFunctionMode

from distsim import testing
from distsim.script_capture.hub.call_cache import CachedCallFrame, cached_call_frame
from distsim.script_capture.hub.state import RankProcess
from distsim.script_capture.protocol.blocked_threads import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def mixed(long_way: bool) -> None:
    """Rank 0 and 1 exchange; 2 sends ahead, with tags, to those who receive at once, later, as
    requests, or from anyone.
    """
    rank, x, other = (
        dist.get_rank(),
        torch.full((4,), float(dist.get_rank())),
        torch.zeros(4, dtype=torch.int64),
    )
    with BaseTorchFunctionMode() if long_way else nullcontext():
        for step in range(4):
            if rank == 2:
                for to in (0, 1):
                    dist.send(x + step, to, tag=step % 2)
                    dist.send(other + step, to, tag=7)
                dist.recv(x, 1)
            else:
                got, late, ready = torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int64)
                work = dist.irecv(late, 2, tag=step % 2)
                exchange(rank, x, got)
                assert got.tolist() == [1.0 - rank] * 4
                source = dist.recv(ready, 2 if step % 2 else None, tag=7)
                work.wait()
                assert (source, ready.tolist(), late[0].item()) == (
                    2,
                    [step] * 4,
                    2.0 if not step else late[0].item(),
                )
            if rank == 1:
                dist.send(got * 0 + 2, 2)


def exchange(rank: int, x: torch.Tensor, got: torch.Tensor) -> None:
    if rank == 0:
        dist.send(x, 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(x, 0)


def test_the_cached_path_gives_the_same_program_as_the_uncached() -> None:
    """Calls, matches and waits, and the numbers that arrive: also where messages wait for their
    receives, by tag, request or any source.
    """
    shorter, longer = (testing.run(mixed, 3, args=(long,), check=False) for long in (False, True))

    assert shorter.outcome == longer.outcome == "completes"
    for ours, theirs in zip(
        shorter.simulation.program.codes, longer.simulation.program.codes, strict=True
    ):
        assert [(c.op, str(c.fields), c.waits) for c in ours.calls] == [
            (c.op, str(c.fields), c.waits) for c in theirs.calls
        ]
    assert [f.code for f in shorter.simulation.findings] == [
        f.code for f in longer.simulation.findings
    ]


def both_receive_in_the_end() -> None:
    rank, x = dist.get_rank(), torch.ones(4)
    for _ in range(3):
        exchange(rank, x, torch.zeros(4))
    dist.recv(x, 1 - rank)


def test_a_cycle_after_delivered_messages_is_still_a_cycle() -> None:
    """What was taken before is no message that was meant for the receive that stands."""
    judged = testing.run(both_receive_in_the_end, 2, check=False)

    assert judged.outcome == "hangs"
    assert [(f.code, f.ranks) for f in judged.simulation.findings if f.severity == "error"] == [
        ("DS301", (0, 1))
    ]


def in_a_thread() -> None:
    """A thread of its own sends what the main thread of the other rank receives, while the main
    threads meet.
    """
    rank, x = dist.get_rank(), torch.ones(4)
    group = dist.new_group([0, 1])

    def sends() -> None:
        for _ in range(3):
            exchange(0, x, torch.zeros(4))

    if rank == 0:
        thread = threading.Thread(target=sends)
        thread.start()
        dist.all_reduce(x.clone(), group=group)
        thread.join()
    else:
        for _ in range(3):
            exchange(1, x, torch.zeros(4))
        dist.all_reduce(x.clone(), group=group)


def test_messages_of_another_thread_belong_to_that_thread() -> None:
    """Its calls keep their thread, so that no rank is reported as hanging."""
    judged = testing.run(in_a_thread, 2, check=False)

    assert judged.outcome == "completes"
    assert {
        e.thread
        for e in judged.captured.ranks[0].events
        if e.call is not None and e.call.op == "isend"
    } == {1}


def test_a_loop_of_messages_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many plans as there are frames that differ, whatever the number of rounds."""
    made: list[object] = []

    def counted(member: RankProcess, message: list[object]) -> object:
        made.append(cached_call_frame(member, message))
        return made[-1]

    monkeypatch.setattr("distsim.script_capture.hub.event_loop.cached_call_frame", counted)

    judged = testing.run(many_rounds, 2, check=False)

    assert judged.outcome == "completes"
    assert (
        2 <= sum(type(one) is CachedCallFrame for one in made) <= len(made) <= 6
    )  # of a rank: a message and the wait for its answer, and each by itself where the hub asked for it


def many_rounds() -> None:
    for _ in range(20):
        exchange(dist.get_rank(), torch.ones(4), torch.zeros(4))
