"""`distsim learn`: the lessons, and their scenarios into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.scenario.lessons import Lesson

Name = Annotated[str | None, typer.Argument(metavar="LESSON", help="One lesson; left out: all.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Write the scenarios there; what is there stays as it is.",
    ),
]


def command(name: Name = None, output: Output = None) -> None:
    """List the lessons, or write their scenarios into a folder to try and change.

    \b
    Example: distsim learn
    Example: distsim learn -o scenarios
    Example: distsim learn deadlocks -o scenarios
    """
    from distsim.scenario.lessons import LESSONS, find_lesson

    chosen = LESSONS if name is None else (find_lesson(name),)
    if output is None:
        console.out(_lesson_list(chosen) if name is None else _lesson_text(chosen[0]))
        return
    files = dict.fromkeys(file for one in chosen for file in one.files)
    new = sum(_write(output / f"{file}.yaml", file) for file in files)
    kept = (
        f"; {len(files) - new} were there already and stay as they are" if new < len(files) else ""
    )
    console.note(f"wrote {new} scenario{'' if new == 1 else 's'} into {output}{kept}")


def _write(path: Path, file: str) -> bool:
    """Write a scenario where there is none of that name yet; was it written?"""
    from distsim.common.errors import EnvironmentFault
    from distsim.scenario.lessons import lesson_scenario_text

    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{path.parent} cannot be made: {error.strerror}", "name a folder that you may write"
        ) from None
    console.write_file(path, lesson_scenario_text(file))
    return True


def _lesson_list(lessons: Sequence[Lesson]) -> str:
    width = max(len(one.name) for one in lessons)
    lines = [f"  {one.name.ljust(width)}  {one.title}" for one in lessons]
    return "\n".join(
        [
            "Lessons, in order",
            *lines,
            "",
            "`distsim learn LESSON` tells what one has; `distsim learn -o FOLDER` writes",
            "the scenarios of all. The pages are in docs/learn.",
        ]
    )


def _lesson_text(one: Lesson) -> str:
    lines = [
        f"{one.title}: at its end you can {one.able}.",
        "",
        f"`distsim learn {one.name} -o scenarios` writes its files:",
    ]
    return "\n".join([*lines, *(f"  distsim simulate scenarios/{file}.yaml" for file in one.files)])
