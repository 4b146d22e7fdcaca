"""Findings as text: the sentence, the places with their ranks, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distsim.checker.verdict import Verdict
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.output.text_layout import page_width, rank_list, ranks_label, wrapped_lines

#: Findings and places of one finding that are shown; the rest is counted.
MAX_FINDINGS = 20
MAX_PLACES = 8
#: From so many findings on that read alike but for their numbers, the first speaks for all.
_MIN_SIMILAR = 3
_SEVERITY_ORDER = {"error": 0, "warning": 1, "note": 2}


def findings_lines(findings: Sequence[Finding], file: str) -> list[str]:
    """All findings, errors first; empty when there is none. In sentences, places in ``file`` are
    shortened to their line.
    """
    lines: list[str] = []
    groups = _similar_findings(sorted(findings, key=lambda f: _SEVERITY_ORDER[f.severity]))
    for first, *others in groups[:MAX_FINDINGS]:
        lines += [*([""] if lines else []), *_finding_lines(first, file), *_more_lines(others)]
    left = sum(map(len, groups[MAX_FINDINGS:]))
    return [*lines, "", f"… and {left} more findings; --format json has all"] if left else lines


def _similar_findings(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that read alike but for their numbers, where there are several of them; the others
    by themselves.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, one in enumerate(findings):
        words = tuple(re.sub(r"\d+", "0", text) for text in (one.message, *one.help))
        places = frozenset((place.file, place.line, place.column) for place in one.places)
        alike.setdefault((one.severity, one.code, words, places), []).append(number)
    groups = [
        group
        for found in alike.values()
        for group in ([found] if len(found) >= _MIN_SIMILAR else [[one] for one in found])
    ]
    return [[findings[number] for number in group] for group in sorted(groups)]


def _more_lines(others: Sequence[Finding]) -> list[str]:
    """How many more there are like one that was told, and on which ranks."""
    ranks = sorted({rank for one in others for rank in one.ranks})
    return (
        wrapped_lines(
            f"and {len(others)} more like it{f', on {ranks_label(ranks)}' if ranks else ''}",
            "  ",
            "    ",
        )
        if others
        else []
    )


def verdict_text(verdict: Verdict) -> str:
    """The verdict, what it depends on, and whom it is about."""
    text = f"verdict {verdict.verdict}"
    if verdict.depends_on:
        text += f", depends on {verdict.depends_on}"
    if verdict.ranks:
        text += f", {ranks_label(sorted(verdict.ranks))}"
    if verdict.core and tuple(verdict.core) != tuple(verdict.ranks):
        text += f" (the cause: {rank_list(sorted(verdict.core))})"
    return text


def _finding_lines(finding: Finding, file: str) -> list[str]:
    head, *rest = _shorten_file_references(finding.message, file).splitlines() or [""]
    lines = wrapped_lines(f"{finding.severity} {finding.code}: {head}", further="  ")
    for line in rest:
        blanks = line[: len(line) - len(line.lstrip())] or "  "
        lines += wrapped_lines(line.strip(), blanks + "  ", blanks + "      ")
    places = _place_lines(finding.places, file)
    lines += places[:MAX_PLACES]
    if len(places) > MAX_PLACES:
        lines.append(f"  … and {len(places) - MAX_PLACES} more places")
    for advice in finding.help:
        lines += wrapped_lines(f"help: {_shorten_file_references(advice, file)}", "  ", "    ")
    return lines


def _shorten_file_references(text: str, file: str) -> str:
    """Lines of the file without its name; a file of the same name in another folder keeps its
    own.
    """
    return re.sub(rf"(?<![\w./-]){re.escape(file)}:", "line ", text)


def _place_lines(places: Sequence[SourceLocation], file: str) -> list[str]:
    """One line per place, with all the ranks that are there."""
    ranks: dict[tuple[str, int, int, str], dict[int, None]] = {}
    for place in places:
        at = ranks.setdefault((place.file, place.line, place.column, place.op), {})
        if place.rank is not None:
            at[place.rank] = None
    return [line for key, who in ranks.items() for line in _place_line(*key, sorted(who), file)]


def _place_line(
    file: str, line: int, column: int, op: str, ranks: list[int], main: str
) -> list[str]:
    where = f"{file}:{line}:{column}" if line else file or main
    who = f"  {ranks_label(ranks)}" if ranks else ""
    text = f"  at {where}  {op}{who}".rstrip()
    return [text] if len(text) <= page_width() else wrapped_lines(text.strip(), "  ", "    ")


# --- where the verdict and the outcome of the back end do not agree, in one sentence ---
_HARMLESS_VERDICTS = ("ok", "leak")
#: A `fail`, an `exit` or a fault of the file ends ranks: no back end is to blame.
_RANK_EXIT_CODES = ("DS801", "DS802", "DS803", "DS805")
_OUTCOME_TEXT = {
    "hangs": "it hangs",
    "raises": "it raises",
    "crashes": "a process crashes",
    "wrong-data": "the data are wrong",
    "undefined": "what happens is left open",
}


def verdict_conflict_lines(
    verdict: Verdict | None, outcome: str, backend: str, findings: Sequence[Finding]
) -> list[str]:
    """`Right by the contract, but on nccl it hangs: batch both or neither, or …`; no line where
    verdict and outcome agree.

    ``outcome``: what comes of the program under its own back end. The remedy is that of the first
    finding which explains it.
    """
    if verdict is None or not verdict.complete or any(f.code in _RANK_EXIT_CODES for f in findings):
        return []
    told = sorted(
        (f for f in findings if f.severity != "note" and f.help and f.code != "DS705"),
        key=lambda f: f.severity,
    )
    remedy = _final_advice(told[0].help) if told else ""
    what = f": {remedy}" if remedy else "."
    if verdict.verdict in _HARMLESS_VERDICTS and outcome in _OUTCOME_TEXT:
        return wrapped_lines(
            f"Right by what torch.distributed promises, but on {backend} {_OUTCOME_TEXT[outcome]}{what}"
        )
    if verdict.verdict == "invalid" and outcome == "completes":
        return wrapped_lines(
            f"An argument that no call may have; {backend} goes on all the same{what}"
        )
    if verdict.verdict not in _HARMLESS_VERDICTS and outcome == "completes":
        return wrapped_lines(
            f"Wrong by what torch.distributed promises; that {backend} completes is luck{what}"
        )
    return []


def _final_advice(lines: Sequence[str]) -> str:
    """The last line of a help, with those that it carries on."""
    first = len(lines) - 1
    while first and (lines[first - 1].endswith((",", ":")) or lines[first].startswith("or ")):
        first -= 1
    return " ".join(lines[first:])
