"""`distsim.dataclass` makes the classes that the standard library makes: held side by side."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from distsim import dataclass as ours

WAYS = [
    {},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"slots": True},
    {"eq": False},
    {"frozen": True, "slots": True, "order": True},
    {"frozen": True, "slots": True, "eq": False},
]


def _classes(make: Callable[..., Any], field: Callable[..., Any], way: dict[str, bool]) -> tuple[type[Any], type[Any]]:
    @make(**way)
    class Base:
        a: int
        b: list[int] = field(default_factory=list, compare=False)

    @make(**way)
    class Point(Base):
        c: str = "x"
        d: int = field(default=3, repr=False)

        @property
        def twice(self) -> int:
            return 2 * self.a

    return Base, Point


def _told(what: Callable[[], Any]) -> Any:
    """What comes of a call, or the error with its words; addresses of objects left out."""
    try:
        found = what()
    except (TypeError, AttributeError) as error:
        return type(error).__name__, str(error).partition(" object at")[0]
    return found if isinstance(found, str | int | bool | tuple | list | type(None)) else type(found).__name__


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way) or "plain")
@pytest.mark.parametrize("objects", [1, 40], ids=["few", "many"])
def test_objects_do_what_those_of_the_standard_library_do(way: dict[str, bool], objects: int) -> None:
    """Made by place and by name, wrong calls, shown, compared, hashed, replaced, assigned to, matched; as first object and as fortieth."""

    def answers(make: Callable[..., Any], field: Callable[..., Any]) -> list[Any]:
        _, point = _classes(make, field, way)
        for _ in range(objects):
            point(1)
        one, same, other = point(1, [2]), point(1, b=[9]), point(2, d=5, c="y")
        return [
            _told(lambda: repr(other)), _told(lambda: one == same), _told(lambda: one == other), _told(lambda: one != 1),
            _told(lambda: hash(one) == hash(same)), _told(lambda: one < other), _told(lambda: one >= other),
            _told(lambda: [f.name for f in dataclasses.fields(one)]), _told(lambda: repr(dataclasses.replace(one, c="z"))),
            _told(point), _told(lambda: point(1, 2, "x", 3, 4)), _told(lambda: point(1, e=3)), _told(lambda: point(1, a=1)),
            _told(lambda: setattr(one, "a", 7)), _told(lambda: delattr(one, "a")), "slots" in way or _told(lambda: setattr(one, "new", 7)),
            point.__match_args__, hasattr(one, "__dict__"), point(3).b is not point(3).b, other.twice, point(1).d,
            getattr(point, "__slots__", None), _told(lambda: [getattr(one, n) for n in "abcd" if hasattr(one, n)]),
        ]  # fmt: skip

    assert answers(ours.dataclass, ours.field) == answers(dataclasses.dataclass, dataclasses.field)


@ours.dataclass(frozen=True, slots=True)
class Kept:
    """Pickle finds a class by its name."""

    a: int
    b: tuple[int, ...] = ()


def test_frozen_objects_without_a_dict_are_pickled() -> None:
    assert copy.copy(Kept(1, (2,))) == Kept(1, (2,))
    assert Kept(1).__reduce_ex__(4)[2] == [1, ()]


def test_a_default_that_can_change_is_refused_and_own_methods_stay() -> None:
    with pytest.raises(ValueError, match="default_factory"):

        @ours.dataclass
        class Wrong:
            a: list[int] = []

    @ours.dataclass
    class Mine:
        a: int

        def __post_init__(self) -> None:
            self.a += 1

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "mine"

    assert repr(Mine(1)) == "mine"
    assert Mine(1) == Mine(2)
    assert Mine(1).a == 2
