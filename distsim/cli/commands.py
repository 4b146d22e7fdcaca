"""The commands, and how one is run: a command line that leaves nothing open without typer, whose loading takes longer than a small
simulation; typer has the others, help and mistakes among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from distsim.cli import console

#: Every command, in the order in which they are listed; each is the function `command` of the module of that name.
COMMANDS = (
    "simulate", "check", "plan", "sweep", "shrink", "run", "replay", "compare", "doctor", "capture", "bench", "calibrate", "render",
    "report", "explain", "test", "expand", "schema", "clusters", "learn", "new",
)  # fmt: skip


def run(words: Sequence[str]) -> None:
    """Run a command line; SystemExit has the status of what ends otherwise than well."""
    command = _plain(words)
    if command is None:
        from distsim.cli.app import application

        application(words)(prog_name="distsim", terminal_width=min(max(console.columns() or 80, 40), 200) - 2)
        return
    from distsim.views.tables import set_width

    set_width(console.columns())
    command()


def _plain(words: Sequence[str]) -> Callable[[], None] | None:
    """The command with what it is given, where `distsim.cli.declared.plainly` can say that."""
    from distsim.cli.declared import plainly

    if "_DISTSIM_COMPLETE" in os.environ or not words or words[0] not in COMMANDS:
        return None
    command: Callable[..., None] = import_module(f"distsim.cli.{words[0]}").command
    given = plainly(command, list(words[1:]))
    return None if given is None else partial(command, **given)
