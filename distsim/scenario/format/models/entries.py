"""The entries of a program (steps, blocks and repeats, as written, with their places).

Also the names that every expression may use. Nothing here evaluates or checks an entry.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from distsim.common.expressions import Expression
from distsim.common.records import dataclass
from distsim.operations.core.field_types import PerRank

if TYPE_CHECKING:
    from distsim.operations.core.operation_base import Operation

#: The ranks that make a step: global ranks, a condition, or all ranks (None).
Selector = Expression | tuple[int, ...] | None

# --- names with a fixed meaning in expressions; no definition may reuse them ---
RANK_NAMES = ("rank", "world_size", "node", "local_rank")
GROUP_NAMES = ("group_rank", "group_size")
VALUE_NAMES = ("index", "copy")
#: The index of the top-level `iterations`, known in the program.
ITERATION_INDEX = "iteration"
RESERVED_NAMES = (
    *RANK_NAMES,
    *GROUP_NAMES,
    *VALUE_NAMES,
    ITERATION_INDEX,
    "min",
    "max",
    "true",
    "false",
    "world",
    "else",
)


@dataclass(frozen=True, slots=True)
class ScenarioStep:
    """One operation.

    ``line`` and ``column`` count from 1; they are 0 in a scenario built in Python. ``path`` is the
    position in the file's data: ``("program", 0, "steps", 1)``. None of them plays a part in
    equality.
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
    """``repeat: {times, index, steps}``.

    ``index`` counts from 0 inside; ``times`` may differ by rank.
    """

    times: Expression | PerRank[Expression]
    index: str | None
    steps: tuple[Entry, ...]
    ranks: Selector = None
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    path: tuple[str | int, ...] = field(default=(), compare=False, repr=False)


Entry = ScenarioStep | ScenarioBlock | ScenarioRepeat
