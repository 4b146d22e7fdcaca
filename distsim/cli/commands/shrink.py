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
        "--output",
        "-o",
        metavar="S.yaml",
        help="Write the scenario to a file. [default: standard output]",
    ),
]
MaxTrialsOption = Annotated[
    int | None,
    typer.Option(
        "--max-trials",
        metavar="N",
        min=1,
        help="Check at most N smaller scenarios. [default: 3000]",
    ),
]


def command(
    file: ScenarioArgument,
    output: OutputOption = None,
    backend: BackendOption = None,
    max_trials: MaxTrialsOption = None,
    sets: SetOption = None,
) -> None:
    """Reduce a failing scenario to a minimal one.

    distsim removes or reduces ranks, steps, loops, tensors, fields and sizes. The verdict, the
    first finding and the outcome on the scenario's backend do not change. Exit status: 0, or 2 for
    a scenario that does not fail.

    \b
    Example: distsim shrink scenarios/pipeline_wrong_order.yaml -o small.yaml
    """
    from distsim.api.functions import shrink
    from distsim.cli.shared.trace_output import check_output_folder

    if output is not None:
        check_output_folder(output)
    shrunk = shrink(read_scenario(file, sets), backend=backend, tries=max_trials).raw
    if output is None:
        console.out(shrunk.text.rstrip("\n"))
    else:
        console.write_file(output, shrunk.text)
        console.note(f"wrote {output}")
    calls_before, calls_after = shrunk.calls
    ranks_before, ranks_after = shrunk.ranks
    console.note(
        f"reduced {calls_before:,} calls on {ranks_before:,} ranks to "
        f"{calls_after:,} calls on {ranks_after:,} ranks; unchanged: {shrunk.failure} "
        f"({shrunk.tried:,} scenarios checked)"
    )
    if not shrunk.whole:
        console.note(
            "the limit of --max-trials was reached; a higher limit may give a smaller scenario"
        )
