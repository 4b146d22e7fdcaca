"""Ranks of which several threads call at the same time: what came through is not said to hang, what
stands is named with its lines.

And worlds that come one after the other.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from distsim import testing
from distsim.output.text.capture_report import capture_json, capture_text
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.evaluation import CaptureResult, evaluate_capture

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def run_in_threads(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def a_pair_of_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    return dist.new_group([0, 1]), dist.new_group([0, 1])


def opposite_orders() -> None:
    """Each rank's threads come to their groups in the other rank's opposite order."""
    rank, groups = dist.get_rank(), a_pair_of_groups()
    first = threading.Event()

    def work(k: int) -> None:
        if k == rank:
            first.set()
        else:
            first.wait()
            time.sleep(0.05)
        x = torch.ones(1)
        dist.all_reduce(x, group=groups[k])
        dist.all_reduce(x, group=groups[k])
        assert x == 4

    run_in_threads(lambda: work(0), lambda: work(1))
    dist.barrier()


def a_pool() -> None:
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]) for _ in range(3)]

    def work(k: int) -> float:
        x = torch.full((1,), float(rank + k))
        dist.all_reduce(x, group=groups[k])
        dist.send(x, 1, group=groups[k]) if rank == 0 else dist.recv(x, 0, group=groups[k])
        return x.item()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3) if rank else (2, 1, 0))) == (
            [1, 3, 5] if rank else [5, 3, 1]
        )


def loads_data_in_a_thread() -> None:
    """A thread gets the batches from rank 0 over a group of its own, ahead of the steps."""
    side, batches = dist.new_group(backend="gloo"), queue.Queue[torch.Tensor | None](2)

    def load() -> None:
        for k in range(5):
            x = torch.full((4,), float(k)) if dist.get_rank() == 0 else torch.empty(4)
            dist.broadcast(x, 0, group=side)
            batches.put(x)
        batches.put(None)

    threading.Thread(target=load, daemon=True).start()
    while (x := batches.get()) is not None:
        dist.all_reduce(x)
        time.sleep(0.002 * dist.get_rank())


def listens_for_ever() -> None:
    """A daemon thread that is in a receive when its rank ends."""
    rank, side = dist.get_rank(), dist.new_group([0, 1])
    heard = threading.Semaphore(0)

    def listen() -> None:
        while True:
            dist.recv(torch.empty(1), 1 - rank, group=side)
            heard.release()

    threading.Thread(target=listen, daemon=True).start()
    for _ in range(3):
        dist.send(torch.ones(1), 1 - rank, group=side)
        dist.barrier()
    for _ in range(3):
        heard.acquire()
    dist.barrier()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "program", [opposite_orders, a_pool, loads_data_in_a_thread, listens_for_ever]
)
def test_threads_that_complete_on_their_own_groups_complete(program, backend):
    judged = testing.run(program, 2, backend=backend)

    assert judged.simulation.verdict is not None
    assert (judged.outcome, judged.simulation.verdict.verdict) == ("completes", "ok")
    assert "several threads made calls; only the captured order" in " ".join(
        capture_text(judged).split()
    )
    assert capture_json(judged)["captured"]["threaded"] == [0, 1]  # type: ignore[index]


def lines_of(judged: CaptureResult) -> set[str]:
    return {source_text(p.file, p.line) for f in judged.simulation.findings for p in f.places}


def a_circle_of_threads() -> None:
    """Rank 0 calls once too often in one thread, rank 1 in the other."""
    rank, (a, b) = dist.get_rank(), a_pair_of_groups()

    def one() -> None:
        dist.all_reduce(torch.ones(1), group=a)
        if rank == 0:
            dist.broadcast(torch.ones(1), 1, group=a)  # the first

    def two() -> None:
        dist.all_reduce(torch.ones(1), group=b)
        if rank == 1:
            dist.broadcast(torch.ones(1), 0, group=b)  # the second

    run_in_threads(one, two)
    dist.barrier()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_cycle_of_threads_is_a_deadlock_with_the_lines_of_the_blocked_threads(backend):
    judged = testing.run(a_circle_of_threads, 2, backend=backend, check=False)

    assert (judged.outcome, judged.captured.ended) == ("hangs", "stalled")
    assert judged.simulation.verdict is not None
    assert judged.simulation.verdict.verdict == "deadlock"
    assert {line.rpartition("# ")[2] for line in lines_of(judged)} == {"the first", "the second"}


def both_threads_stand() -> None:
    rank, (a, b) = dist.get_rank(), a_pair_of_groups()
    if rank == 0:
        run_in_threads(
            lambda: dist.recv(torch.ones(1), 1, group=a),
            lambda: dist.recv(torch.ones(2), 1, group=b),
        )
    dist.barrier()


def test_each_blocked_thread_of_a_rank_is_reported_with_its_line():
    judged = testing.run(both_threads_stand, 2, check=False)

    assert judged.outcome == "hangs"
    assert [(s.rank, s.what) for s in judged.stands] == [(0, "recv"), (0, "recv"), (1, "barrier")]
    assert {s.source for s in judged.stands[:2]} == {
        f"lambda: dist.recv(torch.ones({k + 1}), 1, group={g})," for k, g in enumerate("ab")
    }


def sends_match_while_a_thread_runs() -> None:
    """What the main threads do hangs where sends wait, whatever the others do."""
    rank, side = dist.get_rank(), dist.new_group([0, 1])
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=side))
    thread.start()
    dist.send(torch.ones(1 << 18), 1 - rank)
    dist.recv(torch.ones(1 << 18), 1 - rank)
    thread.join()


def test_a_hang_of_one_thread_under_the_backend_rules_is_not_hidden_by_another_thread():
    judged = testing.run(sends_match_while_a_thread_runs, 2, check=False)

    assert (judged.captured.ended, judged.outcome) == ("ended", "hangs")
    assert any(line.startswith("dist.send(") for line in lines_of(judged))


WORLDS = """\
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def sums(rank, size):
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == size
    dist.destroy_process_group()
