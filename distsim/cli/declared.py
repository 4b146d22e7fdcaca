"""Arguments and options of commands as they are declared: what typer is told of them, when it is needed (`distsim.cli.app`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

#: Settings that say nothing about which values are taken.
_WORDS = frozenset(("metavar", "help", "show_default"))


class Declared(NamedTuple):
    """One argument (no names) or option."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    is_option: bool

    @property
    def is_plain(self) -> bool:
        """Whether each name stands for the same, and nothing bounds the values but their type."""
        return not any("/" in name for name in self.names) and self.settings.keys() <= _WORDS


def Option(*names: str, **settings: Any) -> Declared:  # noqa: N802
    """An option, with `typer.Option`'s arguments."""
    return Declared(names, settings, True)


def Argument(**settings: Any) -> Declared:  # noqa: N802
    """An argument, with `typer.Argument`'s arguments."""
    return Declared((), settings, False)


class Parameter(NamedTuple):
    """A parameter of a command: ``kind`` is what one word of its becomes, ``many``: a list of such."""

    name: str
    kind: object
    many: bool
    default: object  # inspect.Parameter.empty: it must be given
    annotation: object
    declared: Declared


def parameters_of(command: Callable[..., None]) -> list[Parameter]:
    """What a command takes, in order."""
    hints = get_type_hints(command, include_extras=True)
    return [_parameter(hints[one.name], one) for one in inspect.signature(command).parameters.values()]


def _parameter(hint: object, given: inspect.Parameter) -> Parameter:
    kind, declared = get_args(hint)
    if get_origin(kind) is UnionType:
        kind = next(one for one in get_args(kind) if one is not NoneType)
    many = get_origin(kind) is list
    return Parameter(given.name, get_args(kind)[0] if many else kind, many, given.default, get_args(hint)[0], declared)


def for_typer(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it."""
    import typer

    parameters = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default,
            annotation=Annotated[
                one.annotation, (typer.Option if one.declared.is_option else typer.Argument)(*one.declared.names, **one.declared.settings)
            ],
        )
        for one in parameters_of(command)
    ]  # fmt: skip

    def typed(**given: object) -> None:
        command(**given)

    typed.__doc__ = command.__doc__
    typed.__annotations__ = {one.name: one.annotation for one in parameters}
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return typed


def plainly(command: Callable[..., None], words: list[str]) -> dict[str, object] | None:
    """What a command is given by a command line that leaves nothing open: options by their whole names, each value a word that its type
    takes. None where something is not so, wrong or asked for: typer takes such a line, and tells."""
    parameters = parameters_of(command)
    options = {name: one for one in parameters if one.declared.is_plain for name in one.declared.names}
    found: dict[str, object] = {}
    places: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            places += rest
        elif not word.startswith("-") or word == "-":
            places.append(word)
        elif not _take(options, found, word, rest):
            return None
    for one in parameters:
        if one.declared.is_option:
            found.setdefault(one.name, one.default)
    placed = _place([one for one in parameters if not one.declared.is_option], places, found)
    return found if placed and inspect.Parameter.empty not in found.values() else None


def _take(options: dict[str, Parameter], found: dict[str, object], word: str, rest: Iterator[str]) -> bool:
    """Take an option with its value; False where something is not plain."""
    name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
    one = options.get(name)
    if one is None:
        return False
    if one.kind is bool:
        found[one.name] = True
        return not equals
    if not equals:
        value = next(rest, "-")
    return not value.startswith("-") and _keep(one, value, found)


def _place(arguments: list[Parameter], places: list[str], found: dict[str, object]) -> bool:
    """Give the arguments their words, each of which is used."""
    for one in arguments:
        if not one.declared.is_plain:
            return False
        mine, places = (places, []) if one.many else (places[:1], places[1:])
        if not all(_keep(one, word, found) for word in mine) or (not mine and one.default is inspect.Parameter.empty):
            return False
        if not mine:
            found[one.name] = one.default
    return not places


def _keep(one: Parameter, word: str, found: dict[str, Any]) -> bool:
    """Note the value of a word; False where its type may not take it."""
    value: object = word
    if isinstance(one.kind, type) and issubclass(one.kind, Enum):
        if word not in {str(member.value) for member in one.kind}:
            return False
        value = one.kind(word)
    elif one.kind is int:
        if not (word.isascii() and word.isdecimal() and len(word) < 10):
            return False
        value = int(word)
    elif one.kind is Path:
        value = Path(word)
    elif one.kind is not str:
        return False
    if one.many:
        found.setdefault(one.name, []).append(value)
    else:
        found[one.name] = value
    return True


__all__ = ["Argument", "Declared", "Option", "Parameter", "for_typer", "parameters_of", "plainly"]
