"""Peak memory of torch's cross_entropy in the backward pass, in bytes per logit. It counts every
storage that torch allocates on the CPU.

    python -m tests.support.loss_memory

Prints two numbers: for the whole vocabulary on one rank, and for an eighth of it (loss_parallel, on
a process group that sends nothing).
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel.loss as parallel_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy, linear
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, HIDDEN, VOCABULARY = 256, 8, 4096
#: What DTensor computes on a rank's part, out of a dispatch mode's sight.
_INSIDE = ("_log_softmax", "_nll_loss_forward", "_nll_loss_and_log_softmax_backward")


class Counted(TorchDispatchMode):
    """Bytes of all storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = 0, 0
        self.known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            local = one._local_tensor if isinstance(one, DTensor) else one
            if isinstance(local, torch.Tensor):
                self.see(local.untyped_storage())
        return made

    def see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes()
            self.alive += storage.nbytes()
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self.gone, key)

    def gone(self, key: int) -> None:
        self.alive -= self.known.pop(key, 0)


def bytes_a_logit(ranks: int) -> float:
    """At the peak of the backward pass, of a rank's part of the logits, which the caller still
    holds as the product left them.
    """
    counted = Counted()
    for name in _INSIDE:
        setattr(parallel_loss, name, _seen(getattr(parallel_loss, name), counted))
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY // ranks, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCABULARY, (TOKENS,))
    gc.collect()
    with counted, loss_parallel() if ranks > 1 else nullcontext():
        logits = linear(hidden, weight)
        if ranks > 1:
            logits = DTensor.from_local(
                logits, init_device_mesh("cpu", (ranks,)), [Shard(1)], run_check=False
            )
        loss = cross_entropy(logits.float(), target, reduction="sum")
        counted.most = 0
        loss.backward()
    return counted.most / (TOKENS * VOCABULARY // ranks)


def _seen(function: Any, counted: Counted) -> Any:
    def inside(*args: Any) -> Any:
        with counted:
            return function(*args)

    return inside


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    sys.stdout.write(f"{bytes_a_logit(1):.2f} {bytes_a_logit(8):.2f}\n")
