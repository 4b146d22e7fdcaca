"""`distsim shrink`: reduce a failing scenario to a minimal one that fails in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    BackendOption,
    ScenarioArgument,
    SetOption,
    read_scenario,
)

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="S.yaml", help="Where it is written; else to the terminal."
    ),
]
TriesOption = Annotated[
    int | None,
    typer.Option("--tries", metavar="N", min=1, help="Smaller scenarios tried at most (3000)."),
]


def command(
    file: ScenarioArgument,
    output: OutputOption = None,
    backend: BackendOption = None,
    tries: TriesOption = None,
    sets: SetOption = None,
) -> None:
    """Make a failing scenario as small as it can be.

    Ranks, steps, loops, tensors, fields and sizes are left out or made smaller as long as the
    verdict, the first finding and the outcome under the back end stay the same. Ends with 0; with 2
    for a scenario that does not fail.

    \b
    Example: distsim shrink scenarios/pipeline_wrong_order.yaml -o small.yaml
    """
    from distsim.api.functions import shrink

    shrunk = shrink(read_scenario(file, sets), backend=backend, tries=tries).raw
    if output is None:
        console.out(shrunk.text.rstrip("\n"))
    else:
        console.write_file(output, shrunk.text)
        console.note(f"wrote {output}")
    calls_before, calls_after = shrunk.calls
    ranks_before, ranks_after = shrunk.ranks
    console.note(
        f"{calls_before:,} calls of {ranks_before:,} ranks became "
        f"{calls_after:,} of {ranks_after:,}: {shrunk.failure} ({shrunk.tried:,} tried)"
    )
    if not shrunk.whole:
        console.note("the tries are used up, so that more might be left out: raise --tries")
