"""Findings for other tools: SARIF 2.1.0 (OASIS standard, errata 01), the form that code-scanning
services read; and annotations of a GitHub Actions log, one workflow command per finding, put at its
first place.

In SARIF a finding is a result with its first place as location and the others as related locations;
a code is a rule with its page as help. A file that cannot be read is a notification of the tool: it
is no result of the check. Form and escapes of workflow commands: docs.github.com, "Workflow
commands for GitHub Actions"; actions/toolkit, packages/core/src/command.ts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import quote

from distsim.findings.codes import CODES

if TYPE_CHECKING:
    from distsim.common.errors import ScenarioProblem
    from distsim.findings.code_info import CodeInfo
    from distsim.findings.finding_types import Finding, SourceLocation
    from distsim.simulation.check_scenario import CheckResult

SARIF_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def check_sarif(
    results: Sequence[CheckResult], version: str, not_covered: Sequence[str] = ()
) -> dict[str, object]:
    """One run over all files. ``version`` is distsim's own."""
    found = [(result.file, finding) for result in results for finding in result.findings]
    codes = sorted({finding.code for _, finding in found})
    index = {code: i for i, code in enumerate(codes)}
    problems = [problem for result in results for problem in result.errors]
    about = (
        f"Verdicts on torch.distributed programs. Not covered: {'; '.join(not_covered)}."
        if not_covered
        else "Verdicts."
    )
    driver = {
        "name": "distsim",
        "informationUri": "urn:distsim:check",
        "semanticVersion": version,
        "fullDescription": {"text": about},
        "rules": [_sarif_rule(CODES[code]) for code in codes],
    }
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [
                    {
                        "executionSuccessful": not problems,
                        "toolExecutionNotifications": [
                            _notification(problem) for problem in problems
                        ],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "results": [
                    _sarif_result(file, finding, index[finding.code]) for file, finding in found
                ],
            }
        ],
    }


def _pascal_case(title: str) -> str:
    """A title as an identifier: its words, capitalised, without spaces."""
    letters = [c if c.isalnum() else " " for c in title]
    words = "".join(letters).split()
    return "".join(word.capitalize() for word in words)


def _sarif_rule(info: CodeInfo) -> dict[str, object]:
    example = "".join(f"    {line}\n" for line in info.example.splitlines())
    return {
        "id": info.code,
        "name": _pascal_case(info.title),
        "shortDescription": {"text": info.title},
        "fullDescription": {"text": f"{info.what} {info.why}"},
        "help": {
            "text": info.remedy,
            "markdown": f"{info.what}\n\n**What happens.** {info.why}\n\n"
            f"**What to do.** {info.remedy}\n\n{example}",
        },
        "defaultConfiguration": {"level": info.severity},
    }


def _sarif_result(file: str, finding: Finding, rule: int) -> dict[str, object]:
    first, *others = finding.places or (None,)
    text = "\n".join([finding.message, *(f"help: {line}" for line in finding.help)])
    related = [
        {"id": i, **_location(place, file), "message": {"text": _place_label(place)}}
        for i, place in enumerate(others, 1)
        if place
    ]
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": {"text": text},
        "locations": [_location(first, file)],
        **({"relatedLocations": related} if related else {}),
        "properties": {"ranks": list(finding.ranks), "core": list(finding.core)},
    }


def _place_label(place: SourceLocation) -> str:
    return place.op if place.rank is None else f"{place.op} of rank {place.rank}"


def _location(place: SourceLocation | None, file: str) -> dict[str, object]:
    """A physical location; what speaks of the file as a whole stands at its first line."""
    name = place.file if place is not None and place.file else file
    return _physical_location(
        name, place.line if place is not None else 0, place.column if place is not None else 0
    )


def _physical_location(file: str, line: int, column: int) -> dict[str, object]:
    region = (
        {"startLine": line, "startColumn": max(column, 1)}
        if line
        else {"startLine": 1, "startColumn": 1, "endLine": 1}
    )
    return {"physicalLocation": {"artifactLocation": {"uri": file_uri(file)}, "region": region}}


def file_uri(file: str) -> str:
    """A path as a URI reference (RFC 3986): relative as it is, absolute with its scheme; `-` and
    `<stdin>` keep their name.
    """
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _notification(problem: ScenarioProblem) -> dict[str, object]:
    text = problem.message + (f"\nhelp: {problem.hint}" if problem.hint else "")
    return {
        "level": "error",
        "message": {"text": text},
        "locations": [_physical_location(problem.file, problem.line, problem.column)],
    }


# --- GitHub ---
_ANNOTATION_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def github_annotations(results: Sequence[CheckResult]) -> str:
    """One line per finding and per problem of a file that cannot be read; empty when there is
    neither.
    """
    return "\n".join(_annotation_lines(results))


def _annotation_lines(results: Sequence[CheckResult]) -> Iterator[str]:
    for result in results:
        for e in result.errors:
            text = e.message + (f"\nhelp: {e.hint}" if e.hint else "")
            yield _workflow_command("error", e.file, e.line, e.column, "cannot be read", text)
        for finding in result.findings:
            yield _annotation(finding, result.file)


def _annotation(finding: Finding, file: str) -> str:
    place = next((p for p in finding.places if p.line), None)
    text = "\n".join([finding.message, *(f"help: {line}" for line in finding.help)])
    title = f"{finding.code} {CODES[finding.code].title}" if finding.code in CODES else finding.code
    at = (place.file, place.line, place.column) if place is not None else (file, 0, 0)
    return _workflow_command(_ANNOTATION_LEVELS[finding.severity], *at, title, text)


def _workflow_command(name: str, file: str, line: int, column: int, title: str, text: str) -> str:
    where = {
        "file": file,
        **({"line": str(line), "col": str(max(column, 1))} if line else {}),
        "title": title,
    }
    properties = ",".join(f"{key}={_escaped_property(value)}" for key, value in where.items())
    return f"::{name} {properties}::{_escaped_data(text)}"


def _escaped_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped_data(text).replace(":", "%3A").replace(",", "%2C")
