"""`distsim clusters`: list the cluster presets, or print a preset or a cluster file."""

from __future__ import annotations

from typing import Annotated

import typer

from distsim.cli.shared import console

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Preset or cluster file to print in full, as a `cluster:` block."
    ),
]


def command(name: NameArgument = None) -> None:
    """List the cluster presets, or print one cluster.

    \b
    Example: distsim clusters dgx-a100
    """
    from distsim.api.inputs import load_machines
    from distsim.hardware.cluster import PRESETS, preset
    from distsim.output.text.calibration_tables import cluster_table, cluster_yaml

    if name is None:
        console.out(cluster_table([preset(each) for each in PRESETS]))
    else:
        console.out(cluster_yaml(load_machines(name)))
