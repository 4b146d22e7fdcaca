"""`distsim mcp`: serve distsim's answers to coding agents, by the Model Context Protocol."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console

FolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="Folder with the files that the tools may read. [default: the current one]",
        show_default=False,
    ),
]


def command(folder: FolderArgument = Path()) -> None:
    """Offer the commands check, simulate, doctor, explain and capture to coding agents.

    An agent starts this command and talks to it over standard input and output (Model Context
    Protocol). `capture` runs programs with your permissions.

    \b
    Example: distsim mcp
    """
    from importlib.util import find_spec

    from distsim.common.errors import EnvironmentFault, UsageError
    from distsim.common.installation import install_command

    if find_spec("mcp") is None:
        raise EnvironmentFault(
            "the Python SDK of the Model Context Protocol (mcp) is not installed",
            install_command("mcp"),
        )
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "name the folder of your project")
    from distsim.cli.mcp_server import build_server

    if sys.stdin.isatty():
        console.note("waiting for an agent on standard input; see `distsim mcp --help`")
    build_server(folder).run("stdio")
