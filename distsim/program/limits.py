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
#: Bytes that commands take without `--max-calls`, estimated; what is simulated for all ranks of a code together, such as 1 000 ranks
#: with 5 000 calls each, stays below.
MAX_BYTES = 2_500_000_000
#: What a call of a rank, a call of a code (compiled once for all its ranks) and a rank take in a program that completes, roughly: bytes,
#: and ns of one core. Measured: 100 000 calls of one code on 2 ranks take 175 MB, 1 000 ranks with 200 calls of one code 64 MB.
_CALL, _CODE, _RANK = (400, 15_000), (1_200, 60_000), (3_000, 80_000)


def bounded_world(scenario: Scenario, max_calls: int | None) -> None:
    """Raise UsageError for more ranks than anybody waits for, before their calls are laid out. ``max_calls``: what the user allows."""
    ranks = scenario.world.size
    if max_calls is None and ranks > MAX_RANKS:
        raise _refusal(scenario.file, f"{ranks:,} ranks", _costs(ranks, 0, ranks), f"{MAX_RANKS:,} ranks", ranks)


def bounded_program(program: Program, max_calls: int | None) -> None:
    """Raise UsageError for a program of more calls or bytes than commands take; ``max_calls`` is what the user allows instead."""
    if (found := _too_large(program, max_calls)) is not None:
        raise found


def fits(program: Program, max_calls: int | None) -> bool:
    """Whether `bounded_program` lets a program pass."""
    return _too_large(program, max_calls) is None


def _too_large(program: Program, max_calls: int | None) -> UsageError | None:
    calls, ranks = program.present_calls, len(program.present)
    costs = _costs(calls, sum(len(code.calls) for code in program.codes), ranks)
    limit = f"{MAX_CALLS if max_calls is None else max_calls:,} calls"
    if calls <= (MAX_CALLS if max_calls is None else max_calls):
        if max_calls is not None or costs[0] <= MAX_BYTES:
            return None
        limit = show_bytes(MAX_BYTES)
    return _refusal(program.file, f"{calls:,} calls on {ranks:,} ranks", costs, limit, calls)


def _costs(calls: int, of_codes: int, ranks: int) -> tuple[int, int]:
    """Bytes and ns of one core."""
    nbytes, ns = (calls * _CALL[k] + of_codes * _CODE[k] + ranks * _RANK[k] for k in (0, 1))
    return nbytes, ns


def _refusal(file: str, said: str, costs: tuple[int, int], limit: str, needed: int) -> UsageError:
    nbytes, ns = costs
    cost = f"about {show_bytes(round(nbytes, -8))} of memory and {show_ns(max(ns // 10**9, 1) * 10**9)} if it completes, more if it hangs"
    return UsageError(
        f"{file}: {said}: {cost}; the limit is {limit}",
        f"take fewer ranks, iterations or repeats, or go on with `--max-calls {needed}`",
    )
