"""Repairs of what a trace tells of: sought in the scenario of its calls, told at the lines of its script."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from distsim.compact import compact
from distsim.errors import UsageError
from distsim.ops.table import OPS
from distsim.repair.fixes import Fix, fixes
from distsim.repair.proposals import ADDS_CALLS, LEAVES_OUT
from distsim.trace import Trace, is_partial

_LINE = re.compile(r", line (\d+)")
_SOURCE = re.compile(r"  # (\S+:\d+)$")


def trace_fixes(trace: Trace, file: str, *, backend: str | None = None) -> tuple[Fix, ...]:
    """Repairs of a trace's calls, as `fixes` has them; their patches change a scenario of these calls.

    Of a run that stopped, what each rank would have called after that is known only as far as others wait for it: nothing that adds a
    call or leaves one out can be judged then, and is not proposed. Raises UsageError for a trace that tells of no program.
    """
    if not is_partial(trace):
        return _found(trace, file, backend, LEAVES_OUT)
    tried = (_found(part, file, backend, ADDS_CALLS - 1) for part in _parts(trace))
    return next((found for found in tried if found), ())


def _found(trace: Trace, file: str, backend: str | None, kinds: int) -> tuple[Fix, ...]:
    try:
        text = compact(trace).text
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", error.remedy) from None
    lines = text.splitlines()
    return tuple(
        fix._replace(words=tuple(_scripted(word, lines) for word in fix.words))
        for fix in fixes(text, file, backend=backend, kinds=kinds)
    )


def _parts(trace: Trace) -> Iterator[Trace]:
    """The calls that ranks came to; with the collectives that they would have joined later; with all that they would have called later.

    What was to come has no place. That a message would have come is a guess of the one that waits for it, so it is made last.
    """
    unplaced = np.array([place.line == 0 for place in trace.tables.get("place", ())] + [True], dtype=np.bool_)[trace["place"]]
    message = np.array([OPS[op].kind == "p2p" for op in trace.tables["op"]], dtype=np.bool_)[trace["op"]]
    sizes = set()
    for keep in (~unplaced, ~(unplaced & message), np.ones(len(trace), dtype=np.bool_)):
        if keep.any() and int(keep.sum()) not in sizes:
            sizes.add(int(keep.sum()))
            yield Trace(trace.header, trace.tables, {name: column[keep] for name, column in trace.columns.items()})


def _scripted(words: str, lines: list[str]) -> str:
    """A repair's words with places of the script in place of the scenario's lines."""

    def place(found: re.Match[str]) -> str:
        number = int(found[1])
        source = _SOURCE.search(lines[number - 1]) if number <= len(lines) else None
        return f", {source[1]}" if source else ""

    return _LINE.sub(place, words)
