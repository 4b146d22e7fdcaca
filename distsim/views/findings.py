"""Findings as text: the sentence, the places with their ranks, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.check.verdict import Verdict
from distsim.findings.record import Finding, Place
from distsim.views.tables import folded, page_width, ranks_text, ranks_words

#: Findings and places of one finding that are shown; the rest is counted.
MOST_FINDINGS = 20
MOST_PLACES = 8
_ORDER = {"error": 0, "warning": 1, "note": 2}


def findings_lines(findings: Sequence[Finding], file: str) -> list[str]:
    """All findings, errors first; empty when there is none. In sentences, places in ``file`` are shortened to their line."""
    lines: list[str] = []
    ordered = sorted(findings, key=lambda f: _ORDER[f.severity])
    for finding in ordered[:MOST_FINDINGS]:
        lines += [*([""] if lines else []), *_finding(finding, file)]
    if len(ordered) > MOST_FINDINGS:
        lines += ["", f"… and {len(ordered) - MOST_FINDINGS} more findings; --format json has all"]
    return lines


def verdict_words(verdict: Verdict) -> str:
    """The verdict, what it depends on, and whom it is about."""
    text = f"verdict {verdict.verdict}"
    if verdict.depends_on:
        text += f", depends on {verdict.depends_on}"
    if verdict.ranks:
        text += f", {ranks_words(sorted(verdict.ranks))}"
    if verdict.core and tuple(verdict.core) != tuple(verdict.ranks):
        text += f" (the cause: {ranks_text(sorted(verdict.core))})"
    return text


def _finding(finding: Finding, file: str) -> list[str]:
    head, *rest = finding.message.replace(f"{file}:", "line ").splitlines() or [""]
    lines = folded(f"{finding.severity} {finding.code}: {head}", further="  ")
    for line in rest:
        blanks = line[: len(line) - len(line.lstrip())] or "  "
        lines += folded(line.strip(), blanks + "  ", blanks + "      ")
    places = _places(finding.places, file)
    lines += places[:MOST_PLACES]
    if len(places) > MOST_PLACES:
        lines.append(f"  … and {len(places) - MOST_PLACES} more places")
    for advice in finding.help:
        lines += folded(f"help: {advice.replace(f'{file}:', 'line ')}", "  ", "    ")
    return lines


def _places(places: Sequence[Place], file: str) -> list[str]:
    """One line per place, with all the ranks that are there."""
    ranks: dict[tuple[str, int, int, str], list[int]] = {}
    for place in places:
        at = ranks.setdefault((place.file, place.line, place.column, place.op), [])
        if place.rank is not None and place.rank not in at:
            at.append(place.rank)
    return [line for key, who in ranks.items() for line in _place(*key, sorted(who), file)]


def _place(file: str, line: int, column: int, op: str, ranks: list[int], main: str) -> list[str]:
    where = f"{file}:{line}:{column}" if line else file or main
    who = f"  {ranks_words(ranks)}" if ranks else ""
    text = f"  at {where}  {op}{who}".rstrip()
    return [text] if len(text) <= page_width() else folded(text.strip(), "  ", "    ")
