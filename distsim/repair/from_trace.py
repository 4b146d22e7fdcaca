"""Repairs of the program that a trace records.

They are searched in the scenario of its calls and reported with the lines of its script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from distsim.common.errors import UsageError
from distsim.operations.registry import OPERATIONS
from distsim.repair.proposals import ADDS_CALLS, REMOVES_CALLS
from distsim.repair.search import ScenarioRepair, find_repairs
from distsim.simulation.trace_replay.compact import compact_trace
from distsim.trace.model import Trace
from distsim.trace.run_end import is_partial

_LINE_PATTERN = re.compile(r"^line (\d+)(, |: )")
_INNER_LINE_PATTERN = re.compile(r" \(line (\d+)\)")
_SOURCE_PATTERN = re.compile(r"  # (\S+:\d+)$")


def find_trace_repairs(
    trace: Trace, file: str, *, backend: str | None = None
) -> tuple[ScenarioRepair, ...]:
    """Repairs of a trace's calls; their patches change a scenario of these calls.

    If the run stopped early, the later calls of a rank are known only if others wait for them. Then
    no repair that adds or removes a call can be judged, and none is proposed. Raises UsageError for
    a trace that records no program.
    """
    if not is_partial(trace):
        return _repairs_of(trace, file, backend, REMOVES_CALLS)
    tried = (_repairs_of(part, file, backend, ADDS_CALLS - 1) for part in _completions(trace))
    return next((found for found in tried if found), ())


def _repairs_of(
    trace: Trace, file: str, backend: str | None, kinds: int
) -> tuple[ScenarioRepair, ...]:
    try:
        text = compact_trace(trace).text
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", error.remedy) from None
    lines = text.splitlines()
    return tuple(
        fix._replace(words=tuple(_with_script_lines(word, lines) for word in fix.words))
        for fix in find_repairs(text, file, backend=backend, kinds=kinds)
    )


def _completions(trace: Trace) -> Iterator[Trace]:
    """The calls that ranks came to; with the collectives that they would have joined later; with
    all that they would have called later.

    What was to come has no place. That a message would have come is a guess of the one that waits
    for it, so it is made last.
    """
    unplaced = np.array(
        [place.line == 0 for place in trace.tables.get("place", ())] + [True], dtype=np.bool_
    )[trace["place"]]
    message = np.array([OPERATIONS[op].kind == "p2p" for op in trace.tables["op"]], dtype=np.bool_)[
        trace["op"]
    ]
    sizes = set()
    for keep in (~unplaced, ~(unplaced & message), np.ones(len(trace), dtype=np.bool_)):
        if keep.any() and int(keep.sum()) not in sizes:
            sizes.add(int(keep.sum()))
            yield Trace(
                trace.header,
                trace.tables,
                {name: column[keep] for name, column in trace.columns.items()},
            )


def _with_script_lines(words: str, lines: list[str]) -> str:
    """A repair's words with places of the script in place of the scenario's lines."""

    def place(found: re.Match[str]) -> str:
        number = int(found[1])
        source = _SOURCE_PATTERN.search(lines[number - 1]) if number <= len(lines) else None
        return f"{source[1]}{found[2]}" if source else ""

    def inner_place(found: re.Match[str]) -> str:
        source = _SOURCE_PATTERN.search(lines[int(found[1]) - 1])
        return f" ({source[1]})" if source else ""

    return _LINE_PATTERN.sub(place, _INNER_LINE_PATTERN.sub(inner_place, words))
