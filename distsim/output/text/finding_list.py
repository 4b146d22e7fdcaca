"""Findings as text: the message, the places with their ranks, and the advice.

Findings that differ only in numbers are shown once, with the number of the others. The last part
explains a verdict that differs from the outcome on the backend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distsim.checker.verdict import Verdict
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.output.report_record import Block, Paragraph, Report, Section, paragraphs
from distsim.output.report_text import write_text
from distsim.output.text_layout import ranks_label

#: Findings, and places of one finding, that are shown; the others are counted.
MAX_FINDINGS = 20
MAX_PLACES = 8
#: From this many findings on that differ only in numbers, only the first is shown.
_MIN_SIMILAR = 3
_SEVERITY_ORDER = {"error": 0, "warning": 1, "note": 2}


def findings_text(findings: Sequence[Finding], file: str) -> str:
    """All findings as text, errors first; empty if there is none."""
    return write_text(Report(finding_sections(findings, file)))


def finding_sections(findings: Sequence[Finding], file: str) -> list[Section]:
    """A section for each finding, errors first.

    In messages, places in ``file`` are shortened to their line.
    """
    groups = _similar_findings(sorted(findings, key=lambda f: _SEVERITY_ORDER[f.severity]))
    sections = [
        Section([*_finding_blocks(first, file), Paragraph(_more_text(others), "  ", "    ")])
        for first, *others in groups[:MAX_FINDINGS]
    ]
    hidden = sum(map(len, groups[MAX_FINDINGS:]))
    if hidden:
        sections.append(
            Section([Paragraph(f"… and {hidden} more findings; --format json has all")])
        )
    return sections


def _similar_findings(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Groups of findings that differ only in numbers; in the order of their first findings.

    Fewer than `_MIN_SIMILAR` similar findings stay in groups of one.
    """
    similar: dict[tuple[object, ...], list[int]] = {}
    for index, finding in enumerate(findings):
        texts = tuple(re.sub(r"\d+", "0", text) for text in (finding.message, *finding.help))
        places = frozenset((place.file, place.line, place.column) for place in finding.places)
        similar.setdefault((finding.severity, finding.code, texts, places), []).append(index)
    groups: list[list[int]] = []
    for indices in similar.values():
        if len(indices) >= _MIN_SIMILAR:
            groups.append(indices)
        else:
            groups += [[index] for index in indices]
    return [[findings[index] for index in group] for group in sorted(groups)]


def _more_text(others: Sequence[Finding]) -> str:
    """The number of findings like the one that is shown, and their ranks."""
    if not others:
        return ""
    text = f"and {len(others)} more like this"
    ranks = sorted({rank for finding in others for rank in finding.ranks})
    return f"{text}, on {ranks_label(ranks)}" if ranks else text


def verdict_text(verdict: Verdict) -> str:
    """The verdict, what it depends on, and the ranks that it concerns."""
    text = f"verdict {verdict.verdict}"
    if verdict.depends_on:
        causes = verdict.depends_on.replace("schedule", "the order of events")
        text += f", depends on {causes}"
    if verdict.ranks:
        text += f", {ranks_label(sorted(verdict.ranks))}"
    if verdict.core and tuple(verdict.core) != tuple(verdict.ranks):
        text += f" (caused by {ranks_label(sorted(verdict.core))})"
    return text


def _finding_blocks(finding: Finding, file: str) -> list[Block]:
    head, *rest = _shorten_file_references(finding.message, file).splitlines() or [""]
    blocks: list[Block] = [Paragraph(f"{finding.severity} {finding.code}: {head}", further="  ")]
    for line in rest:
        blanks = line[: len(line) - len(line.lstrip())] or "  "
        blocks.append(Paragraph(line.strip(), blanks + "  ", blanks + "      "))
    places = _place_texts(finding.places, file)
    blocks += paragraphs((f"at {place}" for place in places[:MAX_PLACES]), "  ", "    ")
    if len(places) > MAX_PLACES:
        blocks.append(Paragraph(f"… and {len(places) - MAX_PLACES} more places", "  "))
    for advice in finding.help:
        text = f"help: {_shorten_file_references(advice, file)}"
        blocks.append(Paragraph(text, "  ", "    "))
    return blocks


