"""How large a program is simulated without being asked for: an estimate first, instead of an hour or the kernel's killer."""

from __future__ import annotations

from distsim.errors import UsageError
from distsim.program.records import Program
from distsim.scenario.model import Scenario
from distsim.units import show_bytes, show_ns

#: Calls of all ranks together, and ranks, that commands take without `--max-calls`.
MAX_CALLS = 5_000_000
MAX_RANKS = 1 << 17
#: Programs of more calls are folded without being asked for: ranks that do the same are simulated once.
FOLDED_CALLS = 20_000
#: What a call and a rank take in a program that completes, roughly: bytes, and ns of one core.
_CALL, _RANK = (400, 15_000), (3_000, 80_000)


def bounded_world(scenario: Scenario, max_calls: int | None) -> None:
    """Raise UsageError for more ranks than anybody waits for, before their calls are laid out. ``max_calls``: what the user allows."""
    ranks = scenario.world.size
    if max_calls is None and ranks > MAX_RANKS:
        _refuse(scenario.file, f"{ranks:,} ranks", ranks, ranks, f"{MAX_RANKS:,} ranks", ranks)


def bounded_program(program: Program, max_calls: int | None) -> None:
    """Raise UsageError for a program of more calls than commands take; ``max_calls`` is what the user allows instead."""
    limit = MAX_CALLS if max_calls is None else max_calls
    calls, ranks = program.present_calls, len(program.present)
    if calls > limit:
        _refuse(program.file, f"{calls:,} calls on {ranks:,} ranks", calls, ranks, f"{limit:,} calls", calls)


def _refuse(file: str, said: str, calls: int, ranks: int, limit: str, needed: int) -> None:
    nbytes, ns = (calls * _CALL[k] + ranks * _RANK[k] for k in (0, 1))
    cost = f"about {show_bytes(round(nbytes, -8))} of memory and {show_ns(max(ns // 10**9, 1) * 10**9)} if it completes, more if it hangs"
    raise UsageError(
        f"{file}: {said}: {cost}; the limit is {limit}",
        f"take fewer ranks, iterations or repeats, or go on with `--max-calls {needed}`",
    )
