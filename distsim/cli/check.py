"""`distsim check`: verdicts on many files, without a clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import BackendOption, MaxCalls, NoFold, ReportOption, Sets, is_trace, taking
from distsim.cli.report import check_report_name, report_check

if TYPE_CHECKING:
    from distsim.checking import CheckResult
    from distsim.simulation import Simulation


class Format(StrEnum):
    """How findings are printed."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


Paths = Annotated[list[str], typer.Argument(metavar="FILE…", help="Scenario files, or folders that hold some.")]
FormatOption = Annotated[
    Format, typer.Option("--format", help="A report, JSON, SARIF 2.1.0 for code scanning, or GitHub annotations.")
]
MaxStates = Annotated[
    int | None,
    typer.Option("--max-states", metavar="N", min=1, help="Bound of the search over orders of events (200000)."),
]
Fix = Annotated[bool, typer.Option("--fix", help="Propose repairs, each checked again and priced; prints a patch.")]
Patch = Annotated[Path | None, typer.Option("-o", metavar="F.patch", help="With --fix: write the patches there.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="A leak counts as an error, and a search that stopped at its bound as a failure.")
]


@dataclass(frozen=True)
class CheckOptions:
    """The arguments of `check`."""

    files: Paths
    format: FormatOption = Format.text
    max_states: MaxStates = None
    backend: BackendOption = None
    strict: Strict = False
    max_calls: MaxCalls = None
    no_fold: NoFold = False
    sets: Sets = None
    fix: Fix = False
    patch: Patch = None
    report: ReportOption = None


@taking(CheckOptions)
def command(given: CheckOptions) -> None:
    """Check scenarios: verdict, findings, and each back end's outcome.

    The verdict covers every reading of what blocks and every order of events. A file that can't be read is reported, and the
    others are still checked. Ends with 2 when one can't be read, else with 1 when one has an error finding, does not complete
    under its own back end (or --backend), or may hang on some back end and the search stopped at its bound; else with 0. JSON has each file
    as it comes.

    \b
    Example: distsim check scenarios/ring_of_four.yaml
    Example: distsim check scenarios/ --format sarif > findings.sarif
    Example: distsim check scenarios/ring_of_four.yaml --fix
    """
    from distsim.checking import MAX_STATES, CheckResult, check_file
    from distsim.cli.progress import watched
    from distsim.cli.traced import check_trace
    from distsim.errors import OUT_OF_BOUNDS, Problem, out_of_bounds

    _fixable(given)
    bound = MAX_STATES if given.max_states is None else given.max_states
    backend = given.backend

    def checked(path: str) -> CheckResult:
        try:
            if is_trace(path):
                return check_trace(path, backend=backend and str(backend), max_states=bound)
            return check_file(
                path,
                sets=given.sets or (),
                backend=backend,
                max_states=bound,
                strict=given.strict,
                max_calls=given.max_calls,
                fold=False if given.no_fold else None,
            )
        except OUT_OF_BOUNDS as error:
            refused = out_of_bounds(error, "")
            return CheckResult(path, (Problem(path, 0, 0, refused.message, hint=refused.remedy),))

    files = expanded(given.files)
    _reportable(given, files)
    results = (checked(path) for path in watched(files, "checking"))
    raise typer.Exit(_stream(results, given, len(files)) if given.format is Format.json else _told(list(results), given))


def _told(results: list[CheckResult], given: CheckOptions) -> int:
    """Print what was found, once all files are done; the exit status."""
    if given.report is not None:
        report_check(given.report, results[0], _simulated(given))
    text = report_of(results, given.format)
    if text:
        console.out(text, commands=given.format is Format.github)
    if given.fix:
        from distsim.cli.fix import propose

        propose(results, given.backend and str(given.backend), given.patch)
    return max((result.status() for result in results), default=0)


def _stream(results: Iterable[CheckResult], given: CheckOptions, count: int) -> int:
    """Print the JSON of each file as soon as it is checked, and keep none; the exit status."""
    from distsim.views.checkview import check_json, file_json

    head, end = console.to_json(check_json(())).rsplit("[]", 1)
    status = 0
    console.out(f"{head}[")
    for k, result in enumerate(results, 1):
        if given.report is not None:
            report_check(given.report, result, _simulated(given))
        element = console.to_json(file_json(result)).replace("\n", "\n    ")
        console.out(f"    {element}{',' if k < count else ''}")
        status = max(status, result.status())
    console.out(f"  ]{end}")
    return status


def _fixable(given: CheckOptions) -> None:
    from distsim.errors import UsageError

    if given.fix and (given.format is not Format.text or given.sets):
        raise UsageError("--fix changes the file and prints text", "leave out --format and --set")
    if given.patch is not None and not given.fix:
        raise UsageError(f"-o {given.patch} is for the patches of --fix", "add --fix, or leave it out")


def _reportable(given: CheckOptions, files: list[str]) -> None:
    from distsim.errors import UsageError

    check_report_name(given.report)
    if given.report is not None and len(files) > 1:
        raise UsageError(f"--report is of one file, and these are {len(files)}", "name one file")


def _simulated(given: CheckOptions) -> Simulation | None:
    """The run beside the verdict; None for a file that can't be read."""
    from distsim.cli.app import read_scenario
    from distsim.cli.traced import simulate_trace
    from distsim.errors import DistsimError
    from distsim.simulation import simulate

    (file,) = expanded(given.files)
    try:
        if is_trace(file):
            return simulate_trace(file, backend=given.backend and str(given.backend), cluster=None)
        return simulate(read_scenario(file, given.sets), backend=given.backend, with_verdict=False, max_calls=given.max_calls)
    except DistsimError:  # said already
        return None


def expanded(paths: list[str]) -> list[str]:
    """Each file once; a folder stands for the ``.yaml`` files in it, at any depth, sorted. Raises UsageError for an empty folder."""
    from distsim.errors import UsageError

    found: dict[str, None] = {}
    for path in paths:
        if not Path(path).is_dir():
            found[path] = None
            continue
        inside = sorted(p for p in Path(path).rglob("*") if p.suffix in (".yaml", ".yml") and p.is_file())
        if not inside:
            raise UsageError(f"no scenario (*.yaml) in {path}", "name a folder with scenarios")
        found |= dict.fromkeys(map(str, inside))
    return list(found)


def report_of(results: list[CheckResult], format: Format) -> str:
    """The findings of files as text, or in a form for other tools."""
    from distsim.checking import NOT_COVERED

    if format is Format.json:
        from distsim.views.checkview import check_json

        return console.to_json(check_json(results))
    if format is Format.sarif:
        from distsim import __version__
        from distsim.views.sarif import check_sarif

        return console.to_json(check_sarif(results, __version__, NOT_COVERED))
    if format is Format.github:
        from distsim.views.sarif import github_annotations

        return github_annotations(results)
    return _text(results)


def _text(results: list[CheckResult]) -> str:
    from distsim.checking import NOT_COVERED
    from distsim.views.checkview import check_summary, check_text

    for result in results:
        for problem in result.errors:
            console.note(problem.render(console.note_columns()))
    if len(results) > 1:
        console.note(check_summary(results))
    return check_text(results, NOT_COVERED)
