"""Programs of torch.distributed as people write them, right and wrong, for the tests of capture.
Each is a function of one rank.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Fault(NamedTuple):
    """A wrong program and what must be said of it: verdict, a finding's code, ranks of the cause,
    the text of its line.
    """

    program: Callable[[], None]
    ranks: int
    verdict: str
    code: str
    core: tuple[int, ...]
    line: str


def every_collective() -> None:
    """Asserts the numbers of each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, total = torch.arange(4.0) + rank, sum(range(size))
    for op, expected in (
        (dist.ReduceOp.SUM, total),
        (dist.ReduceOp.MAX, size - 1),
        (dist.ReduceOp.MIN, 0),
        (dist.ReduceOp.AVG, total / size),
    ):
        y = x.clone()
        dist.all_reduce(y, op=op)
        assert y[0] == expected, op
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, x)
    assert [p[0].item() for p in parts] == list(range(size))
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(rank * k)) for k in range(size)])
    assert out[0] == total * rank
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank)
    assert out.tolist() == [10.0 * k + rank for k in range(size)]
    y = x.clone()
    dist.broadcast(y, 1)
    assert y[0] == 1
    parts = [torch.empty(4) for _ in range(size)] if rank == 0 else None
    dist.gather(x, parts, 0)
    assert rank or [p[0].item() for p in parts or ()] == list(range(size))
    out = torch.empty(1)
    dist.scatter(out, [torch.ones(1) * k for k in range(size)] if rank == 0 else None, 0)
    assert out[0] == rank
    large = torch.ones(1 << 18) * rank
    dist.all_reduce(large)
    assert bool((large == total).all())
    half = torch.ones(3, dtype=torch.bfloat16)
    dist.all_reduce(half, async_op=True).wait()
    assert half[0] == size
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects[-1] == {"rank": size - 1}
    dist.barrier()


