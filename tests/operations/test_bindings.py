"""Who sends to whom inside gloo's collectives, the work of kernels, and one-sided accesses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import pytest

from distsim.common.expressions import parse_expression
from distsim.common.field_parsing import FieldErrors
from distsim.operations.core.backend_bindings import (
    gather_route,
    needs_only_root,
    reduce_route,
    scatter_route,
    tree_route,
)
from distsim.operations.core.kernel_work import KernelWorkEntry, WorkField
from distsim.operations.core.operation_base import MemberRoute
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.operations.one_sided import FIRST_SIGNAL_TAG, is_signal, tag_text
from distsim.operations.registry import OPERATIONS

Route = Callable[[ResolvedCall, int, int], MemberRoute]
WORLD = RankGroup(0, "world", (0, 1, 2, 3))


def buffer(*shape: int, dtype: str = "float32") -> TensorBuffer:
    return TensorBuffer("x", 0, shape, dtype)


def routes(route: Route, n: int, root: int, numel: int = 1000) -> dict[int, MemberRoute]:
    group = RankGroup(0, "g", tuple(range(10, 10 + n)))
    call = ResolvedCall(op="reduce", rank=10, group=group, inputs=(buffer(numel),))
    return {me: route(call, root, me) for me in range(n)}


@pytest.mark.parametrize("route", [tree_route, gather_route, scatter_route, reduce_route])
@pytest.mark.parametrize("n", range(1, 10))
def test_each_message_of_a_route_has_a_sender_and_a_receiver(route: Route, n: int) -> None:
    for root in range(n):
        members = routes(route, n, root)
        sent = {(me, to) for me, one in members.items() for to in one.sends}
        received = {(sender, me) for me, one in members.items() for sender in one.receives}

        assert sent == received
        assert all(0 <= to < n and to != me for me, to in sent)
        assert {one.ring for one in members.values()} == {route is reduce_route}


@pytest.mark.parametrize("n", range(1, 18))
def test_a_tree_reaches_each_member_once_in_logarithmic_depth(n: int) -> None:
    for root in range(n):
        members = routes(tree_route, n, root)
        depth = {root: 0}
        reached = [root]
        for me in reached:
            for child in members[me].sends:
                assert child not in depth
                depth[child] = depth[me] + 1
                reached.append(child)
        assert sorted(reached) == list(range(n))
        assert max(depth.values()) <= (n - 1).bit_length()
        assert not members[root].receives


def test_gather_and_scatter_go_directly_and_only_the_root_needs_all() -> None:
    for root in range(4):
        others = frozenset(range(4)) - {root}
        assert routes(gather_route, 4, root)[root].receives == others
        assert routes(scatter_route, 4, root)[root].sends == others
        needed = [needs_only_root(4, root, me) for me in range(4)]
        assert needed == [None if me == root else frozenset({root}) for me in range(4)]


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 7, 10, 11, 600_000, 10_000_000])
def test_the_owners_of_chunks_are_those_that_the_elements_are_dealt_to(n: int, numel: int) -> None:
    """Segments of at most 1 MiB are dealt out in equal numbers, at least two for each rank."""
    segment = min(ceil(numel / (2 * n)), (1 << 20) // 4)
    owners = set()
    if numel:
        each = ceil(max(ceil(numel / segment), 2 * n) / n)
        owners = {first // segment // each for first in range(0, numel, segment)}
    members = routes(reduce_route, n, 0, numel)

    assert {me for me in range(1, n) if members[me].sends} == owners - {0}


# --- work of kernels ---
(WORK,) = (one for one in WorkField.__metadata__)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("written", "entry"),
    [
        ({"flops": "2 TFLOP"}, KernelWorkEntry(2e12)),
        ({"bytes": "3 MiB"}, KernelWorkEntry(0.0, 3 << 20)),
        ({"flops": "1 GFLOP", "bytes": "5 B", "kernels": 7}, KernelWorkEntry(1e9, 5, 7)),
        ({"bytes": "1 B", "dtype": "bfloat16"}, KernelWorkEntry(0.0, 1, 1, "bfloat16")),
        ({"bytes": "0 B"}, KernelWorkEntry()),
    ],
)
def test_an_entry_of_work_is_read_and_written_back(
    written: dict[str, object], entry: KernelWorkEntry
) -> None:
    assert WORK.func([written, entry]) == (entry, entry)
    assert WORK.write((entry,)) == [written]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (3, "expected a mapping {flops, bytes, kernels, dtype}, found 3"),
        ({}, "expected `flops`, `bytes` or both, found neither"),
        ({"kernels": 2}, "expected `flops`, `bytes` or both, found neither"),
        ({"flop": 1}, "unknown key flop; known keys: flops, bytes, kernels, dtype; did you mean"),
        (
            {"bytes": "1 B", "kernels": 0},
            "expected a number of kernels from 1 to 1000000000, found 0",
        ),
        (
            {"bytes": "1 B", "kernels": True},
            "expected a number of kernels from 1 to 1000000000, found",
        ),
        ({"bytes": "1 B", "kernels": 10**9 + 1}, "expected a number of kernels"),
    ],
)
def test_a_wrong_entry_of_work_says_what_is_expected(written: object, said: str) -> None:
    with pytest.raises(FieldErrors) as error:
        WORK.func([{"bytes": "1 B", "kernels": 10**9}, written])

    assert str(error.value).startswith(said)
    assert error.value.errors[0].path[0] == 1


def test_work_may_be_an_expression() -> None:
    (entry,) = WORK.func([{"flops": "rank * 2"}])

    assert entry.flops == parse_expression("rank * 2")


# --- messages, signals and accesses ---
def test_a_signal_is_distinguished_from_a_message_by_its_tag() -> None:
    tags = [0, 7, FIRST_SIGNAL_TAG - 1, FIRST_SIGNAL_TAG, FIRST_SIGNAL_TAG + 3]

    assert [is_signal(tag) for tag in tags] == [False, False, False, True, True]
    assert [tag_text(tag) for tag in tags[:2] + tags[3:]] == ["", "tag 7", "channel 0", "channel 3"]


@pytest.mark.parametrize(
    ("op", "parties"),
    [
        ("send", (2, 0)),
        ("isend", (2, 0)),
        ("recv", (0, 2)),
        ("put", (2, 0)),
        ("get", (2, 0)),
        ("put_signal", (2, 0)),
        ("wait_signal", (0, 2)),
    ],
)
def test_a_pair_of_ranks_takes_part_unless_the_peer_is_open_or_invalid(
    op: str, parties: tuple[int, int]
) -> None:
    row = OPERATIONS[op]
    tag = FIRST_SIGNAL_TAG if row.signals else 0
    buffers = () if row.signals else (buffer(4),)
    call = ResolvedCall(
        op=op, rank=2, group=WORLD, peer=0, tag=tag, inputs=buffers, outputs=buffers
    )

    assert row.parties(call) == parties
    assert row.faults(call) is None
    assert "9" in (row.faults(replace(call, peer=9)) or "")
    assert row.faults(replace(call, peer=2))
    assert row.faults(replace(call, group=RankGroup(1, "g", (0, 1))))
    assert row.nbytes(call) == (4 if row.signals else 16)
    if not row.signals:
        assert row.parties(replace(call, peer=None)) == (2,)


def test_an_access_needs_buffers_of_one_size_and_type() -> None:
    call = ResolvedCall(
        op="put", rank=2, group=WORLD, peer=0, inputs=(buffer(4),), outputs=(buffer(2, 2),)
    )

    assert OPERATIONS["put"].faults(call) is None
    for other in (buffer(5), buffer(4, dtype="int32")):
        fault = OPERATIONS["put"].faults(replace(call, outputs=(other,)))
        assert fault is not None
        assert fault.startswith("put reads 4 float32 elements of x, but x has ")


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        ((), "the new group g has no ranks"),
        ((1, 1), "ranks [1, 1] of the new group g list a rank twice"),
        ((3, 4), "rank 4 of the new group g is outside the world"),
        ((3, 0), None),
    ],
)
def test_a_new_group_needs_different_ranks_of_the_world(
    ranks: tuple[int, ...], fault: str | None
) -> None:
    row = OPERATIONS["new_group"]
    call = ResolvedCall(op="new_group", rank=0, group=WORLD, name="g", ranks=ranks)

    assert row.faults(call) == fault
    assert row.parties(call) == (0, 1, 2, 3)
    assert row.parties(replace(call, local_sync=True)) == ranks
    assert row.agreement(call)["ranks"] == tuple(sorted(ranks))
