"""`distsim new`: write a starter scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="File to write; it must not exist yet.")
]
KindOption = Annotated[
    str,
    typer.Option("--kind", metavar="KIND", help="Kind of scenario: plain, ring, ddp or pipeline."),
]


def command(file: FileArgument = Path("scenario.yaml"), kind: KindOption = "plain") -> None:
    """Write a starter scenario to a new file.

    \b
    Example: distsim new mine.yaml --kind pipeline
    """
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream
    from distsim.scenario import starter

    text = starter(kind)
    if file.exists() and not is_stream(file):
        raise UsageError(f"{file} already exists", "choose a new name: `distsim new mine.yaml`")
    console.write_file(file, text)
    console.note(f"wrote {file}; run it: `distsim simulate {file}`")
