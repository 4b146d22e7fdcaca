"""The arguments of searches over many simulations: worker processes and budget (sweep, plan)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N",
        min=1,
        help="Number of worker processes. [default: one per core]",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDR",
        help="Use remote workers: tcp://… (a Dask scheduler) or ray://….",
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--budget",
        metavar="N",
        min=1,
        help="Try only N candidates, chosen by a guided search (Optuna).",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Random seed of the guided search.")
]
TopOption = Annotated[
    int, typer.Option("--top", metavar="N", min=1, help="Number of table rows to print.")
]


@dataclass(frozen=True)
class WorkerArguments:
    """Where points are computed, how many are tried, and how many the table shows."""

    jobs: JobsOption = None
    address: AddressOption = None
    budget: BudgetOption = None
    seed: SeedOption = 0
    top: TopOption = 15


def comma_separated_names(text: str | None) -> tuple[str, ...]:
    """The names in `a,b`, each once."""
    words = [word.strip() for word in (text or "").split(",")]
    return tuple(dict.fromkeys(word for word in words if word))
