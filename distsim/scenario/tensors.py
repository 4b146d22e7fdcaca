"""What a tensor's declaration leaves out: `like` another one, a shape from a list of values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distsim.expr import Expression
from distsim.names import listing, near
from distsim.ops.fields import expression
from distsim.scenario.document import Problems
from distsim.scenario.parts import TensorDecl

_COPIED = ("shape", "dtype", "copies")


def resolve(tensors: Mapping[str, TensorDecl], names: Collection[str], problems: Problems) -> dict[str, TensorDecl]:
    """Every tensor with its shape, dtype and copies. ``names``: all that the file declares, also those with problems."""
    found: dict[str, TensorDecl] = {}
    for name in tensors:
        found[name] = _filled(name, tensors, names, found, problems, ())
    return found


def _filled(
    name: str,
    tensors: Mapping[str, TensorDecl],
    names: Collection[str],
    found: dict[str, TensorDecl],
    problems: Problems,
    above: tuple[str, ...],
) -> TensorDecl:
    if name in found:
        return found[name]
    tensor = tensors[name]
    if tensor.like is None:
        return _shaped(name, tensor, problems)
    other = tensor.like
    if other not in tensors:
        if other not in names:
            message = f"unknown tensor {other}; declared are {listing(names)}{near(other, [n for n in names if n != name])}"
            problems.add(("tensors", name, "like"), message)
        return tensor
    if other in (*above, name):
        problems.add(("tensors", name, "like"), f"{name} is like itself: {' -> '.join((*above, name, other))}")
        return tensor
    model = _filled(other, tensors, names, found, problems, (*above, name))
    given = tensor.model_fields_set
    return _with(tensor, {key: getattr(model, key) for key in _COPIED if key not in given})


def _shaped(name: str, tensor: TensorDecl, problems: Problems) -> TensorDecl:
    if tensor.shape is not None or not isinstance(tensor.value, tuple):
        return tensor
    sizes = _sizes(tensor.value)
    if sizes is None:
        problems.add(("tensors", name, "value"), "the lists of values have different lengths; their shape can't be told")
        return tensor
    return _with(tensor, {"shape": tuple(expression(n) for n in sizes)})


def _sizes(value: Any) -> tuple[int, ...] | None:
    """The shape of nested lists; None when they are ragged."""
    if isinstance(value, Expression):
        return ()
    inner = [_sizes(item) for item in value]
    if any(sizes is None or sizes != inner[0] for sizes in inner):
        return None
    return (len(value), *(inner[0] or ())) if inner else (0,)


def _with(tensor: TensorDecl, changes: dict[str, object]) -> TensorDecl:
    """A copy with further fields, which `to_yaml` leaves out since the file does."""
    return TensorDecl.model_construct(_fields_set=set(tensor.model_fields_set), **{**dict(tensor), **changes})
