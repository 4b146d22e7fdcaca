"""Finds expressions for numbers that differ by rank.

Key idea: guess and verify. Candidates are tried from the simplest to the most complex, and each is
compared with all values before it is accepted. If none fits, the numbers are listed by rank. So the
result is always correct; the search only decides how readable it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntVector = NDArray[np.int64]
#: The text of an expression, a number, or the number of each rank.
FittedValue = str | int | dict[int | str, object]

#: Larger factors are artefacts of a badly conditioned fit.
_MAX_FACTOR: Final = 1 << 40


class Variable(NamedTuple):
    """A name that expressions may use.

    ``values``: on the ranks in question. ``size``: how many values it can have (from 0 on), and
    ``size_name``: the name of that number, "" if it has none.
    """

    name: str
    values: IntVector
    size_name: str
    size: int


@dataclass(frozen=True)
class RankVariables:
    """The variables of a world: the rank, and its coordinates in the mesh.

    ``axes``: the coordinate of every rank of the world, by axis.
    """

    size: int
    axes: Mapping[str, IntVector]
    lengths: Mapping[str, int]

    @classmethod
    def of(cls, size: int, mesh: Mapping[str, int]) -> RankVariables:
        """The variables of a mesh, whose outermost axis comes first."""
        axes: dict[str, IntVector] = {}
        stride = size
        for axis, length in mesh.items():
            stride //= length
            axes[axis] = np.arange(size, dtype=np.int64) // stride % length
        return cls(size, axes, dict(mesh))

    def rank(self, ranks: IntVector) -> Variable:
        """The variable `rank`, with its value for each of these ranks."""
        return Variable("rank", ranks, "world_size", self.size)

    def coordinates(self, ranks: IntVector) -> list[Variable]:
        """The axes of the mesh as variables."""
        return [
            Variable(axis, values[ranks], f"{axis}_size", self.lengths[axis])
            for axis, values in self.axes.items()
        ]

    def divisors(self) -> list[int]:
        """The divisors of the world size but 1 and itself."""
        return [number for number in range(2, self.size) if self.size % number == 0]


def fit_expression(
    values: IntVector,
    ranks: IntVector,
    names: RankVariables,
    group: tuple[IntVector, IntVector] | None = None,
) -> FittedValue:
    """An expression that has these values on these ranks, or a mapping of ranks if none is found.

    ``group``: the rank in its group and the size of the group, for numbers that count inside a
    group; then only these two are used.
    """
    if not len(values):
        return 0
    if _is_constant(values):
        return int(values[0])
    if group is None:
        variables = [names.rank(ranks), *names.coordinates(ranks)]
        found = _fit_shift(values, variables) or _fit_affine(values, variables)
        found = found or _fit_blocks(values, ranks, names)
    else:
        variables = _group_variables(*group)
        found = _fit_shift(values, variables) or _fit_affine(values, variables)
    found = found or _fit_conditional(values, ranks, names)
    return found or values_by_rank(values.tolist(), ranks.tolist())


def _is_constant(values: NDArray[Any]) -> bool:
    return bool((values == values[0]).all())


def _group_variables(group_rank: IntVector, group_size: IntVector) -> list[Variable]:
    """The rank in the group, if all groups have the same size."""
    if not _is_constant(group_size):
        return []
    return [Variable("group_rank", group_rank, "group_size", int(group_size[0]))]


# --- forms of expressions ---


def _fit_shift(values: IntVector, variables: Sequence[Variable]) -> str | None:
    """``variable + c``, or ``(variable + c) % size``."""
    for variable in variables:
        difference = values - variable.values
        if _is_constant(difference):
            return plus_constant(variable.name, int(difference[0]))
        remainder = difference % variable.size
        is_in_range = (values >= 0) & (values < variable.size)
        if _is_constant(remainder) and is_in_range.all():
            shift = _nearest_shift(int(remainder[0]), variable.size)
            return f"({plus_constant(variable.name, shift)}) % {variable.size_name}"
    return None


def _nearest_shift(remainder: int, size: int) -> int:
    """The shorter way around a ring: -1 instead of size - 1."""
    return remainder if remainder <= size // 2 else remainder - size


def _fit_affine(values: IntVector, variables: Sequence[Variable]) -> str | None:
    """A sum of multiples of at most two variables, and a constant."""
    choices: list[tuple[Variable, ...]] = [(variable,) for variable in variables]
    choices += combinations(variables, 2)
    for chosen in choices:
        # With as few values as unknowns, a fit always succeeds and explains nothing.
        if len(values) <= len(chosen) + 1:
            continue
        solution = _integer_solution(values, [variable.values for variable in chosen])
        if solution is not None and np.abs(solution).max() < _MAX_FACTOR:
            factors = [int(factor) for factor in solution[:-1]]
            names = [variable.name for variable in chosen]
            return _sum_text(list(zip(factors, names, strict=True)), int(solution[-1]))
    return None


def _integer_solution(values: IntVector, terms: Sequence[IntVector]) -> IntVector | None:
    """Integer factors of the terms and a constant, whose sum is exactly these values."""
    columns = np.stack([*terms, np.ones_like(values)], axis=1)
    real = np.linalg.lstsq(columns.astype(np.float64), values.astype(np.float64), rcond=None)[0]
    solution: IntVector = np.rint(real).astype(np.int64)
    return solution if (columns @ solution == values).all() else None


def _sum_text(terms: Sequence[tuple[int, str]], constant: int) -> str:
    """The text of a sum of (factor, name) and a constant; terms with factor 0 are omitted."""
    present = [(factor, name) for factor, name in terms if factor]
    if not present:
        return str(constant)
    if constant > 0 and all(factor < 0 for factor, _ in present):
        # 7 - rank instead of -rank + 7.
        negative = _sum_text(present, 0)
        return f"{constant} {negative[0]} {negative[1:]}"
    text = ""
    for factor, name in present:
        term = name if abs(factor) == 1 else f"{abs(factor)} * {name}"
        if text:
            text += f" {'-' if factor < 0 else '+'} {term}"
        else:
            text = f"-{term}" if factor < 0 else term
    return plus_constant(text, constant)


def plus_constant(text: str, constant: int) -> str:
    """``text + constant``, without a zero."""
    if not constant:
        return text
    return f"{text} {'-' if constant < 0 else '+'} {abs(constant)}"


def _fit_blocks(values: IntVector, ranks: IntVector, names: RankVariables) -> str | None:
    """Expressions with blocks of k ranks, where k divides the world size.

    ``rank % k + c``, ``rank // k + c``, a ring inside each block, and sums of multiples of
    ``rank % k`` and ``rank // k``.
    """
    for k in names.divisors():
        for text, base in ((f"rank % {k}", ranks % k), (f"rank // {k}", ranks // k)):
            difference = values - base
            if _is_constant(difference):
                return plus_constant(text, int(difference[0]))
        stays_in_block = (values // k == ranks // k).all()
        remainder = (values - ranks) % k
        if stays_in_block and _is_constant(remainder):
            shift = _nearest_shift(int(remainder[0]), k)
            return f"rank // {k} * {k} + ({plus_constant('rank', shift)}) % {k}"
    if len(values) <= 3:
        return None
    for k in names.divisors():
        solution = _integer_solution(values, [ranks % k, ranks // k])
        if solution is not None:
            inner, outer, constant = (int(factor) for factor in solution)
            return _sum_text([(inner, f"(rank % {k})"), (outer, f"(rank // {k})")], constant)
    return None


def _fit_conditional(values: IntVector, ranks: IntVector, names: RankVariables) -> str | None:
    """``a if condition else b``, where a and b are both numbers, or both the rank plus a number."""
    for is_relative in (False, True):
        numbers = values - ranks if is_relative else values
        distinct = np.unique(numbers)
        if len(distinct) != 2:
            continue
        condition = fit_selector(numbers == distinct[0], ranks, names)
        if isinstance(condition, str):
            first, second = (
                plus_constant("rank", int(number)) if is_relative else str(int(number))
                for number in distinct
            )
            return f"{first} if {condition} else {second}"
    return None


def values_by_rank(values: Sequence[Any], ranks: Sequence[int]) -> dict[int | str, Any]:
    """The value of each rank; the most common one as ``else``."""
    common, count = Counter(values).most_common(1)[0]
    if count == 1:
        return dict(zip(ranks, values, strict=True))
    pairs = zip(ranks, values, strict=True)
    by_rank: dict[int | str, Any] = {rank: value for rank, value in pairs if value != common}
    return {**by_rank, "else": common}


# --- selectors ---


def fit_selector(
    mask: NDArray[np.bool_], ranks: IntVector, names: RankVariables
) -> str | list[int] | int | None:
    """Which of the ranks are chosen: None for all, a condition, a rank, or a list of ranks."""
    if mask.all():
        return None
    chosen = ranks[mask]
    for variable in _selector_variables(ranks, names):
        inside = np.unique(variable.values[mask])
        outside = np.unique(variable.values[~mask])
        if len(inside) == 1 and inside[0] not in outside:
            if variable.name == "rank":
                return _rank_or_list(chosen)
            return _equality(variable, int(inside[0]))
        condition = _condition(variable, inside, outside)
        if condition is not None:
            return condition
    return _rank_or_list(chosen)


def _selector_variables(ranks: IntVector, names: RankVariables) -> Iterable[Variable]:
    """Coordinates first, because `tp == 0` says more than `rank % 4 == 0`."""
    yield from names.coordinates(ranks)
    yield names.rank(ranks)
    yield from _block_variables(ranks, names)


def _block_variables(ranks: IntVector, names: RankVariables) -> Iterator[Variable]:
    for k in names.divisors():
        yield Variable(f"rank % {k}", ranks % k, "", k)
        yield Variable(f"rank // {k}", ranks // k, "", names.size // k)


def _last_value(variable: Variable) -> str:
    return f"{variable.size_name} - 1" if variable.size_name else str(variable.size - 1)


def _equality(variable: Variable, value: int) -> str:
    is_last = value == variable.size - 1
    # With two values, 1 is clearer than size - 1.
    text = _last_value(variable) if is_last and value > 1 else str(value)
    return f"{variable.name} == {text}"


def _condition(variable: Variable, inside: IntVector, outside: IntVector) -> str | None:
    """A condition on a variable that holds for the values inside, and for none outside."""
    name = variable.name
    if len(outside) == 1 and outside[0] not in inside:
        if outside[0] == 0:
            return f"{name} > 0"
        if outside[0] == variable.size - 1:
            return f"{name} < {_last_value(variable)}"
        return f"{name} != {outside[0]}"
    if inside.max() < outside.min():
        return f"{name} < {outside.min()}"
    if inside.min() > outside.max():
        return f"{name} > {outside.max()}"
    return None


def _rank_or_list(chosen: IntVector) -> int | list[int]:
    return int(chosen[0]) if len(chosen) == 1 else [int(rank) for rank in chosen]
