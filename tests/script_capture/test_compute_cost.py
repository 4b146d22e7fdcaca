"""FLOP and bytes that a script computes are counted as theory counts them, and priced by the
cluster's roofline.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from distsim.hardware.cluster import preset
from distsim.hardware.cost import CostModel
from distsim.operations.core.resolved_call import KernelWork
from distsim.script_capture.compute import kernel_counter
from distsim.script_capture.compute.kernel_counter import (
    ComputeInterval,
    ComputeKernel,
    count_kernels,
    duration_ns,
)

torch = pytest.importorskip("torch")


class Block(torch.nn.Module):
    """A layer of GPT-2: attention and a feed-forward network of four times the width, both with
    residuals.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (
            torch.nn.LayerNorm(width, bias=False),
            torch.nn.LayerNorm(width, bias=False),
        )
        self.qkv, self.out = (
            torch.nn.Linear(width, 3 * width, bias=False),
            torch.nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            torch.nn.Linear(width, 4 * width, bias=False),
            torch.nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Any) -> Any:
        b, t, c = x.shape
        q, k, v = (
            p.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for p in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(torch.nn.Module):
    """GPT-2 with its head tied to the token embedding."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = (
            torch.nn.Embedding(words, width),
            torch.nn.Embedding(length, width),
        )
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = torch.nn.functional.linear(self.norm(x), self.words.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def theory(model: Gpt, layers: int, width: int, batch: int, length: int) -> int:
    """6 FLOP a parameter in a product and token, and 12 · layers · width · length a token for
    attention (PaLM, appendix B), of which the backward pass of flash attention does one of six
    products again (Dao et al., 2022); the scores on and below the diagonal alone."""
    parameters = sum(p.numel() for p in model.parameters()) - model.places.weight.numel()
    return batch * length * (6 * parameters + 14 * layers * width * (length + 1) // 2)


def test_a_small_gpt_has_the_theoretical_operation_count_within_a_percent() -> None:
    model, tokens = Gpt(2, 64, 4, 256, 32), torch.randint(256, (4, 32))

    with count_kernels() as counted:
        model(tokens).backward()
        found = counted.take()

    assert found.flops == pytest.approx(theory(model, 2, 64, 4, 32), rel=0.01)
    assert found.dtype == "float32"
    assert counted.take() == ComputeInterval()


def test_gpt2_124m_is_counted_without_its_memory_and_costed_on_an_a100_near_published_steps() -> (
    None
):
    """nanoGPT's batch of 12 sequences of 1024 tokens. Its README: about 4 days on 8 A100s, which
    for its 600,000 steps of 5 such batches is 115 ms a batch; the roofline, which knows no gaps and
    large products alone, may be a third below and not above it."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model, tokens = Gpt(12, 768, 12, 50304, 1024), torch.zeros(12, 1024, dtype=torch.long)
        with count_kernels() as counted, torch.autocast("cpu", torch.bfloat16):
            model(tokens).backward()
        step = counted.take()

    assert step.flops == pytest.approx(theory(model, 12, 768, 12, 1024), rel=0.01)
    assert step.dtype == "bfloat16"
    assert 2 / 3 * 115e6 < duration_ns(step, "dgx-a100") < 115e6


def test_causal_attention_counts_only_used_scores_and_views_of_products_are_free() -> None:
    q, x, w = torch.randn(1, 2, 32, 8), torch.ones(2, 3, 8), torch.ones(4, 8)
    with count_kernels() as counted:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        whole = counted.take()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        causal = counted.take()
        torch.nn.functional.linear(x, w)
        product = counted.take()

    assert causal.flops * 2 * 32 == whole.flops * 33
    assert (product.launches, product.bytes) == (1, 4 * (2 * 3 * 8 + 4 * 8 + 2 * 3 * 4))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_an_rms_norm_is_one_kernel_forward_and_two_backward_even_when_recomputed(
    dtype: Any, size: int
) -> None:
    """As torch's fused kernels on a GPU: input read and output written; then the input's gradient,
    and the weight's.
    """
    from torch.utils.checkpoint import checkpoint

    norm, x = torch.nn.RMSNorm(16, dtype=dtype), torch.randn(8, 16, dtype=dtype, requires_grad=True)
    row = 8 * 16 * size
    sine = lambda t: torch.sin(norm(t))  # noqa: E731
    with count_kernels() as counted:
        y = norm(x)
        forward = counted.take()
        y.backward(torch.ones_like(y), retain_graph=True)
        backward = counted.take()
        y.backward(torch.ones_like(y))
        again = counted.take()
        checkpoint(sine, x, use_reentrant=False).sum().backward()
        recomputed = counted.take()

    assert forward.kernels == ((ComputeKernel(0, 2 * row, str(dtype)[6:]), 1),)
    assert {(k.nbytes, k.flops) for k, _ in backward.kernels} >= {(3 * row, 0), (2 * row, 0)}
    norms = [
        sum(n for k, n in found.kernels if k.nbytes == 3 * row)
        for found in (backward, again, recomputed)
    ]
    assert min(norms) >= 1
    assert backward.launches <= 4
    assert dict(recomputed.kernels)[ComputeKernel(0, 2 * row, str(dtype)[6:])] >= 4, (
        "norm and sine, and both again"
    )


def test_an_interval_costs_the_roofline_of_each_kernel() -> None:
    model = CostModel(preset("dgx-h100"), 1, 1)
    product, copy = ComputeKernel(10**12, 10**6, "bfloat16"), ComputeKernel(0, 10**9, "float32")

    interval = ComputeInterval(((product, 3), (copy, 2)))

    # Times are whole nanoseconds, so a sum differs by less than one for each kernel.
    one_by_one = 3 * model.compute_ns(0, 10**12, 10**6, "bfloat16") + 2 * model.compute_ns(
        0, 0, 10**9, "float32"
    )
    assert 0 <= one_by_one - duration_ns(interval, "dgx-h100") < 5


def test_kernels_that_copy_are_one_entry_and_products_stay_apart_by_size_and_dtype() -> None:
    kernels = (
        (ComputeKernel(100, 10, "bfloat16"), 3),
        (ComputeKernel(0, 50, "bfloat16"), 4),
        (ComputeKernel(100, 10, "float32"), 1),
        (ComputeKernel(0, 7, "int64"), 1),
    )

    assert ComputeInterval(kernels).work() == (
        KernelWork(300, 30, 3, "bfloat16"),
        KernelWork(100, 10, 1, "float32"),
        KernelWork(0, 207, 5, "float32"),
    )


def test_views_are_free_and_kernels_read_and_write_each_tensor_once() -> None:
    x = torch.ones(8, 16)

    with count_kernels() as counted:
        x.view(16, 8).t()[1:].expand_as(x.view(16, 8).t()[1:])
        empty = counted.take()
        x.add(1)
        added = counted.take()
        torch.ones(1, 16).expand(8, 16).mul(2)
        counted.take()

    assert empty == ComputeInterval()
    assert (added.bytes, added.launches, added.flops) == (2 * 8 * 16 * 4, 1, 0)


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: torch.ones(3, 4) @ torch.ones(4), 24),
        (lambda: torch.nn.LSTM(4, 8)(torch.ones(5, 2, 4)), 2 * 5 * 2 * (32 * 4 + 32 * 8)),
        (
            lambda: torch.nn.functional.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)),
            2 * 9 * 3 * 2 * 9,
        ),
    ],
)
def test_operators_without_a_torch_formula_are_counted(run: Any, flops: int) -> None:
    with torch.no_grad(), count_kernels() as counted:
        run()

    assert counted.take().flops == flops


