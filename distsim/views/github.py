"""Findings as annotations of a GitHub Actions log: one workflow command per finding, put at its first place.

Form and escapes: docs.github.com, "Workflow commands for GitHub Actions"; actions/toolkit, packages/core/src/command.ts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from distsim.findings.codes import CODES

if TYPE_CHECKING:
    from distsim.checking import CheckResult
    from distsim.findings.record import Finding

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def github_annotations(results: Sequence[CheckResult]) -> str:
    """One line per finding and per problem of a file that can't be read; empty when there is neither."""
    return "\n".join(_lines(results))


def _lines(results: Sequence[CheckResult]) -> Iterator[str]:
    for result in results:
        for e in result.errors:
            text = e.message + (f"\nhelp: {e.hint}" if e.hint else "")
            yield _command("error", e.file, e.line, e.column, "can't be read", text)
        for finding in result.findings:
            yield _annotation(finding, result.file)


def _annotation(finding: Finding, file: str) -> str:
    place = next((p for p in finding.places if p.line), None)
    text = "\n".join([finding.message, *(f"help: {line}" for line in finding.help)])
    title = f"{finding.code} {CODES[finding.code].title}" if finding.code in CODES else finding.code
    at = (place.file, place.line, place.column) if place is not None else (file, 0, 0)
    return _command(_COMMANDS[finding.severity], *at, title, text)


def _command(name: str, file: str, line: int, column: int, title: str, text: str) -> str:
    where = {"file": file, **({"line": str(line), "col": str(max(column, 1))} if line else {}), "title": title}
    return f"::{name} {','.join(f'{key}={_property(value)}' for key, value in where.items())}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
