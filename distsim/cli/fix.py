"""`distsim check --fix`: repairs of the files that fail, as patches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distsim.cli import console

if TYPE_CHECKING:
    from distsim.checking import CheckResult
    from distsim.repair.fixes import Fix

_KINDS = ("order", "arguments", "calls added", "a call left out: look whether it is needed")


def propose(results: list[CheckResult], backend: str | None, output: Path | None) -> None:
    """Print the repairs of each file that fails, the best with its patch; all best patches go into ``output``."""
    from distsim.repair.fixes import fixes

    patches = []
    for result in results:
        if result.verdict is None or result.status() == 0:
            continue
        if result.file == "-" or not Path(result.file).is_file():
            console.note(f"{result.file}: no file to repair")
            continue
        found = fixes(Path(result.file).read_text(encoding="utf-8"), result.file, backend=backend)
        console.out(_told(result.file, found).rstrip("\n"))
        patches += [found[0].patch] if found else []
    if output is not None and patches:
        console.write_file(output, "".join(patches))
        console.note(f"wrote {output}; `patch -p1 < {output}` applies it")


def _told(file: str, found: tuple[Fix, ...]) -> str:
    from distsim.units import show_ns

    if not found:
        return f"\n{file}: no repair found that checks ok"
    lines = [f"\n{file}: {len(found)} {'repair checks' if len(found) == 1 else 'repairs check'} ok under every reading"]
    for k, fix in enumerate(found, 1):
        where = ", ".join(fix.completes)
        lines.append(f"  {k}. {'; then '.join(fix.words)} ({_KINDS[fix.kind]})")
        lines.append(f"     completes on {where}; {show_ns(fix.makespan_ns)} simulated")
    return "\n".join([*lines, "", found[0].patch])
