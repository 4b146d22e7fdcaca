"""Compares measured times of model blocks and matrix products on one H100 with distsim's predictions.

    python benchmarks/gpu/compare_compute.py

Reads `compute_h100.json`, which `compute.py` recorded on that GPU. A block is the forward and
backward pass of one layer on one rank of a tensor-parallel axis, without communication. The column
`transformer` shows the prediction of the strategy. The column `capture` shows the sum of the
operator times that `distsim capture` predicts.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402
from counted import counted_us, read, read_us  # noqa: E402
from modules import MODELS, Model, Options, Sizes  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from distsim.script_capture.compute.kernel_counter import count_kernels, duration_ns  # noqa: E402


def captured_us(sizes: Sizes, batch: int, length: int, share: int) -> tuple[float, float]:
    """Forward and backward time of one block, as `distsim capture --fake` predicts them."""
    part = sizes._replace(
        heads=sizes.heads // share,
        kv_heads=max(sizes.kv_heads // share, 1),
        ffn=sizes.ffn // share,
        head=sizes.head_width,
        layers=1,
        vocabulary=64,
        positions=bool(sizes.positions) * length,
    )
    plain = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            block: Any = Model(part, Options()).layers[0]
            block.attention.freqs = (
                None
                if part.positions
                else torch.empty(length, part.head_width // 2, dtype=torch.complex64)
            )
            x = torch.randn(batch, length, part.hidden, requires_grad=True)
            with count_kernels() as counted:
                y = block(x)
                forward = counted.take()
                y.backward(torch.empty_like(y))
                backward = counted.take()
    finally:
        torch.set_default_dtype(plain)
    return duration_ns(forward, "dgx-h100") / 1e3, duration_ns(backward, "dgx-h100") / 1e3


def blocks(found: dict[str, Any]) -> None:
    print("us, forward + backward; ratio = predicted / measured\n")
    print("| block | measured | transformer | | capture | |\n|---|---|---|---|---|---|")
    for (model, batch, length, share), took in read_us(found).items():
        predicted = sum(counted_us(model, batch, length, share))
        cells = f"| {model}, {batch} × {length}, 1/{share} | {took:.0f} | {predicted:.0f} | {predicted / took:.2f} |"
        if MODELS[model].experts:
            print(f"{cells} | |")
            continue
        seen = sum(captured_us(MODELS[model], batch, length, share))
        print(f"{cells} {seen:.0f} | {seen / took:.2f} |")


def roofline(found: dict[str, Any]) -> None:
    """Prints the error of a fitted roofline: one FLOP rate, one bandwidth and one start-up time.

    The fit uses the mean of logarithms.
    """
    errors = []
    for row in found["products"]:
        m, n, k = row["m"], row["n"], row["k"]
        if m % 8 == n % 8 == k % 8 == 0:
            predicted = max(2 * m * n * k / 796e6, 2 * (m * k + n * k + m * n) / 2.8546e6) + 5.9
            errors.append(abs(predicted / row["us"] - 1))
    mean, most = sum(errors) / len(errors), max(errors)
    print(
        f"\n{len(errors)} products compared with max(FLOP / 796 TFLOP/s, bytes / 2.85 TB/s) + 5.9 us: {mean:.1%} off, at most {most:.0%}"
    )


def rates(found: dict[str, Any]) -> None:
    """TFLOP/s of products by the smallest of their three sides, and of attention by length."""
    groups: dict[int, list[float]] = defaultdict(list)
    for row in found["products"]:
        if row["n"] % 8 == 0 and row["k"] % 8 == 0 and row["m"] % 8 == 0:
            side = min(row["m"], row["n"], row["k"])
            groups[1 << (side.bit_length() - 1)].append(
                2 * row["m"] * row["n"] * row["k"] / row["us"] / 1e6
            )
    print(
        "\nproducts in bfloat16, by their smallest side\n\n| from | shapes | least | median | most |\n|---|---|---|---|---|"
    )
    for side, each in sorted(groups.items()):
        each.sort()
        print(
            f"| {side} | {len(each)} | {each[0]:.0f} | {each[len(each) // 2]:.0f} | {each[-1]:.0f} |"
        )
    print("\nattention\n\n| | forward | backward |\n|---|---|---|")
    flops: dict[str, list[str]] = defaultdict(list)
    for row in found["attention"]:
        if "us" in row and row["backend"] != "default":
            count = (
                4
                * row["batch"]
                * row["heads"]
                * row["length"] ** 2
                * row["wide"]
                / (2 if row["causal"] else 1)
            )
            count *= 2.5 if row["way"] == "backward" else 1
            name = f"{row['backend']}, {row['batch']} × {row['length']}, {row['heads']} × {row['wide']}{', causal' * row['causal']}"
            flops[name].append(f"{count / row['us'] / 1e6:.0f}")
    for name, each_way in flops.items():
        print(f"| {name} | {' | '.join(each_way)} |")


def main() -> None:
    found = read()
    blocks(found)
    roofline(found)
    rates(found)


if __name__ == "__main__":
    main()
