"""A misspelt value or option name gets a suggestion, and no word of a library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import distsim
from distsim.cli.application import _is_empty
from distsim.cli.commands.capture import _parse_timeout_s
from distsim.cli.shared.html_report import check_report_path
from distsim.real.bench.measurement import run_bench
from tests.support.harness import ROOT, Cli

HYBRID = ROOT / "scenarios" / "hybrid.yaml"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("check", ""), "'FILE'"),
        (("doctor", ""), "'PATH'"),
        (("capture", ""), "'-- COMMAND'"),
        (("simulate", HYBRID, "--trace="), "'--trace'"),
        (("simulate", HYBRID, "--set", ""), "'--set'"),
    ],
)
def test_an_empty_value_is_refused_and_does_not_mean_the_current_folder(
    cli: Cli, words: tuple[object, ...], place: str
) -> None:
    done = cli(*words)

    assert done.returncode == 2
    assert f"{place}: the value is empty; write a value, or omit it" in done.stderr


def test_a_command_to_capture_may_have_empty_arguments() -> None:
    assert not _is_empty("words", ["python", "script.py", ""])
    assert not _is_empty("words", None)


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


@pytest.mark.parametrize(
    "use",
    [
        lambda: _parse_timeout_s("-5s"),
        lambda: _parse_timeout_s("soon"),
        lambda: run_bench(ranks=[99_999]),
        lambda: distsim.plan("llama3-8b", gpus=8, cluster="dgx-h100", global_batch=10**23),
        lambda: check_report_path(Path("-")),
    ],
    ids=["capture --timeout", "no time", "bench --ranks", "plan --global-batch", "report -o -"],
)
def test_an_impossible_value_is_refused_with_a_remedy(use: Callable[[], object]) -> None:
    with pytest.raises(distsim.UsageError) as refusal:
        use()

    assert refusal.value.remedy
    assert "-.html" not in refusal.value.remedy


def test_a_missing_output_folder_is_refused_before_the_work(tmp_path: Path, cli: Cli) -> None:
    done = cli("shrink", HYBRID, "-o", tmp_path / "missing" / "small.yaml")

    assert done.returncode == 2
    assert f"the folder {tmp_path / 'missing'} does not exist" in done.stderr
