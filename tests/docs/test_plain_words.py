"""User-visible texts contain no banned phrase and no long sentence (`tests.support.plain_words`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.cli.commands.explain import explain_page
from distsim.findings.codes import CODES
from tests.support.plain_words import (
    ALLOWED,
    ROOT,
    complaints_about,
    complaints_about_text,
    complaints_without_reason,
)

COMMANDS = sorted(get_command(application()).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs", "distsim", "scenarios"])
def test_no_complaint_about_files(path: str) -> None:
    assert [str(complaint) for complaint in complaints_without_reason([path])] == []


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_no_complaint_about_help(command: str) -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(application(), [*command.split(), "--help"])

    assert result.stdout
    assert complaints_about_text(command, result.stdout) == []


@pytest.mark.parametrize("code", list(CODES))
def test_no_complaint_about_finding_pages(code: str) -> None:
    assert complaints_about_text(code, explain_page(code)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "# Title\n\nHere nobody waits.\n"),
        ("module.py", 'TEXT = "the machine stands still"\n'),
        ("scenario.yaml", "about: The two ranks are alike.\n"),
        ("long.md", "word " * 40),
    ],
)
def test_a_banned_word_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")

    assert len(complaints_without_reason([str(path)])) == 1


def test_a_banned_word_in_printed_text_is_found() -> None:
    assert complaints_about_text("help", "Nobody waits.")


def test_every_allowed_phrase_still_occurs() -> None:
    unused = []
    for path, words in ALLOWED:
        found = [complaint.phrase for complaint in complaints_about(ROOT / path)]
        if not any(phrase.startswith(words) for phrase in found):
            unused.append((path, words))

    assert unused == []
