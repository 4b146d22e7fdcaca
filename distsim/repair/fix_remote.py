"""Repairs of accesses to the memory of another rank: puts, gets and signals.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    make_step,
    op_of,
    ranks_of,
    value_at,
    with_steps_replaced,
)

_SIGNALS: Final = ("put_signal", "wait_signal")
_REMOTE_OPS: Final = ("put", "get")
_BARRIER: Final = "symm_mem_barrier"


def same_channel(data: ScenarioData, steps: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """A signal and the wait for it use one channel."""
    signals = [path for path in steps if op_of(value_at(data, path)) in _SIGNALS]
    # The wait follows the signal first: its rank is the one that hangs.
    signals.sort(key=lambda path: op_of(value_at(data, path)), reverse=True)
    for path in signals:
        for other in signals:
            entry, other_entry = value_at(data, path), value_at(data, other)
            own, theirs = fields_of(entry), fields_of(other_entry)
            channel = theirs.get("channel", 0)
            if op_of(entry) == op_of(other_entry) or own.get("channel", 0) == channel:
                continue
            fields = {key: value for key, value in own.items() if key != "channel"}
            if channel != 0:
                fields["channel"] = channel
            step = make_step(op_of(entry), fields, ranks_of(entry))
            words = f"{op_of(entry)}: use channel {channel}, like {op_of(other_entry)}"
            yield words, with_steps_replaced(data, path, [step])


def synchronise_accesses(
    data: ScenarioData, steps: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """All ranks call a barrier between an access to another rank's memory and the next steps."""
    accesses = [path for path in steps if op_of(value_at(data, path)) in _REMOTE_OPS]
    places = sorted({int(path[1]) + 1 for path in accesses} | {int(path[1]) for path in accesses})
    for place in reversed(places):
        changed = copy.deepcopy(data)
        changed["program"].insert(place, {_BARRIER: {}})
        yield f"call {_BARRIER} on all ranks", changed


__all__ = ["same_channel", "synchronise_accesses"]