def _shorten_file_references(text: str, file: str) -> str:
    """Replace ``FILE:11`` by ``line 11``; not for a file of that name in another folder."""
    return re.sub(rf"(?<![\w./-]){re.escape(file)}:", "line ", text)


def _place_texts(places: Sequence[SourceLocation], file: str) -> list[str]:
    """A text per place, with all ranks that are there; ``file`` stands in for an empty name."""
    same_place: dict[tuple[str, int, int, str], list[SourceLocation]] = {}
    for place in places:
        key = (place.file, place.line, place.column, place.op)
        same_place.setdefault(key, []).append(place)
    texts = []
    for locations in same_place.values():
        ranks = {location.rank for location in locations if location.rank is not None}
        texts.append(_place_text(locations[0], sorted(ranks), file))
    return texts


def _place_text(place: SourceLocation, ranks: list[int], main_file: str) -> str:
    where = place.file or main_file
    if place.line:
        where = f"{place.file}:{place.line}:{place.column}"
    text = f"{where}  {place.op}"
    if ranks:
        text += f"  {ranks_label(ranks)}"
    return text.rstrip()


# --- if the verdict and the outcome of the backend disagree ---
_HARMLESS_VERDICTS = ("ok", "leak")
#: The findings on ranks that a `fail`, an `exit` or an injected fault ends, and what happens there.
_RANK_EXIT_CODES = {
    "DS801": "a fault kills a rank",
    "DS802": "a rank raises an error",
    "DS803": "a rank exits with an error code",
    "DS805": "a rank never starts",
}
#: Data of two calls are exchanged: the results are wrong on every backend.
_EXCHANGE_CODES = ("DS601", "DS610")
_OUTCOME_TEXT = {
    "hangs": "it hangs",
    "raises": "it raises an error",
    "crashes": "a process crashes",
    "wrong-data": "the results are wrong",
    "undefined": "its behaviour is undefined",
}


def verdict_conflict_text(
    verdict: Verdict | None, outcome: str, backend: str, findings: Sequence[Finding]
) -> str:
    """A sentence if the verdict and the outcome on the backend disagree, else an empty text.

    The verdict covers every behaviour that torch.distributed allows; the outcome is that of one
    backend. The sentence ends with the code of the finding that explains the difference.
    """
    if verdict is None or not verdict.complete:
        return ""
    exit_codes = [finding.code for finding in findings if finding.code in _RANK_EXIT_CODES]
    if exit_codes:
        return _rank_exit_text(verdict, outcome, backend, exit_codes)
    code = _explaining_code(findings)
    is_harmless = verdict.verdict in _HARMLESS_VERDICTS
    if is_harmless and outcome in _OUTCOME_TEXT:
        where = "" if code in _EXCHANGE_CODES else f"on {backend} "
        text = (
            "The program follows the rules of torch.distributed, but "
            f"{where}{_OUTCOME_TEXT[outcome]}"
        )
    elif verdict.verdict == "invalid" and outcome == "completes":
        text = f"A call has an invalid argument, although the program completes on {backend}"
    elif not is_harmless and outcome == "completes":
        text = f"The program completes on {backend}, but it is not correct"
    elif outcome == "completes" and any(f.severity == "error" for f in findings):
        # For example, the ranks need more memory than the device has.
        text = "All calls match, but the program cannot run"
    else:
        return ""
    return f"{text} (see {code})." if code else f"{text}."


def _rank_exit_text(verdict: Verdict, outcome: str, backend: str, exit_codes: Sequence[str]) -> str:
    """Why a program whose verdict is ok does not simply complete: some ranks end early."""
    if verdict.verdict not in _HARMLESS_VERDICTS:
        return ""
    if outcome == "completes" and "DS805" in exit_codes:
        return "The verdict covers only the ranks that start (see DS805)."
    if outcome not in _OUTCOME_TEXT:
        return ""
    code = exit_codes[0]
    return (
        f"The verdict ({verdict.verdict}) judges only the calls. The outcome on {backend} is "
        f'"{outcome}", because {_RANK_EXIT_CODES[code]} (see {code}).'
    )


def _explaining_code(findings: Sequence[Finding]) -> str:
    """The code of the most severe finding with a remedy; empty if there is none."""
    explaining = [f for f in findings if f.help and f.severity != "note"]
    if not explaining:
        return ""
    # "error" sorts before "warning".
    return min(explaining, key=lambda f: f.severity).code
