"""The result of a check: outcome on every backend, findings, exit status, and folding of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distsim.checker.verdict import Verdict
from distsim.common.errors import UsageError
from distsim.engine.backend_outcomes import BackendOutcome
from distsim.findings.finding_types import Finding
from distsim.scenario import Scenario, loads
from distsim.simulation.check_scenario import (
    CheckResult,
    check_file,
    check_scenario,
    unreadable_result,
)
from distsim.simulation.simulate_scenario import simulate
from tests.support.check_programs import HANG, LEAK, OK, ORDER
from tests.support.spmd import program


def test_a_failure_only_under_another_backend_is_a_warning() -> None:
    """Two groups in another order, asynchronously: gloo completes."""
    text = """world: 2
backend: gloo
groups: {a: [0, 1], b: [0, 1]}
tensors: {x: {shape: [4]}, y: {shape: [4]}}
program:
  - all_reduce: {tensor: x, group: a, async: true, as: h}
    ranks: 0
  - all_reduce: {tensor: y, group: b, async: true, as: k}
  - all_reduce: {tensor: x, group: a, async: true, as: h}
    ranks: 1
  - wait: [h, k]
"""
    result = check_scenario(loads(text))

    assert (result.verdict.verdict if result.verdict else "", result.status()) == ("ok", 0)
    assert [(f.code, f.severity) for f in result.findings] == [("DS604", "warning")]
    assert check_scenario(loads(text), backend="mpi").status() == 1


def test_a_difference_only_on_mpi_is_a_note() -> None:
    text = OK.replace("shape: [4], value: rank", "shape: [4], dtype: bfloat16").replace(
        "gloo", "nccl"
    )

    assert [(f.code, f.severity) for f in check_scenario(loads(text)).findings] == [
        ("DS604", "note")
    ]


def test_a_search_bound_that_was_hit_is_reported() -> None:
    result = check_scenario(loads(ORDER), max_states=1)

    assert result.verdict is not None
    assert not result.verdict.complete
    assert "DS902" in [f.code for f in result.findings]


def test_a_portable_program_differs_by_the_reason_of_the_other_backend() -> None:
    text = OK.replace("shape: [4], value: rank", "shape: [4], dtype: bfloat16")
    (finding,) = check_scenario(loads(text.replace("gloo", "nccl"))).findings

    first, reason = finding.message.splitlines()
    assert first == "the program completes on nccl, but not on mpi"
    assert reason.startswith("  mpi  raises: all_reduce does not support bfloat16 (tensor x)")
    assert finding.help[0].startswith(
        "if the program must run on mpi, check it with `--backend mpi`"
    )


def test_the_buffer_at_which_an_outcome_changes_is_stated_for_each_backend_that_has_one() -> None:
    result = check_scenario(loads(HANG))
    (finding,) = (
        f for f in check_scenario(loads(HANG), backend="mpi").findings if f.code == "DS603"
    )

    assert (result.profiles["mpi"].outcome, result.status()) == ("completes", 1)
    limit = "  mpi buffers messages up to 4 KiB: with this limit, the program completes"
    assert limit in finding.message.splitlines()


@pytest.mark.parametrize(
    ("strict", "severity", "status"), [(False, "warning", 0), (True, "error", 1)]
)
def test_a_leak_is_an_error_only_if_strict(strict: bool, severity: str, status: int) -> None:
    result = check_scenario(loads(LEAK), strict=strict)

    assert {f.severity for f in result.findings if f.code.startswith("DS5")} == {severity}
    assert result.status() == status


# --- the exit status ---
def result_of(
    complete: bool,
    possible: tuple[str, ...],
    mpi: tuple[str, ...] = ("completes",),
    severity: str = "",
) -> CheckResult:
    """The result of a search under gloo, whose first outcome is that of the run."""
    found = (Finding("DS101", severity, "message"),) if severity else ()
    outcomes = {
        "gloo": BackendOutcome(possible[0], possible, ()),
        "mpi": BackendOutcome(mpi[0], mpi, ()),
    }
    return CheckResult("f", (), "gloo", Verdict("ok", complete), outcomes, found)


@pytest.mark.parametrize(
    ("result", "status", "strict_status", "reason"),
    [
        (CheckResult("f"), 2, 2, ""),
        (result_of(True, ("completes",)), 0, 0, ""),
        (result_of(True, ("completes",), severity="warning"), 0, 0, ""),
        (result_of(True, ("completes",), severity="error"), 1, 1, ""),
        (result_of(True, ("completes",), ("hangs",)), 0, 0, ""),
        (result_of(True, ("hangs",)), 1, 1, ""),
        (result_of(False, ("completes",)), 0, 1, "--strict requires a complete search"),
        (result_of(False, ("completes",), ("hangs", "completes")), 1, 1, "mpi may hang"),
        (result_of(False, ("completes", "hangs"), ("hangs",)), 1, 1, "gloo and mpi may hang"),
        (
            result_of(False, ("completes", "raises")),
            1,
            1,
            "the program may fail on gloo",
        ),
    ],
)
def test_a_search_that_hit_its_bound_is_a_success_only_if_nothing_worse_is_possible(
    result: CheckResult, status: int, strict_status: int, reason: str
) -> None:
    strict = replace(result, strict=True)

    assert (result.status(), strict.status()) == (status, strict_status)
    assert strict.inconclusive_reason().endswith(reason)
    assert bool(strict.inconclusive_reason()) is bool(reason)


def test_a_file_that_cannot_be_checked_is_a_result_that_names_it_once(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("world: 2\nprogram:\n  - sned: {}\n", encoding="utf-8")
    bad = check_file(tmp_path / "bad.yaml")
    large = check_file(_written(tmp_path, OK), max_calls=1)
    odd = unreadable_result("a+b\n", UsageError("a+b\\n: is odd", "name another"))

    assert [(error.line, error.message) for error in bad.errors] == [
        (3, "unknown step 'sned'; did you mean send?")
    ]
    assert (bad.status(), bad.verdict) == (2, None)
    assert large.errors[0].message.startswith("2 calls on 2 ranks: about")
    assert large.errors[0].hint.endswith("`--max-calls 2`")
    assert (odd.errors[0].render(), odd.status()) == ("a+b\n: is odd\n  help: name another", 2)


def _written(folder: Path, text: str) -> Path:
    path = folder / "written.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- folding ---
@pytest.mark.parametrize("seed", [0, 1, 2, 5, 7, 8])
def test_checking_and_simulating_representative_ranks_gives_the_result_of_all_ranks(
    seed: int,
) -> None:
    scenario = Scenario(**{**program(seed), "options": {"stays_connected": True}})
    folded, whole = (check_scenario(scenario, fold=fold) for fold in (True, False))

    assert replace(folded, findings=()) == replace(whole, findings=(), verdict=folded.verdict)
    assert _essence(folded) == _essence(whole)
    few, all_ranks = (simulate(scenario, fold=fold) for fold in (True, False))
    assert few.timeline == all_ranks.timeline
    for of_few, of_all in zip(few.run.trace.rows(), all_ranks.run.trace.rows(), strict=True):
        assert of_few == of_all
    assert few.findings == all_ranks.findings
    assert few.outcome == all_ranks.outcome


def _essence(result: CheckResult) -> object:
    verdict = result.verdict
    assert verdict is not None
    findings = [(f.code, f.severity, f.message, f.ranks) for f in result.findings]
    return verdict.verdict, verdict.ranks, verdict.depends_on, findings
