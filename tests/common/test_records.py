"""Records of distsim.common.records do as the standard library's dataclasses do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest

from distsim.common.records import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Slotted:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True)
class Open:
    a: int
    b: tuple[int, ...] = ()


@dataclass
class Mutable:
    a: int
    b: list[int] = field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Standard:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list, compare=False, repr=False)


CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((1,), {}),
    ((1, "x"), {}),
    ((1, "x", [3]), {}),
    ((), {"a": 2}),
    ((1,), {"c": [4]}),
    ((), {"c": [], "b": "q", "a": 0}),
)
WRONG: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {}),
    ((1, "x", [], 4), {}),
    ((1,), {"a": 2}),
    ((1,), {"d": 2}),
    ((), {"b": "x"}),
    ((), {"b": "x", "d": 1}),
    ((1, "x", []), {"c": []}),
)


@pytest.mark.parametrize(("given", "named"), CALLS)
def test_a_record_behaves_like_a_standard_dataclass(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    mine, theirs = Slotted(*given, **named), Standard(*given, **named)
    assert repr(mine) == repr(theirs).replace("Standard", "Slotted")
    assert [mine.a, mine.b, mine.c] == [theirs.a, theirs.b, theirs.c]
    assert hash(mine) == hash(theirs)
    assert mine == Slotted(mine.a, mine.b, [9]) != Slotted(mine.a + 1, mine.b)
    assert (mine < Slotted(mine.a + 1), mine >= Slotted(mine.a + 1)) == (True, False)
    assert mine != theirs
    assert not hasattr(mine, "__dict__")


@pytest.mark.parametrize(("given", "named"), WRONG)
def test_a_record_refuses_what_dataclasses_refuse(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    for made in (Slotted, Standard):
        with pytest.raises(TypeError):
            made(*given, **named)


@pytest.mark.parametrize("record", [Slotted(1, "x", [2]), Open(1, (2,))])
def test_frozen_records_refuse_changes_and_can_be_replaced_copied_and_pickled(record: Any) -> None:
    for change in (lambda: setattr(record, "a", 2), lambda: delattr(record, "a")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert dataclasses.replace(record, a=5) == type(record)(5, record.b)
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record  # noqa: S301
    assert [f.name for f in dataclasses.fields(record)][:2] == ["a", "b"]


def test_a_mutable_record_can_change_and_compare_and_has_no_hash() -> None:
    one = Mutable(1)
    one.b.append(2)
    assert one == Mutable(1, [2])
    assert repr(one) == "Mutable(a=1, b=[2])"
    with pytest.raises(TypeError):
        hash(one)
