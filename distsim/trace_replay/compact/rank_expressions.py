"""Expressions for numbers that differ by rank: tried from the plainest on, each held against all
values before it is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntVector = NDArray[np.int64]
#: The text of an expression, a number, or what each rank has.
FittedValue = str | int | dict[int | str, object]


@dataclass(frozen=True)
class RankVariables:
    """What expressions may count with: the rank, and its coordinates in the mesh. Vectors are over
    the world.
    """

    size: int
    axes: Mapping[str, IntVector]
    lengths: Mapping[str, int]

    @classmethod
    def of(cls, size: int, mesh: Mapping[str, int]) -> RankVariables:
        below, axes = size, dict[str, IntVector]()
        for axis, length in mesh.items():
            below //= length
            axes[axis] = np.arange(size, dtype=np.int64) // below % length
        return cls(size, axes, dict(mesh))

    def bases(self, ranks: IntVector) -> Iterator[tuple[str, IntVector, str, int]]:
        """(name, values on the ranks, name of its number of values, that number), the rank
        first.
        """
        yield "rank", ranks, "world_size", self.size
        for axis, values in self.axes.items():
            yield axis, values[ranks], f"{axis}_size", self.lengths[axis]


def fit_expression(
    values: IntVector,
    ranks: IntVector,
    names: RankVariables,
    group: tuple[IntVector, IntVector] | None = None,
) -> FittedValue:
    """An expression that has these values on these ranks, or a mapping of ranks where none is
    found.

    ``group``: place in the group and its size, for what counts inside a group.
    """
    if not len(values):
        return 0
    if (values == values[0]).all():
        return int(values[0])
    bases = (
        [("group_rank", group[0], "group_size", int(group[1][0]))]
        if group is not None and len(set(group[1])) == 1
        else []
    )
    if group is None:
        bases += list(names.bases(ranks))
    for found in (
        _fit_shift(values, bases),
        _fit_affine(values, bases),
        _fit_blocks(values, ranks, names) if group is None else None,
    ):
        if found is not None:
            return found
    chosen = _fit_conditional(values, ranks, names)
    return chosen if chosen is not None else values_by_rank(values.tolist(), ranks.tolist())


def _fit_shift(values: IntVector, bases: Sequence[tuple[str, IntVector, str, int]]) -> str | None:
    """``base + c``, or that modulo the number of its values."""
    for name, base, size_name, size in bases:
        by = values - base
        if (by == by[0]).all():
            return plus_constant(name, int(by[0]))
        rest = by % size
        if (rest == rest[0]).all() and ((values >= 0) & (values < size)).all():
            shift = int(rest[0])
            return f"({plus_constant(name, shift if shift <= size // 2 else shift - size)}) % {size_name}"
    return None


def _fit_affine(values: IntVector, bases: Sequence[tuple[str, IntVector, str, int]]) -> str | None:
    """A sum of at most two multiples of the names, and a constant."""
    picks: list[list[tuple[str, IntVector, str, int]]] = [[a] for a in bases] + [
        [a, b] for i, a in enumerate(bases) for b in bases[i + 1 :]
    ]
    for pick in picks:
        columns = np.stack([base for _, base, _, _ in pick] + [np.ones_like(values)], axis=1)
        if len(values) < columns.shape[1]:
            continue
        solved = np.rint(
            np.linalg.lstsq(columns.astype(np.float64), values.astype(np.float64), rcond=None)[0]
        ).astype(np.int64)
        if (
            (columns @ solved == values).all()
            and np.abs(solved).max() < 1 << 40
            and len(values) > columns.shape[1]
        ):
            return _sum_text(
                [(int(k), name) for k, (name, *_) in zip(solved, pick, strict=False)],
                int(solved[-1]),
            )
    return None


def _sum_text(terms: Sequence[tuple[int, str]], constant: int) -> str:
    if terms and all(factor <= 0 for factor, _ in terms) and constant > 0:
        return (
            f"{constant} {_sum_text(terms, 0)[0]} {_sum_text(terms, 0)[1:]}"
            if any(factor for factor, _ in terms)
            else str(constant)
        )
    text = ""
    for factor, name in terms:
        if factor:
            term = name if abs(factor) == 1 else f"{abs(factor)} * {name}"
            text = (
                f"{text} {'-' if factor < 0 else '+'} {term}"
                if text
                else (f"-{term}" if factor < 0 else term)
            )
    return plus_constant(text, constant) if text else str(constant)


def plus_constant(text: str, constant: int) -> str:
    """``text + constant``, without a zero."""
    return text if not constant else f"{text} {'-' if constant < 0 else '+'} {abs(constant)}"


def _fit_blocks(values: IntVector, ranks: IntVector, names: RankVariables) -> str | None:
    """Numbers that repeat with, or step by, a divisor of the world: ``rank % k``, ``rank // k``,
    and a ring inside blocks of k.
    """
    for k in (k for k in range(2, names.size) if names.size % k == 0):
        for text, base in ((f"rank % {k}", ranks % k), (f"rank // {k}", ranks // k)):
            by = values - base
            if (by == by[0]).all():
                return plus_constant(text, int(by[0]))
        if (values // k == ranks // k).all():
            rest = (values - ranks) % k
            if (rest == rest[0]).all():
                shift = int(rest[0]) if rest[0] <= k // 2 else int(rest[0]) - k
                return f"rank // {k} * {k} + ({plus_constant('rank', shift)}) % {k}"
    for k in (k for k in range(2, names.size) if names.size % k == 0):
        columns = np.stack([ranks % k, ranks // k, np.ones_like(ranks)], axis=1)
        solved = np.rint(
            np.linalg.lstsq(columns.astype(np.float64), values.astype(np.float64), rcond=None)[0]
        ).astype(np.int64)
        if len(values) > 3 and (columns @ solved == values).all():
            return _sum_text(
                [(int(solved[0]), f"(rank % {k})"), (int(solved[1]), f"(rank // {k})")],
                int(solved[2]),
            )
    return None


def _fit_conditional(values: IntVector, ranks: IntVector, names: RankVariables) -> str | None:
    """``a if condition else b``, where a and b are numbers or the rank and a number."""
    for of in (values, values - ranks):
        kinds = np.unique(of)
        if len(kinds) != 2:
            continue
        condition = fit_selector(of == kinds[0], ranks, names)
        if isinstance(condition, str):
            first, second = (
                str(int(k)) if of is values else plus_constant("rank", int(k)) for k in kinds
            )
            return f"{first} if {condition} else {second}"
    return None


def values_by_rank(values: Sequence[Any], ranks: Sequence[int]) -> dict[int | str, Any]:
    """Each rank's own, what most of them have as ``else``."""
    common, count = Counter(values).most_common(1)[0]
    if count == 1:
        return dict(zip(ranks, values, strict=True))
    found: dict[int | str, Any] = {
        rank: value for rank, value in zip(ranks, values, strict=True) if value != common
    }
    return {**found, "else": common}


