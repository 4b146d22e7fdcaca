"""Reports at 40 to 200 columns: nothing stands out on the right, wide characters count twice, and
room is used where there is some.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.cli.commands.explain import explain_page
from distsim.output.text.simulation_report import simulation_report_text
from distsim.output.text_layout import (
    display_width,
    set_page_width,
    table_lines,
    truncated,
    wrapped_lines,
)
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import Simulation, simulate

ROOT = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.fixture(scope="module")
def runs() -> list[Simulation]:
    wide = "world: 2\nname: 通信の例\ntensors: {勾配: {shape: [2], value: rank}}\nprogram:\n"
    wide += "  - compute: {name: 順伝播, time: 3 ms}\n  - all_reduce: {tensor: 勾配}\n"
    return [
        simulate(load(ROOT / "hybrid.yaml")),
        simulate(load(ROOT / "ring_of_four.yaml")),
        simulate(loads(wide, "f.yaml")),
    ]


@pytest.fixture(autouse=True)
def _plain_width() -> Iterator[None]:
    yield
    set_page_width(None)


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_no_report_line_is_wider_than_the_page(columns: int, runs: list[Simulation]) -> None:
    """Exceptions are texts to copy in one piece: a single word that is wider than the page, such
    as a path, and a step or a call of torch.
    """
    set_page_width(columns)
    for text in [
        *map(simulation_report_text, runs),
        explain_page("scatter"),
        explain_page("world"),
        explain_page("expressions"),
        explain_page("scenario"),
    ]:
        wide = [
            line
            for line in text.splitlines()
            if display_width(line) > columns and len(line.split()) > 1
        ]
        assert [line for line in wide if not line.lstrip().startswith(("- ", "at ", "dist."))] == []


def test_no_column_is_dropped_at_120_columns(runs: list[Simulation]) -> None:
    set_page_width(120)
    text = simulation_report_text(runs[0])

    assert all(
        word in text
        for word in (
            *("algbw", "busbw", "exposed comm", "wait for peers", "idle", "finished"),
            *("share", "where"),
        )
    )


def test_wide_characters_count_two_columns_and_combining_ones_none() -> None:
    assert [display_width(text) for text in ("abc", "勾配", "e\u0301", "→", "")] == [3, 4, 1, 1, 0]
    rows = table_lines(("name", "n"), [("勾配", "1"), ("grad", "2")])
    assert len({display_width(row) for row in rows}) == 1
    assert display_width(truncated("勾配勾配勾配", 6)) <= 6


def test_lines_break_at_blanks_and_keep_words_whole() -> None:
    set_page_width(40)
    word = "x" * 60

    assert wrapped_lines(f"a {word} b") == ["a", word, "b"]
    assert all(display_width(line) <= 40 for line in wrapped_lines("勾配 " * 40))


@pytest.mark.parametrize(("asked", "given"), [(10, 40), (1000, 200), (None, 80), (97, 97)])
def test_widths_stay_between_40_and_200(asked: int | None, given: int) -> None:
    from distsim.output.text_layout import page_width

    set_page_width(asked)
    assert page_width() == given


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_errors_follow_the_terminal_width_and_the_caret_stays_under_its_place(columns: int) -> None:
    from distsim.common.errors import ScenarioErrors

    broken = (
        "world: 4\nprogram:\n  - all_reduce: {tensor: x, opp: sum, group: "
        + "g" * 90
        + "}\n  - send: {tensr: x, dst: 1}\n"
    )
    with pytest.raises(ScenarioErrors) as caught:
        loads(broken, "a_file_of_mine.yaml")
    for problem in caught.value.problems:
        lines = problem.render(columns).split("\n")
        assert [
            line for line in lines if display_width(line) > columns and len(line.split()) > 1
        ] == []
        caret = next(k for k, line in enumerate(lines) if line.strip() == "^")
        place = lines[caret].index("^")
        assert lines[caret - 1][place:].startswith(
            broken.split("\n")[problem.line - 1][problem.column - 1 :][:3]
        )
        assert " ".join(problem.render(columns).split()).count("help:") == 1
        assert problem.render().count("\n") <= 3


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_page_of_a_finding_follows_the_terminal(columns: int) -> None:
    from distsim.findings.codes import CODES

    set_page_width(columns)
    for code in CODES:
        text = explain_page(code).partition("\nExample (")[0]
        assert [
            line
            for line in text.splitlines()
            if display_width(line) > columns and len(line.split()) > 1
        ] == []
    assert (
        max(map(display_width, explain_page("DS301").partition("A scenario")[0].splitlines()))
        > min(columns, 130) - 20
    )
