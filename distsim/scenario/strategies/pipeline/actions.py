"""Pipeline schedules: the actions of each pipeline rank in order, and PyTorch's text form of them.

The text form is that of torch.distributed.pipelining (schedules.py, `_Action` and `_load_csv`): one
line per rank, actions separated by commas, an action as stage, kind and micro-batch: ``3F0``,
``3I0``, ``3SEND_F0``, ``(3F5;4B1)OVERLAP_F_B``.

The module has the data and the checks of a schedule from a file. How actions become calls is in
`distsim.scenario.strategies.pipeline.rank_calls`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: F: forward; B: the whole backward; I and W: its halves, the gradients of input and weights.
COMPUTE_KINDS = ("F", "B", "I", "W")
MESSAGE_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
#: Actions of sharded weights; without sharding they only take a turn in the order.
SHARDING_KINDS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
#: In "batched" rows: send the collected messages without a computation.
COMMIT = "COMMIT"
OVERLAP = "OVERLAP_F_B"

_ACTION_PATTERN = re.compile(
    r"(\d{1,6})(F|I|BW|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d{0,6})"
)
_OVERLAP_PATTERN = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


#: Stage and micro-batch of an action that has none.
NO_STAGE = -1
NO_MICRO_BATCH = -1


class PipelineAction(NamedTuple):
    """One action of one rank.

    ``micro_batch`` is NO_MICRO_BATCH for actions that have none. ``parts`` are the two actions of
    an overlapped pair, whose own stage is NO_STAGE.
    """

    stage: int
    kind: str
    micro_batch: int = NO_MICRO_BATCH
    parts: tuple[PipelineAction, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        micro_batch = self.micro_batch if self.micro_batch >= 0 else ""
        return f"{self.stage}{self.kind}{micro_batch}"

    @property
    def each(self) -> tuple[PipelineAction, ...]:
        """Its parts if it is a pair, else itself."""
        return self.parts or (self,)


ScheduleRows = tuple[tuple[PipelineAction, ...], ...]


class PipelineSchedule(NamedTuple):
    """``rows[r]`` are the actions of pipeline rank r, ``rank_of[s]`` is the rank of stage s.

    ``issue`` is the way in which the rows become calls:

    - "fill_drain" and "one_f_one_b": PipelineScheduleSingle's two schedules, which fuse messages;
    - "megatron": 1F1B as Megatron-LM makes it;
    - "runtime": `_PipelineScheduleRuntime`, which runs the SEND and RECV actions of the rows;
    - "batched": the rows also have their messages; all of them since the last computation are in
      one batch.

    ``directions`` is the number of copies of the model; each copy has an equal part of the stages,
    in order, and ``micro_batches`` of its own.
    """

    rows: ScheduleRows
    rank_of: tuple[int, ...]
    micro_batches: int
    issue: str
    directions: int = 1

    @property
    def stages(self) -> int:
        """All stages; with several directions, each of the model's stages counts once in each."""
        return len(self.rank_of)

    @property
    def length(self) -> int:
        """Stages of the model, from a micro-batch's first to its last."""
        return len(self.rank_of) // self.directions

    def first(self, stage: int) -> bool:
        """Whether micro-batches start at a stage."""
        return stage % self.length == 0

    def last(self, stage: int) -> bool:
        """Whether a stage computes the loss."""
        return stage % self.length == self.length - 1

    def adjacent_stage(self, stage: int, offset: int) -> int | None:
        """The stage after (``offset`` 1) or before (-1) in its direction; None at the ends."""
        is_end = self.last(stage) if offset > 0 else self.first(stage)
        return None if is_end else stage + offset

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the model's order: chunk c of the rank is the c-th of them."""
        own = [stage for stage, owner in enumerate(self.rank_of) if owner == rank]
        return tuple(sorted(own, key=lambda stage: stage % self.length))


def compute_actions(row: Iterable[PipelineAction]) -> Iterator[PipelineAction]:
    """The forwards and backwards of a row, with overlapped pairs split."""
    for action in row:
        for part in action.each:
            if part.kind in COMPUTE_KINDS:
                yield part


