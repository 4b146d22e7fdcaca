"""`dataclass` as the standard library has it, at a quarter of its price when a module is loaded.

The standard library writes and compiles six functions for a class; some hundred classes of them were a fifth of a short command. Here
`__init__` is made when there are some objects, and the others are plain functions. Objects, `fields`, `replace`, comparison, hash,
`match` and pickle are the same; there are no InitVar, `kw_only` and `weakref_slot`, and no signature as docstring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, field
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")
Function = Callable[..., Any]

#: Objects of a class before it pays to have its `__init__` made.
_FEW = 30

__all__ = ["dataclass", "field"]


@overload
def dataclass(cls: type[T], /) -> type[T]: ...
@overload
def dataclass(
    *, frozen: bool = False, slots: bool = False, eq: bool = True, order: bool = False
) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(field,))
def dataclass(
    cls: type[Any] | None = None, /, *, frozen: bool = False, slots: bool = False, eq: bool = True, order: bool = False
) -> Any:
    """A class of records, as `dataclasses.dataclass`. Raises TypeError and ValueError as that does."""

    def made(cls: type[Any]) -> type[Any]:
        fields = _fields(cls)
        added = _functions(fields, frozen=frozen, eq=eq, order=order, state=frozen and slots)
        added["__match_args__"] = tuple(name for name, one in fields.items() if one.init)
        added["__dataclass_fields__"] = fields
        added["__dataclass_params__"] = SimpleNamespace(frozen=frozen, eq=eq, order=order, slots=slots, init=True, repr=True)
        own = vars(cls)
        for name in added.keys() & own.keys() - {"__hash__", "__init__"}:
            del added[name]
        if own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own):
            added.pop("__hash__", None)
        new = _slotted(cls, fields) if slots else cls
        for name, value in added.items():
            setattr(new, name, value)
        _starting(new, fields, frozen)
        if frozen:
            _freeze(new, frozenset(fields))
        return new

    return made if cls is None else made(cls)


def _fields(cls: type[Any]) -> dict[str, Field[Any]]:
    """By name, those of the bases first. The class keeps plain defaults as its attributes, and no `Field`."""
    found: dict[str, Field[Any]] = {}
    for base in cls.__mro__[-1:0:-1]:
        found.update(getattr(base, "__dataclass_fields__", {}))
    for name, kind in vars(cls).get("__annotations__", {}).items():
        if "ClassVar" in str(kind):
            continue
        default = getattr(cls, name, MISSING)
        if type(default).__name__ in ("member_descriptor", "cached_property"):  # a slot of a base; none that we know
            default = MISSING
        one: Any = default if isinstance(default, Field) else field(default=default)
        one.name, one.type = name, kind
        one._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # what `fields` and `replace` go by
        if one.default is not MISSING and type(one.default).__hash__ is None:
            raise ValueError(f"mutable default {type(one.default)} for field {name} is not allowed: use default_factory")
        if isinstance(default, Field):
            if one.default is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, one.default)
        found[name] = one
    return found


def _slotted(cls: type[Any], fields: dict[str, Field[Any]]) -> type[Any]:
    """The class anew, its own fields as slots."""
    inherited = {name for base in cls.__mro__[1:-1] for name in getattr(base, "__slots__", ())}
    space = {name: value for name, value in vars(cls).items() if name not in fields and name not in ("__dict__", "__weakref__")}
    space["__slots__"] = tuple(name for name in fields if name not in inherited)
    new: type[Any] = type(cls)(cls.__name__, cls.__bases__, space)  # type: ignore[misc]
    new.__qualname__ = cls.__qualname__
    return new


def _functions(fields: dict[str, Field[Any]], *, frozen: bool, eq: bool, order: bool, state: bool) -> dict[str, Any]:
    shown = tuple(name for name, one in fields.items() if one.repr)
    added: dict[str, Any] = {"__repr__": _repr(shown)}
    of = _values(tuple(name for name, one in fields.items() if one.compare))
    if eq:
        added["__eq__"] = _compared(of, lambda a, b: a == b)
        added["__hash__"] = (lambda self: hash(of(self))) if frozen else None
    if order:
        added |= {
            "__lt__": _compared(of, lambda a, b: a < b), "__le__": _compared(of, lambda a, b: a <= b),
            "__gt__": _compared(of, lambda a, b: a > b), "__ge__": _compared(of, lambda a, b: a >= b),
        }  # fmt: skip
    return added | (_state(tuple(fields)) if state else {})


def _values(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """The function that gives some attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _repr(names: tuple[str, ...]) -> Function:
    def shown(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return shown


def _compared(of: Callable[[Any], tuple[Any, ...]], how: Callable[[Any, Any], bool]) -> Function:
    def compare(self: Any, other: object) -> Any:
        return how(of(self), of(other)) if other.__class__ is self.__class__ else NotImplemented

    return compare


def _state(names: tuple[str, ...]) -> dict[str, Function]:
    """What pickle needs of frozen objects that have no `__dict__`."""

    def given(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def taken(self: Any, state: list[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {"__getstate__": given, "__setstate__": taken}


def _freeze(cls: type[Any], names: frozenset[str]) -> None:
    def assign(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = assign, delete  # type: ignore[assignment]


def _starting(cls: type[Any], fields: dict[str, Field[Any]], frozen: bool) -> None:
    """Give the class an `__init__` that fills in the fields of the first objects by itself. When there are more of them, or the call is
    wrong, it has the standard library make one, and that takes over: it is the faster one and has the right words."""
    names, left = tuple(name for name, one in fields.items() if one.init), _FEW
    put = object.__setattr__

    def start(self: Any, *args: Any, **given: Any) -> None:
        nonlocal left
        left -= 1
        values = {**dict(zip(names, args, strict=False)), **given}
        left_out = [one for name, one in fields.items() if name not in values]
        wrong = len(values) != len(args) + len(given) or bool(given.keys() - fields.keys()) or any(map(_needed, left_out))
        if left < 0 or wrong:
            cls.__init__ = _standard(cls, fields, frozen)
            cls.__init__(self, *args, **given)
            return
        for one in left_out:
            values[one.name] = one.default if one.default_factory is MISSING else one.default_factory()
        for name in fields:
            put(self, name, values[name])
        if hasattr(cls, "__post_init__"):
            self.__post_init__()

    cls.__init__ = start


def _needed(one: Field[Any]) -> bool:
    """It must be given; or it must not, which the standard library knows how to do."""
    return not one.init or (one.default is MISSING and one.default_factory is MISSING)


def _standard(cls: type[Any], fields: dict[str, Field[Any]], frozen: bool) -> Function:
    """The standard library's `__init__` for such fields."""
    types = {name: one.type for name, one in fields.items()}
    space: dict[str, Any] = {"__doc__": cls.__name__, "__annotations__": types, **fields}
    if hasattr(cls, "__post_init__"):
        space["__post_init__"] = cls.__post_init__
    donor: Any = dataclasses.dataclass(repr=False, eq=False, match_args=False, frozen=frozen)(type(cls.__name__, (), space))
    made: Function = donor.__init__
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made
