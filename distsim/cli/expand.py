"""`distsim expand`: a scenario in its plain form."""

from __future__ import annotations

from distsim.cli import console
from distsim.cli.options import File, Sets, read_scenario


def command(file: File, sets: Sets = None) -> None:
    """Print a scenario in plain form: short forms written out, --set applied.

    \b
    Example: distsim expand scenarios/hybrid.yaml --set backend=gloo
    """
    console.out(read_scenario(file, sets).to_yaml().rstrip("\n"))
