"""The explicit rules: a program under a profile as a small state with `enabled` and `apply`.

    rules = Rules(program, PROFILES["gloo"])
    state = rules.initial()
    while choices := rules.enabled(state):
        state = rules.apply(state, choices[0])
    standstill(rules, state).stuck

Drivers choose: the engine by time, `Rules.settle` in any order, an explorer every choice. No clock, no cost.
"""

from distsim.rules.blocked import choice_of, standstill
from distsim.rules.code import Launch, Leave, Part, PartKind
from distsim.rules.host import any_source
from distsim.rules.state import (
    FINISH,
    STEP,
    TAKE,
    Cancelled,
    Choice,
    Done,
    Due,
    Ended,
    Event,
    Met,
    Mismatched,
    Phase,
    Released,
    Started,
    State,
)  # fmt: skip
from distsim.rules.step import Rules

__all__ = [
    "FINISH", "STEP", "TAKE", "Cancelled", "Choice", "Done", "Due", "Ended", "Event", "Launch", "Leave", "Met", "Mismatched",
    "Part", "PartKind", "Phase", "Released", "Rules", "Started", "State", "any_source", "choice_of", "standstill",
]  # fmt: skip
