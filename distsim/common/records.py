"""Record classes that are cheap to define and cheap to create by the million.

They are dataclasses whose methods are shared functions. The standard library instead compiles up to
six generated methods for each class at every start of the process, which takes a tenth of a short
command's time. So the classes that every command loads use this decorator. `dataclasses.fields`,
`replace` and mypy treat them as dataclasses. The only visible difference is speed: creating an
instance by position is faster, by keyword slower.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, order=False):
        """The decorator of the standard library, without features that no class here uses.

        These are ``init=False`` and ``__post_init__``.
        """

        def made(plain):
            record = dataclasses.dataclass(init=not frozen, repr=False, eq=False, slots=slots)(
                plain
            )
            assert not (frozen and hasattr(record, "__post_init__")), (
                "take the decorator of the standard library"
            )
            _add_missing_methods(
                record,
                {
                    "__repr__": _record_repr,
                    **(_comparison_methods(record, frozen, order) if eq else {}),
                    **(_frozen_methods(record, slots) if frozen else {}),
                },
            )
            return record

        return made if cls is None else made(cls)


def _add_missing_methods(record: type, methods: Mapping[str, object]) -> None:
    """Set the methods that the class does not define itself."""
    for name, method in methods.items():
        if name not in record.__dict__ or record.__dict__[name] is None:
            setattr(record, name, method)


def _comparison_methods(record: type, frozen: bool, order: bool) -> dict[str, object]:
    """Methods that compare and hash the values of the fields."""
    values = _field_reader([field.name for field in fields(record) if field.compare])
    orders = (operator.lt, operator.le, operator.gt, operator.ge) if order else ()
    compared = {
        f"__{compare.__name__}__": _comparison(values, compare)
        for compare in (operator.eq, *orders)
    }
    return {**compared, "__hash__": (lambda self: hash(values(self))) if frozen else None}


def _comparison(
    values: Callable[[object], tuple[object, ...]], compare: Callable[[object, object], bool]
) -> Callable[[object, object], bool]:
    def compared(self: object, other: object) -> bool:
        return (
            compare(values(self), values(other))
            if other.__class__ is self.__class__
            else NotImplemented
        )

    return compared


def _frozen_methods(record: type, slots: bool) -> dict[str, object]:
    """Methods of an immutable class: creation and pickling, but no assignment."""
    kept = {"__getstate__": _pickle_state, "__setstate__": _restore_pickle_state} if slots else {}
    return {
        "__init__": _frozen_init(record, slots),
        "__setattr__": _refuse_assignment,
        "__delattr__": _refuse_assignment,
        **kept,
    }


def _field_reader(names: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    """A function that reads these attributes of a record."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def _frozen_init(record: type, slots: bool) -> Callable[..., None]:
    """``__init__`` of a frozen class.

    Calls that pass all fields by position take a fast path without `_argument_binder`.
    """
    names = tuple(field.name for field in fields(record))
    given_by = _argument_binder(record, names)
    count, setters = len(names), [getattr(record, name).__set__ for name in names] if slots else []

    def into_slots(self: object, *given: object, **named: object) -> None:
        for put, value in zip(
            setters,
            given if len(given) == count and not named else given_by(given, named),
            strict=True,
        ):
            put(self, value)

    def into_dict(self: object, *given: object, **named: object) -> None:
        self.__dict__.update(
            zip(
                names,
                given if len(given) == count and not named else given_by(given, named),
                strict=True,
            )
        )

    return into_slots if slots else into_dict


def _argument_binder(
    record: type, names: tuple[str, ...]
) -> Callable[[tuple[object, ...], dict[str, object]], Iterable[object]]:
    """A function that maps the arguments of a call to the values of the fields.

    It raises TypeError unless each field gets exactly one value.
    """
    known = frozenset(names)
    defaults = {
        field.name: field.default for field in fields(record) if field.default is not MISSING
    }
    factories = {
        field.name: field.default_factory
        for field in fields(record)
        if field.default_factory is not MISSING
    }

    def given_by(given: tuple[object, ...], named: dict[str, object]) -> Iterable[object]:
        bound = {**defaults, **dict(zip(names, given, strict=False)), **named}
        for name, factory in factories.items():
            if name not in bound:
                bound[name] = factory()
        twice = named.keys() & names[: len(given)]
        if bound.keys() != known or len(given) > len(names) or twice:
            wrong = (
                sorted({*twice, *bound.keys() ^ known})
                or f"{len(given)} values for {len(names)} fields"
            )
            raise TypeError(f"{record.__qualname__}(): missing, unknown or given twice: {wrong}")
        return [bound[name] for name in names]

    return given_by


def _record_repr(self: Any) -> str:
    values = ", ".join(
        f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr
    )
    return f"{type(self).__qualname__}({values})"


def _refuse_assignment(self: object, name: str, *value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to or delete field {name!r}")


def _pickle_state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in fields(self)]


def _restore_pickle_state(self: Any, state: list[object]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


__all__ = ["dataclass"]


# --- many records at once ---
@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector.

    Traversing a million new records that are all in use would take a third of the time. Afterwards
    these records count as old, so that the next collection does not traverse them at once.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # If objects are frozen already, unfreezing would also affect those.
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
