"""Micro-batches without a pipeline: which layer's gradients and parameters travel when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distsim.strategies.base import Entry

if TYPE_CHECKING:
    from distsim.strategies.train_steps import TrainWriter, Weights


def micro_batches(writer: TrainWriter) -> list[Entry]:
    """All micro-batches of a step. ZeRO 3 gathers and reduces in each (fully_shard); else gradients are reduced in the last."""
    count = writer.train.micro_batches
    if writer.train.zero == 3 and writer.shared is not None:
        return writer.times(count, [*_sharded_forward(writer), *_sharded_backward(writer)])
    early = [*writer.stage_forward(0), *writer.stage_backward(0)]
    if not writer.train.overlap_grad_reduce:
        return [*writer.times(count, early), *writer.reduce(0)]
    return [*writer.times(count - 1, early), *writer.stage_forward(0), *_reducing_backward(writer)]


def _reducing_backward(writer: TrainWriter) -> list[Entry]:
    """The last backward pass: each layer's gradients go out as soon as they are there."""
    handle = f"{writer.p}_reduced"
    head = [writer.priced("backward head", 2 * writer.one.head_flops)]
    layers = writer.split[0]
    body = [*writer.layer_backward(), *_reduce(writer, writer.layer_weights(), handle, f"{writer.p}_l")]
    ends = _reduce(writer, writer.ends_weights(0), handle, str(layers))
    waits: list[Entry] = [{"wait": "all"}] if ends else []
    return [*head, {"repeat": {"times": layers, "index": f"{writer.p}_l", "steps": body}}, *ends, *waits]


def reducing_stage(writer: TrainWriter, stage: int) -> list[Entry]:
    """A pipeline stage's last backward pass: each layer's gradients go out as soon as they are there; the step's end waits for them.

    Handles are numbered over the chunks of a rank.
    """
    most = max(writer.split)
    first = writer.schedule.stages_of(writer.schedule.rank_of[stage]).index(stage) * (most + 1)
    head = [writer.priced("backward head", 2 * writer.one.head_flops)] if stage == writer.stages - 1 else []
    handle, index = f"{writer.p}_reduced", f"{writer.p}_l"
    body = [*writer.layer_backward(), *_reduce(writer, writer.layer_weights(), handle, f"({first} + {index})")]
    ends = _reduce(writer, writer.ends_weights(stage), handle, str(first + most))
    layers = writer.split[stage]
    return [*head, *([{"repeat": {"times": layers, "index": index, "steps": body}}] if layers else []), *ends]


def _reduce(writer: TrainWriter, weights: Weights, handle: str, index: str) -> list[Entry]:
    def asked(word: str) -> dict[str, Any]:
        return {"async_": True, "as_": f"{handle}_{word}@{index}"}

    dense = writer.reduce_one(weights.dense, writer.shared, **asked("dense"))
    return [*dense, *writer.reduce_one(weights.expert, writer.apart, **asked("expert"))]


def _gather(writer: TrainWriter, weights: Weights, index: str, ranks: str | None = None) -> list[Entry]:
    when = {} if ranks is None else {"ranks": ranks}
    kinds = (("dense", weights.dense, writer.shared), ("expert", weights.expert, writer.apart))
    return [
        {**entry, **when}
        for word, elements, group in kinds
        for entry in writer.gather_weights(elements, group, async_=True, as_=f"{writer.p}_gathered_{word}@{index}")
    ]


def _gathered(writer: TrainWriter, weights: Weights, index: str) -> list[Entry]:
    words = [("dense", weights.dense, writer.shared), ("expert", weights.expert, writer.apart)]
    return [{"wait": f"{writer.p}_gathered_{word}@{index}"} for word, n, group in words if n and group is not None]


def _ahead(writer: TrainWriter, work: list[Entry], after: list[Entry]) -> list[Entry]:
    """Layer by layer, the next layer's parameters on their way meanwhile."""
    layers, weights, index = writer.split[0], writer.layer_weights(), f"{writer.p}_l"
    body = [
        *_gather(writer, weights, f"({index} + 1)", f"{index} + 1 < {layers}"),
        *_gathered(writer, weights, index),
        *work,
        *after,
    ]
    return [*_gather(writer, weights, "0"), {"repeat": {"times": layers, "index": index, "steps": body}}]


def _sharded_forward(writer: TrainWriter) -> list[Entry]:
    """Embeddings, norm and head stay gathered from here to the end of the backward pass, as the root of fully_shard does."""
    layers, root = str(writer.split[0]), writer.ends_weights(0)
    begin = [*_gather(writer, root, layers), *_gathered(writer, root, layers)]
    return [*begin, *_ahead(writer, writer.layer_forward(), []), writer.priced("forward head", writer.one.head_flops)]


def _sharded_backward(writer: TrainWriter) -> list[Entry]:
    handle, index = f"{writer.p}_reduced", f"{writer.p}_l"
    head = [writer.priced("backward head", 2 * writer.one.head_flops)]
    layers = _ahead(writer, writer.layer_backward(), _reduce(writer, writer.layer_weights(), handle, index))
    return [*head, *layers, *_reduce(writer, writer.ends_weights(0), handle, str(writer.split[0])), {"wait": "all"}]
