"""The table of operations: every operation's name and its row.

A row is a class with a name (``op``) in a module of this folder; a new one needs no more than its
own file (docs/contributing/extending.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules
from typing import get_args

from distsim import operations
from distsim.operations.core.operation_base import Operation, OperationKind


def _discovered_operations() -> Iterator[type[Operation]]:
    for found in iter_modules(operations.__path__):
        if not found.ispkg and found.name != "registry":
            module = import_module(f"{operations.__name__}.{found.name}")
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, Operation) and "op" in vars(value):
                    yield value


def _sorted_by_kind(rows: Iterator[type[Operation]]) -> dict[str, type[Operation]]:
    """By kind, and in it by name: the order of every list of operations."""
    kinds = get_args(OperationKind)
    every = sorted(set(rows), key=lambda row: (kinds.index(row.kind), row.op, row.__module__))
    for row, following in pairwise(every):
        assert row.op != following.op, (
            f"{row.__module__} and {following.__module__} both define the operation {row.op}"
        )
    return {row.op: row for row in every}


OPERATIONS: dict[str, type[Operation]] = _sorted_by_kind(_discovered_operations())

#: Names that torch has used or will use for the same operation.
OPERATION_ALIASES: dict[str, str] = {
    alias: name for name, row in OPERATIONS.items() for alias in row.aliases
}

#: Operations in which a rank computes.
COMPUTE_OPS = ("compute", "assign")
#: Operations that never stand for moving data, even where a trace gives them times.
LOCAL_OPS = (*COMPUTE_OPS, "sleep", "wait", "wait_stream", "synchronize", "exit", "fail")
#: Operations on another rank's memory.
REMOTE_OPS = tuple(name for name, row in OPERATIONS.items() if row.kind == "remote")
