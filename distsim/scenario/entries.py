"""What a program is made of: steps, blocks and repeats, as written, with their places."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from distsim.expr import Expression
from distsim.ops.fields import PerRank
from distsim.records import dataclass

if TYPE_CHECKING:
    from distsim.ops.base import Op

#: Who makes a step: global ranks, a condition, or everybody (None).
Selector = Expression | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation. ``line`` and ``column`` (from 1; 0 in a scenario built in Python) play no part in equality.

    ``path`` is where it stands in the file's data: ``("program", 0, "steps", 1)``.
    """

    op: Op
    ranks: Selector = None
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Block:
    """``{ranks, steps}``: entries for some ranks."""

    ranks: Selector
    steps: tuple[Entry, ...]
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Repeat:
    """``repeat: {times, index, steps}``: ``index`` counts from 0 inside; ``times`` may differ by rank."""

    times: Expression | PerRank[Expression]
    index: str | None
    steps: tuple[Entry, ...]
    ranks: Selector = None
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


Entry = Step | Block | Repeat
