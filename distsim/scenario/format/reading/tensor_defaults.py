"""Defaults of tensor declarations: the fields of a `like` tensor, a shape from listed values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distsim.common.expressions import Expression
from distsim.common.message_text import did_you_mean, name_list
from distsim.operations.core.field_types import expression_field
from distsim.scenario.format.models.sections import TensorDecl
from distsim.scenario.format.source.problems import ProblemCollector

_INHERITED_FIELDS = ("shape", "dtype", "copies")


def fill_in_tensors(
    tensors: Mapping[str, TensorDecl], names: Collection[str], problems: ProblemCollector
) -> dict[str, TensorDecl]:
    """Every tensor with its shape, dtype and copies.

    ``names``: all tensors that the file declares, including those that cannot be read.
    """
    return _TensorDefaults(tensors, names, problems).filled_in()


class _TensorDefaults:
    """Fills in tensors; a tensor that others are `like` is filled in once, before them."""

    def __init__(
        self,
        tensors: Mapping[str, TensorDecl],
        names: Collection[str],
        problems: ProblemCollector,
    ) -> None:
        self.tensors = tensors
        self.names = names
        self.problems = problems
        self.done: dict[str, TensorDecl] = {}

    def filled_in(self) -> dict[str, TensorDecl]:
        for name in self.tensors:
            self.done[name] = self._fill_in(name, ())
        return self.done

    def _fill_in(self, name: str, dependents: tuple[str, ...]) -> TensorDecl:
        """The tensor ``name``; ``dependents`` are those whose `like` has led to it."""
        if name in self.done:
            return self.done[name]
        tensor = self.tensors[name]
        if tensor.like is None:
            return _with_inferred_shape(name, tensor, self.problems)
        if not self._check_like(name, tensor.like, dependents):
            return tensor
        model = self._fill_in(tensor.like, (*dependents, name))
        inherited = {
            key: getattr(model, key)
            for key in _INHERITED_FIELDS
            if key not in tensor.model_fields_set
        }
        return _copy_with(tensor, inherited)

    def _check_like(self, name: str, other: str, dependents: tuple[str, ...]) -> bool:
        """Whether a tensor can be `like` another one; if not, the reason is noted."""
        path = ("tensors", name, "like")
        chain = (*dependents, name)
        if other not in self.tensors:
            if other not in self.names:  # else it has a problem of its own
                candidates = [known for known in self.names if known != name]
                self.problems.add(
                    path,
                    (
                        f"unknown tensor {other}; declared tensors: "
                        f"{name_list(self.names)}{did_you_mean(other, candidates)}"
                    ),
                )
            return False
        if other in chain:
            self.problems.add(
                path, (f"{name} refers to itself through `like`: {' -> '.join((*chain, other))}")
            )
            return False
        return True


def _with_inferred_shape(name: str, tensor: TensorDecl, problems: ProblemCollector) -> TensorDecl:
    if tensor.shape is not None or not isinstance(tensor.value, tuple):
        return tensor
    sizes = _nested_shape(tensor.value)
    if sizes is None:
        problems.add(
            ("tensors", name, "value"),
            "the lists of values have different lengths, so the tensor has no shape",
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
    """A copy with further values; `to_yaml` omits them, because the set of given fields is kept."""
    return TensorDecl.model_construct(
        _fields_set=set(tensor.model_fields_set), **{**dict(tensor), **changes}
    )
