"""A misspelt value or option name gets a suggestion, and no word of a library."""

from __future__ import annotations

import pytest

from tests.support.harness import ROOT, Cli

HYBRID = ROOT / "scenarios" / "hybrid.yaml"


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (("simulate", HYBRID, "--backend", "ncll"), "unknown value 'ncll'; did you mean nccl?"),
        (("simulate", HYBRID, "--format", "jsn"), "unknown value 'jsn'; did you mean json?"),
        (("check", HYBRID, "--format", "sarf"), "unknown value 'sarf'; did you mean sarif?"),
        (("run", HYBRID, "--launcher", "spwn"), "unknown value 'spwn'; did you mean spawn?"),
        (("schema", "--of", "simulat"), "unknown value 'simulat'; did you mean simulate?"),
    ],
)
def test_a_misspelt_value_gets_a_suggestion(
    cli: Cli, words: tuple[object, ...], suggestion: str
) -> None:
    done = cli(*words)

    assert done.returncode == 2
    assert suggestion in done.stderr
    assert "Value error" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "llama3-8b", "--only", "tp=1"),
        ("simulate", HYBRID, "--against", HYBRID),
        ("simulate", HYBRID, "--no-fold"),
        ("simulate", HYBRID, "--draws", "3"),
        ("simulate", HYBRID, "--schedule", "order.json"),
        ("shrink", HYBRID, "--tries", "3"),
    ],
    ids=lambda words: str(words),
)
def test_a_former_option_name_is_an_unknown_option(cli: Cli, words: tuple[object, ...]) -> None:
    done = cli(*words)

    assert done.returncode == 2
    assert "No such option" in done.stderr
