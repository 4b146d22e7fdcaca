"""What a pipeline's schedule is: for each rank of the pipeline the actions it takes, in order; and
PyTorch's text form of them.

The text form is that of torch.distributed.pipelining (schedules.py, `_Action` and `_load_csv`): one
line per rank, actions separated by commas, an action as stage, kind and micro-batch: ``3F0``,
``3I0``, ``3SEND_F0``, ``(3F5;4B1)OVERLAP_F_B``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: Forward; the whole backward; its two halves: the gradient of the input, the gradient of the
#: weights.
COMPUTE_KINDS = ("F", "B", "I", "W")
MESSAGE_KINDS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
#: What only sharded weights need, and what only orders the others.
SHARDING_KINDS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
#: In "batched" rows: what came up goes out without a computation.
COMMIT = "COMMIT"
OVERLAP = "OVERLAP_F_B"

_ACTION_PATTERN = re.compile(
    r"(\d{1,6})(F|I|BW|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d{0,6})"
)
_OVERLAP_PATTERN = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class PipelineAction(NamedTuple):
    """One action of one rank. ``micro_batch`` is -1 where there is none; ``parts`` are those of an
    overlapped pair.
    """

    stage: int
    kind: str
    micro_batch: int = -1
    parts: tuple[PipelineAction, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"

    @property
    def each(self) -> tuple[PipelineAction, ...]:
        """The actions in it: its parts, else itself."""
        return self.parts or (self,)


ScheduleRows = tuple[tuple[PipelineAction, ...], ...]


class PipelineSchedule(NamedTuple):
    """``rows[r]`` are the actions of pipeline rank r, ``rank_of[s]`` is the rank of stage s.

    ``issue`` says how PyTorch turns the rows into calls: "fill_drain" and "one_f_one_b"
    (PipelineScheduleSingle's two schedules, which fuse messages by themselves), "megatron" (1F1B as
    Megatron-LM makes it), "runtime" (`_PipelineScheduleRuntime`, which runs the rows' own SEND and
    RECV), or "batched" (the rows' own messages too, all that came up since the last computation in
    one batch). ``directions``: so many copies of the model, each of an equal part of the stages, in
    order; each has ``micro_batches`` of its own.
    """

    rows: ScheduleRows
    rank_of: tuple[int, ...]
    micro_batches: int
    issue: str
    directions: int = 1

    @property
    def stages(self) -> int:
        """All there are; with several directions each of the model's stages is one in each."""
        return len(self.rank_of)

    @property
    def length(self) -> int:
        """Stages of the model, from a micro-batch's first to its last."""
        return len(self.rank_of) // self.directions

    def first(self, stage: int) -> bool:
        """Whether micro-batches start there."""
        return stage % self.length == 0

    def last(self, stage: int) -> bool:
        """Whether their loss is there."""
        return stage % self.length == self.length - 1

    def beside(self, stage: int, way: int) -> int | None:
        """The stage after it (``way`` 1) or before it (-1) in its direction; None at the ends."""
        return None if (self.last(stage) if way > 0 else self.first(stage)) else stage + way

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the model's order: chunk c of the rank is the c-th of them."""
        return tuple(
            sorted(
                (s for s, r in enumerate(self.rank_of) if r == rank), key=lambda s: s % self.length
            )
        )


def compute_actions(row: Iterable[PipelineAction]) -> Iterator[PipelineAction]:
    """The forwards and backwards of a row, overlapped ones taken apart."""
    for action in row:
        for each in action.each:
            if each.kind in COMPUTE_KINDS:
                yield each


