"""The arguments of `distsim simulate`: for the simulation itself, and for its what-if questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared.arguments import (
    AllRanksOption,
    BackendOption,
    ClusterOption,
    FormatOption,
    MaxCallsOption,
    OutputFormat,
    ReportOption,
    ScenarioArgument,
    SetOption,
    StrictOption,
    TraceOutputs,
)

NoVerdictOption = Annotated[
    bool,
    typer.Option(
        "--no-verdict",
        help=("Simulate one order of events only; skip the verdict, which covers all orders."),
    ),
]
NoValuesOption = Annotated[
    bool, typer.Option("--no-values", help="Do not compute the contents of tensors.")
]
EventOrderOption = Annotated[
    Path | None,
    typer.Option(
        "--event-order",
        metavar="F",
        help="Replay the order of events in F, an output of `check --format json`.",
    ),
]
CompareWithOption = Annotated[
    str | None,
    typer.Option(
        "--compare-with",
        metavar="OTHER",
        help="Also simulate OTHER and compare: column A is OTHER, column B is FILE.",
    ),
]
WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if", help="Make each resource twice as fast in turn, and print the speed-ups."
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        metavar="N",
        min=2,
        help="Run N simulations with consecutive seeds (starting at the scenario's) "
        "and report the spread.",
    ),
]
StragglersOption = Annotated[
    str | None,
    typer.Option(
        "--stragglers",
        metavar="SHARExFACTOR",
        help="With --seeds: make random ranks slower. For example, 1%x1.3 makes "
        "1 % of the ranks slower by a factor of 1.3.",
    ),
]


@dataclass(frozen=True)
class SimulateArguments:
    """The arguments of `simulate`."""

    file: ScenarioArgument
    trace: TraceOutputs = None
    report: ReportOption = None
    format: FormatOption = OutputFormat.text
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None
    event_order: EventOrderOption = None
    no_verdict: NoVerdictOption = False
    no_values: NoValuesOption = False
    strict: StrictOption = False
    max_calls: MaxCallsOption = None
    all_ranks: AllRanksOption = False


@dataclass(frozen=True)
class WhatIfArguments:
    """The what-if questions of `simulate`; each adds a table to the report or replaces it."""

    compare_with: CompareWithOption = None
    what_if: WhatIfOption = False
    seeds: SeedsOption = None
    stragglers: StragglersOption = None
