"""The features that a program uses: words by which a check decides whether it can find anything.

A detector or an engine that names the features it needs is skipped for programs without them. The
features are read from the codes alone, so every call counts, whether it is reached or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from distsim.operations.registry import OPERATIONS
from distsim.program.code import ANY_SOURCE, CodeCall, SharedCode

#: - ``requests``: a call leaves a request, or is a batch.
#: - ``messages``: a send or a receive, including signals. ``any source``: a receive without a peer.
#: - ``tags``: a message has a tag other than 0.
#: - ``remote``: access to another rank's memory.
#: - ``signals``, ``streams``: calls that use them.
#: - ``host work``: a sleep, or a compute step on the host, which no device waits for.
#: - ``branches``: ranks do not all make the same calls on the same tensor copies.
#: - ``new groups``: a step makes a group, or the world.
#: - ``timeouts``: the program sets one, or a call has its own.
#: - ``numbers``: a tensor has a value or is assigned one. Without it, the simulation of values can
#:   show only where data comes from.
Feature = Literal[
    "requests",
    "messages",
    "any source",
    "tags",
    "remote",
    "signals",
    "streams",
    "host work",
    "branches",
    "new groups",
    "timeouts",
    "numbers",
]


def features_of(
    codes: Sequence[SharedCode], *, has_timeouts: bool, has_numbers: bool
) -> frozenset[Feature]:
    """All features of a program.

    ``has_timeouts``: the options or a group set a timeout. ``has_numbers``: a tensor is declared
    with a value.
    """
    found: set[Feature] = set()
    for code in codes:
        found.update(_code_features(code))
        for call in code.distinct_calls():
            found.update(_call_features(call))
    if len(codes) > 1:
        found.add("branches")
    if has_timeouts:
        found.add("timeouts")
    if has_numbers:
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
    # Copy indices that differ by rank: equal calls then touch different copies.
    if any(isinstance(index, np.ndarray) for index in _copy_indices(call)):
        yield "branches"


def _copy_indices(call: CodeCall) -> Iterator[object]:
    for side in ("inputs", "outputs"):
        for buffer in call.fields.get(side) or ():
            yield buffer.index


def _code_features(code: SharedCode) -> Iterator[Feature]:
    if code.guards is not None:
        yield "branches"
    if any(np.any(np.asarray(endpoint.peer) == ANY_SOURCE) for endpoint in code.endpoints):
        yield "any source"
    if any(np.any(np.asarray(endpoint.tag)) for endpoint in code.endpoints):
        yield "tags"


def makes_request(call: CodeCall) -> bool:
    """Whether the call leaves a request that a later call has to wait for."""
    row = OPERATIONS[call.op]
    if row.kind == "p2p":
        return row.nonblocking
    return row.kind in ("batch", "collective") and call.is_async
