"""`distsim shrink`: the smallest scenario that fails in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.application import BackendOption, ScenarioArgument, SetOption, read_scenario
from distsim.cli.shared import console

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="S.yaml", help="Where it is written; else to the terminal."
    ),
]
Tries = Annotated[
    int | None,
    typer.Option("--tries", metavar="N", min=1, help="Smaller scenarios tried at most (3000)."),
]


def command(
    file: ScenarioArgument,
    output: Output = None,
    backend: BackendOption = None,
    tries: Tries = None,
    sets: SetOption = None,
) -> None:
    """Make a failing scenario as small as it can be.

    Ranks, steps, loops, tensors, fields and sizes are left out or made smaller as long as the
    verdict, the first finding and the outcome under the back end stay the same. Ends with 0; with 2
    for a scenario that does not fail.

    \b
    Example: distsim shrink scenarios/pipeline_wrong_order.yaml -o small.yaml
    """
    from distsim.repair.shrink import MAX_SHRINK_TRIALS, shrink_scenario

    found = shrink_scenario(
        read_scenario(file, sets), backend=backend and str(backend), most=tries or MAX_SHRINK_TRIALS
    )
    if output is None:
        console.out(found.text.rstrip("\n"))
    else:
        console.write_file(output, found.text)
        console.note(f"wrote {output}")
    (before, after), (ranks, left) = found.calls, found.ranks
    console.note(
        f"{before:,} calls of {ranks:,} ranks became {after:,} of {left:,}: {found.failure} ({found.tried:,} tried)"
    )
    if not found.whole:
        console.note("the tries are used up, so that more might be left out: raise --tries")
