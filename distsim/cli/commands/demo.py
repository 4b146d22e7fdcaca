"""`distsim demo`: a hang, its cause, a verified repair and a report, in a few seconds.

It uses only the public functions, and it prints the command that does the same for each step, so
that a new user can repeat and change every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console

FolderArgument = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder for the files of the demo; created if missing."),
]

_SCENARIO = """\
# Four ranks pass a tensor around a ring, as in ring attention.
name: ring
about: Every rank passes a tensor to the next rank and gets one from the previous rank.
world: 4
backend: gloo
cluster: cpu-10gbe
tensors:
  kv: {shape: [1048576], value: rank}   # 4 MiB
  next: {like: kv}
program:
  - send: {tensor: kv, dst: (rank + 1) % world_size}
  - recv: {tensor: next, src: (rank - 1) % world_size}
"""


def command(folder: FolderArgument = Path("distsim-demo")) -> None:
    """Show a hang, its cause, a verified repair and an HTML report.

    \b
    Example: distsim demo
    """
    import distsim
    from distsim.common.errors import UsageError

    scenario, repaired, page = (folder / name for name in ("ring.yaml", "fixed.yaml", "ring.html"))
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} exists and is not empty; the demo overwrites no files",
            f"name another folder: `distsim demo {folder}-2`",
        )
    _create(folder)
    console.write_file(scenario, _SCENARIO)

    _print_heading(f"1. A program, in {scenario}")
    console.out(_SCENARIO)

    _print_heading(f"2. Will it hang?  distsim simulate {scenario}")
    hang = distsim.simulate(scenario)
    console.out(_first_paragraphs(hang.to_text(), 2))

    _print_heading(f"3. A repair, checked again  distsim check {scenario} --diff")
    fix = distsim.fix(scenario)
    console.out(fix.patches[0])
    console.write_file(repaired, fix.texts[0])

    _print_heading(f"4. The repaired program  distsim simulate {repaired}")
    console.out(distsim.simulate(repaired).to_text() + "\n")

    _print_heading(f"5. A report for the browser  distsim report {scenario} -o {page}")
    distsim.report(hang).save(page)
    console.out(f"Open {page}: it shows every call, and why each one waits.\n")

    console.out(
        "Next: `distsim capture --nproc 4 -- python train.py` checks your own script,\n"
        "`distsim doctor DUMPS` finds the cause of a hung job, and\n"
        "`distsim learn` lists the lessons."
    )


def _create(folder: Path) -> None:
    from distsim.common.errors import EnvironmentFault

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot create {folder}: {error.strerror}", "name a folder that you may write"
        ) from None


def _print_heading(text: str) -> None:
    console.out(f"== {text}\n")


def _first_paragraphs(text: str, count: int) -> str:
    return "\n\n".join(text.split("\n\n")[:count]) + "\n"
