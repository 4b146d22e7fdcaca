"""What a program is made of: steps, blocks and repeats, as written, with their places."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from distsim.common.expressions import Expression
from distsim.common.records import dataclass
from distsim.operations.core.field_types import PerRank

if TYPE_CHECKING:
    from distsim.operations.core.operation_base import Operation

#: Who makes a step: global ranks, a condition, or everybody (None).
Selector = Expression | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ScenarioStep:
    """One operation. ``line`` and ``column`` (from 1; 0 in a scenario built in Python) play no part
    in equality.

    ``path`` is where it stands in the file's data: ``("program", 0, "steps", 1)``.
    """

    op: Operation
    ranks: Selector = None
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ScenarioBlock:
    """``{ranks, steps}``: entries for some ranks."""

    ranks: Selector
    steps: tuple[Entry, ...]
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ScenarioRepeat:
    """``repeat: {times, index, steps}``: ``index`` counts from 0 inside; ``times`` may differ by
    rank.
    """

    times: Expression | PerRank[Expression]
    index: str | None
    steps: tuple[Entry, ...]
    ranks: Selector = None
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


Entry = ScenarioStep | ScenarioBlock | ScenarioRepeat
