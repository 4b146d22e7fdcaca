"""What strategies and quantities may know of a scenario before any of its entries is read.

Everything here is read from plain data before it is validated. Values that cannot be read are
skipped without a message, because the reader of their own key reports them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from distsim.backends import DEFAULT_BACKEND
from distsim.common.expressions import Expression, parse_expression
from distsim.common.quantities import QuantityKind, has_units, parse_quantity, quantity_kind
from distsim.operations.core.field_types import expression_field
from distsim.scenario.format.models.scalars import MAX_WORLD, integer
from distsim.scenario.strategies.base import ExpansionContext


def strategy_context(
    data: Mapping[Any, Any], taken_names: frozenset[str] = frozenset(), folder: str = ""
) -> ExpansionContext | None:
    """The sizes that strategies may use; None if the world or the mesh cannot be read."""
    parse_size = integer(1, MAX_WORLD)
    try:
        world = _world_shape(data.get("world"))
        mesh = {str(axis): parse_size(size) for axis, size in dict(data.get("mesh") or {}).items()}
        iterations = parse_size(data.get("iterations", 1))
    except (ValueError, TypeError, KeyError):
        return None
    world_size = world.nodes * world.ranks_per_node
    if mesh and prod(mesh.values()) != world_size:
        return None
    return ExpansionContext(
        world_size=world_size,
        ranks_per_node=world.ranks_per_node,
        mesh=mesh,
        backend=str(data.get("backend", DEFAULT_BACKEND)),
        iterations=iterations,
        tensors=_mapping_at(data, "tensors"),
        taken=taken_names,
        groups=_mapping_at(data, "groups"),
        folder=folder,
    )


class _WorldShape(NamedTuple):
    nodes: int
    ranks_per_node: int


def _world_shape(value: Any) -> _WorldShape:
    parse_size = integer(1, MAX_WORLD)
    if isinstance(value, Mapping):
        return _WorldShape(parse_size(value["nodes"]), parse_size(value["ranks_per_node"]))
    if hasattr(value, "ranks_per_node"):  # a `World` of a scenario built in Python
        return _WorldShape(value.nodes, value.ranks_per_node)
    return _WorldShape(1, parse_size(value))


def _mapping_at(data: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


# --- values that are the same on every rank ---
def uniform_values(data: Mapping[Any, Any], context: ExpansionContext) -> dict[str, Any]:
    """The world's size, the axes' sizes, and the vars that are computed from them alone."""
    values = _sizes(context)
    for name, value in _mapping_at(data, "vars").items():
        with suppress(ValueError):
            expression = value if hasattr(value, "evaluate") else parse_expression(value)
            if expression.names <= values.keys():
                values[str(name)] = expression.evaluate(values)
    return values


def uniform_quantities(data: Mapping[object, object]) -> dict[str, object]:
    """What quantities outside of steps may use, as the context of Pydantic's validation.

    ``names`` are those with one value for all ranks, as in `uniform_values`, but their values may
    be quantities; ``kinds`` says what those measure.
    """
    context = strategy_context(data)
    names: dict[str, object] = {} if context is None else {**_sizes(context)}
    kinds: dict[str, QuantityKind] = {}
    for name, value in _mapping_at(data, "vars").items():
        with suppress(ValueError):
            expression = parse_variable(value)
            if expression.names <= names.keys():
                names[str(name)] = expression.evaluate(names)
                kinds[str(name)] = quantity_kind(expression, kinds) or None
    return {"names": names, "kinds": kinds}


def _sizes(context: ExpansionContext) -> dict[str, Any]:
    sizes: dict[str, Any] = {"world_size": context.world_size}
    sizes |= {f"{axis}_size": size for axis, size in context.mesh.items()}
    return sizes


def parse_variable(value: Any) -> Expression:
    """A var: a number, an expression, or a quantity with its unit. Raises ValueError."""
    if isinstance(value, str) and has_units(value):
        return parse_quantity(value)
    return expression_field(value)


# --- names that a strategy must not use for its own tensors and handles ---
def declared_names(data: Mapping[object, object]) -> Iterator[str]:
    """Names that a file declares, or that its steps bind."""
    for key in ("vars", "groups", "tensors", "mesh"):
        for name in _mapping_at(data, key):
            yield str(name)
            yield f"{name}_size"
    yield from bound_names(data.get("program"))


def bound_names(value: object) -> Iterator[str]:
    """Names that steps bind: handles, loop indices and groups."""
    pending = [value]
    while pending:
        item = pending.pop()
        # Dictionaries and lists first: asking for a Mapping is slow, and an expansion is large.
        if isinstance(item, dict):
            for key, part in item.items():
                if not isinstance(part, str):
                    pending.append(part)
                elif key in ("as", "index", "name"):
                    yield part.partition("@")[0].strip()
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, Mapping):
            pending.append(dict(item))
