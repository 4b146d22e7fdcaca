"""What a tensor's declaration leaves out: `like` another one, a shape from a list of values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distsim.common.expressions import Expression
from distsim.common.message_text import did_you_mean, name_list
from distsim.operations.core.field_types import expression_field
from distsim.scenario.format.models.sections import TensorDecl
from distsim.scenario.format.source.document import ProblemCollector

_INHERITED_FIELDS = ("shape", "dtype", "copies")


def fill_in_tensors(
    tensors: Mapping[str, TensorDecl], names: Collection[str], problems: ProblemCollector
) -> dict[str, TensorDecl]:
    """Every tensor with its shape, dtype and copies. ``names``: all that the file declares, also
    those with problems.
    """
    found: dict[str, TensorDecl] = {}
    for name in tensors:
        found[name] = _fill_in_tensor(name, tensors, names, found, problems, ())
    return found


def _fill_in_tensor(
    name: str,
    tensors: Mapping[str, TensorDecl],
    names: Collection[str],
    found: dict[str, TensorDecl],
    problems: ProblemCollector,
    above: tuple[str, ...],
) -> TensorDecl:
    if name in found:
        return found[name]
    tensor = tensors[name]
    if tensor.like is None:
        return _with_inferred_shape(name, tensor, problems)
    other = tensor.like
    if other not in tensors:
        if other not in names:
            message = f"unknown tensor {other}; declared are {name_list(names)}{did_you_mean(other, [n for n in names if n != name])}"
            problems.add(("tensors", name, "like"), message)
        return tensor
    if other in (*above, name):
        problems.add(
            ("tensors", name, "like"),
            f"{name} is like itself: {' -> '.join((*above, name, other))}",
        )
        return tensor
    model = _fill_in_tensor(other, tensors, names, found, problems, (*above, name))
    given = tensor.model_fields_set
    return _copy_with(
        tensor, {key: getattr(model, key) for key in _INHERITED_FIELDS if key not in given}
    )


def _with_inferred_shape(name: str, tensor: TensorDecl, problems: ProblemCollector) -> TensorDecl:
    if tensor.shape is not None or not isinstance(tensor.value, tuple):
        return tensor
    sizes = _nested_shape(tensor.value)
    if sizes is None:
        problems.add(
            ("tensors", name, "value"),
            "the lists of values have different lengths; their shape can't be told",
        )
        return tensor
    return _copy_with(tensor, {"shape": tuple(expression_field(n) for n in sizes)})


def _nested_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of nested lists; None when they are ragged."""
    if isinstance(value, Expression):
        return ()
    inner = [_nested_shape(item) for item in value]
    if any(sizes is None or sizes != inner[0] for sizes in inner):
        return None
    return (len(value), *(inner[0] or ())) if inner else (0,)


def _copy_with(tensor: TensorDecl, changes: dict[str, object]) -> TensorDecl:
    """A copy with further fields, which `to_yaml` leaves out since the file does."""
    return TensorDecl.model_construct(
        _fields_set=set(tensor.model_fields_set), **{**dict(tensor), **changes}
    )
