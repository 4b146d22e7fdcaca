"""A scenario is a test: `expect` passes when all came out so, and each thing that did not is
named.
"""

from __future__ import annotations

import pytest

from distsim.common.errors import ScenarioErrors, UsageError
from distsim.scenario import loads
from distsim.simulation.expectations import check_expectations, scenario_files, unmet_expectations
from distsim.simulation.simulate_scenario import simulate

SUM = "world: 4\nbackend: gloo\ntensors: {x: {shape: [2], value: rank}}\nprogram:\n  - all_reduce: {tensor: x}\n"
HANG = """
world: 2
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - send: {tensor: x, dst: 1 - rank}
  - recv: {tensor: x, src: 1 - rank}
"""


def differing(text: str, expect: str) -> list[str]:
    """What `differences` names for a scenario with this `expect`."""
    return [d.what for d in unmet_expectations(simulate(loads(f"{text}expect: {expect}\n")))]


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        (SUM, "{verdict: ok, outcome: completes}"),
        (SUM, "{values: {x: 6}}"),
        (SUM, "{values: {x: {0: 6.0, other_ranks: [6, 6]}}}"),
        (SUM, "{makespan: {at_least: 1 us, at_most: 1 s}, findings: []}"),
        (SUM, "{outcome: {gloo: completes, nccl: completes, mpi: completes}}"),
        (
            HANG,
            "{verdict: deadlock, depends_on: buffering, ranks: [0, 1], core: [0, 1], findings: [DS301]}",
        ),
        (HANG, "{outcome: {gloo: hangs, mpi: completes}}"),
        (HANG, "{values: {x: '?'}}"),
    ],
)
def test_an_outcome_as_expected_has_no_difference(text, expect):
    assert differing(text, expect) == []


@pytest.mark.parametrize(
    ("text", "expect", "named"),
    [
        (SUM, "{verdict: deadlock}", ["verdict"]),
        (SUM, "{outcome: hangs}", ["outcome"]),
        (SUM, "{outcome: {mpi: hangs, gloo: completes}}", ["outcome under mpi"]),
        (
            SUM,
            "{values: {x: {0: 6, 1: 7, 2: [6, 6.5], 3: '?'}}}",
            ["x on rank 1", "x on rank 2", "x on rank 3"],
        ),
        (
            SUM,
            "{values: {x: [6, 6, 6]}}",
            ["x on rank 0", "x on rank 1", "x on rank 2", "x on rank 3"],
        ),
        (SUM, "{makespan: {at_most: 1 ns}, iteration: {at_most: 1 s}}", ["makespan", "iteration"]),
        (SUM, "{findings: [DS301]}", ["findings"]),
        (HANG, "{findings: []}", ["findings"]),
        (HANG, "{ranks: [0], core: [1]}", ["ranks", "core"]),
        (HANG, "{verdict: deadlock, depends_on: null}", ["depends_on"]),
    ],
)
def test_each_difference_from_the_expectation_is_named(text, expect, named):
    assert differing(text, expect) == named


def test_low_precision_numbers_are_compared_approximately():
    text = "world: 2\nbackend: gloo\ntensors: {x: {shape: [1], dtype: bfloat16, value: 0.1}}\nprogram:\n  - barrier\n"

    assert differing(text, "{values: {x: 0.1}}") == []
    assert differing(text, "{values: {x: 0.11}}") == ["x on rank 0", "x on rank 1"]


def test_an_unreadable_file_is_a_result_and_the_others_are_still_checked(tmp_path, cli):
    (tmp_path / "a.yaml").write_text("world: [\n", encoding="utf-8")
    (tmp_path / "b.yaml").write_text(SUM + "expect: {verdict: ok}\n", encoding="utf-8")
    (tmp_path / "c.yaml").write_text(SUM + "expect: {verdict: leak}\n", encoding="utf-8")
    (tmp_path / "d.yaml").write_text(SUM, encoding="utf-8")

    assert [check_expectations(p).status for p in scenario_files([tmp_path])] == [
        "unreadable",
        "passed",
        "failed",
        "no expect",
    ]
    found = cli("test", tmp_path)
    assert found.returncode == 2
    assert "1 passed, 1 failed, 1 unreadable, 1 no expect" in found.stderr
    assert cli("test", tmp_path / "b.yaml").returncode == 0
    assert cli("test", tmp_path / "c.yaml").returncode == 1


def test_directories_are_searched_and_a_missing_path_is_refused(tmp_path):
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    (deep / "x.yaml").write_text(SUM, encoding="utf-8")

    assert scenario_files([tmp_path, deep / "x.yaml"]) == (deep / "x.yaml",)
    with pytest.raises(UsageError, match="does not exist"):
        scenario_files([tmp_path / "no"])
    with pytest.raises(UsageError, match="no scenario"):
        scenario_files([empty])


@pytest.mark.parametrize(
    ("text", "options", "status"),
    [(SUM, (), 0), (HANG, (), 1), (HANG, ("--backend", "mpi"), 1), (SUM, ("--set", "nope=1"), 2)],
)
def test_simulate_exits_with_1_on_error_findings_and_with_2_on_bad_input(
    tmp_path, cli, text, options, status
):
    """A deadlock of the contract stays an error where the back end's buffers hide it."""
    (tmp_path / "s.yaml").write_text(text, encoding="utf-8")

    assert cli("simulate", tmp_path / "s.yaml", *options).returncode == status


def test_a_leak_is_a_warning_unless_strict(tmp_path, cli):
    (tmp_path / "s.yaml").write_text(
        SUM.replace("{tensor: x}", "{tensor: x, async: true, as: h}"), encoding="utf-8"
    )

    assert cli("simulate", tmp_path / "s.yaml").returncode == 0
    assert cli("simulate", tmp_path / "s.yaml", "--strict").returncode == 1


def test_the_former_key_for_all_other_ranks_is_refused_naming_the_new_one() -> None:
    with pytest.raises(ScenarioErrors, match="the key `else` has a new name: write `other_ranks`"):
        loads(SUM + "expect: {values: {x: {0: 6, else: 6}}}\n")
