"""The operations that an entry may name, and their fields as a file names them."""

from __future__ import annotations

from functools import cache
from typing import Any

from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario.strategies import STRATEGIES


@cache
def operation_row(name: str) -> type[Operation] | None:
    """The operation behind a name or an alias; None for `repeat` and strategies."""
    return OPERATIONS.get(OPERATION_ALIASES.get(name, name))


@cache
def model_fields_by_key(row: type[Operation]) -> dict[str, str]:
    """The fields of an operation: name in a file -> name in the model."""
    return {info.alias or name: name for name, info in row.model_fields.items()}


@cache
def fields_with_keys(row: type[Operation]) -> tuple[tuple[str, str], ...]:
    """The fields of an operation: (name in the model, name in a file)."""
    return tuple((name, info.alias or name) for name, info in row.model_fields.items())


def is_step_name(key: Any) -> bool:
    """Whether a key of an entry is an operation, one of its aliases, or a strategy."""
    return key in OPERATIONS or key in OPERATION_ALIASES or key in STRATEGIES
