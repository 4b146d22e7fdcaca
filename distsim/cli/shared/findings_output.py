"""Printing findings as text, JSON, SARIF or GitHub annotations: `check` and `capture`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from distsim.cli.shared import console
from distsim.cli.shared.arguments import choice_option

if TYPE_CHECKING:
    from distsim.simulation.check_scenario import CheckResult


class FindingsFormat(StrEnum):
    """How findings are printed."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


FindingsFormatOption = Annotated[
    FindingsFormat,
    choice_option(
        FindingsFormat,
        "--format",
        help="Print a text report, JSON, SARIF 2.1.0 for code scanning, or GitHub annotations.",
    ),
]


def findings_report(results: list[CheckResult], format: FindingsFormat) -> str:
    """The findings of files in one of the formats; notes about unreadable files are printed."""
    from distsim.simulation.check_scenario import NOT_COVERED

    if format is FindingsFormat.json:
        from distsim.output.text.check_results import check_json

        return console.to_json(check_json(results))
    if format is FindingsFormat.sarif:
        from distsim import __version__
        from distsim.output.json.sarif import check_sarif

        return console.to_json(check_sarif(results, __version__, NOT_COVERED))
    if format is FindingsFormat.github:
        from distsim.output.json.sarif import github_annotations

        return github_annotations(results)
    return _findings_text(results)


def _findings_text(results: list[CheckResult]) -> str:
    from distsim.output.text.check_results import check_summary, check_text
    from distsim.simulation.check_scenario import NOT_COVERED

    for result in results:
        for problem in result.errors:
            console.note(problem.render(console.note_columns()))
    if len(results) > 1:
        console.note(check_summary(results))
    return check_text(results, NOT_COVERED)
