"""Bytes that a transformer layer keeps for its backward pass under torch.autocast. It counts every
storage that torch allocates on the CPU.

    python -m tests.support.autocast_memory

Prints two numbers: for a GPT layer, and for a gated layer with grouped queries, without the casts of
their weights. A LayerNorm without bias, which keeps the same tensors, replaces RMSNorm, because
RMSNorm is fused on a GPU but consists of several operations on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.support.loss_memory import Counted

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

from modules import Model, Options, Sizes

TOKENS = 256
GPT = Sizes(1, 64, 4, 4, 256, 256, positions=TOKENS)
GATED = Sizes(1, 64, 4, 2, 160, 256)


def normed(
    x: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None
) -> torch.Tensor:
    return functional.layer_norm(x, shape, weight, None, eps or 1e-5)


def kept(sizes: Sizes) -> int:
    """Bytes that are alive after a forward pass, but for the weights' casts."""
    model = Model(sizes, Options()).filled("cpu", TOKENS)
    words = torch.randint(sizes.vocabulary, (1, TOKENS))
    weights = sum(p.numel() for p in model.layers.parameters() if p.dim() > 1)
    gc.collect()
    counted = Counted()
    with counted, torch.autocast("cpu", torch.bfloat16):
        out = model(words)
    found = counted.alive - 2 * weights
    del out
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    functional.rms_norm = torch.rms_norm = normed  # type: ignore[assignment]
    sys.stdout.write(
        " ".join(str(kept(sizes._replace(layers=2)) - kept(sizes)) for sizes in (GPT, GATED)) + "\n"
    )
