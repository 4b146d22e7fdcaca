"""Findings as SARIF 2.1.0 (OASIS standard, errata 01), the form that code-scanning services read.

A finding is a result with its first place as location and the others as related locations; a code is a rule with its page as
help. A file that can't be read is a notification of the tool: it is no result of the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from distsim.findings.codes import CODES

if TYPE_CHECKING:
    from distsim.checking import CheckResult
    from distsim.errors import Problem
    from distsim.findings.info import CodeInfo
    from distsim.findings.record import Finding, Place

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def check_sarif(results: Sequence[CheckResult], version: str, not_covered: Sequence[str] = ()) -> dict[str, Any]:
    """One run over all files. ``version`` is distsim's own."""
    found = [(result.file, finding) for result in results for finding in result.findings]
    codes = sorted({finding.code for _, finding in found})
    index = {code: i for i, code in enumerate(codes)}
    problems = [problem for result in results for problem in result.errors]
    about = f"Verdicts on torch.distributed programs. Not covered: {'; '.join(not_covered)}." if not_covered else "Verdicts."
    driver = {
        "name": "distsim",
        "semanticVersion": version,
        "fullDescription": {"text": about},
        "rules": [_rule(CODES[code]) for code in codes],
    }
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [
                    {
                        "executionSuccessful": not problems,
                        "toolExecutionNotifications": [_notification(problem) for problem in problems],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "results": [_result(file, finding, index[finding.code]) for file, finding in found],
            }
        ],
    }


def _rule(info: CodeInfo) -> dict[str, Any]:
    example = "".join(f"    {line}\n" for line in info.example.splitlines())
    return {
        "id": info.code,
        "name": "".join(word.capitalize() for word in "".join(c if c.isalnum() else " " for c in info.title).split()),
        "shortDescription": {"text": info.title},
        "fullDescription": {"text": f"{info.what} {info.why}"},
        "help": {
            "text": info.remedy,
            "markdown": f"{info.what}\n\n**What happens.** {info.why}\n\n**What to do.** {info.remedy}\n\n{example}",
        },
        "defaultConfiguration": {"level": info.severity},
    }


def _result(file: str, finding: Finding, rule: int) -> dict[str, Any]:
    first, *others = finding.places or (None,)
    text = "\n".join([finding.message, *(f"help: {line}" for line in finding.help)])
    related = [
        {"id": i, **_location(place, file), "message": {"text": _who(place)}} for i, place in enumerate(others, 1) if place
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


def _who(place: Place) -> str:
    return place.op if place.rank is None else f"{place.op} of rank {place.rank}"


def _location(place: Place | None, file: str) -> dict[str, Any]:
    """A physical location; without a region where nothing was written."""
    at: dict[str, Any] = {"artifactLocation": {"uri": uri(place.file if place is not None and place.file else file)}}
    if place is not None and place.line:
        at["region"] = {"startLine": place.line, "startColumn": max(place.column, 1)}
    return {"physicalLocation": at}


def uri(file: str) -> str:
    """A path as a URI reference (RFC 3986): relative as it is, absolute with its scheme; `-` and `<stdin>` keep their name."""
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _notification(problem: Problem) -> dict[str, Any]:
    at: dict[str, Any] = {"artifactLocation": {"uri": uri(problem.file)}}
    if problem.line:
        at["region"] = {"startLine": problem.line, "startColumn": max(problem.column, 1)}
    text = problem.message + (f"\nhelp: {problem.hint}" if problem.hint else "")
    return {"level": "error", "message": {"text": text}, "locations": [{"physicalLocation": at}]}
