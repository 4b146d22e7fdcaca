"""How large a program may be before a command asks for `--max-calls`.

The memory and time of a simulation are estimated before it starts, so that a program that is too
large ends with a message at once. It neither runs for an hour nor out of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from distsim.common.errors import UsageError
from distsim.common.units import show_bytes, show_ns
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.scenario.model import Scenario

#: Calls of all ranks together, and ranks, that commands accept without `--max-calls`.
DEFAULT_MAX_CALLS = 5_000_000
DEFAULT_MAX_RANKS = 1 << 17
#: Programs with more calls are folded by default: ranks that do the same are simulated once.
FOLDING_THRESHOLD_CALLS = 20_000
#: Estimated bytes that commands accept without `--max-calls`. Programs whose ranks share a code,
#: such as 1 000 ranks with 5 000 calls each, stay below.
DEFAULT_MAX_BYTES = 2_500_000_000


class _Cost(NamedTuple):
    """Estimated memory, and time on one core."""

    nbytes: int
    ns: int


#: Rough costs of a program that completes. Measured: 100 000 calls of one code on 2 ranks take
#: 175 MB, 1 000 ranks with 200 calls of one code 64 MB. A call of a code is compiled once for all
#: its ranks; a call of a rank is counted once for every rank that makes it.
_COST_PER_CALL = _Cost(nbytes=400, ns=15_000)
_COST_PER_CODE_CALL = _Cost(nbytes=1_200, ns=60_000)
_COST_PER_RANK = _Cost(nbytes=3_000, ns=80_000)


def check_world_size(scenario: Scenario, max_calls: int | None) -> None:
    """Raise UsageError for a world of too many ranks, before their calls are laid out.

    ``max_calls`` is the limit that the user sets; any such limit also allows any number of ranks.
    """
    ranks = scenario.world.size
    if max_calls is None and ranks > DEFAULT_MAX_RANKS:
        cost = _estimated_cost(calls=ranks, code_calls=0, ranks=ranks)
        limit = f"{DEFAULT_MAX_RANKS:,} ranks"
        raise _too_large_error(scenario.file, f"{ranks:,} ranks", cost, limit, ranks)


def check_program_size(program: Program, max_calls: int | None) -> None:
    """Raise UsageError for a program of more calls or bytes than commands accept.

    ``max_calls`` is the limit that the user sets instead.
    """
    error = _size_error(program, max_calls)
    if error is not None:
        raise error


def is_within_size_limit(program: Program, max_calls: int | None) -> bool:
    """Whether `check_program_size` accepts a program."""
    return _size_error(program, max_calls) is None


def _size_error(program: Program, max_calls: int | None) -> UsageError | None:
    calls, ranks = program.present_calls, len(program.present)
    code_calls = sum(len(code.calls) for code in program.codes)
    cost = _estimated_cost(calls, code_calls, ranks)
    allowed_calls = DEFAULT_MAX_CALLS if max_calls is None else max_calls
    if calls > allowed_calls:
        limit = f"{allowed_calls:,} calls"
    elif max_calls is None and cost.nbytes > DEFAULT_MAX_BYTES:
        limit = show_bytes(DEFAULT_MAX_BYTES)
    else:
        return None
    return _too_large_error(program.file, f"{calls:,} calls on {ranks:,} ranks", cost, limit, calls)


def _estimated_cost(calls: int, code_calls: int, ranks: int) -> _Cost:
    return _Cost(
        calls * _COST_PER_CALL.nbytes
        + code_calls * _COST_PER_CODE_CALL.nbytes
        + ranks * _COST_PER_RANK.nbytes,
        calls * _COST_PER_CALL.ns + code_calls * _COST_PER_CODE_CALL.ns + ranks * _COST_PER_RANK.ns,
    )


def _too_large_error(file: str, size: str, cost: _Cost, limit: str, needed: int) -> UsageError:
    memory = show_bytes(round(cost.nbytes, -8))
    time = show_ns(max(cost.ns // 10**9, 1) * 10**9)
    return UsageError(
        f"{file}: {size}: about {memory} of memory and {time} if it completes, more if it hangs; "
        f"the limit is {limit}",
        f"use fewer ranks, iterations or repeats, or continue with `--max-calls {needed}`",
    )
