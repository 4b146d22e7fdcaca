"""`distsim check`: verdicts on many files, without a clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    BackendOption,
    MaxCallsOption,
    NoFoldOption,
    ReportOption,
    SetOption,
    command_with_arguments,
    is_trace,
)
from distsim.cli.commands.report import check_report_path, write_check_report
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation


class FindingsFormat(StrEnum):
    """How findings are printed."""

    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"


Paths = Annotated[
    list[str], typer.Argument(metavar="FILE…", help="Scenario files, or folders that hold some.")
]
FormatOption = Annotated[
    FindingsFormat,
    typer.Option(
        "--format", help="A report, JSON, SARIF 2.1.0 for code scanning, or GitHub annotations."
    ),
]
MaxStates = Annotated[
    int | None,
    typer.Option(
        "--max-states",
        metavar="N",
        min=1,
        help="Bound of the search over orders of events (200000).",
    ),
]
Fix = Annotated[
    bool,
    typer.Option("--fix", help="Propose repairs, each checked again and priced; prints a patch."),
]
Patch = Annotated[
    Path | None, typer.Option("-o", metavar="F.patch", help="With --fix: write the patches there.")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="A leak counts as an error, and a search that stopped at its bound as a failure.",
    ),
]


@dataclass(frozen=True)
class CheckArguments:
    """The arguments of `check`."""

    files: Paths
    format: FormatOption = FindingsFormat.text
    max_states: MaxStates = None
    backend: BackendOption = None
    strict: Strict = False
    max_calls: MaxCallsOption = None
    no_fold: NoFoldOption = False
    sets: SetOption = None
    fix: Fix = False
    patch: Patch = None
    report: ReportOption = None


@command_with_arguments(CheckArguments)
def command(given: CheckArguments) -> None:
    """Check scenarios: verdict, findings, and each back end's outcome.

    The verdict covers every reading of what blocks and every order of events. A file that can't be
    read is reported, and the others are still checked. Ends with 2 when one can't be read, else
    with 1 when one has an error finding, does not complete under its own back end (or --backend),
    or may hang on some back end and the search stopped at its bound; else with 0. JSON has each
    file as it comes.

    \b
    Example: distsim check scenarios/ring_of_four.yaml
    Example: distsim check scenarios/ --format sarif > findings.sarif
    Example: distsim check scenarios/ring_of_four.yaml --fix
    """
    from distsim.cli.shared.progress import with_progress_bar
    from distsim.cli.shared.trace_input import check_trace
    from distsim.common.errors import RESOURCE_ERRORS, ScenarioProblem, resource_error
    from distsim.simulation.check_scenario import MAX_STATES, CheckResult, check_file

    _refuse_impossible_fix(given)
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
        except RESOURCE_ERRORS as error:
            refused = resource_error(error, "")
            return CheckResult(
                path, (ScenarioProblem(path, 0, 0, refused.message, hint=refused.remedy),)
            )

    files = expand_folders(given.files)
    _refuse_impossible_report(given, files)
    results = (checked(path) for path in with_progress_bar(files, "checking"))
    raise typer.Exit(
        _stream_json(results, given, len(files))
        if given.format is FindingsFormat.json
        else _print_results(list(results), given)
    )


def _print_results(results: list[CheckResult], given: CheckArguments) -> int:
    """Print what was found, once all files are done; the exit status."""
    if given.report is not None:
        write_check_report(given.report, results[0], _simulate_for_report(given))
    text = findings_report(results, given.format)
    if text:
        console.out(text, commands=given.format is FindingsFormat.github)
    if given.fix:
        from distsim.cli.shared.repair_report import print_repairs

        print_repairs(results, given.backend and str(given.backend), given.patch)
    return max((result.status() for result in results), default=0)


def _stream_json(results: Iterable[CheckResult], given: CheckArguments, count: int) -> int:
    """Print the JSON of each file as soon as it is checked, and keep none; the exit status."""
    from distsim.output.text.check_results import check_file_json, check_json

    head, end = console.to_json(check_json(())).rsplit("[]", 1)
    status = 0
    console.out(f"{head}[")
    for k, result in enumerate(results, 1):
        if given.report is not None:
            write_check_report(given.report, result, _simulate_for_report(given))
        element = console.to_json(check_file_json(result)).replace("\n", "\n    ")
        console.out(f"    {element}{',' if k < count else ''}")
        status = max(status, result.status())
    console.out(f"  ]{end}")
    return status


def _refuse_impossible_fix(given: CheckArguments) -> None:
    from distsim.common.errors import UsageError

    if given.fix and (given.format is not FindingsFormat.text or given.sets):
        raise UsageError("--fix changes the file and prints text", "leave out --format and --set")
    if given.patch is not None and not given.fix:
        raise UsageError(
            f"-o {given.patch} is for the patches of --fix", "add --fix, or leave it out"
        )


def _refuse_impossible_report(given: CheckArguments, files: list[str]) -> None:
    from distsim.common.errors import UsageError

    check_report_path(given.report)
    if given.report is not None and len(files) > 1:
        raise UsageError(f"--report is of one file, and these are {len(files)}", "name one file")


def _simulate_for_report(given: CheckArguments) -> Simulation | None:
    """The run beside the verdict; None for a file that can't be read."""
    from distsim.cli.application import read_scenario
    from distsim.cli.shared.trace_input import simulate_trace
    from distsim.common.errors import DistsimError
    from distsim.simulation.simulate_scenario import simulate

    (file,) = expand_folders(given.files)
    try:
        if is_trace(file):
            return simulate_trace(file, backend=given.backend and str(given.backend), cluster=None)
        return simulate(
            read_scenario(file, given.sets),
            backend=given.backend,
            with_verdict=False,
            max_calls=given.max_calls,
        )
    except DistsimError:  # said already
        return None


def expand_folders(paths: list[str]) -> list[str]:
    """Each file once; a folder stands for the ``.yaml`` files in it, at any depth, sorted. Raises
    UsageError for an empty folder.
    """
    from distsim.common.errors import UsageError

    found: dict[str, None] = {}
    for path in paths:
        if not Path(path).is_dir():
            found[path] = None
            continue
        inside = sorted(
            p for p in Path(path).rglob("*") if p.suffix in (".yaml", ".yml") and p.is_file()
        )
        if not inside:
            raise UsageError(f"no scenario (*.yaml) in {path}", "name a folder with scenarios")
        found |= dict.fromkeys(map(str, inside))
    return list(found)


def findings_report(results: list[CheckResult], format: FindingsFormat) -> str:
    """The findings of files as text, or in a form for other tools."""
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
