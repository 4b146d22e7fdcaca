"""The messages between stages before their first micro-batch: a vote, then shapes.

In the vote every stage reports whether it needs to be sent shapes. The shapes are sent with one
forward and one backward pass of the model.

Follows torch.distributed.pipelining 2.13: schedules.py `_initialize_pp_stages`, stage.py
`_warmup_forward_vote`, `_warmup_backward_result`, `_forward_metadata_inference`,
`_backward_metadata_inference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from distsim.scenario.strategies.base import Entry, step, tensor_declaration
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.rank_entries import ComputeTemplate, PipelineRankWriter

_VOTE_TENSOR = tensor_declaration(1, "int32")
_LENGTH_TENSOR = tensor_declaration(1, "int64")


class _StagePass(NamedTuple):
    """A pass of a stage: forward (F) or backward (B)."""

    stage: int
    direction: str


def shape_vote_entries(writer: PipelineRankWriter) -> list[Entry]:
    """One number from the first stage to the last and back.

    The messages are blocking, so that the communicator of every pair is created.
    """
    steps = []
    for stage_pass in _forward_then_backward(writer.schedule, writer.rank):
        source = _peer_rank(writer.schedule, stage_pass, sends=False)
        if source is not None:
            steps.append(_p2p("recv", _VOTE_TENSOR, writer, source))
        destination = _peer_rank(writer.schedule, stage_pass, sends=True)
        if destination is not None:
            steps.append(_p2p("send", _VOTE_TENSOR, writer, destination))
    return steps


def shape_exchange_entries(
    writer: PipelineRankWriter, shape: Sequence[int], dtype: str, directions: str = "FB"
) -> list[Entry]:
    """Forward and backward of one micro-batch with the shapes sent from stage to stage.

    Each shape is sent as an object, its length first. The model's two passes cost as much as later
    ones; nothing is added to the gradients. ``directions`` F: no gradients, so no backward.
    """
    steps: list[Entry] = []
    for stage_pass in _forward_then_backward(writer.schedule, writer.rank):
        if stage_pass.direction not in directions:
            continue
        payload = tensor_declaration(object_nbytes(shape, dtype, stage_pass.direction), "uint8")
        source = _peer_rank(writer.schedule, stage_pass, sends=False)
        if source is not None:
            steps += _object_message("irecv", payload, writer, source)
        steps += _shape_inference_pass(writer, stage_pass)
        destination = _peer_rank(writer.schedule, stage_pass, sends=True)
        if destination is not None:
            steps += _object_message("isend", payload, writer, destination)
    return steps


def object_nbytes(shape: Sequence[int], dtype: str, direction: str) -> int:
    """Bytes of the object that describes one tensor, in Python's pickle protocol 4.

    The object is `_StageForwardMeta` (direction F) or `_StageBackwardMeta` (B). Its fixed parts
    take 146 bytes (backward: 147) and the dtype's name; a fourth dimension makes each of the two
    tuples, shape and strides, one byte longer.
    """
    strides = [prod(shape[k + 1 :]) for k in range(len(shape))]
    fixed = 147 if direction == "B" else 146
    tuple_marks = 2 if len(shape) > 3 else 0
    numbers = sum(_pickled_int_nbytes(n) for n in [*shape, *strides])
    return fixed + len(dtype) + tuple_marks + numbers


def _pickled_int_nbytes(number: int) -> int:
    if number < 256:
        return 2
    return 3 if number < 65536 else 5


def _shape_inference_pass(writer: PipelineRankWriter, stage_pass: _StagePass) -> list[Entry]:
    """The model's own pass: the compute steps of an action without its tensors."""
    steps: list[Entry] = []
    for instance in writer.computes(PipelineAction(stage_pass.stage, stage_pass.direction, 0)):
        template = instance.what
        if isinstance(template, ComputeTemplate):
            without_tensors = ComputeTemplate(f"shapes, {template.name}", template.cost, (), ())
            steps += without_tensors.entries(())
    return steps


def _forward_then_backward(schedule: PipelineSchedule, rank: int) -> Iterator[_StagePass]:
    stages = schedule.stages_of(rank)
    for stage in stages:
        yield _StagePass(stage, "F")
    for stage in reversed(stages):
        yield _StagePass(stage, "B")


def _peer_rank(schedule: PipelineSchedule, stage_pass: _StagePass, sends: bool) -> int | None:
    """The rank of the stage after a pass (``sends``) or before it.

    None if there is no such stage, or if it is on the same rank.
    """
    stage, direction = stage_pass
    peer = stage + (1 if (direction == "F") == sends else -1)
    if not 0 <= peer < schedule.stages or schedule.rank_of[peer] == schedule.rank_of[stage]:
        return None
    return schedule.rank_of[peer]


def _object_message(
    operation: str, payload: Entry, writer: PipelineRankWriter, peer: int
) -> list[Entry]:
    """The length of an object and the object, each as a batch of one."""
    messages = [_p2p(operation, tensor, writer, peer) for tensor in (_LENGTH_TENSOR, payload)]
    return [{"batch_isend_irecv": {"ops": [message]}} for message in messages]


def _p2p(operation: str, tensor: Entry, writer: PipelineRankWriter, peer: int) -> Entry:
    side = "group_dst" if operation in ("send", "isend") else "group_src"
    neighbours = {1: f"{writer.axis} + 1", -1: f"{writer.axis} - 1"}
    coordinate = neighbours.get(peer - writer.rank, peer)
    return step(operation, tensor=dict(tensor), group=writer.axis, **{side: coordinate})
