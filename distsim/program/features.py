"""How large a program is, and what it uses.

How large: an estimate before it is simulated without being asked for, instead of an hour or the
kernel's killer. What it uses: words with which whoever looks for something in it says what it would
be found in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from distsim.common.errors import UsageError
from distsim.common.units import show_bytes, show_ns
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, Program, SharedCode

if TYPE_CHECKING:
    from distsim.scenario.model import Scenario

# --- how large it is ---


#: Calls of all ranks together, and ranks, that commands take without `--max-calls`.
DEFAULT_MAX_CALLS = 5_000_000
DEFAULT_MAX_RANKS = 1 << 17
#: Programs of more calls are folded without being asked for: ranks that do the same are simulated
#: once.
FOLDING_THRESHOLD_CALLS = 20_000
#: Bytes that commands take without `--max-calls`, estimated; what is simulated for all ranks of a
#: code together, such as 1 000 ranks with 5 000 calls each, stays below.
DEFAULT_MAX_BYTES = 2_500_000_000
#: What a call of a rank, a call of a code (compiled once for all its ranks) and a rank take in a
#: program that completes, roughly: bytes, and ns of one core. Measured: 100 000 calls of one code
#: on 2 ranks take 175 MB, 1 000 ranks with 200 calls of one code 64 MB.
_COST_PER_CALL, _COST_PER_CODE_CALL, _COST_PER_RANK = (
    (400, 15_000),
    (1_200, 60_000),
    (3_000, 80_000),
)


def check_world_size(scenario: Scenario, max_calls: int | None) -> None:
    """Raise UsageError for more ranks than anybody waits for, before their calls are laid out.
    ``max_calls``: what the user allows.
    """
    ranks = scenario.world.size
    if max_calls is None and ranks > DEFAULT_MAX_RANKS:
        raise _too_large_error(
            scenario.file,
            f"{ranks:,} ranks",
            _estimated_costs(ranks, 0, ranks),
            f"{DEFAULT_MAX_RANKS:,} ranks",
            ranks,
        )


def check_program_size(program: Program, max_calls: int | None) -> None:
    """Raise UsageError for a program of more calls or bytes than commands take; ``max_calls`` is
    what the user allows instead.
    """
    if (found := _size_error(program, max_calls)) is not None:
        raise found


def is_within_size_limit(program: Program, max_calls: int | None) -> bool:
    """Whether `check_program_size` lets a program pass."""
    return _size_error(program, max_calls) is None


def _size_error(program: Program, max_calls: int | None) -> UsageError | None:
    calls, ranks = program.present_calls, len(program.present)
    costs = _estimated_costs(calls, sum(len(code.calls) for code in program.codes), ranks)
    limit = f"{DEFAULT_MAX_CALLS if max_calls is None else max_calls:,} calls"
    if calls <= (DEFAULT_MAX_CALLS if max_calls is None else max_calls):
        if max_calls is not None or costs[0] <= DEFAULT_MAX_BYTES:
            return None
        limit = show_bytes(DEFAULT_MAX_BYTES)
    return _too_large_error(
        program.file, f"{calls:,} calls on {ranks:,} ranks", costs, limit, calls
    )


def _estimated_costs(calls: int, of_codes: int, ranks: int) -> tuple[int, int]:
    """Bytes and ns of one core."""
    nbytes, ns = (
        calls * _COST_PER_CALL[k] + of_codes * _COST_PER_CODE_CALL[k] + ranks * _COST_PER_RANK[k]
        for k in (0, 1)
    )
    return nbytes, ns


def _too_large_error(
    file: str, said: str, costs: tuple[int, int], limit: str, needed: int
) -> UsageError:
    nbytes, ns = costs
    cost = f"about {show_bytes(round(nbytes, -8))} of memory and {show_ns(max(ns // 10**9, 1) * 10**9)} if it completes, more if it hangs"
    return UsageError(
        f"{file}: {said}: {cost}; the limit is {limit}",
        f"take fewer ranks, iterations or repeats, or go on with `--max-calls {needed}`",
    )


# --- what it uses ---


#: ``requests``: a call leaves a request, or is a batch. ``messages``: a send or a receive, signals
#: among them; ``any source``: a peer is open. ``remote``: another rank's memory. ``signals``,
#: ``streams``: calls with them. ``branches``: ranks do not all make the same calls on the same
#: copies. ``new groups``: a step makes a group, or the world. ``timeouts``: one is said, or a call
#: has its own. ``host work``: a sleep, or a compute on the host, which no device waits for.
#: ``numbers``: a tensor has a value or is assigned one; if not, all that values can tell is
#: lineage.
Feature = Literal[
    "requests",
    "messages",
    "any source",
    "remote",
    "signals",
    "streams",
    "host work",
    "branches",
    "new groups",
    "timeouts",
    "numbers",
]


def features_of(program: Program) -> frozenset[Feature]:
    """All features of a program, whether its calls are reached or not."""
    found = {
        feature
        for code in program.codes
        for call in code.distinct_calls()
        for feature in _call_features(call)
    }
    found |= {feature for code in program.codes for feature in _code_features(code)}
    if len(program.codes) > 1:
        found.add("branches")
    if program.options.get("timeout_ns") is not None or any(
        group.timeout_ns is not None for group in program.groups
    ):
        found.add("timeouts")
    if any(spec.value is not None for spec in program.tensors.values()):
        found.add("numbers")
    return frozenset(found)


def _call_features(call: CodeCall) -> Iterator[Feature]:
    row = OPERATIONS[call.op]
    if makes_request(call) or call.parts:
        yield "requests"
    if row.direction is not None:
        yield "messages"
    if row.kind == "remote":
        yield "remote"
    if row.signals:
        yield "signals"
    if call.stream or call.op == "wait_stream":
        yield "streams"
    if call.op == "sleep" or call.fields.get("queue") == "host":
        yield "host work"
    if call.op in ("new_group", "init_process_group"):
        yield "new groups"
    if call.fields.get("timeout_ns") or call.op == "monitored_barrier":
        yield "timeouts"
    if call.op == "assign":
        yield "numbers"
    buffers = (buffer for side in ("inputs", "outputs") for buffer in call.fields.get(side) or ())
    if any(isinstance(buffer.index, np.ndarray) for buffer in buffers):
        yield "branches"


def _code_features(code: SharedCode) -> Iterator[Feature]:
    if code.guards is not None:
        yield "branches"
    if any(np.any(np.asarray(port.peer) == -1) for port in code.ports):
        yield "any source"


def makes_request(call: CodeCall) -> bool:
    """The call leaves a request that someone has to wait for."""
    row = OPERATIONS[call.op]
    return (row.kind == "p2p" and row.nonblocking) or (
        row.kind in ("batch", "collective") and call.is_async
    )
