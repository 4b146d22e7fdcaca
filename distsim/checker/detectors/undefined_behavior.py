"""Detect behaviour that a backend's manual leaves undefined (DS705).

Only the text of the program is examined. Without a specific cause, the finding only says that the
outcome is undefined.

That an outcome is undefined is decided by the engine (`distsim.engine.backend_outcomes`), which
also runs the program under unfavourable conditions. This module looks for the two causes that the
program's text shows, so that the finding can name lines.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from distsim.backends import BackendProfile
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.wording import aligned_columns, call_words, location_text, rank_list
from distsim.findings.finding_types import Finding
from distsim.program.model import Program
from distsim.semantics.form.nccl_connect import ConnectingLaunch, connection_mismatches


def undefined_findings(
    program: Program, layout: ChannelLayout, profile: BackendProfile
) -> tuple[Finding, ...]:
    """Connections in different directions (semantics N9), and groups used in different order (N12).

    One finding on all connections, and one per pair of groups that share ranks. NCCL's guide
    ("Using multiple NCCL communicators concurrently") requires one order on all devices.
    """
    where = CallIndex(layout)
    found = _connection_findings(program, profile)
    # The world is one of the groups: its communicator competes with the others, too.
    for a, b in combinations(range(len(program.groups)), 2):
        shared = [
            rank for rank in layout.sequence_ranks[a] if rank in set(layout.sequence_ranks[b])
        ]
        orders = _first_order_difference(where, a, b, shared) if len(shared) > 1 else None
        if orders is not None:
            found.append(_group_order_finding(program, profile, a, b, orders))
    return tuple(found) or (_unspecified_finding(profile),)


def _connection_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    # Only the first pair is shown in full: usually all pairs run the same line of the program.
    contacts = connection_mismatches(program, profile) if profile.device else ()
    if not contacts:
        return []
    (p, q), launches = contacts[0]
    more = f" (and {len(contacts) - 1} more pairs)" if len(contacts) > 1 else ""
    calls = list(zip((p, q), (one.position for one in launches), strict=True))
    rows = [
        (
            f"rank {rank}",
            call_words(program.call(rank, k)),
            location_text(program.place(rank, k)),
        )
        for rank, k in calls
    ]
    head = (
        f"undefined behaviour on {profile.name}: rank {p} creates {_direction_words(launches[0])} "
        f"to rank {q}, which creates {_direction_words(launches[1])}{more}"
    )
    places = tuple(dict.fromkeys(program.place(rank, k) for rank, k in calls))
    ranks = tuple(sorted({rank for one in contacts for rank in one.pair}))
    advice = (
        f"on ranks {p} and {q}, put send and receive into one batch_isend_irecv. Or use single "
        f"calls: rank {p} sends first, and rank {q} receives first"
    )
    return [
        Finding(
            "DS705",
            "warning",
            "\n".join([head, *aligned_columns(rows)]),
            ranks,
            (),
            (advice,),
            places,
        )
    ]


def _direction_words(launched: ConnectingLaunch) -> str:
    """The connections that a launch opens to its peer."""
    if len(launched.ways) > 1:
        return "send and receive connections"
    return "only a send connection" if "send" in launched.ways else "only a receive connection"


class _UseOrder(NamedTuple):
    """A rank's call on one group, and its next call on the other group."""

    rank: int
    position: int
    later: int


def _first_order_difference(
    where: CallIndex, a: int, b: int, shared: list[int]
) -> tuple[_UseOrder, _UseOrder] | None:
    """The first rank that uses two groups in another order than the first shared rank, after it."""

    def calls_of(rank: int) -> list[tuple[int, int]]:
        calls = [(position, a) for position in where.joins(rank, a)]
        calls += [(position, b) for position in where.joins(rank, b)]
        return sorted(calls)

    first = shared[0]
    first_calls = calls_of(first)
    for other in shared[1:]:
        other_calls = calls_of(other)
        pairs = zip(first_calls, other_calls, strict=False)
        for k, ((_, first_sequence), (_, other_sequence)) in enumerate(pairs):
            if first_sequence != other_sequence:
                return _use_order(first_calls, k, first), _use_order(other_calls, k, other)
    return None


def _use_order(calls: list[tuple[int, int]], k: int, rank: int) -> _UseOrder:
    """The order from the k-th of these calls on, each (position, sequence)."""
    position, own_sequence = calls[k]
    # Without a later call on the other group, the call itself is shown twice.
    later = next((p for p, sequence in calls[k:] if sequence != own_sequence), position)
    return _UseOrder(rank, position, later)


def _group_order_finding(
    program: Program,
    profile: BackendProfile,
    a: int,
    b: int,
    orders: tuple[_UseOrder, _UseOrder],
) -> Finding:
    names = [program.groups[g].name for g in (a, b)]
    rows = [
        (
            f"rank {rank}",
            call_words(program.call(rank, position)),
            location_text(program.place(rank, position)),
            note,
        )
        for rank, first, later in orders
        for position, note in ((first, "first"), (later, "then"))
    ]
    who = rank_list([order.rank for order in orders])
    head = (
        f"undefined behaviour on {profile.name}: {who} use groups {names[0]} and {names[1]} "
        "in different orders"
    )
    places = tuple(dict.fromkeys(program.place(rank, p) for rank, *pair in orders for p in pair))
    ranks = tuple(sorted(order.rank for order in orders))
    return Finding(
        "DS705",
        "warning",
        "\n".join([head, *aligned_columns(rows)]),
        ranks,
        (),
        (f"use {names[0]} and {names[1]} in the same order on all ranks",),
        places,
    )


def _unspecified_finding(profile: BackendProfile) -> Finding:
    message = (
        f"undefined behaviour on {profile.name}: the program may complete here and hang elsewhere"
    )
    return Finding(
        "DS705",
        "warning",
        message,
        (),
        (),
        ("make equal calls in the same order on all ranks",),
    )