def both_send(rank, size):
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=rank, world_size=size)
    dist.send(torch.ones(1), 1 - rank)
    dist.recv(torch.ones(1), 1 - rank)
if __name__ == "__main__":
    for name, size in zip(sys.argv[1::2], sys.argv[2::2]):
        mp.spawn(globals()[name], (int(size),), int(size))
"""


@pytest.mark.parametrize(
    ("asked", "outcome", "world", "words"),
    [
        (
            ("sums", "2", "sums", "3", "sums", "1"),
            "completes",
            1,
            "the script created 3 worlds one after the other; this report is about the last one",
        ),
        (
            ("both_send", "2", "sums", "3"),
            "hangs",
            2,
            "this report is about the first one that fails",
        ),
    ],
)
def test_consecutive_worlds_of_a_script_are_checked_separately(
    asked, outcome, world, words, tmp_path
):
    """As torch's own DDP tutorial does; a world may be of one rank."""
    script = tmp_path / "train.py"
    script.write_text(WORLDS)

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script), asked), keep_output=True))
    )

    assert (judged.outcome, judged.simulation.program.world_size) == (outcome, world), (
        judged.captured.outputs
    )
    assert words in " ".join(capture_text(judged).split())


STARTS = """\
import os, subprocess, sys, torch.distributed as dist
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
other = [sys.executable, "-c", "import time; time.sleep(60)"]
if sys.argv[1] == "named":
    subprocess.Popen(other, env={**os.environ, "RANK": "1"})
subprocess.Popen(other)
dist.init_process_group("gloo")
"""


def test_ranks_started_as_programs_are_refused_by_name_and_are_no_deadlock(tmp_path):
    """The first where it is seen; else nobody knows what the program would have done."""
    script = tmp_path / "train.py"
    script.write_text(STARTS)

    named, unnamed = (
        run_capture(CaptureRunOptions(CaptureTarget(str(script), (how,)), keep_output=True))
        for how in ("named", "unnamed")
    )

    assert (
        "does not support ranks that a script starts as subprocesses" in named.others[0].ended.text
    )
    assert named.others[0].ended.place[1] == 5
    assert evaluate_capture(unnamed).outcome == "undecided"


KILLED = """\
import os, signal, threading, torch, torch.distributed as dist, torch.multiprocessing as mp
def work(rank):
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=rank, world_size=3)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        signal.raise_signal(signal.SIGSEGV)
    dist.barrier()
if __name__ == "__main__":
    mp.spawn(work, (), 3)
"""


def test_a_rank_started_by_the_script_and_ended_by_a_signal_is_named_with_the_signal(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(KILLED)

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), keep_output=True, timeout_s=60))
    )

    assert {s.rank: (s.state, s.what) for s in judged.stands}[1] == ("killed", "SIGSEGV")
    assert [f.code for f in judged.simulation.findings] == ["DS303"]
    assert "ranks 0 and 2 are blocked in barrier" in judged.simulation.findings[0].message


FORKS = """\
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import set_num_threads
def work(rank, asked):
    assert asked, "the pool of threads is that of the parent"
    dist.init_process_group("gloo", "tcp://127.0.0.1:1", rank=rank, world_size=2)
    dist.barrier()
if __name__ == "__main__":
    asked = []
    torch.set_num_threads = lambda count: (asked.append(count), set_num_threads(count))
    mp.spawn(work, (asked,), 2)
"""


def test_a_forked_rank_numbers_its_own_threads_before_autograd_threads(tmp_path):
    """The first count after a fork replaces the parent's pool; a thread that counts meanwhile finds
    none, and torch aborts.
    """
    script = tmp_path / "train.py"
    script.write_text(FORKS)

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), keep_output=True, timeout_s=60))
    )

    assert judged.outcome == "completes", judged.captured.outputs