def forward_only(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule without its backward passes, as eval() runs it: messages stay where those of
    training put them.
    """
    kept = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    if schedule.issue == "batched":
        return schedule._replace(
            rows=tuple(tuple(_forward_only_batched(row)) for row in schedule.rows)
        )
    rows = tuple(
        tuple(each for action in row for each in action.each if each.kind in kept)
        for row in schedule.rows
    )
    return schedule._replace(
        rows=rows,
        issue="fill_drain" if schedule.issue in ("one_f_one_b", "megatron") else schedule.issue,
    )


def _forward_only_batched(row: Iterable[PipelineAction]) -> Iterator[PipelineAction]:
    """A batched row of forwards alone: a backward of its own still sends what came up before it
    (dualpipe.py, `_backward_chunk`).
    """
    for action in row:
        yield from (each for each in action.each if each.kind in ("F", "SEND_F", "RECV_F"))
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
        return PipelineAction(-1, OVERLAP, -1, parts)
    match = _ACTION_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"expected an action as stage, kind and micro-batch, such as 2F0 or 2SEND_F0, found {text}"
        )
    if not match[3] and match[2] not in SHARDING_KINDS:
        raise ValueError(f"{text}: the micro-batch is missing, as in {text}0")
    return PipelineAction(int(match[1]), match[2], int(match[3] or -1))


def parse_rows(lines: Iterable[str]) -> ScheduleRows:
    """The rows of a schedule in PyTorch's CSV format; empty cells are pauses and are left out.
    Raises ValueError.

    PyTorch before 2.6 wrote ``B`` for the input's gradient and ``BW`` for the whole backward. Lines
    that have ``W`` but no ``I`` are read so; by today's names they would compute the weights'
    gradients twice.
    """
    rows = []
    for number, cells in enumerate(csv.reader(lines)):
        row = []
        for cell in cells:
            if not cell.strip():
                continue
            try:
                row.append(parse_action(cell))
            except ValueError as error:
                raise ValueError(f"rank {number}: {error}") from None
        rows.append(tuple(row))
    kinds = {each.kind for row in rows for action in row for each in action.each}
    if "BW" in kinds or ("W" in kinds and "I" not in kinds):
        old = {"B": "I", "BW": "B"}
        rows = [tuple(a._replace(kind=old.get(a.kind, a.kind)) for a in row) for row in rows]
    return tuple(row for row in rows if row)


def has_messages(rows: ScheduleRows) -> bool:
    return any(action.kind in MESSAGE_KINDS for row in rows for action in row)


# --- what must hold ---
def stage_placement(rows: ScheduleRows) -> tuple[int, ...]:
    """The rank of each stage. Raises ValueError where a stage is missing or stands on two ranks."""
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in compute_actions(row):
            if found.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} stands on rank {found[action.stage]} and on rank {rank}"
                )
    if sorted(found) != list(range(len(found))):
        missing = next(s for s in range(len(found)) if s not in found)
        raise ValueError(f"stage {missing} is missing; the stages are numbered from 0")
    return tuple(found[s] for s in range(len(found)))


def schedule_from_rows(rows: ScheduleRows, micro_batches: int | None = None) -> PipelineSchedule:
    """A schedule of given rows. Raises ValueError where no PyTorch would take it (schedules.py,
    `_validate_schedule`).
    """
    if not rows:
        raise ValueError("a schedule without actions")
    count = 1 + max((a.micro_batch for row in rows for a in compute_actions(row)), default=-1)
    if micro_batches is not None and micro_batches != count:
        raise ValueError(
            f"the schedule is for {count} micro-batches, micro_batches is {micro_batches}"
        )
    schedule = PipelineSchedule(rows, stage_placement(rows), count, "runtime")
    for rank, row in enumerate(rows):
        _check_row(rank, row)
    _check_counts(schedule)
    return schedule


def _check_row(rank: int, row: Sequence[PipelineAction]) -> None:
    done: set[tuple[int, str, int]] = set()
    for action in row:
        for stage, kind, m, _ in action.each:
            need = {"B": "F", "I": "F", "W": "I", "SEND_F": "F", "SEND_B": "I"}.get(kind)
            others = {"I"} | {"B"} if kind in ("W", "SEND_B") else {need}
            if need is not None and not any(
                (stage, other, m) in done for other in others if other != kind
            ):
                raise ValueError(f"rank {rank}: {stage}{kind}{m} comes before {stage}{need}{m}")
            if (stage, kind, m) in done and kind not in SHARDING_KINDS:
                raise ValueError(f"rank {rank}: {stage}{kind}{m} comes twice")
            done.add((stage, kind, m))


def _check_counts(schedule: PipelineSchedule) -> None:
    for rank, row in enumerate(schedule.rows):
        done = {(a.stage, a.kind, a.micro_batch) for a in compute_actions(row)}
        for stage in schedule.stages_of(rank):
            for m in range(schedule.micro_batches):
                if (stage, "F", m) not in done:
                    raise ValueError(f"rank {rank}: {stage}F{m} is missing")
                whole, halves = (
                    (stage, "B", m) in done,
                    ((stage, "I", m) in done, (stage, "W", m) in done),
                )
                if whole == any(halves) or (not whole and not all(halves)):
                    raise ValueError(
                        f"rank {rank}: micro-batch {m} of stage {stage} needs either B, or both I and W"
                    )
