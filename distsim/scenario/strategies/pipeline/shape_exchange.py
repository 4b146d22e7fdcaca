"""What stages tell each other before their first micro-batch: a vote on who needs to be told
shapes, then the shapes.

Follows torch.distributed.pipelining 2.13: schedules.py `_initialize_pp_stages`, stage.py
`_warmup_forward_vote`, `_warmup_backward_result`, `_forward_metadata_inference`,
`_backward_metadata_inference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from distsim.scenario.strategies.base import Entry, step, tensor_declaration
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.rank_entries import ComputeTemplate, PipelineRankWriter

_VOTE_TENSOR = tensor_declaration(1, "int32")
_LENGTH_TENSOR = tensor_declaration(1, "int64")


def shape_vote_entries(writer: PipelineRankWriter) -> list[Entry]:
    """One number from the first stage to the last and back: blocking messages, so that every pair's
    communicator is made.
    """
    found = []
    for stage, way in _forward_then_backward(writer.schedule, writer.rank):
        for sends in (False, True):
            peer = _peer_rank(writer.schedule, stage, way, sends)
            if peer is not None:
                found.append(_blocking_p2p("send" if sends else "recv", _VOTE_TENSOR, writer, peer))
    return found


def shape_exchange_entries(
    writer: PipelineRankWriter, shape: Sequence[int], dtype: str, ways: str = "FB"
) -> list[Entry]:
    """Forward and backward of one micro-batch with the shapes told from stage to stage: each as an
    object, its length first.

    The lengths and the objects are batches of one. The two runs of the model cost what they cost
    later; nothing is added to the gradients. ``ways`` F: without gradients, nothing is told
    back.
    """
    found: list[Entry] = []
    for stage, way in _forward_then_backward(writer.schedule, writer.rank):
        if way not in ways:
            continue
        payload = tensor_declaration(object_nbytes(shape, dtype, way), "uint8")
        for sends in (False, True):
            found += _shape_inference_pass(writer, stage, way) if sends else []
            peer = _peer_rank(writer.schedule, stage, way, sends)
            if peer is not None:
                row = "isend" if sends else "irecv"
                found += [
                    {"batch_isend_irecv": {"ops": [_blocking_p2p(row, t, writer, peer)]}}
                    for t in (_LENGTH_TENSOR, payload)
                ]
    return found


def object_nbytes(shape: Sequence[int], dtype: str, way: str) -> int:
    """Bytes of the object that describes one tensor: `_StageForwardMeta` (way F) or
    `_StageBackwardMeta` (B) in Python's pickle 4.

    Its words take 146 bytes (147 backward) and the dtype's name; each number of the shape and of
    the strides takes 2 bytes below 256, 3 below 65536, else 5; a fourth dimension makes both tuples
    one byte longer.
    """
    numbers = [*shape, *(prod(shape[k + 1 :]) for k in range(len(shape)))]
    words = 146 + (way == "B") + len(dtype) + (2 if len(shape) > 3 else 0)
    return words + sum(2 if n < 256 else 3 if n < 65536 else 5 for n in numbers)


def _shape_inference_pass(writer: PipelineRankWriter, stage: int, way: str) -> list[Entry]:
    """The model's own pass: the compute steps of an action without its tensors."""
    found: list[Entry] = []
    for piece in writer.computes(PipelineAction(stage, way, 0)):
        if isinstance(piece.what, ComputeTemplate):
            found += ComputeTemplate(f"shapes, {piece.what.name}", piece.what.cost, (), ()).entries(
                ()
            )
    return found


def _forward_then_backward(schedule: PipelineSchedule, rank: int) -> Iterator[tuple[int, str]]:
    stages = schedule.stages_of(rank)
    yield from ((stage, "F") for stage in stages)
    yield from ((stage, "B") for stage in reversed(stages))


def _peer_rank(schedule: PipelineSchedule, stage: int, way: str, sends: bool) -> int | None:
    """The stage's rank that comes before it (``sends``: after it) on the way; None where there is
    none, or it is here.
    """
    peer = stage + (1 if (way == "F") == sends else -1)
    there = 0 <= peer < schedule.stages and schedule.rank_of[peer] != schedule.rank_of[stage]
    return schedule.rank_of[peer] if there else None


def _blocking_p2p(row: str, tensor: Entry, writer: PipelineRankWriter, peer: int) -> Entry:
    side = "group_dst" if row in ("send", "isend") else "group_src"
    named = {1: f"{writer.axis} + 1", -1: f"{writer.axis} - 1"}.get(peer - writer.rank, peer)
    return step(row, tensor=dict(tensor), group=writer.axis, **{side: named})
