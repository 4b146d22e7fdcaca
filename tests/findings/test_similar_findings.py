"""Findings that differ only in their numbers are reported once."""

from __future__ import annotations

from pathlib import Path

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.output.text.finding_list import findings_text
from tests.support.harness import Cli


def _wait(first: int, line: int = 4) -> Finding:
    ranks = (first, first + 1)
    return Finding(
        "DS301",
        "error",
        f"ranks {first} → {first + 1} → {first} wait for each other",
        ranks,
        ranks,
        ("receive first",),
        tuple(SourceLocation("f.yaml", line, 5, "send", rank) for rank in ranks),
    )


def test_the_first_of_many_equal_findings_represents_all_and_lists_their_ranks() -> None:
    lines = findings_text([_wait(rank) for rank in range(0, 256, 2)], "f.yaml").splitlines()

    assert sum("wait for each other" in line for line in lines) == 1
    assert lines[-1] == "  and 127 more like this, on ranks 2-255"


def test_findings_with_different_texts_or_places_are_reported_separately_in_order() -> None:
    other = Finding("DS305", "error", "rank 9 never comes", (9,))
    found = [_wait(0), other, _wait(2), _wait(4, line=9), _wait(6, line=9)]
    lines = findings_text(found, "f.yaml").splitlines()

    heads = [line for line in lines if line.startswith("error")]
    assert [head.split(":", 1)[0] for head in heads] == [
        "error DS301",
        "error DS305",
        "error DS301",
        "error DS301",
        "error DS301",
    ]
    assert not any("more like this" in line for line in lines)


def test_groups_that_fail_equally_are_one_finding_in_text_and_all_are_in_json(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(
        "world: 12\nbackend: gloo\nmesh: {a: 6, b: 2}\nprogram:\n  - all_reduce: {tensor: {shape: [1024 * (1 + b)]}, group: b}\n",
        encoding="utf-8",
    )
    text = cli("check", file).stdout

    assert text.count("DS202") == 1
    assert "and 5 more like this, on ranks 2-11" in text
    assert cli("check", file, "--format", "json").stdout.count('"DS202"') == 6
