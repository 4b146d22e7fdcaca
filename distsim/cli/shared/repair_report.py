"""`distsim check --fix`: repairs of the files that fail, as patches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distsim.cli.application import is_trace
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.repair.search import ScenarioRepair
    from distsim.simulation.check_scenario import CheckResult

_REPAIR_KINDS = ("order", "arguments", "calls added", "a call left out: look whether it is needed")


def print_repairs(results: list[CheckResult], backend: str | None, file: Path | None) -> None:
    """Print the repairs of each file that fails, the best with its patch; all best patches go to
    ``file``, if there is one.
    """
    from distsim.repair.search import find_repairs
    from distsim.repair.text_patch import unified_diff

    inside = all(Path(result.file).resolve().is_relative_to(Path.cwd()) for result in results)
    patches = []
    for result in results:
        if result.verdict is None or result.status() == 0:
            continue
        path = Path(result.file)
        if is_trace(result.file):
            console.out(_repairs_of_trace(result.file, backend).rstrip("\n"))
            continue
        if result.file == "-" or not path.is_file():
            console.note(f"{result.file}: no file to repair")
            continue
        text, whole = path.read_text(encoding="utf-8"), path.resolve()
        name = str(
            whole.relative_to(Path.cwd() if inside else whole.anchor)
        )  # `patch` takes no absolute name
        found = tuple(
            f._replace(patch=unified_diff(text, f.text, name))
            for f in find_repairs(text, result.file, backend=backend)
        )
        patches += [fix.patch for fix in found[:1]]
        console.out(_repairs_text(result.file, found).rstrip("\n"))
    if file is not None and patches:
        console.write_file(file, "".join(patches))
        console.note(
            f"wrote {file}; now `patch -p1 {'' if inside else '-d / '}< {file}`{' or `git apply`' if inside else ''}"
        )


def _repairs_of_trace(file: str, backend: str | None) -> str:
    """The repairs of a trace's calls, at the script's lines; the patch shows them as a scenario,
    for it is the script that changes.
    """
    from distsim.cli.shared.trace_input import without_file_name
    from distsim.common.errors import UsageError
    from distsim.repair.from_trace import find_trace_repairs
    from distsim.trace.jsonl import read_trace
    from distsim.trace.run_end import is_partial

    try:
        trace = read_trace(file)
        found = find_trace_repairs(trace, file, backend=backend)
    except UsageError as error:
        return f"\n{file}: {without_file_name(error.message, file)}"
    if found or not is_partial(trace):
        return _repairs_text(
            file,
            found,
            "\nIts calls as a scenario, and what changes; the comments name the script's lines:\n",
        )
    return f"\n{file}: no other order and no other arguments of these calls check ok; which calls were still to come is not known"


def _repairs_text(file: str, found: tuple[ScenarioRepair, ...], before: str = "") -> str:
    from distsim.common.units import show_ns

    if not found:
        return f"\n{file}: no repair found that checks ok"
    lines = [
        f"\n{file}: {len(found)} {'repair checks' if len(found) == 1 else 'repairs check'} ok under every reading"
    ]
    for k, fix in enumerate(found, 1):
        where = ", ".join(fix.completes)
        lines.append(f"  {k}. {'; then '.join(fix.words)} ({_REPAIR_KINDS[fix.kind]})")
        lines.append(f"     completes on {where}; {show_ns(fix.makespan_ns)} simulated")
    return "\n".join([*lines, before, found[0].patch])