# --- selectors ---


def fit_selector(
    mask: NDArray[np.bool_], ranks: IntVector, names: RankVariables
) -> str | list[int] | int | None:
    """Which of the ranks: None for all, a condition, a rank or a list of them."""
    if mask.all():
        return None
    chosen = ranks[mask]
    for name, base, size_name, size in [
        *list(names.bases(ranks))[1:],
        *list(names.bases(ranks))[:1],
        *_divisor_bases(ranks, names),
    ]:
        inside, outside = np.unique(base[mask]), np.unique(base[~mask])
        last = f"{size_name} - 1" if size_name else str(size - 1)
        if len(inside) == 1 and inside[0] not in outside:
            return (
                _rank_or_list(chosen)
                if name == "rank"
                else f"{name} == {last if inside[0] == size - 1 > 1 else inside[0]}"
            )
        if len(outside) == 1 and outside[0] not in inside:
            if outside[0] == 0:
                return f"{name} > 0"
            return f"{name} < {last}" if outside[0] == size - 1 else f"{name} != {outside[0]}"
        if inside.max() < outside.min():
            return f"{name} < {outside.min()}"
        if inside.min() > outside.max():
            return f"{name} > {outside.max()}"
    return _rank_or_list(chosen)


def _rank_or_list(chosen: IntVector) -> int | list[int]:
    return int(chosen[0]) if len(chosen) == 1 else [int(rank) for rank in chosen]


def _divisor_bases(
    ranks: IntVector, names: RankVariables
) -> Iterator[tuple[str, IntVector, str, int]]:
    for k in (k for k in range(2, names.size) if names.size % k == 0):
        yield f"rank % {k}", ranks % k, "", k
        yield f"rank // {k}", ranks // k, "", names.size // k
