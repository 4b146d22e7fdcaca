"""The arguments of `distsim simulate`: of the simulation itself, and of its what-if questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared.arguments import (
    BackendOption,
    ClusterOption,
    FormatOption,
    MaxCallsOption,
    NoFoldOption,
    OutputFormat,
    ReportOption,
    ScenarioArgument,
    SetOption,
    StrictOption,
    TraceOutputs,
)

NoVerdictOption = Annotated[
    bool, typer.Option("--no-verdict", help="Skip the verdict: this run alone.")
]
NoValuesOption = Annotated[bool, typer.Option("--no-values", help="Skip what the tensors hold.")]
ScheduleOption = Annotated[
    Path | None,
    typer.Option(
        "--schedule",
        metavar="F",
        help="Follow the order of events in F, which `check --format json` wrote.",
    ),
]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="B",
        help="Beside the scenario B as it stands: one table of differences.",
    ),
]
WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if", help="Every resource twice as fast, in turn; the critical path by kind."
    ),
]
DrawsOption = Annotated[
    int | None,
    typer.Option(
        "--draws",
        metavar="N",
        min=2,
        help="As many runs with seeds from the file's on: the spread.",
    ),
]
StragglersOption = Annotated[
    str | None,
    typer.Option(
        "--stragglers",
        metavar="SHARExFACTOR",
        help="With --draws: ranks that are slow by chance, as 1%x1.3.",
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
    schedule: ScheduleOption = None
    no_verdict: NoVerdictOption = False
    no_values: NoValuesOption = False
    strict: StrictOption = False
    max_calls: MaxCallsOption = None
    no_fold: NoFoldOption = False


@dataclass(frozen=True)
class WhatIfArguments:
    """The what-if questions of `simulate`; each adds a table to the report or replaces it."""

    against: AgainstOption = None
    what_if: WhatIfOption = False
    draws: DrawsOption = None
    stragglers: StragglersOption = None
