"""A command line that leaves nothing open is taken apart without typer, and means what it means to typer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, get_type_hints

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from distsim.cli.commands import COMMANDS
from distsim.cli.declared import for_typer, parameters_of, plainly

WORDS = (
    "a.yaml",
    "b.json",
    "-",
    "nccl",
    "gloo",
    "json",
    "text",
    "3",
    "0",
    "-1",
    "1e3",
    "x=1",
    "",
    "ä b",
    "--",
    "-h",
    "--help",
    "-x",
)


def command_of(name: str) -> Callable[..., None]:
    found: Callable[..., None] = import_module(f"distsim.cli.{name}").command
    return found


def as_typer_takes_it(command: Callable[..., None], words: list[str]) -> dict[str, Any] | None:
    seen: list[dict[str, Any]] = []

    def recorder(**given: Any) -> None:
        seen.append(given)

    recorder.__annotations__ = get_type_hints(command, include_extras=True)
    recorder.__signature__ = inspect.signature(command)  # type: ignore[attr-defined]
    app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(for_typer(recorder))
    CliRunner().invoke(app, words)
    return seen[0] if seen else None


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    name = draw(st.sampled_from(COMMANDS))
    parameters = parameters_of(command_of(name))
    options = [one for one in parameters if one.declared.is_option]
    words: list[str] = []
    for _ in range(draw(st.integers(0, 5))):
        if options and draw(st.booleans()):
            one = draw(st.sampled_from(options))
            values = [str(m.value) for m in one.kind] if isinstance(one.kind, type) and issubclass(one.kind, Enum) else []
            option, value = draw(st.sampled_from(one.declared.names)), draw(st.sampled_from((*values, *WORDS)))
            words += draw(st.sampled_from(([option, value], [f"{option}={value}"], [option])))
        else:
            words.append(draw(st.sampled_from(WORDS)))
    return name, words


@given(command_lines())
@settings(max_examples=250, deadline=None)
def test_what_a_plain_line_says_is_what_typer_hears(line: tuple[str, list[str]]) -> None:
    name, words = line
    command = command_of(name)
    plain = plainly(command, words)
    if plain is not None:
        heard = as_typer_takes_it(command, words)
        assert heard is not None
        assert {k: None if v == [] else v for k, v in heard.items()} == plain


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("simulate", ["a.yaml"]),
        ("simulate", ["a.yaml", "--no-fold", "--backend", "nccl", "--set=a=1", "--set", "b=2", "--trace", "t.json"]),
        ("check", ["--strict", "a.yaml", "b.yaml", "--format", "sarif"]),
        ("capture", ["--nproc", "4", "--", "python", "train.py", "--epochs", "1"]),
        ("render", ["a.yaml", "--view", "timeline", "-o", "a.svg"]),
        ("test", ["scenarios"]),
    ],
)
def test_usual_lines_are_plain(name: str, words: list[str]) -> None:
    assert plainly(command_of(name), words) == as_typer_takes_it(command_of(name), words)


@pytest.mark.parametrize("words", [["--help"], [], ["a.yaml", "b.yaml"], ["a.yaml", "--backend", "ncl"], ["a.yaml", "--max-calls", "0"],
                                   ["a.yaml", "--trace"], ["a.yaml", "--no-fold=1"], ["a.yaml", "--fold"]])  # fmt: skip
def test_help_and_mistakes_are_typers(words: list[str]) -> None:
    assert plainly(command_of("simulate"), words) is None