def test_inference_mode_gives_the_same_counts() -> None:
    layer, x = torch.nn.Linear(4, 8), torch.ones(2, 4)

    with torch.inference_mode(), count_kernels() as counted:
        layer(x)

    assert counted.take().flops == 2 * 2 * 4 * 8


def test_work_is_counted_per_call_site_and_not_for_other_threads() -> None:
    here = ["forward"]
    with count_kernels(lambda: here[0]) as counted:
        torch.ones(2, 3) @ torch.ones(3, 4)
        here[0] = "backward"
        torch.ones(4, 3) @ torch.ones(3, 4)
        other = threading.Thread(target=lambda: torch.ones(9, 9) @ torch.ones(9, 9))
        other.start()
        other.join()

    assert {site: stretch.flops for site, stretch in counted.sites().items()} == {
        "forward": 48,
        "backward": 96,
    }
    assert isinstance(counted, kernel_counter.KernelCounter)


def test_an_operator_that_runs_others_counts_as_one_kernel() -> None:
    """As DTensor's random numbers; torch shows such an operator only as a whole."""
    from torch._higher_order_ops.utils import autograd_not_implemented
    from torch._ops import HigherOrderOperator

    class Doubled(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("distsim_doubled")

        def __call__(self, x: Any) -> Any:
            return super().__call__(x)

    doubled = Doubled()
    doubled.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x: x * 2)
    doubled.py_autograd_impl(autograd_not_implemented(doubled, deferred_error=True))
    x = torch.ones(4)
    with count_kernels() as counted:
        y = doubled(x)
        found = counted.take()

    assert y.tolist() == [2, 2, 2, 2]
    assert (found.launches, found.flops, found.bytes) == (1, 0, 4 * (4 + 4))