def forward_only(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule without its backward passes, as eval() runs it.

    Messages stay where training has them.
    """
    if schedule.issue == "batched":
        rows = tuple(tuple(_forward_only_batched(row)) for row in schedule.rows)
        return schedule._replace(rows=rows)
    rows = tuple(tuple(_forward_only_row(row)) for row in schedule.rows)
    issue = schedule.issue
    if issue in ("one_f_one_b", "megatron"):
        issue = "fill_drain"
    return schedule._replace(rows=rows, issue=issue)


def _forward_only_row(row: Iterable[PipelineAction]) -> Iterator[PipelineAction]:
    for action in row:
        for part in action.each:
            if part.kind in ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"):
                yield part


def _forward_only_batched(row: Iterable[PipelineAction]) -> Iterator[PipelineAction]:
    """A batched row of forwards only.

    A backward that is not part of a pair still sends the messages collected before it
    (dualpipe.py, `_backward_chunk`).
    """
    for action in row:
        for part in action.each:
            if part.kind in ("F", "SEND_F", "RECV_F"):
                yield part
        if action.kind in ("B", "I"):
            yield PipelineAction(action.stage, COMMIT)


# --- text ---
def parse_action(text: str) -> PipelineAction:
    """An action from its text. Raises ValueError."""
    text = text.strip()
    pair = _OVERLAP_PATTERN.fullmatch(text)
    if pair is not None:
        parts = tuple(parse_action(part) for part in pair[1].split(";"))
        if any(part.kind not in COMPUTE_KINDS for part in parts):
            raise ValueError(f"{text}: only forwards and backwards can overlap")
        return PipelineAction(NO_STAGE, OVERLAP, NO_MICRO_BATCH, parts)
    match = _ACTION_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            "expected an action as stage, kind and micro-batch, such as 2F0 or 2SEND_F0, "
            f"found {text}"
        )
    if not match[3] and match[2] not in SHARDING_KINDS:
        raise ValueError(f"{text}: the micro-batch is missing, expected for example {text}0")
    return PipelineAction(int(match[1]), match[2], int(match[3] or NO_MICRO_BATCH))


def parse_rows(lines: Iterable[str]) -> ScheduleRows:
    """The rows of a schedule in PyTorch's CSV format. Raises ValueError.

    Empty cells are pauses, which are omitted. PyTorch before 2.6 wrote ``B`` for the input's
    gradient and ``BW`` for the whole backward. Lines that have ``W`` but no ``I`` are read that
    way; by today's names they would compute the weights' gradients twice.
    """
    rows = [
        _parse_row(rank, [cell for cell in cells if cell.strip()])
        for rank, cells in enumerate(csv.reader(lines))
    ]
    actions = [action for row in rows for action in row]
    kinds = {part.kind for action in actions for part in action.each}
    if "BW" in kinds or ("W" in kinds and "I" not in kinds):
        rows = [tuple(_with_new_kind(action) for action in row) for row in rows]
    return tuple(row for row in rows if row)


def _parse_row(rank: int, cells: Iterable[str]) -> tuple[PipelineAction, ...]:
    try:
        return tuple(parse_action(cell) for cell in cells)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


def _with_new_kind(action: PipelineAction) -> PipelineAction:
    """The action by today's names, from those before PyTorch 2.6."""
    new_kinds = {"B": "I", "BW": "B"}
    return action._replace(kind=new_kinds.get(action.kind, action.kind))


def has_messages(rows: ScheduleRows) -> bool:
    """Whether the schedule contains sends and receives, as torch's CSV files may."""
    return any(action.kind in MESSAGE_KINDS for row in rows for action in row)


# --- what must hold ---
def stage_placement(rows: ScheduleRows) -> tuple[int, ...]:
    """The rank of each stage. Raises ValueError if a stage is missing or is on two ranks."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in compute_actions(row):
            known = rank_of.setdefault(action.stage, rank)
            if known != rank:
                raise ValueError(f"stage {action.stage} is on rank {known} and on rank {rank}")
    stages = range(len(rank_of))
    missing = next((stage for stage in stages if stage not in rank_of), None)
    if missing is not None:
        raise ValueError(f"stage {missing} is missing; the stages are numbered from 0")
    return tuple(rank_of[stage] for stage in stages)


def schedule_from_rows(rows: ScheduleRows, micro_batches: int | None = None) -> PipelineSchedule:
    """A schedule of given rows. Raises ValueError if PyTorch would refuse it.

    The checks are those of schedules.py, `_validate_schedule`.
    """
    if not rows:
        raise ValueError("the schedule has no actions")
    numbers = [action.micro_batch for row in rows for action in compute_actions(row)]
    count = 1 + max(numbers, default=-1)
    if micro_batches is not None and micro_batches != count:
        raise ValueError(
            f"the schedule has {count} micro-batches, but micro_batches is {micro_batches}"
        )
    schedule = PipelineSchedule(rows, stage_placement(rows), count, "runtime")
    for rank, row in enumerate(rows):
        _check_row(rank, row)
    _check_counts(schedule)
    return schedule


#: Actions that must be before an action of a kind, on the same stage and micro-batch; any of them
#: suffices. The first is the one that a message names.
_REQUIRED_BEFORE = {
    "B": ("F",),
    "I": ("F",),
    "W": ("I", "B"),
    "SEND_F": ("F",),
    "SEND_B": ("I", "B"),
}


def _check_row(rank: int, row: Sequence[PipelineAction]) -> None:
    """Raise ValueError for an action before those that it needs, or one that is there twice."""
    done: set[tuple[int, str, int]] = set()
    for action in row:
        for stage, kind, m, _ in action.each:
            required = _REQUIRED_BEFORE.get(kind, ())
            if required and not any((stage, other, m) in done for other in required):
                raise ValueError(
                    f"rank {rank}: {stage}{kind}{m} comes before {stage}{required[0]}{m}"
                )
            if (stage, kind, m) in done and kind not in SHARDING_KINDS:
                raise ValueError(f"rank {rank}: {stage}{kind}{m} comes twice")
            done.add((stage, kind, m))


def _check_counts(schedule: PipelineSchedule) -> None:
    """Raise ValueError if a stage lacks the forward or the backward of a micro-batch."""
    for rank, row in enumerate(schedule.rows):
        done = {(a.stage, a.kind, a.micro_batch) for a in compute_actions(row)}
        for stage in schedule.stages_of(rank):
            for m in range(schedule.micro_batches):
                if (stage, "F", m) not in done:
                    raise ValueError(f"rank {rank}: {stage}F{m} is missing")
                kinds = [kind for kind in "BIW" if (stage, kind, m) in done]
                if kinds not in (["B"], ["I", "W"]):
                    raise ValueError(
                        f"rank {rank}: micro-batch {m} of stage {stage} needs either B, "
                        "or both I and W"
                    )
