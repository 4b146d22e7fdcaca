"""DeepSeek's DualPipe: its own step on CPU tensors. Recording takes the package (1.0.0, commit
3da1bbe), which nothing else here needs.

What it wants of CUDA is a device's name; a stage is a matrix whose gradient waits where the
schedule says so.
"""

from __future__ import annotations

from typing import Any

from tests.support.wrapped import Case

ROWS, WIDTH = 2, 8


def weighted(torch: Any) -> Any:
    """A layer that computes its weight's gradient later where DualPipe asks for it."""
    from dualpipe.utils import WeightGradStore

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors

            def later() -> None:
                weight.grad = x.T @ grad + (0 if weight.grad is None else weight.grad)

            WeightGradStore.put(later) if WeightGradStore.enabled else later()
            return grad @ weight.T, None

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            return Times.apply(x, self.weight)

    return Stage


def piped(name: str, micro_batches: int, evaluate: bool = False) -> Any:
    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        import dualpipe
        import torch
        from dualpipe import comm

        torch.cuda.current_device = lambda: "cpu"
        comm.build_from_tensor_shapes = lambda: [torch.empty(ROWS, WIDTH, requires_grad=True)]
        dualpipe.set_p2p_tensor_shapes([(ROWS, WIDTH)])
        dualpipe.set_p2p_tensor_dtype(torch.float32)
        stage = weighted(torch)
        model = getattr(dualpipe, name)((stage(), stage()))
        both = name == "DualPipe"
        batch = torch.randn(ROWS * micro_batches // (1 + both), WIDTH)
        ends = rank in ((0, size - 1) if both else (0,))
        with torch.set_grad_enabled(not evaluate):
            model.step(
                batch if ends else None,
                num_chunks=micro_batches,
                criterion=torch.nn.functional.mse_loss,
                labels=(batch if ends else None,),
            )

    return body


def twin(ranks: int, schedule: str, micro_batches: int, **fields: Any) -> dict[str, Any]:
    base = {
        "schedule": schedule,
        "micro_batches": micro_batches,
        "activation": {"shape": [ROWS, WIDTH]},
        "forward": "1 ms",
        "backward": "2 ms",
    }
    return {"mesh": {"pp": ranks}, "program": [{"pipeline": {**base, **fields}}]}


def case(ranks: int, micro_batches: int, evaluate: bool = False) -> Case:
    words = f"{micro_batches} micro-batches on {ranks} ranks" + (
        ", only forward passes" if evaluate else ""
    )
    fields = {"evaluate": True} if evaluate else {"reduce_copies": False}
    return Case(
        words,
        ranks,
        piped("DualPipe", micro_batches, evaluate),
        twin(ranks, "dualpipe", micro_batches, **fields),
    )


CASES: dict[str, Case] = {
    "two": case(2, 4),
    "two_many": case(2, 10),
    "four": case(4, 8),
    "four_many": case(4, 14),
    "six": case(6, 12),
    "eight": case(8, 20),
    "two_eval": case(2, 4, evaluate=True),
    "four_eval": case(4, 10, evaluate=True),
    "six_eval": case(6, 14, evaluate=True),
}
