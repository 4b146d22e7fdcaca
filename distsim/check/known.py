"""What PyTorch's own errors mean: a remedy for each that a rank may raise before the others wait for it."""

from __future__ import annotations

#: Where models differ by rank.
SAME_MODEL = (
    "build the same model on all ranks, with the same parameters frozen: DistributedDataParallel raises where it is made,",
    '"DDP expects same model across all ranks"',
)
_NO_GPU = ("there is no GPU here: under `distsim capture`, `--cuda` gives each rank one over this memory",)
#: Words of an error (torch 2.13, torch/nn/parallel/distributed.py, reducer.cpp, torch/cuda/__init__.py; Megatron-Core) -> what to do.
_KNOWN: dict[str, tuple[str, ...]] = {
    "expects same model across all ranks": SAME_MODEL,
    "appears not to match": SAME_MODEL,
    "Expected to have finished reduction in the prior iteration": (
        "some of its parameters got no gradient in the pass before: let the forward pass use them all on every rank,",
        "or pass find_unused_parameters=True to DistributedDataParallel",
    ),
    "Communication call has not been issued for this bucket": (
        "a parameter of that bucket got no gradient, and nothing was sent for it: let every parameter take part in the loss,",
        "or train without overlap_grad_reduce",
    ),
    "Torch not compiled with CUDA enabled": _NO_GPU,
    "Found no NVIDIA driver": _NO_GPU,
    "No CUDA GPUs are available": _NO_GPU,
    "has no attribute '_cuda_": _NO_GPU,
}


def remedy(error: str) -> tuple[str, ...]:
    """What to do about an error that says so; empty where it is none that is known."""
    return next((lines for words, lines in _KNOWN.items() if words in error), ())


__all__ = ["SAME_MODEL", "remedy"]
