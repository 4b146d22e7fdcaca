"""What findings of a verdict say, word for word: tests/data/verdict_findings.txt has small programs
and all that is said of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.checker.verdict import Verdict, verdict_of
from distsim.program.lower import lower
from distsim.scenario import loads

DATA = Path(__file__).resolve().parents[1] / "data" / "verdict_findings.txt"
HEAD = """name: n
backend: gloo
tensors: {x: {shape: [4]}, h: {shape: [4], dtype: float16}, big: {shape: [12]}, many: {shape: ['12 + 3 * (rank == 1)']},
          y: {shape: ['4 + (rank == 1)']}, z: {shape: ['1 + rank']}}
"""


def cases() -> dict[str, tuple[str, list[str]]]:
    """By title: world and program as in a scenario, and the lines that `said` gives."""
    found = {}
    for block in DATA.read_text(encoding="utf-8").split("\n=== ")[1:]:
        title, _, rest = block.partition("\n")
        text, _, wanted = rest.partition("\n---\n")
        found[title] = (text, wanted.rstrip("\n").split("\n"))
    return found


def said(verdict: Verdict) -> Iterator[str]:
    """The verdict and its ranks; of each finding code, severity, ranks and core, message, help,
    places and slips.
    """
    ranks = {
        "ranks": verdict.ranks,
        "core": verdict.core,
        "culprits": verdict.culprits,
        "open": verdict.nondeterministic,
    }
    parts = [f"{word} {' '.join(map(str, who))}" for word, who in ranks.items() if who]
    yield "; ".join(
        [
            verdict.verdict,
            *parts,
            *([f"depends on {verdict.depends_on}"] if verdict.depends_on else []),
        ]
    )
    for finding in verdict.findings:
        core = f", core {' '.join(map(str, finding.core))}" if finding.core else ""
        yield f"{finding.code} {finding.severity} {' '.join(map(str, finding.ranks))}{core}"
        yield from (f"  {line}" for line in finding.message.splitlines())
        yield from (f"  help: {line}" for line in finding.help)
        for word, places in (("at", finding.places), ("slips", finding.slips)):
            if places:
                where = (
                    f"{p.line}:{p.column}{'' if p.rank is None else f' rank {p.rank}'}"
                    for p in places
                )
                yield f"  {word}: {', '.join(where)}"


@pytest.mark.parametrize("title", cases())
def test_a_finding_states_the_ranks_difference_place_and_remedy(title: str) -> None:
    text, wanted = cases()[title]

    assert list(said(verdict_of(lower(loads(f"{HEAD}{text}\n"))))) == wanted
