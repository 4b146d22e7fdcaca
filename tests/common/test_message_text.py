"""Texts of errors: nearest names, shortened values, the place with a caret, exit statuses."""

from __future__ import annotations

import errno

import pytest

from distsim.common.errors import (
    EnvironmentFault,
    InternalError,
    ScenarioErrors,
    ScenarioProblem,
    UsageError,
    is_out_of_memory,
    raise_if_out_of_memory,
    resource_error,
)
from distsim.common.message_text import (
    closest_name,
    did_you_mean,
    name_list,
    unknown_value_text,
    value_text,
)


@pytest.mark.parametrize(
    ("name", "candidates", "closest"),
    [
        ("al_reduce", ["all_reduce", "broadcast"], "all_reduce"),
        ("ALL-REDUCE", ["all_reduce", "broadcast"], "all_reduce"),
        ("all_reduce", ["All-Reduce", "broadcast"], "All-Reduce"),
        ("gather", ["scatter", "barrier", "gater"], "gater"),
        ("xyz", ["all_reduce", "broadcast"], None),
        ("all_reduce", [], None),
        (12, ["12"], None),
        ("a" * 80, ["a" * 80], "a" * 80),
        ("a" * 81, ["a" * 81], None),
    ],
)
def test_the_closest_name_ignores_case_and_kind_of_dash(
    name: object, candidates: list[str], closest: str | None
) -> None:
    """Long texts are no names, and comparing them takes long."""
    assert closest_name(name, candidates) == closest
    shown = "" if closest in (None, name) else f"; did you mean {closest}?"
    assert did_you_mean(name, candidates) == shown


def test_a_list_of_names_is_cut_after_the_limit() -> None:
    assert [name_list(range(count), 3) for count in (0, 1, 3, 4, 9)] == [
        "none",
        "0",
        "0, 1, 2",
        "0, 1, 2 and 1 more",
        "0, 1, 2 and 6 more",
    ]
    assert name_list(range(12)).endswith("10, 11")
    assert name_list(range(13)).endswith("10, 11 and 1 more")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing"),
        ({1: 2}, "a mapping"),
        ([1], "a list"),
        ((), "a list"),
        (True, "true"),
        (0.5, "0.5"),
        ("it's", '"it\'s"'),
        ("x" * 58, f"'{'x' * 58}'"),
        ("x" * 59, f"'{'x' * 56}..."),
    ],
)
def test_a_value_is_shown_as_a_file_has_it_in_at_most_60_characters(
    value: object, text: str
) -> None:
    assert value_text(value) == text
    assert len(text) <= 60


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ncll", "unknown value 'ncll'; did you mean 'nccl'?"),
        ("ucx", "unknown value 'ucx'; expected one of gloo, nccl"),
        (None, "expected one of gloo, nccl, found nothing"),
        (["gloo"], "expected one of gloo, nccl, found a list"),
    ],
)
def test_an_unknown_value_is_shown_with_what_was_expected(value: object, text: str) -> None:
    assert unknown_value_text(value, ["gloo", "nccl"]) == text


# --- problems of a scenario ---
def problem(line: str, column: int, hint: str = "") -> ScenarioProblem:
    return ScenarioProblem("f.yaml", 7, column, "it is wrong", line, hint)


@pytest.mark.parametrize(
    ("column", "width"), [(1, None), (60, None), (140, None), (290, None), (140, 50), (1, 40)]
)
def test_the_caret_points_at_the_column_in_a_visible_part_of_the_line(
    column: int, width: int | None
) -> None:
    """The character at the column is the only Y in a long line."""
    line = "x" * (column - 1) + "Y" + "z" * (300 - column)
    place, text, caret = problem(line, column).render(width).splitlines()

    assert place == f"f.yaml:7:{column}: it is wrong"
    assert text[caret.index("^")] == "Y"
    assert caret.strip() == "^"
    assert len(text) <= (102 if width is None else width)
    assert text.strip() in line
    assert len(text.strip()) >= min((100 if width is None else width - 2), 300) * 0.25


def test_a_line_of_100_characters_is_shown_whole_and_tabs_stay_tabs() -> None:
    whole = "\t" + "x" * 98 + "Y"

    assert problem(whole, 100).render().splitlines()[1:] == [f"  {whole}", f"  \t{' ' * 98}^"]
    assert problem(f"{whole}z", 100).render().splitlines()[1] != f"  {whole}z"
    assert problem("a\x1bb\x00c", 3).render().splitlines()[1:] == ["  a\ufffdb\ufffdc", "    ^"]


def test_a_problem_without_text_has_its_path_and_no_caret() -> None:
    in_python = ScenarioProblem("f.yaml", 0, 0, "wrong", "text", "write 3", "program[0].send.dst")

    assert in_python.render() == "f.yaml: program[0].send.dst: wrong\n  help: write 3"
    assert in_python._replace(path="", hint="").render() == "f.yaml: wrong"
    assert problem("   ", 1).render() == "f.yaml:7:1: it is wrong"


def test_messages_are_wrapped_at_blanks_and_not_without_a_width() -> None:
    many = problem("send", 1, "one two three four-five " + "w" * 30)
    errors = ScenarioErrors((many, problem("", 1)))

    assert errors.render_for_width(20).splitlines() == [
        "f.yaml:7:1: it is",
        "    wrong",
        "  send",
        "  ^",
        "  help: one two",
        "    three four-five",
        "    " + "w" * 30,
        "f.yaml:7:1: it is",
        "    wrong",
    ]
    assert str(errors) == f"{many.render()}\nf.yaml:7:1: it is wrong"
    usage = UsageError("a b c d e f", "g h")
    assert usage.render_for_width(8) == "a b c d\n    e f\n  help:\n    g h"
    assert usage.render_for_width(None) == str(usage) == "a b c d e f\n  help: g h"
    assert str(UsageError("a")) == "a"


def test_the_exit_status_shows_who_can_fix_the_problem() -> None:
    errors = [ScenarioErrors((problem("", 1),)), UsageError("a"), InternalError("b")]

    assert [error.exit_code for error in [*errors, EnvironmentFault("c")]] == [2, 2, 3, 4]


# --- resources ---
@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "no"), True),
        (OSError(errno.ENOENT, "no"), False),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (OSError("libx.so: Cannot allocate memory"), True),
        (ImportError("no module named x"), False),
        (ValueError("cannot allocate memory"), False),
    ],
)
def test_a_library_that_does_not_fit_into_memory_is_not_a_missing_library(
    error: Exception, is_memory: bool
) -> None:
    assert is_out_of_memory(error) is is_memory
    if not isinstance(error, ImportError | OSError):
        return
    if not is_memory:
        raise_if_out_of_memory(error)
        return
    with pytest.raises(MemoryError):
        raise_if_out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "not enough free memory"),
        (RecursionError(), "the input is nested too deeply"),
        (OverflowError(), "times or sizes add up to more than 64 bits can count"),
    ],
)
def test_an_error_of_an_oversized_input_has_its_place_and_a_remedy(
    error: Exception, text: str
) -> None:
    with_place, alone = resource_error(error, "a.yaml"), resource_error(error, "")

    assert with_place.message == f"a.yaml: {alone.message}"
    assert alone.message.startswith(text)
    assert alone.remedy == with_place.remedy != ""
