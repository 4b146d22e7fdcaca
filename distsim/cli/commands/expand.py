"""`distsim expand`: replace a scenario's training strategies by the operations they stand for."""

from __future__ import annotations

from distsim.cli.shared import console
from distsim.cli.shared.arguments import ScenarioArgument, SetOption, read_scenario


def command(file: ScenarioArgument, sets: SetOption = None) -> None:
    """Print a scenario with training strategies expanded to plain operations.

    distsim also replaces short forms of steps (`barrier`) by full ones and applies --set. The
    output is a scenario that makes the same calls.

    \b
    Example: distsim expand scenarios/strategies/ddp.yaml --set iterations=2
    """
    from distsim.api.functions import expand

    console.out(expand(read_scenario(file, sets)).rstrip("\n"))
