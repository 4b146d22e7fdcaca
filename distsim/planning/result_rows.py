"""Results of layouts as rows of a table on disk, from which an interrupted plan continues.

A row is found by a hash of everything on which its result depends, so a row of another request, or
of another version of distsim, is never taken for this one. Somebody may have edited the file, so
each cell is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from distsim.common.errors import UsageError
from distsim.common.version import __version__
from distsim.hardware.cost.memory_fit import MemoryFit
from distsim.planning.layout_result import LayoutResult, StepTimePart
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout

#: Part of each row's key. Change it when the meaning of a column changes.
_ROW_VERSION = "plan 3"
#: No cell of a table of results is larger.
_LARGEST_CELL = 1 << 62
PLAN_COLUMNS = (
    "cluster",
    "gpus",
    "tp",
    "pp",
    "chunks",
    "cp",
    "ep",
    "dp",
    "zero",
    "recompute",
    "micro_batch",
    "schedule",
    "precision",
    "status",
    "step_ns",
    "low_ns",
    "high_ns",
    "tokens_s_gpu",
    "mfu",
    "memory",
    "bubble",
    "exposed",
    "bound",
    "held_nbytes",
    "memory_low_nbytes",
    "memory_high_nbytes",
    "memory_reserve_nbytes",
    "may_run_out",
    "shares",
    "parts",
    "timed",
    "reason",
)


def layout_key(request: PlanRequest, layout: ParallelLayout) -> str:
    """A hash of everything on which a layout's outcome depends."""
    model = request.model if isinstance(request.model, str) else dict(request.model)
    step = [
        model,
        request.global_batch,
        request.sequence,
        request.node,
        dict(request.step),
        request.cluster.key,
        request.reserve_nbytes,
        request.framework,
    ]
    text = json.dumps([__version__, _ROW_VERSION, step, list(layout)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_row(request: PlanRequest, result: LayoutResult | RejectedLayout) -> dict[str, object]:
    """The row of a layout, by `PLAN_COLUMNS`."""
    layout = result.layout
    row: dict[str, object] = {**layout._asdict(), "dp": layout.dp, "cluster": request.cluster.name}
    if isinstance(result, RejectedLayout):
        return {**row, "status": "left out", "reason": result.reason}
    low, high = result.band_ns
    return {
        **row,
        "status": "ok",
        "step_ns": result.step_ns,
        "low_ns": low,
        "high_ns": high,
        "tokens_s_gpu": result.tokens_s_gpu,
        "mfu": result.mfu,
        "memory": result.memory,
        "bubble": result.bubble,
        "exposed": result.exposed,
        "bound": result.bound,
        "held_nbytes": result.held_nbytes,
        "memory_low_nbytes": result.fit.low_nbytes,
        "memory_high_nbytes": result.fit.high_nbytes,
        "memory_reserve_nbytes": result.fit.reserve_nbytes,
        "may_run_out": int(result.fit.may_run_out),
        "shares": json.dumps(result.shares),
        "parts": json.dumps(result.parts),
        "timed": result.timed,
    }


def result_from_row(
    request: PlanRequest, layout: ParallelLayout, row: Mapping[str, str], file: str
) -> LayoutResult | RejectedLayout:
    """The result that `result_row` wrote. Raises UsageError if somebody has damaged the row."""
    cells = _RowCells(row, file)
    if cells.one_of("status", ("ok", "left out")) != "ok":
        return RejectedLayout(layout, row["reason"])
    fit = MemoryFit(
        cells.whole_number("memory_low_nbytes"),
        cells.whole_number("memory_high_nbytes"),
        cells.whole_number("memory_reserve_nbytes"),
        request.cluster.device.memory_nbytes,
    )
    return LayoutResult(
        layout,
        cells.one_of("cluster", (request.cluster.name,)),
        cells.whole_number("step_ns", least=1),
        cells.parts("parts"),
        cells.shares("shares"),
        cells.whole_number("held_nbytes"),
        fit,
        tokens_s_gpu=cells.number("tokens_s_gpu"),
        mfu=cells.number("mfu"),
        timed=cells.one_of("timed", ("alone", "exact", "short")),
    )


class _RowCells:
    """The cells of a row in a table that was written earlier, checked when they are read."""

    def __init__(self, row: Mapping[str, str], file: str) -> None:
        self.row = row
        self.file = file

    def one_of(self, column: str, choices: Sequence[str]) -> str:
        if self.row[column] not in choices:
            raise self._error(column, f"is not {' or '.join(choices)}")
        return self.row[column]

    def whole_number(self, column: str, least: int = 0) -> int:
        try:
            number = int(self.row[column])
        except ValueError:
            raise self._error(column, "is not a whole number") from None
        if not least <= number <= _LARGEST_CELL:
            raise self._error(column, f"is not between {least} and 2^62")
        return number

    def number(self, column: str) -> float:
        try:
            number = float(self.row[column])
        except ValueError:
            raise self._error(column, "is not a number") from None
        if not _is_amount(number):
            raise self._error(column, "is negative or infinite")
        return number

    def shares(self, column: str) -> dict[str, float]:
        shares = self._json(column)
        if not isinstance(shares, dict) or not all(map(_is_amount, shares.values())):
            raise self._error(column, "is not an object of shares")
        return shares

    def parts(self, column: str) -> tuple[StepTimePart, ...]:
        parts = self._json(column)
        if not isinstance(parts, list) or not all(map(_is_part, parts)):
            raise self._error(column, "is not a list of [name, ns, low, high]")
        return tuple(StepTimePart(*part) for part in parts)

    def _json(self, column: str) -> object:
        try:
            return json.loads(self.row[column])
        except (ValueError, RecursionError):
            raise self._error(column, "is not JSON") from None

    def _error(self, column: str, problem: str) -> UsageError:
        shown = self.row[column][:40] or "an empty cell"
        return UsageError(
            f"{self.file}: row {self.row['key']}, column {column}: {shown} {problem}",
            "remove the row; it is computed again",
        )


def _is_amount(value: object) -> bool:
    """Whether this is a finite number that is not negative."""
    return isinstance(value, int | float) and 0 <= value <= _LARGEST_CELL


def _is_part(part: object) -> bool:
    if not isinstance(part, list) or len(part) != len(StepTimePart._fields):
        return False
    return isinstance(part[0], str) and all(map(_is_amount, part[1:]))
