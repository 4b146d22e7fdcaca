"""`distsim clusters`: the presets."""

from __future__ import annotations

from typing import Annotated

import typer

from distsim.cli.shared import console

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Print this one whole, as `cluster:` may have it."),
]


def command(name: Name = None) -> None:
    """List the cluster presets, or print one.

    \b
    Example: distsim clusters dgx-a100
    """
    from distsim.hardware.cluster import PRESETS, preset
    from distsim.output.text.calibration_tables import cluster_table, cluster_yaml

    console.out(
        cluster_table([preset(n) for n in PRESETS]) if name is None else cluster_yaml(preset(name))
    )
