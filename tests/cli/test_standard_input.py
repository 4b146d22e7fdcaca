"""Commands that take a scenario read it from standard input for ``-``, and say so in their help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import ROOT, Cli

HYBRID = (ROOT / "scenarios" / "hybrid.yaml").read_text(encoding="utf-8")
RING = (ROOT / "scenarios" / "ring_of_four.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "-"),
        ("check", "-"),
        ("check", "-", "--format", "json"),
        ("expand", "-"),
        ("test", "-"),
        ("render", "-", "--format", "dot"),
        ("report", "-", "-o", "/dev/null"),
        ("run", "-"),
    ],
    ids=" ".join,
)
def test_a_command_reads_a_scenario_from_standard_input(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words, input=HYBRID)

    assert done.returncode == 0, done.stderr


def test_shrink_reads_a_failing_scenario_from_standard_input(cli: Cli) -> None:
    done = cli("shrink", "-", "--max-trials", "5", input=RING)

    assert done.returncode == 0, done.stderr
    assert "program:" in done.stdout


def test_check_writes_a_report_about_standard_input(cli: Cli, tmp_path: Path) -> None:
    """The input is read once, but checked and simulated."""
    page = tmp_path / "hybrid.html"
    done = cli("check", "-", "--report", page, input=HYBRID)

    assert done.returncode == 0, done.stderr
    assert page.read_text(encoding="utf-8").startswith("<!")
