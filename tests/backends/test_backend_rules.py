"""Each rule of the back ends by its number (docs/explanation/semantics.md), in the smallest program that shows
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.engine.backend_outcomes import BackendOutcome, backend_outcome
from distsim.program.from_calls import build_program
from distsim.program.model import RankFault
from tests.support.gloo_observed import (
    BARRIER,
    REDUCE,
    batch,
    both,
    coll,
    group,
    irecv,
    isend,
    pause,
    recv,
    send,
    wait,
)

Ranks = list[list[dict[str, Any]]]
BIG = 4_000_000  # elements of float32: 16 MB, above every buffer
LAZY, EAGER, BARE = {"init": "lazy"}, {"init": "eager"}, {"buffsize": -1}
WARM = EAGER | {"connected": True}  # what N9 makes on the host was made before


def under(
    backend: str, ranks: Ranks, options: Mapping[str, Any] | None = None, **more: Any
) -> BackendOutcome:
    program = build_program(
        len(ranks), dict(enumerate(ranks)), backend=backend, options=dict(options or {}), **more
    )
    return backend_outcome(program, BACKEND_PROFILES[backend])


def crossed(n: int = 1) -> Ranks:
    return [[send(1, n), recv(1, n)], [send(0, n), recv(0, n)]]


def started(name: str, op: str = "all_reduce", **more: Any) -> dict[str, Any]:
    return coll(op, **{"async": True, "handle": name, **more})


def behind_barriers(k: int) -> Ranks:
    """Rank 2 comes to k barriers only when rank 1 is through a broadcast that needs rank 0
    alone.
    """
    barriers, names = [started(f"b{i}", "barrier") for i in range(k)], [f"b{i}" for i in range(k)]
    broadcast = coll("broadcast", root=0)
    end = wait(*names)
    return [
        [*barriers, broadcast, end],
        [*barriers, broadcast, send(2), end],
        [recv(1), *barriers, broadcast, end],
    ]


SWAPPED_TAGS = [
    [isend(1, "a", tag=1), isend(1, "b", tag=2), wait("a", "b")],
    [recv(0, tag=2), recv(0, tag=1)],
]
OVERLAP = {"A": [0, 1], "B": [0, 1]}
ON = {name: coll("all_reduce", group=name) for name in OVERLAP}
START = {name: started(name, group=name) for name in OVERLAP}
ORDERS = [[ON["A"], ON["B"]], [ON["B"], ON["A"]]]
ASYNC_ORDERS = [[START["A"], START["B"], wait("A", "B")], [START["B"], START["A"], wait("A", "B")]]


def gathered_then_sent(src: int, dst: int) -> Ranks:
    """All gather to rank 0; then the sender's host goes on to a barrier of both, which the receiver
    passes before it receives.
    """
    meet, first = coll("barrier", group="A"), [coll("gather", root=0)]
    ends = {
        src: [*first, isend(dst, "s"), meet, wait("s")],
        dst: [*first, meet, irecv(src, "r"), wait("r")],
    }
    return [[meet, *ends[0]], [meet, *ends[1]], first]


LATE = [[REDUCE], [pause(2), REDUCE]]
SECOND = {"timeout_ns": 10**9}

#: (rule, what it says, back end, ranks, options, further arguments of the program, outcome).
CASES: list[tuple[str, str, str, Ranks, dict[str, Any], dict[str, Any], str]] = [
    ("G1", "a send is a rendezvous at 4 bytes", "gloo", crossed(), {}, {}, "hangs"),
    ("G1", "and at 16 MB", "gloo", crossed(BIG), {}, {}, "hangs"),
    (
        "G1",
        "the receive need only be posted",
        "gloo",
        [[send(1)], [irecv(0, "w"), pause(1), wait("w")]],
        {},
        {},
        "completes",
    ),
    ("G2", "tags are true", "gloo", [[send(1, tag=1)], [recv(0, tag=2)]], {}, {}, "hangs"),
    ("G2", "order across tags is free", "gloo", SWAPPED_TAGS, {}, {}, "completes"),
    (
        "G2",
        "groups do not match each other",
        "gloo",
        [[send(1)], [recv(0, group="g")]],
        {},
        {"groups": {"g": [0, 1]}},
        "hangs",
    ),
    (
        "G3",
        "transfers go on without a wait",
        "gloo",
        [[send(1)], [irecv(0, "w"), pause(1)]],
        {},
        {},
        "completes",
    ),
    (
        "G4",
        "a dropped isend never arrives",
        "gloo",
        [[isend(1, None)], [pause(1), recv(0)]],
        {"stays_connected": True},
        {},
        "hangs",
    ),
    (
        "G4",
        "but where the receive was there",
        "gloo",
        [[pause(1), isend(1, None)], [recv(0)]],
        {},
        {},
        "completes",
    ),
    (
        "G4",
        "a dropped irecv swallows the message",
        "gloo",
        [[pause(1), send(1)], [irecv(0, None), pause(2), recv(0)]],
        {"stays_connected": True},
        {},
        "hangs",
    ),
    (
        "G5",
        "another kind at the same number never meets",
        "gloo",
        [[REDUCE], [BARRIER]],
        {},
        {},
        "hangs",
    ),
    (
        "G5",
        "the same kind is not compared",
        "gloo",
        [[REDUCE], [coll("all_reduce", reduce_op="max")]],
        {},
        {},
        "wrong-data",
    ),
    (
        "G6",
        "gather lets go who needs the root alone",
        "gloo",
        [
            [coll("gather", root=0), send(2)],
            [coll("gather", root=0)],
            [recv(0), coll("gather", root=0)],
        ],
        {},
        {},
        "hangs",
    ),
    (
        "G6",
        "scatter lets go who has its part",
        "gloo",
        [
            [coll("scatter", root=0)],
            [coll("scatter", root=0), send(2)],
            [recv(1), coll("scatter", root=0)],
        ],
        {},
        {},
        "completes",
    ),
    (
        "G7",
        "one blocked collective leaves a worker",
        "gloo",
        behind_barriers(1),
        {},
        {},
        "completes",
    ),
    ("G7", "two use them up", "gloo", behind_barriers(2), {}, {}, "hangs"),
    (
        "G8",
        "a collective's request may be dropped",
        "gloo",
        both(coll("all_reduce", **{"async": True}), pause(1)),
        {},
        {},
        "completes",
    ),
    (
        "G9",
        "overlapping groups in opposite order, blocking",
        "gloo",
        ORDERS,
        {},
        {"groups": OVERLAP},
        "hangs",
    ),
    ("G9", "and asynchronous", "gloo", ASYNC_ORDERS, {}, {"groups": OVERLAP}, "completes"),
    ("G10", "a timeout raises while others move", "gloo", LATE, SECOND, {}, "raises"),
    (
        "G11",
        "a message has the timeout that its group was made with",
        "gloo",
        [
            [group("g", 0, 1, timeout_s=9), recv(1, group="g")],
            [group("g", 0, 1, timeout_s=9), pause(2), send(0, group="g")],
        ],
        SECOND,
        {},
        "completes",
    ),
    (
        "G12",
        "new groups do not inherit the timeout",
        "gloo",
        [
            [group("g", 0, 1, timeout_s=None), coll("all_reduce", group="g")],
            [group("g", 0, 1, timeout_s=None), pause(2), coll("all_reduce", group="g")],
        ],
        SECOND,
        {},
        "completes",
    ),
    (
        "G13",
        "who has a transfer with the dead one sees it",
        "gloo",
        [[recv(1)], [pause(2)]],
        {},
        {"faults": (RankFault(1, "kill", at_ns=10**9),)},
        "raises",
    ),
    (
        "G13",
        "others don't",
        "gloo",
        [[recv(2)], [pause(2)], []],
        {"stays_connected": True},
        {"faults": (RankFault(1, "kill", at_ns=10**9),)},
        "hangs",
    ),
    ("G14", "a receive too small aborts", "gloo", [[send(1, 8)], [recv(0, 4)]], {}, {}, "crashes"),
    (
        "G14",
        "one too large keeps its tail",
        "gloo",
        [[send(1, 4)], [recv(0, 8)]],
        {},
        {},
        "wrong-data",
    ),
    (
        "N1",
        "the host runs ahead of its device",
        "nccl",
        [[recv(1), send(2)], [], [recv(0)]],
        EAGER,
        {},
        "hangs",
    ),
    (
        "N2",
        "an async collective leaves the current stream free",
        "nccl",
        [[START["A"], ON["B"], wait("A")], [ON["B"], START["A"], wait("A")]],
        WARM,
        {"groups": OVERLAP},
        "undefined",
    ),
    (
        "N3",
        "one communicator runs in issue order",
        "nccl",
        [[isend(1, "s"), REDUCE, wait("s")], [REDUCE, recv(0)]],
        BARE | EAGER,
        {},
        "hangs",
    ),
    ("N4", "collectives meet by order alone", "nccl", [[REDUCE], [BARRIER]], {}, {}, "undefined"),
    ("N5", "tags are ignored", "nccl", SWAPPED_TAGS, {}, {}, "wrong-data"),
    ("N6", "no receive from any source", "nccl", [[recv(None)], [send(0)]], EAGER, {}, "raises"),
    (
        "N7",
        "unbatched messages of a pair have a communicator (lazy)",
        "nccl",
        [[send(1, BIG), REDUCE], [started("w"), recv(0, BIG), wait("w")]],
        LAZY,
        {},
        "hangs",
    ),
    (
        "N8",
        "a batch as the first use of a group needs all its ranks",
        "nccl",
        [[batch(None, isend(1, None))], [batch(None, irecv(0, None))], []],
        LAZY,
        {},
        "hangs",
    ),
    (
        "N8",
        "eager init has met",
        "nccl",
        [[batch(None, isend(1, None))], [batch(None, irecv(0, None))], []],
        EAGER,
        {},
        "completes",
    ),
    (
        "N9",
        "two sends as the first contact stand still on the host",
        "nccl",
        crossed(),
        {},
        {},
        "hangs",
    ),
    (
        "N9",
        "so do requests",
        "nccl",
        [
            [isend(1, "s"), irecv(1, "r"), wait("s", "r")],
            [isend(0, "s"), irecv(0, "r"), wait("s", "r")],
        ],
        EAGER,
        {},
        "hangs",
    ),
    (
        "N9",
        "but not where one receives first",
        "nccl",
        [
            [isend(1, "s"), irecv(1, "r"), wait("s", "r")],
            [irecv(0, "r"), isend(0, "s"), wait("s", "r")],
        ],
        {},
        {},
        "completes",
    ),
    (
        "N9",
        "the other direction is connected by its own first message",
        "nccl",
        [[send(1), send(2), recv(1)], [recv(0), isend(0, None)], [recv(0)]],
        {},
        {},
        "completes",
    ),
    (
        "N9",
        "for which the host waits",
        "nccl",
        [[send(1), recv(2), recv(1)], [recv(0), isend(0, None), send(2)], [recv(1), send(0)]],
        {},
        {},
        "hangs",
    ),
    (
        "N9",
        "the first collective of a communicator that eager init has made",
        "nccl",
        ASYNC_ORDERS,
        EAGER,
        {"groups": OVERLAP},
        "hangs",
    ),
    (
        "N9",
        "one behind a gather connects anew",
        "nccl",
        [
            [coll("gather", root=0), started("w"), send(1), wait("w")],
            [coll("gather", root=0), recv(0), started("w"), wait("w")],
        ],
        {},
        {},
        "hangs",
    ),
    (
        "N9",
        "one of another kind does not",
        "nccl",
        [
            [REDUCE, started("w", "broadcast", root=0), send(1), wait("w")],
            [REDUCE, recv(0), started("w", "broadcast", root=0), wait("w")],
        ],
        LAZY,
        {},
        "completes",
    ),
    (
        "N9",
        "a batch whose sides differ in their directions, over two calls",
        "nccl",
        [
            [batch("b", isend(1, None), irecv(1, None)), wait("b")],
            [irecv(0, "r"), isend(0, "s"), wait("s", "r")],
        ],
        EAGER,
        {},
        "undefined",
    ),
    (
        "N9",
        "what a gather has connected, a message need not",
        "nccl",
        gathered_then_sent(1, 0),
        EAGER,
        {"groups": OVERLAP},
        "completes",
    ),
    (
        "N9",
        "but the way back it must",
        "nccl",
        gathered_then_sent(0, 1),
        EAGER,
        {"groups": OVERLAP},
        "hangs",
    ),
    (
        "N9",
        "and lazily a single message has a communicator of its own",
        "nccl",
        gathered_then_sent(1, 0),
        LAZY,
        {"groups": OVERLAP},
        "hangs",
    ),
    (
        "N9",
        "an all_to_all has connected all: a batch may meet single calls",
        "nccl",
        [
            [coll("all_to_all_single", 2), batch("b", isend(1, None), irecv(1, None)), wait("b")],
            [coll("all_to_all_single", 2), irecv(0, "r"), isend(0, "s"), wait("s", "r")],
        ],
        EAGER,
        {},
        "completes",
    ),
    (
        "N9",
        "after another contact they pass",
        "nccl",
        [[send(1), *crossed()[0]], [recv(0), *crossed()[1]]],
        {},
        {},
        "completes",
    ),
    (
        "N10",
        "large ones do not run ahead",
        "nccl",
        [[send(1), *crossed(BIG)[0]], [recv(0), *crossed(BIG)[1]]],
        {},
        {},
        "hangs",
    ),
    (
        "N11",
        "a batch ends as a unit",
        "nccl",
        [
            [batch("b", isend(1, None, BIG), irecv(1, None)), wait("b"), {"op": "synchronize"}],
            [batch("b", irecv(0, None, BIG)), wait("b"), {"op": "synchronize"}],
        ],
        EAGER,
        {},
        "hangs",
    ),
    (
        "N12",
        "opposite order, blocking: one stream",
        "nccl",
        ORDERS,
        EAGER,
        {"groups": OVERLAP},
        "hangs",
    ),
    (
        "N12",
        "NCCL_LAUNCH_ORDER_IMPLICIT makes one order of all",
        "nccl",
        ASYNC_ORDERS,
        WARM | {"launch_order_implicit": True},
        {"groups": OVERLAP},
        "hangs",
    ),
    (
        "N13",
        "a dropped request changes nothing",
        "nccl",
        [[isend(1, None)], [pause(1), recv(0)]],
        {},
        {},
        "completes",
    ),
    (
        "N14",
        "a barrier stops the host",
        "nccl",
        [[BARRIER, send(2)], [pause(1)], [recv(0)]],
        EAGER,
        {},
        "hangs",
    ),
    ("M1", "small sends return at once", "mpi", crossed(), {}, {}, "completes"),
    ("M1", "large ones wait", "mpi", crossed(BIG), {}, {}, "hangs"),
    ("M2", "tags are true", "mpi", [[send(1, BIG, tag=1)], [recv(0, BIG, tag=2)]], {}, {}, "hangs"),
    (
        "M3",
        "one worker runs the collectives of a process",
        "mpi",
        ASYNC_ORDERS,
        {},
        {"groups": OVERLAP},
        "hangs",
    ),
    (
        "M3",
        "and holds the lock that messages need",
        "mpi",
        [[started("w"), send(1, BIG), wait("w")], [recv(0, BIG), REDUCE]],
        {},
        {},
        "hangs",
    ),
    ("M4", "no timeout", "mpi", LATE, SECOND, {}, "completes"),
    (
        "M4",
        "a dropped request ends the process",
        "mpi",
        [[isend(1, None)], [recv(0)]],
        {},
        {},
        "crashes",
    ),
    (
        "M4",
        "so does one that is never waited for",
        "mpi",
        [[isend(1, "w")], [recv(0)]],
        {},
        {},
        "crashes",
    ),
    (
        "M5",
        "new_group is collective over all",
        "mpi",
        [[group("g", 0, 1)], [group("g", 0, 1)], []],
        {},
        {},
        "hangs",
    ),
    (
        "M6",
        "dtypes that are not in its table",
        "mpi",
        both(coll("all_reduce", dtype="bfloat16")),
        {},
        {},
        "raises",
    ),
]


@pytest.mark.parametrize(
    ("rule", "says", "backend", "ranks", "options", "more", "outcome"),
    CASES,
    ids=[f"{c[0]} {c[1]}" for c in CASES],
)
def test_each_rule_holds_in_its_cases(
    rule: str,
    says: str,
    backend: str,
    ranks: Ranks,
    options: dict[str, Any],
    more: dict[str, Any],
    outcome: str,
) -> None:
    """The outcome is what the rule says."""
    assert under(backend, ranks, options, **more).outcome == outcome


def test_every_rule_has_a_case() -> None:
    wanted = {
        *(f"G{i}" for i in range(1, 15)),
        *(f"N{i}" for i in range(1, 15)),
        *(f"M{i}" for i in range(1, 7)),
    }
    assert {case[0] for case in CASES} == wanted


# --- calls that no program may make, and what each back end does with them (2.1, 2.2, 2.3) ---
@pytest.mark.parametrize(
    ("backend", "ranks", "outcome", "possible"),
    [
        ("gloo", [[send(2)], []], "hangs", ("crashes", "hangs")),
        ("nccl", [[send(2)], []], "hangs", ("hangs",)),
        ("mpi", [[send(2)], []], "raises", ("raises",)),
        ("gloo", [[send(0)], []], "raises", ("raises",)),
        ("gloo", both(coll("all_to_all_single", 5)), "wrong-data", ("wrong-data",)),
        ("nccl", both(coll("all_to_all_single", 5)), "raises", ("raises",)),
        ("gloo", [[irecv(1, "w"), wait("w"), wait("w")], [send(0)]], "hangs", ("hangs",)),
        ("mpi", [[irecv(1, "w"), wait("w"), wait("w")], [send(0)]], "completes", ("completes",)),
        ("nccl", [[irecv(1, "w"), wait("w"), wait("w")], [send(0)]], "completes", ("completes",)),
        ("gloo", [[started("w"), wait("w"), wait("w")], [REDUCE]], "completes", ("completes",)),
        ("gloo", [[coll("all_reduce", group="g")], []], "completes", ("completes",)),
        ("gloo", [[send(1, group="g")], []], "raises", ("raises",)),
        (
            "nccl",
            both(batch(None, isend(0, None), irecv(0, None)), n=1),
            "completes",
            ("completes",),
        ),
    ],
)
def test_invalid_calls_get_the_expected_finding(
    backend: str, ranks: Ranks, outcome: str, possible: tuple[str, ...]
) -> None:
    """A wrong partner, oneself, parts that do not come out even, a second wait, a group the caller
    is not in.
    """
    found = under(backend, ranks, groups={"g": [1]} if len(ranks) > 1 else {})
    assert (found.outcome, found.possible) == (outcome, possible)


def test_gloo_treats_uneven_all_to_all_parts_as_messages() -> None:
    """More than there is room for aborts, less leaves the tail."""

    def cut(ins: list[int], outs: list[int]) -> list[dict[str, Any]]:
        return [coll("all_to_all_single", sum(ins), in_splits=ins, out_splits=outs)]

    assert under("gloo", [cut([1, 3], [1, 2]), cut([3, 1], [3, 1])]).outcome == "crashes"
    assert under("gloo", [cut([1, 3], [1, 4]), cut([3, 1], [3, 1])]).outcome == "wrong-data"


# --- new_group (2.3) ---
ONE, TWO, REST = group("one", 0, 1), group("two", 2, 3), group("rest", 0, 1, 2, 3)


def test_groups_created_in_different_orders_mix_on_gloo() -> None:
    """Ranks 1 and 2 find each other under one name and go on; 0 and 3 never get through."""
    found = under("gloo", [*both(ONE, TWO), *both(TWO, ONE)])
    assert (found.outcome, found.ranks) == ("hangs", (0, 3))


def test_a_gloo_rank_that_skips_a_new_group_is_one_group_behind() -> None:
    assert under("gloo", [*both(ONE, REST), *both(REST)]).ranks == (0, 1, 2, 3)
    assert under("gloo", [*both(ONE), *both()]).outcome == "completes"
    local = group("one", 0, 1, use_local_synchronization=True)
    assert under("gloo", [*both(local, REST), *both(REST)]).outcome == "completes"


def test_ranks_that_skip_the_first_of_two_groups_are_lost_under_its_name_on_gloo() -> None:
    """Rank 0 creates only the second group, under the name that ranks 2 and 3 gave the first.

    A real run (torch 2.13) hangs on the same ranks.
    """
    first, second = group("first", 2, 3), group("second", 0, 2)
    use_first = coll("all_reduce", group="first")
    use_second = coll("all_reduce", group="second")
    found = under(
        "gloo",
        [
            [second, use_second],
            [second],
            [first, second, use_first, use_second],
            [first, second, use_first],
        ],
    )
    assert (found.outcome, found.ranks) == ("hangs", (0, 2, 3))


def test_a_group_with_inconsistent_members_hangs_at_first_use_on_nccl() -> None:
    """Made alone it does no harm under lazy init; under eager init all split the parent, or
    hang.
    """
    apart = [[group("g", 0, 1)], [group("g", 0, 1, 2)], [group("g", 0, 1, 2)]]
    assert under("nccl", apart, LAZY).outcome == "completes"
    used = [[*calls, coll("all_reduce", group="g")] for calls in apart]
    assert under("nccl", used, LAZY).outcome == "hangs"
    assert under("nccl", apart, EAGER).outcome == "undefined"
    two = [
        [group("g", *members), coll("all_reduce", group="g")]
        for members in ((0, 2), (1, 3), (0, 2), (1, 3))
    ]
    assert under("nccl", two, LAZY).outcome == "undefined"


def test_disjoint_groups_in_one_call_are_fine_on_mpi() -> None:
    assert under("mpi", [*both(group("a", 0, 1)), *both(group("b", 2, 3))]).outcome == "completes"
    assert (
        under("mpi", [*both(group("a", 0, 1)), *both(group("b", 1, 2, 3))]).outcome == "undefined"
    )


# --- what decides ---
def test_buffering_depends_on_the_limit_in_force() -> None:
    assert under("mpi", crossed()).flips_at_nbytes == 4096
    assert under("mpi", crossed(), {"eager_limit": 2}).outcome == "hangs"
    assert under("mpi", crossed(), {"eager_limit": 2}).flips_at_nbytes == 2
    assert under("nccl", crossed(BIG), WARM).flips_at_nbytes == 8 << 20
    assert under("gloo", crossed()).flips_at_nbytes is None
    assert under("mpi", [[recv(1)], [recv(0)]]).flips_at_nbytes is None
    assert under("nccl", both(REDUCE)).flips_at_nbytes is None


def test_both_ways_to_create_communicators_are_reported() -> None:
    ring = [[isend((r + 1) % 3, "s"), irecv((r - 1) % 3, "r"), wait("s", "r")] for r in range(3)]
    assert under("nccl", ring).variants == {"lazy": "hangs", "eager": "hangs"}
    apart = [[batch("b", isend(1 - r, None), irecv(1 - r, None)), wait("b")] for r in range(2)] + [
        []
    ]
    assert under("nccl", apart).variants == {"lazy": "hangs", "eager": "completes"}
    assert under("nccl", apart, EAGER).outcome == "completes"
    assert under("nccl", both(REDUCE)).variants == {"lazy": "completes", "eager": "completes"}
    assert under("gloo", ring).variants is None


def test_asynchronous_collectives_in_opposite_orders_may_hang_on_nccl() -> None:
    """N12: they complete if the device runs both at once."""
    found = under("nccl", ASYNC_ORDERS, WARM, groups=OVERLAP)
    assert (found.outcome, found.possible) == ("undefined", ("undefined", "hangs", "completes"))
    alike = [ASYNC_ORDERS[0], ASYNC_ORDERS[0]]
    assert under("nccl", alike, WARM, groups=OVERLAP).possible == ("completes",)


def test_a_wildcard_receive_may_starve_a_named_one() -> None:
    """The order of time says which end is expected; every order, what is possible."""
    early = [[send(1)], [pause(1), recv(None), recv(0)], [pause(2), send(1)]]
    found = under("gloo", early, {"stays_connected": True})
    assert (found.outcome, found.possible) == ("hangs", ("hangs", "completes"))
    late = [[pause(2), send(1)], [recv(None), recv(0)], [send(1)]]
    assert under("gloo", late).outcome == "completes"


def test_a_bounded_search_reports_its_bound() -> None:
    many = [[recv(None) for _ in range(6)], *([send(0), send(0)] for _ in range(3))]
    program = build_program(4, dict(enumerate(many)))
    assert backend_outcome(program, BACKEND_PROFILES["gloo"]).complete
    assert not backend_outcome(program, BACKEND_PROFILES["gloo"], max_states=3).complete
