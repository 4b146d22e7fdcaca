"""Repairs of the files that fail: written by `distsim check --fix`, printed by `--diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distsim.api.inputs import is_trace
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.repair.search import ScenarioRepair
    from distsim.simulation.check_scenario import CheckResult

#: A note on repairs of some kinds, by their number (`ScenarioRepair.kind`).
_REPAIR_NOTES = {3: ". Check that the program does not need the removed call"}
_RESULT_NOTE = ". Check that the program still computes what you want"

_NO_REPAIR = "no repair found: no change that distsim tried gives verdict ok"


def failing_results(results: list[CheckResult]) -> list[CheckResult]:
    """The results that a repair may improve: files that can be read and fail."""
    return [result for result in results if result.verdict is not None and result.status() != 0]


def write_repairs(results: list[CheckResult], backend: str | None) -> list[CheckResult]:
    """Repair the failing files in place, and print what was changed.

    Returns the results of the files that still fail. The calls of a trace come from a script, which
    distsim never changes: its patch is printed.
    """
    from distsim.api.functions import fix

    still_failing = []
    for result in failing_results(results):
        if is_trace(result.file):
            console.out(_repairs_of_trace(result.file, backend).rstrip("\n"))
            console.note(f"{result.file}: recorded from a script, so no file was changed")
            still_failing.append(result)
            continue
        answer = fix(result.file, backend=backend, write=True)
        if not answer.written:
            reason = _choice_text(result.file, answer.raw) or f"\n{_no_repair_text(result)}"
            console.out(f"{reason}\n  the file is unchanged")
            still_failing.append(result)
            continue
        best = answer.raw[0]
        lines = [f"\n{result.file}: repaired, verdict ok", *_repair_lines(1, best)]
        console.out("\n".join(lines))
        console.note(f"wrote {result.file}")
    return still_failing


def print_repairs(results: list[CheckResult], backend: str | None, patch_file: Path | None) -> None:
    """Print the repairs of each file that fails; the best one is shown as a patch.

    The best patches of all files go to ``patch_file``, if it is given.
    """
    # `patch` refuses absolute names. The patches are relative to the current folder if it
    # contains all files, else to the root.
    all_below_here = all(
        Path(result.file).resolve().is_relative_to(Path.cwd()) for result in results
    )
    patches = []
    for result in failing_results(results):
        if is_trace(result.file):
            console.out(_repairs_of_trace(result.file, backend).rstrip("\n"))
            continue
        repairs = _repairs_with_patches(result.file, backend, all_below_here)
        patches += [repair.patch for repair in repairs[:1]]
        text = _repairs_text(result.file, repairs) if repairs else f"\n{_no_repair_text(result)}"
        console.out(text.rstrip("\n"))
    if patch_file is None or not patches:
        return
    console.write_file(patch_file, "".join(patches))
    if all_below_here:
        command = f"`patch -p1 < {patch_file}` or `git apply`"
    else:
        command = f"`patch -p1 -d / < {patch_file}`"
    console.note(f"wrote {patch_file}; apply it: {command}")


def _repairs_with_patches(
    file: str, backend: str | None, below_here: bool
) -> tuple[ScenarioRepair, ...]:
    """The repairs of a scenario file, each with its patch."""
    from distsim.api.functions import fix
    from distsim.repair.apply_repair import open_for_repair
    from distsim.repair.text_patch import unified_diff

    text = open_for_repair(Path(file), writable=False).text
    absolute = Path(file).resolve()
    base = Path.cwd() if below_here else absolute.anchor
    name = str(absolute.relative_to(base))
    repairs = fix(file, backend=backend).raw
    return tuple(repair._replace(patch=unified_diff(text, repair.text, name)) for repair in repairs)


def _repairs_of_trace(file: str, backend: str | None) -> str:
    """The repairs of the calls of a trace.

    They name lines of the recorded script, which distsim cannot patch. So the patch shows the
    calls as a scenario.
    """
    from distsim.api.recorded_calls import without_file_name
    from distsim.common.errors import UsageError
    from distsim.repair.from_trace import find_trace_repairs
    from distsim.trace.jsonl import read_trace
    from distsim.trace.run_end import is_partial

    try:
        trace = read_trace(file)
        repairs = find_trace_repairs(trace, file, backend=backend)
    except UsageError as error:
        return f"\n{file}: {without_file_name(error.message, file)}"
    if repairs or not is_partial(trace):
        return _repairs_text(
            file,
            repairs,
            "\nA patch of its calls as a scenario; the comments name the lines of the script:\n",
        )
    return (
        f"\n{file}: no repair found: no other order and no other arguments of these calls give "
        "verdict ok, and the calls after the end of the trace are unknown"
    )


def _no_repair_text(result: CheckResult) -> str:
    """That no repair was found, and what the first finding with a remedy says to do."""
    from distsim.output.text_layout import wrapped_lines

    remedies = (finding.help for finding in result.findings if finding.help)
    lines = [f"{result.file}: {_NO_REPAIR}"]
    for remedy in next(remedies, ()):
        lines += wrapped_lines(f"help: {remedy}", indent="  ", further="    ")
    return "\n".join(lines)


def _choice_text(file: str, repairs: tuple[ScenarioRepair, ...]) -> str:
    """The repairs among which the user must choose; empty if there are none."""
    from distsim.output.text_layout import wrapped_lines

    if not repairs:
        return ""
    lines = [f"\n{file}: not repaired: the best repair ends an exchange of data"]
    for number, repair in enumerate(repairs, 1):
        lines += _repair_lines(number, repair)
    remedy = (
        "help: choose a repair and edit the file. To apply repair 1, run "
        f"`distsim check {file} --diff -o repair.patch` and the command that it prints"
    )
    return "\n".join([*lines, *wrapped_lines(remedy, indent="  ", further="    ")])


def _repairs_text(file: str, repairs: tuple[ScenarioRepair, ...], before_patch: str = "") -> str:
    """The list of repairs, and the patch of the first one."""
    if not repairs:
        return f"\n{file}: {_NO_REPAIR}"
    found = f"{len(repairs)} repairs found; with each of them, the verdict is ok"
    if len(repairs) == 1:
        found = "1 repair found; with it, the verdict is ok"
    lines = [f"\n{file}: {found}"]
    for number, repair in enumerate(repairs, 1):
        lines += _repair_lines(number, repair)
    if len(repairs) > 1:
        lines += ["", "Patch of repair 1:"]
    return "\n".join([*lines, before_patch, repairs[0].patch])


def _repair_lines(number: int, repair: ScenarioRepair) -> list[str]:
    """The changes of one repair, and what they lead to."""
    from distsim.common.units import show_ns
    from distsim.output.text_layout import wrapped_lines

    backends = ", ".join(repair.completes)
    note = _REPAIR_NOTES.get(repair.kind, _RESULT_NOTE if repair.changes_results else "")
    changes = f"{number}. {'; '.join(repair.words)}{note}"
    first, *rest = wrapped_lines(changes, indent="     ")
    return [
        f"  {first.lstrip()}",
        *rest,
        f"     completes on {backends}; predicted time {show_ns(repair.makespan_ns)}",
    ]
