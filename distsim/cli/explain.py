"""`distsim explain`: a finding or an operation on a page."""

from __future__ import annotations

from typing import Annotated

import typer

from distsim.cli import console

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="A finding's code or an operation; left out: all of them.")]


def command(name: Name = None) -> None:
    """Explain a finding (DS301) or an operation (all_gather).

    \b
    Example: distsim explain all_gather
    """
    from distsim.views.pages import index_page

    console.out(index_page() if name is None else page(name))


def page(name: str) -> str:
    """The page of a finding or an operation. Raises UsageError, with the nearest name, for any other word."""
    from distsim.errors import UsageError
    from distsim.findings.codes import CODES, explain
    from distsim.names import near
    from distsim.ops.table import ALIASES, OPS
    from distsim.views.pages import operation_page

    if name.upper() in CODES:
        return explain(name)
    row = OPS.get(ALIASES.get(name, name))
    if row is None:
        known = [*OPS, *ALIASES, *CODES]
        raise UsageError(f"nothing is called {name}{near(name, known)}", "`distsim explain` lists all findings and operations")
    return operation_page(row)
