"""Configurations of torch.distributed.pipelining beyond tests/support/pipeline_recorder.py: forward
alone, few micro-batches, data parallelism.
"""

from __future__ import annotations

from typing import Any

from tests.support.wrapped import Case

PRICE = {"forward": "1 ms", "backward": "2 ms"}
WIDTH, BATCH = 16, 2


def piped(
    name: str,
    chunks: int = 1,
    micro_batches: int = 4,
    iterations: int = 2,
    evaluate: bool = False,
    static: bool = False,
    forward_only: bool = False,
) -> Any:
    """``static``: shapes given beforehand; ``forward_only``: no loss function."""

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        import torch
        from torch import nn
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        count = size * chunks
        looped = range(rank, count, size)
        mine = (rank, count - 1 - rank) if name in ("ZBVZeroBubble", "DualPipeV") else looped
        example = torch.randn(BATCH, WIDTH, requires_grad=not (evaluate or forward_only))
        shapes = {"input_args": (example,), "output_args": (example,)} if static else {}
        stages = [
            PipelineStage(nn.Linear(WIDTH, WIDTH), s, count, torch.device("cpu"), **shapes)
            for s in mine
        ]
        loss = {} if forward_only else {"loss_fn": nn.functional.mse_loss}
        schedule = get_schedule_class(name)(
            stages if chunks > 1 else stages[0], micro_batches, **loss
        )
        last = size - 1 if mine is looped else 0
        for _ in range(iterations):
            x, target = (
                torch.randn(BATCH * micro_batches, WIDTH),
                torch.randn(BATCH * micro_batches, WIDTH),
            )
            inputs = (x,) if rank == 0 else ()
            targets = {"target": target} if rank == last and not forward_only else {}
            if evaluate:
                with torch.no_grad():
                    schedule.eval(*inputs, **targets)
            else:
                schedule.step(*inputs, **targets)

    return body


def twin(
    ranks: int,
    schedule: str,
    chunks: int = 1,
    micro_batches: int = 4,
    iterations: int = 2,
    **fields: Any,
) -> dict[str, Any]:
    base = {
        "schedule": schedule,
        "chunks": chunks,
        "micro_batches": micro_batches,
        "shapes_exchange": True,
        "activation": {"shape": [BATCH, WIDTH], "dtype": "float32"},
        **PRICE,
    }
    return {
        "mesh": {"pp": ranks},
        "iterations": iterations,
        "program": [{"pipeline": {**base, **fields}}],
    }


CASES: dict[str, Case] = {
    "gpipe_eval": Case(
        "GPipe, eval()", 2, piped("GPipe", evaluate=True), twin(2, "gpipe", evaluate=True)
    ),
    "gpipe_eval_4": Case(
        "GPipe on 4 ranks, eval()",
        4,
        piped("GPipe", evaluate=True),
        twin(4, "gpipe", evaluate=True),
    ),
    "1f1b_eval": Case(
        "1F1B, eval()", 4, piped("1F1B", evaluate=True), twin(4, "1f1b", evaluate=True)
    ),
    "interleaved_eval": Case(
        "interleaved 1F1B, eval()",
        2,
        piped("Interleaved1F1B", 2, evaluate=True),
        twin(2, "interleaved_1f1b", 2, evaluate=True),
    ),
    "zero_eval": Case(
        "interleaved zero bubble, eval()",
        2,
        piped("InterleavedZeroBubble", 2, evaluate=True),
        twin(2, "zb1p", 2, evaluate=True),
    ),
    "looped_eval": Case(
        "looped breadth first, eval()",
        2,
        piped("LoopedBFS", 2, evaluate=True),
        twin(2, "looped_bfs", 2, evaluate=True),
    ),
    "eval_static": Case(
        "GPipe, eval(), shapes given",
        2,
        piped("GPipe", evaluate=True, static=True),
        twin(2, "gpipe", evaluate=True, shapes_exchange="vote"),
    ),
    "gpipe_few": Case(
        "GPipe, 2 micro-batches on 4 stages",
        4,
        piped("GPipe", micro_batches=2),
        twin(4, "gpipe", micro_batches=2),
    ),
    "gpipe_one": Case(
        "GPipe, one micro-batch on 4 stages",
        4,
        piped("GPipe", micro_batches=1),
        twin(4, "gpipe", micro_batches=1),
    ),
    "gpipe_few_eval": Case(
        "GPipe, 2 micro-batches on 4 stages, eval()",
        4,
        piped("GPipe", micro_batches=2, evaluate=True),
        twin(4, "gpipe", micro_batches=2, evaluate=True),
    ),
    "looped_few": Case(
        "looped breadth first, 2 micro-batches on 4 ranks",
        4,
        piped("LoopedBFS", 2, micro_batches=2),
        twin(4, "looped_bfs", 2, micro_batches=2),
    ),
    "interleaved_few": Case(
        "interleaved 1F1B, 2 micro-batches on 4 ranks",
        4,
        piped("Interleaved1F1B", 2, micro_batches=2),
        twin(4, "interleaved_1f1b", 2, micro_batches=2),
    ),
    "interleaved_6": Case(
        "interleaved 1F1B, 6 micro-batches on 2 ranks, 3 chunks",
        2,
        piped("Interleaved1F1B", 3, micro_batches=6),
        twin(2, "interleaved_1f1b", 3, micro_batches=6),
    ),
    "zero_few": Case(
        "interleaved zero bubble, 2 micro-batches on 4 ranks",
        4,
        piped("InterleavedZeroBubble", 2, micro_batches=2),
        twin(4, "zb1p", 2, micro_batches=2),
    ),
    "zbv_few": Case(
        "ZBV, 2 micro-batches on 4 ranks",
        4,
        piped("ZBVZeroBubble", 2, micro_batches=2),
        twin(4, "zbv", 2, micro_batches=2),
    ),
    "1f1b_8": Case(
        "1F1B, 8 micro-batches on 4 stages",
        4,
        piped("1F1B", micro_batches=8),
        twin(4, "1f1b", micro_batches=8),
    ),
    "gpipe_static": Case(
        "GPipe, shapes given",
        4,
        piped("GPipe", static=True),
        twin(4, "gpipe", shapes_exchange="vote"),
    ),
    "zbv": Case(
        "ZBV on 4 ranks, 8 micro-batches",
        4,
        piped("ZBVZeroBubble", 2, micro_batches=8),
        twin(4, "zbv", 2, micro_batches=8),
    ),
    "dualpipe_v": Case(
        "DualPipeV on 2 ranks, 6 micro-batches",
        2,
        piped("DualPipeV", 2, micro_batches=6),
        twin(2, "dualpipe_v", 2, micro_batches=6),
    ),
}