def messages_and_groups() -> None:
    """Asserts what arrives: by tag, in a batch, in sub-groups, through the store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(3) * rank, torch.empty(3)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y[0] == (rank - 1) % size
    pairs = [dist.new_group([k, k + 1]) for k in range(0, size, 2)]
    one = torch.ones(1)
    dist.all_reduce(one, group=pairs[rank // 2])
    assert one.item() == 2
    if rank == 0:
        works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (5, 6)]
        [work.wait() for work in works]
    elif rank == 1:
        for tag in (6, 5):
            dist.recv(one, 0, tag=tag)
            assert one.item() == tag
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("key", "value")
    assert store.get("key") == b"value"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def ddp() -> None:
    """Two steps of data parallelism end with the same weights on all ranks, those of the mean
    gradient.
    """
    wrapped, alone = DistributedDataParallel(model()), model()
    batches = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(r))
        for r in range(dist.get_world_size())
    ]
    for net, inputs in ((wrapped, [batches[dist.get_rank()]]), (alone, batches)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (sum(net(x).square().sum() for x in inputs) / len(inputs)).backward()
            optimizer.step()
    for mine, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def any_source() -> None:
    if dist.get_rank() == 0:
        for _ in range(dist.get_world_size() - 1):
            dist.recv(torch.empty(1))
    else:
        dist.send(torch.ones(1), 0)


def alive_for_a_while() -> None:
    """A sleep, a thread that calls later and a child process hold the others up, and are no
    hang.
    """
    import subprocess

    x = torch.ones(1)
    if dist.get_rank() == 0:
        time.sleep(0.3)
        subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"], check=True)
        caller = threading.Thread(target=lambda: (time.sleep(0.2), dist.send(x, 1)))
        caller.start()
        caller.join()
    else:
        dist.recv(x, 0)


# --- wrong ones ---
def circle() -> None:
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(2)
    dist.recv(x, (rank - 1) % size)
    dist.send(x, (rank + 1) % size)


def both_send_first() -> None:
    x = torch.ones(2)
    dist.send(x, 1 - dist.get_rank())
    dist.recv(x, 1 - dist.get_rank())


def barrier_behind_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(2))


def early_break() -> None:
    for step in range(5):
        if dist.get_rank() == 1 and step == 3:
            break
        dist.all_reduce(torch.ones(2))


def wrong_tag() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1, tag=3)
    else:
        dist.recv(torch.ones(1), 0, tag=4)


def other_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32))


def wrong_group() -> None:
    pair, world = dist.new_group([0, 1]), None
    dist.all_reduce(torch.ones(2), group=pair if dist.get_rank() == 0 else world)


def skips_backward() -> None:
    net = DistributedDataParallel(model())
    loss = net(torch.ones(1, 6)).sum()
    if dist.get_rank() != 1:
        loss.backward()


def raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad batch")
    dist.barrier()


def polls_for_ever() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(1), 1)
        while not work.is_completed():
            pass
    else:
        dist.barrier()


def monitored() -> None:
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(hours=1))


def uneven_batches() -> None:
    net = DistributedDataParallel(model())
    for _ in range(2 + dist.get_rank()):
        net(torch.ones(1, 6)).sum().backward()


def swapped_order() -> None:
    """A pipeline of two stages, one forward one backward: in its last round the last stage gives
    the gradient before it has the input.
    """
    rank, x = dist.get_rank(), torch.ones(4)
    for step in range(4):
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif step < 3:
            dist.recv(x, 0)
            dist.send(x, 0)
        else:
            dist.send(x, 0)
            dist.recv(x, 0)


def group_by_members_only() -> None:
    """Ranks 0 and 1 make a group of their own; the others go on."""
    if dist.get_rank() < 2:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=pair)
    everyone = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(2), group=everyone)


def forgotten_wait() -> None:
    net = DistributedDataParallel(model())
    loss = net(torch.ones(1, 6)).sum()
    loss.backward()
    shown = loss.detach().clone()
    dist.all_reduce(shown, async_op=True)


FAULTS = {
    "circle": Fault(circle, 3, "deadlock", "DS301", (0, 1, 2), "dist.recv(x, (rank - 1) % size)"),
    "both send first": Fault(
        both_send_first, 2, "deadlock", "DS301", (0, 1), "dist.send(x, 1 - dist.get_rank())"
    ),
    "barrier behind rank 0": Fault(
        barrier_behind_rank_0, 3, "mismatch", "DS201", (0,), "dist.barrier()"
    ),
    "early break": Fault(
        early_break, 3, "deadlock", "DS302", (0, 2), "dist.all_reduce(torch.ones(2))"
    ),
    "wrong tag": Fault(
        wrong_tag, 2, "deadlock", "DS304", (0, 1), "dist.send(torch.ones(1), 1, tag=3)"
    ),
    "another dtype": Fault(
        other_dtype, 2, "mismatch", "DS203", (), "dist.all_reduce(torch.ones(2, dtype="
    ),
    "wrong group": Fault(
        wrong_group, 2, "deadlock", "DS301", (0, 1), "dist.all_reduce(torch.ones(2), group="
    ),
    "skips backward": Fault(skips_backward, 2, "deadlock", "DS302", (0,), "loss.backward()"),
    "raises": Fault(raises, 2, "deadlock", "DS303", (0,), "dist.barrier()"),
    "polls for ever": Fault(
        polls_for_ever, 2, "deadlock", "DS301", (0, 1), "while not work.is_completed():"
    ),
    "time-out": Fault(monitored, 2, "deadlock", "DS302", (0,), "dist.monitored_barrier(timeout="),
    "swapped order": Fault(swapped_order, 2, "deadlock", "DS301", (0, 1), "dist.send(x, 0)"),
    "group by members only": Fault(
        group_by_members_only, 3, "mismatch", "DS210", (), "pair = dist.new_group([0, 1])"
    ),
    "forgotten wait": Fault(
        forgotten_wait, 2, "leak", "DS501", (), "dist.all_reduce(shown, async_op=True)"
    ),
    "uneven batches": Fault(
        uneven_batches, 2, "deadlock", "DS302", (1,), "net(torch.ones(1, 6)).sum().backward()"
    ),
}
