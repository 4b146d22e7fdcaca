"""`distsim expand`: the plain operations behind a scenario's training strategies."""

from __future__ import annotations

from distsim.cli.application import ScenarioArgument, SetOption, read_scenario
from distsim.cli.shared import console


def command(file: ScenarioArgument, sets: SetOption = None) -> None:
    """Print a scenario in plain form: training strategies expanded, short forms written out, --set
    applied.

    What is printed is a scenario again, and makes the same calls.

    \b
    Example: distsim expand scenarios/strategies/ddp.yaml --set iterations=2
    """
    console.out(read_scenario(file, sets).to_yaml(flat=True).rstrip("\n"))
