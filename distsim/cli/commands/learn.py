"""`distsim learn`: list the lessons, or write their scenarios into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.scenario.lessons import Lesson

NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="LESSON", help="The lesson to show; omit it to list all lessons."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Write the scenarios into this folder; existing files are kept.",
    ),
]


def command(name: NameArgument = None, output: OutputOption = None) -> None:
    """List the lessons, show one, or copy their scenarios into a folder, to run and change them.

    \b
    Example: distsim learn
    Example: distsim learn -o scenarios
    Example: distsim learn deadlocks -o scenarios
    """
    from distsim.scenario.lessons import LESSONS, find_lesson, lesson_page

    lessons = LESSONS if name is None else (find_lesson(name),)
    if output is None:
        if name is None:
            console.out(_lesson_list(lessons))
        else:
            console.out_markdown(lesson_page(name))
            console.out(_files_of_lesson(lessons[0]))
        return
    # Lessons share scenarios.
    files = dict.fromkeys(file for lesson in lessons for file in lesson.files)
    written = sum(_write_if_new(output / f"{file}.yaml", file) for file in files)
    kept = len(files) - written
    message = f"wrote {written} scenario{'' if written == 1 else 's'} into {output}"
    if kept:
        message += f"; {kept} already existed and were kept"
    console.note(message)


def _write_if_new(path: Path, file: str) -> bool:
    """Write a scenario unless the path exists; return whether it was written."""
    from distsim.common.errors import EnvironmentFault, UsageError
    from distsim.scenario.lessons import lesson_scenario_text

    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(
            f"{path.parent} is not a folder", "name a new or existing folder"
        ) from None
    except OSError as error:
        raise EnvironmentFault(
            f"{path.parent} cannot be created: {error.strerror}", "name a writable folder"
        ) from None
    console.write_file(path, lesson_scenario_text(file))
    return True


def _lesson_list(lessons: Sequence[Lesson]) -> str:
    width = max(len(lesson.name) for lesson in lessons)
    lines = [f"  {lesson.name.ljust(width)}  {lesson.title}" for lesson in lessons]
    return "\n".join(
        [
            "Lessons, in order",
            *lines,
            "",
            "`distsim learn LESSON` shows a lesson.",
            "`distsim learn -o FOLDER` writes the scenarios of all lessons into a folder.",
        ]
    )


def _files_of_lesson(lesson: Lesson) -> str:
    lines = [f"`distsim learn {lesson.name} -o scenarios` writes the scenarios of this lesson:"]
    lines += [f"  distsim simulate scenarios/{file}.yaml" for file in lesson.files]
    return "\n".join(lines)
