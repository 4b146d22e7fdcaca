"""`distsim check`: verdicts on many files, without simulating times."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    AllRanksOption,
    BackendOption,
    MaxCallsOption,
    ReportOption,
    SetOption,
    StrictOption,
    command_with_arguments,
    read_input,
    read_scenario,
)
from distsim.cli.shared.findings_output import (
    FindingsFormat,
    FindingsFormatOption,
    findings_report,
)
from distsim.cli.shared.html_report import check_report_path, write_check_report

if TYPE_CHECKING:
    from distsim.scenario import Scenario
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation

#: Files after which the memory of the earlier ones is freed.
_FILES_PER_COLLECTION = 20
#: The file name that stands for standard input.
STANDARD_INPUT = "-"

PathsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help=(
            "Scenario files, traces, or folders with scenarios; `-` means standard input. "
            "[default: the scenarios under the current folder]"
        ),
    ),
]
MaxStatesOption = Annotated[
    int | None,
    typer.Option(
        "--max-states",
        metavar="N",
        min=1,
        help="Stop the search over orders of events after N states. [default: 200000]",
    ),
]
FixOption = Annotated[
    bool,
    typer.Option(
        "--fix",
        help=(
            "Repair each failing scenario file in place, unless the best repair ends an "
            "exchange of data."
        ),
    ),
]
DiffOption = Annotated[
    bool,
    typer.Option(
        "--diff",
        help="List up to three repairs and print the first as a patch; change no scenario file.",
    ),
]
PatchOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F.patch",
        help="With --diff: write the patches of all files into F.patch.",
    ),
]


@dataclass(frozen=True)
class CheckArguments:
    """The arguments of `check`."""

    files: PathsArgument = None
    format: FindingsFormatOption = FindingsFormat.text
    max_states: MaxStatesOption = None
    backend: BackendOption = None
    strict: StrictOption = False
    max_calls: MaxCallsOption = None
    all_ranks: AllRanksOption = False
    sets: SetOption = None
    fix: FixOption = False
    diff: DiffOption = False
    patch: PatchOption = None
    report: ReportOption = None


@command_with_arguments(CheckArguments)
def command(arguments: CheckArguments) -> None:
    """Check scenarios: verdict, findings, and the outcome on every backend.

    The verdict covers every order of events, with and without buffered sends. If a file
    cannot be read, distsim reports the error and checks the other files.

    Without files, check finds the scenarios under the current folder. pyproject.toml sets defaults
    under [tool.distsim.check]: paths, exclude, strict, max-states, max-calls.

    Exit status 2: a file cannot be read. Exit status 1: a scenario has an error, does not complete
    on its backend, or may hang in an order of events that the search did not reach. Exit status 0:
    none of these.

    \b
    Example: distsim check scenarios/ring_of_four.yaml
    Example: distsim check scenarios/ --format sarif > findings.sarif
    Example: distsim check scenarios/ring_of_four.yaml --diff
    """
    from distsim.cli.shared.progress import with_progress_bar
    from distsim.cli.shared.project_files import expand_folders

    arguments = _with_project_settings(arguments)
    _check_fix_options(arguments)
    files = expand_folders(arguments.files or [])
    _check_report_options(arguments, files)
    results = _check_files(with_progress_bar(files, "checking"), arguments)
    if arguments.format is FindingsFormat.json:
        raise typer.Exit(_stream_json(results, arguments, files))
    raise typer.Exit(_print_results(list(results), arguments, files))


# --- arguments ---


def _with_project_settings(arguments: CheckArguments) -> CheckArguments:
    """The arguments with defaults from pyproject.toml, and with the scenarios of the repository."""
    from distsim.cli.shared.project_files import command_settings, find_scenarios

    settings = command_settings("check")
    return replace(
        arguments,
        files=arguments.files or find_scenarios(settings),
        strict=arguments.strict or settings.strict,
        max_states=arguments.max_states or settings.max_states,
        max_calls=arguments.max_calls or settings.max_calls,
    )


def _check_fix_options(arguments: CheckArguments) -> None:
    """Raises UsageError for options that do not go together with ``--fix`` and ``--diff``."""
    from distsim.common.errors import UsageError

    if arguments.patch is not None and not arguments.diff:
        raise UsageError(f"-o {arguments.patch} writes the patches of --diff", "add --diff")
    if not arguments.fix and not arguments.diff:
        return
    option = "--fix" if arguments.fix else "--diff"
    if arguments.fix and arguments.diff:
        raise UsageError("--fix writes files and --diff writes none", "use one of --fix and --diff")
    if arguments.format is not FindingsFormat.text:
        raise UsageError(f"{option} prints text only", "omit --format")
    if arguments.sets:
        raise UsageError(f"{option} repairs the file as written", "omit --set")
    if STANDARD_INPUT in (arguments.files or ()):
        raise UsageError(
            f"{option} needs a file; it cannot repair standard input", "name a scenario file"
        )


def _check_report_options(arguments: CheckArguments, files: list[str]) -> None:
    from distsim.common.errors import UsageError

    check_report_path(arguments.report)
    if arguments.report is not None and len(files) > 1:
        raise UsageError(
            f"--report describes one file, but {len(files)} were given", "name one file"
        )


# --- checking ---


@lru_cache(maxsize=1)
def _standard_input(sets: tuple[str, ...]) -> Scenario:
    """The scenario on standard input, which can be read only once."""
    return read_scenario(STANDARD_INPUT, list(sets))


def _input_of(path: str, arguments: CheckArguments) -> Scenario | str:
    if path == STANDARD_INPUT:
        return _standard_input(tuple(arguments.sets or ()))
    return read_input(path, arguments.sets)


def _check_files(files: Iterable[str], arguments: CheckArguments) -> Iterator[CheckResult]:
    """Check the files, and free the programs of earlier files from time to time.

    A program contains reference cycles. `process` makes collections so rare, because they slow down
    a single run, that the programs of hundreds of files would stay in memory. What is loaded by the
    first collection (modules, models) stays alive, so later collections need not visit it.
    """
    has_frozen = False
    try:
        for number, file in enumerate(files, 1):
            yield _check_file(file, arguments)
            if number % _FILES_PER_COLLECTION:
                continue
            if not gc.get_freeze_count():
                gc.freeze()
                has_frozen = True
            gc.collect()
    finally:
        if has_frozen:
            gc.unfreeze()


def _check_file(path: str, arguments: CheckArguments) -> CheckResult:
    """Check one file. A file that cannot be read, or exceeds memory or recursion, gives problems.

    The function `distsim.check` raises an exception instead.
    """
    from distsim.api.functions import check
    from distsim.common.errors import RESOURCE_ERRORS, ScenarioErrors, UsageError, resource_error
    from distsim.simulation.check_scenario import CheckResult, unreadable_result

    try:
        answer = check(
            _input_of(path, arguments),
            backend=arguments.backend,
            strict=arguments.strict,
            max_states=arguments.max_states,
            max_calls=arguments.max_calls,
            fold=False if arguments.all_ranks else None,
        )
    except ScenarioErrors as error:
        return CheckResult(path, error.problems)
    except UsageError as error:
        return unreadable_result(path, error)
    except RESOURCE_ERRORS as error:
        return unreadable_result(path, resource_error(error, ""))
    for note in answer.notes:
        console.note(note)
    return answer.raw


def _simulate_for_report(file: str, arguments: CheckArguments) -> Simulation | None:
    """The run that the report shows with the verdict; None for a file that cannot be read."""
    from distsim.api.functions import simulate
    from distsim.common.errors import DistsimError

    try:
        return simulate(
            _input_of(file, arguments),
            backend=arguments.backend,
            verdict=False,
            max_calls=arguments.max_calls,
        ).raw
    except DistsimError:
        # The result of the check already has this error.
        return None


# --- output ---


def _write_report(result: CheckResult, path: str, arguments: CheckArguments) -> None:
    if arguments.report is not None:
        write_check_report(arguments.report, result, _simulate_for_report(path, arguments))


def _print_results(
    results: list[CheckResult], arguments: CheckArguments, files: Sequence[str]
) -> int:
    """Print the findings after all files have been checked; return the exit status."""
    if arguments.report is not None:  # then there is one file
        _write_report(results[0], files[0], arguments)
    text = findings_report(results, arguments.format)
    if text:
        console.out(text, commands=arguments.format is FindingsFormat.github)
    if arguments.fix:
        return _status_after_repairs(results, arguments)
    if arguments.diff:
        from distsim.cli.shared.repair_report import print_repairs

        print_repairs(results, arguments.backend, arguments.patch)
    return max((result.status() for result in results), default=0)


def _status_after_repairs(results: list[CheckResult], arguments: CheckArguments) -> int:
    """Repair the failing files in place; return the exit status of the files as they are now."""
    from distsim.cli.shared.repair_report import failing_results, write_repairs

    repairable = {result.file for result in failing_results(results)}
    still_failing = write_repairs(results, arguments.backend)
    others = [result for result in results if result.file not in repairable]
    return max((result.status() for result in (*others, *still_failing)), default=0)


def _stream_json(
    results: Iterable[CheckResult], arguments: CheckArguments, files: Sequence[str]
) -> int:
    """Print the JSON of each file as soon as it is checked; return the exit status.

    No result is kept: a check of thousands of files would otherwise fill the memory.
    """
    from distsim.output.text.check_results import check_file_json, check_json

    # The JSON of no files, cut where the files belong.
    head, tail = console.to_json(check_json(())).rsplit("[]", 1)
    status = 0
    console.out(f"{head}[")
    for number, (result, path) in enumerate(zip(results, files, strict=True), 1):
        _write_report(result, path, arguments)
        element = console.to_json(check_file_json(result)).replace("\n", "\n    ")
        console.out(f"    {element}{',' if number < len(files) else ''}")
        status = max(status, result.status())
    console.out(f"  ]{tail}")
    return status
