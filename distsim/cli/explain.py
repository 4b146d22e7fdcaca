"""`distsim explain`: a finding, an operation, a key of the scenario file or the back ends on a page."""

from __future__ import annotations

from typing import Annotated

import typer

from distsim.cli import console

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="A finding's code, an operation, a key of the file, `scenario`, `expressions` or `backends`."
    ),
]


def command(name: Name = None) -> None:
    """Explain a finding (DS301), an operation (all_gather), a key of the file (world.nodes), or the back ends.

    \b
    Example: distsim explain all_gather
    Example: distsim explain tensors.x.shape
    Example: distsim explain all_reduce.async
    Example: distsim explain backends
    """
    from distsim.views.pages import index_page

    console.out(index_page() if name is None else page(name))


def page(name: str) -> str:
    """The page of a finding, an operation, a key, or the back ends. Raises UsageError, with the nearest name, for any other word."""
    from distsim.errors import UsageError
    from distsim.findings.codes import CODES, explain
    from distsim.names import near
    from distsim.ops.table import ALIASES, OPS
    from distsim.scenario.reference import key_of, keys
    from distsim.strategies import STRATEGIES
    from distsim.views.formatpage import expressions_page, key_page, scenario_page
    from distsim.views.pages import backends_page, operation_page, strategy_page

    if name == "backends":
        return backends_page()
    if name.lower() in ("scenario", "file"):
        return scenario_page()
    if name == "expressions":
        return expressions_page()
    if name.upper() in CODES:
        return explain(name)
    if name in STRATEGIES:
        return strategy_page(STRATEGIES[name])
    row = OPS.get(ALIASES.get(name, name))
    if row is None:
        if (key := key_of(name)) is not None:
            return key_page(key)
        known = [*OPS, *ALIASES, *STRATEGIES, *CODES, "backends", "scenario", "expressions", *keys()]
        raise UsageError(f"nothing is called {name}{near(name, known)}", "`distsim explain` lists all names")
    return operation_page(row)
