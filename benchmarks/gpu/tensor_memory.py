"""Counts the bytes of torch's tensors on one rank of `memory.py`'s layouts, without a GPU.

The tensors are fake: they have sizes but no data, and nothing is sent.

    python benchmarks/gpu/tensor_memory.py "llama3-8b, ac full" ...

Only layouts without a tensor-parallel axis are supported. The output shows the peak of each phase
of the second iteration in GiB, and distsim's prediction. The counts exclude memory that the
allocator reserves, workspaces of libraries, and temporary copies of the optimizer. Norms keep their
input and one number per row, as on a GPU.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory
import torch
from memory import RUNS, Rank, Run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from predicted_memory import predicted_memory


class Storages(TorchDispatchMode):
    """Bytes of all storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_iter(out):
            if isinstance(one, Tensor):
                storage = getattr(one, "_local_tensor", one).untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = 0
                    self.resized(storage, storage.nbytes())
                    weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """fully_shard lets parameters go by making their storage empty."""
        if storage._cdata in self.sizes:
            self.now += nbytes - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = nbytes
            self.peak = max(self.peak, self.now)


class Norm(torch.autograd.Function):
    """What the fused norm keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in (x, weight)]
    out = Norm.apply(*local)
    if not hasattr(x, "to_local"):
        return out
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)


def held(run: Run) -> dict[str, int]:
    """Peak bytes by phase of the second iteration."""
    storages, phases = Storages(), dict[str, int]()
    resize, mesh = torch.UntypedStorage.resize_, memory.init_device_mesh
    states: list[Tensor] = []

    class Meter(memory.Meter):
        def phase(self, name: str, does: Callable[[], object]) -> object:
            storages.peak = storages.now
            found = does()
            phases[name] = storages.peak
            return found

    class One(Rank):
        def step(self) -> None:
            for p in self.model.parameters() if not states else ():
                states.extend(
                    torch.empty_like(p.to_local() if hasattr(p, "to_local") else p)
                    for _ in range(2)
                )

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        storages.resized(storage, size)
        return found

    def real_mesh(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return mesh(*args, **kwargs)

    memory.Meter, memory.init_device_mesh, functional.rms_norm = Meter, real_mesh, rms_norm  # type: ignore[misc]
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    with FakeTensorMode(allow_non_fake_inputs=True), storages:
        rank = One(run, "cpu", False)
        for word in ("0", "1"):
            rank.iteration(word)
    return {name: nbytes for name, nbytes in phases.items() if name.startswith("1")}


def main() -> None:
    """One layout a process: torch's groups can be made once."""
    run = next((run for run in RUNS if run.name == " ".join(sys.argv[1:])), None)
    if run is None:
        print("\n".join(run.name for run in RUNS))
        return
    one = predicted_memory(run._asdict())
    counted = one.allocated_nbytes or sum(one.parts.values())
    found = held(run)
    most = max(found.values())
    phases = ", ".join(f"{name[2:]} {nbytes / 2**30:.2f}" for name, nbytes in found.items())
    print(
        f"{run.name}: {most / 2**30:.2f} GiB ({phases}); predicted {counted / 2**30:.2f}, {counted / most:.2f}"
    )


if __name__ == "__main__":
    main()
