"""The cases of a lab that ran gloo (torch 2.13), as programs for the simulator, by the lab's names.

In the lab a step that fails is caught and the rank goes on; here a rank ends with its first
failure. So a case is told up to there. The lab's processes lived until all ranks were done. Every case begins with a barrier of all ranks; the group's
timeout is 3 s unless the case says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distsim.program.from_calls import build_program
from distsim.program.model import Program, RankFault

Calls = list[dict[str, Any]]
SECOND = 10**9
LARGE = 16 * 1024 * 1024
SIZES = {"small": 1, "64KB": 16384, "1MB": 262144, "large": LARGE}


@dataclass(frozen=True)
class Case:
    """``wrong``: all ranks end, some with wrong data. ``either``: ranks of which the lab saw now
    this end, now that.
    """

    ranks: list[Calls]
    wrong: bool = False
    timeout_s: float = 3
    groups: dict[str, list[int]] = field(default_factory=dict)
    faults: tuple[RankFault, ...] = ()
    either: frozenset[int] = frozenset()

    def program(self) -> Program:
        options = {"timeout_ns": int(self.timeout_s * SECOND), "stays_connected": True}
        return build_program(
            len(self.ranks),
            dict(enumerate(self.ranks)),
            groups=self.groups,
            options=options,
            faults=self.faults,
        )


# --- calls ---
def p2p(op: str, peer: int | None, numel: int = 1, **more: Any) -> dict[str, Any]:
    return {"op": op, "peer": peer, "numel": numel, **more}


def send(peer: int, numel: int = 1, **more: Any) -> dict[str, Any]:
    return p2p("send", peer, numel, **more)


def recv(peer: int | None, numel: int = 1, **more: Any) -> dict[str, Any]:
    return p2p("recv", peer, numel, **more)


def isend(peer: int, handle: str | None, numel: int = 1, **more: Any) -> dict[str, Any]:
    return p2p("isend", peer, numel, **more, **({"handle": handle} if handle else {}))


def irecv(peer: int | None, handle: str | None, numel: int = 1, **more: Any) -> dict[str, Any]:
    return p2p("irecv", peer, numel, **more, **({"handle": handle} if handle else {}))


def wait(*handles: str) -> dict[str, Any]:
    return {"op": "wait", "handles": list(handles)}


def pause(seconds: float) -> dict[str, Any]:
    return {"op": "sleep", "time_ns": int(seconds * SECOND)}


def coll(op: str, numel: int = 4, **more: Any) -> dict[str, Any]:
    return {"op": op, "numel": numel, **more}


def batch(handle: str | None, *ops: dict[str, Any]) -> dict[str, Any]:
    return {"op": "batch_isend_irecv", "ops": list(ops), **({"handle": handle} if handle else {})}


def group(name: str, *ranks: int, timeout_s: float | None = 3, **more: Any) -> dict[str, Any]:
    timeout = {} if timeout_s is None else {"timeout_ns": int(timeout_s * SECOND)}
    return {"op": "new_group", "name": name, "ranks": list(ranks), **timeout, **more}


REDUCE, BARRIER = coll("all_reduce"), coll("barrier")


def both(*calls: dict[str, Any], n: int = 2) -> list[Calls]:
    return [list(calls)] * n


# --- messages ---
def messages() -> Iterator[tuple[str, Case]]:
    for label, n in SIZES.items():
        yield f"p2p.send_no_recv.{label}", Case([[send(1, n)], []])
        yield (
            f"p2p.send_late_recv.{label}",
            Case([[send(1, n)], [pause(2), recv(0, n)]], timeout_s=8),
        )
        yield (
            f"p2p.head_to_head_send_send.{label}",
            Case([[send(1, n), recv(1, n)], [send(0, n), recv(0, n)]]),
        )
        ring = [[send((r + 1) % 4, n), recv((r - 1) % 4, n)] for r in range(4)]
        yield f"p2p.ring_send_then_recv.{label}", Case(ring)
    yield "p2p.head_to_head_recv_recv", Case([[recv(1), send(1)], [recv(0), send(0)]])
    yield "p2p.buffer_reuse_after_send", Case([[send(1, 4)], [pause(1), recv(0, 4)]])
    yield "p2p.self_send", Case([[send(0)], []])
    for label, call in (
        ("send_dst7", send(7)),
        ("send_dst-1", send(-1)),
        ("recv_src7", recv(7)),
        ("recv_src-1", recv(-1)),
        ("isend_dst2", isend(2, "w")),
        ("irecv_src2", irecv(2, "w")),
        ("send_group_dst5", send(5)),
    ):
        yield (
            f"p2p.out_of_range.{label}",
            Case([[call], []], either=frozenset({0}) if "7" in label else frozenset()),
        )
    yield "p2p.bad_args", Case([[send(1, 0, tag=99), send(1, tag=-1)], [recv(0, 0, tag=99)]])
    yield "p2p.set_pg_timeout_later", Case([[recv(1)], []], timeout_s=6)
    yield "p2p.wait_timeout_arg", Case([[irecv(1, "w"), wait("w")], [pause(6)]])
    yield (
        "p2p.timeout_then_usable",
        Case(
            [
                [recv(1), pause(2), recv(2), send(1)],
                [pause(5), send(2), recv(0)],
                [pause(5), send(0), recv(1)],
            ]
        ),
    )
    yield (
        "p2p.work_dropped_irecv",
        Case([[pause(0.5), send(1)], [irecv(0, None), pause(1.5), recv(0)]]),
    )
    yield "p2p.isend_kept_not_waited", Case([[isend(1, "w"), pause(2)], [pause(1), recv(0)]])
    yield (
        "p2p.isend_dropped_recv_already_posted",
        Case([[pause(1), isend(1, None, 1 << 20), pause(1)], [recv(0, 1 << 20)]]),
    )
    yield (
        "p2p.isend_tensor_dropped_work_kept",
        Case([[isend(1, "w", 1 << 20), pause(2), wait("w")], [pause(1), recv(0, 1 << 20)]]),
    )
    yield from message_orders()
    yield from message_sizes()


def message_orders() -> Iterator[tuple[str, Case]]:
    three = [isend(1, f"w{i}", tag=i) for i in range(3)]
    open_ = [irecv(0, f"w{i}", tag=i) for i in range(3)]
    yield (
        "p2p.isend_irecv_wait_other_order",
        Case(
            [
                [*three, wait("w2"), wait("w0"), wait("w1")],
                [*open_, wait("w1"), wait("w2"), wait("w0")],
            ]
        ),
    )
    swapped = [recv(0, tag=2), recv(0, tag=1)]
    yield "p2p.tags_out_of_order_blocking", Case([[send(1, tag=1), send(1, tag=2)], swapped])
    yield (
        "p2p.tags_out_of_order_isend",
        Case([[isend(1, "a", tag=1), isend(1, "b", tag=2), wait("a"), wait("b")], swapped]),
    )
    yield "p2p.tag_mismatch", Case([[send(1, tag=1)], [recv(0, tag=2)]])
    eight = [f"w{i}" for i in range(8)]
    yield (
        "p2p.fifo_same_tag",
        Case(
            [
                [*(isend(1, w, tag=5) for w in eight), wait(*eight)],
                [pause(0.5), *(irecv(0, w, tag=5) for w in eight), wait(*reversed(eight))],
            ]
        ),
    )
    yield "p2p.isend_not_waited", Case([[isend(1, None), pause(1)], [recv(0)]])
    yield (
        "p2p.irecv_not_waited_poll_is_completed",
        Case([[pause(1), send(1), pause(2)], [irecv(0, "w"), pause(2), wait("w"), wait("w")]]),
    )
    yield (
        "p2p.any_source",
        Case([[recv(None), recv(None)], [pause(1), send(0)], [pause(0.5), send(0)]]),
    )
    yield (
        "p2p.any_source_irecv",
        Case([[irecv(None, "w"), wait("w"), recv(None, tag=9)], [], [send(0), send(0, tag=8)]]),
    )
    yield (
        "p2p.any_source_both_waiting",
        Case(
            [
                [pause(0.1), recv(None), recv(None), BARRIER],
                [pause(0.02), send(0), BARRIER],
                [pause(0.04), send(0), BARRIER],
            ]
        ),
    )
    yield (
        "p2p.any_source_vs_posted_specific",
        Case(
            [
                [irecv(None, "any"), irecv(1, "one"), wait("any"), wait("one")],
                [pause(0.3), send(0), send(0)],
            ]
        ),
    )
    yield (
        "p2p.tag_collides_with_collective",
        Case([[isend(1, "w"), REDUCE, wait("w")], [REDUCE, recv(0)]]),
    )
    yield (
        "p2p.send_while_peer_in_collective",
        Case([[send(1, LARGE), REDUCE], [REDUCE, recv(0, LARGE)]]),
    )
    for n, label in ((1, "symmetric"), (LARGE, "large_symmetric")):
        yield (
            f"batch.{label}",
            Case(
                [
                    [batch("w", isend(1 - r, None, n), irecv(1 - r, None, n)), wait("w")]
                    for r in range(2)
                ]
            ),
        )
    two_one = (
        [batch("w", isend(1, None), isend(1, None)), wait("w")],
        [batch("w", irecv(0, None)), wait("w")],
    )
    yield "batch.mismatched_count", Case(list(two_one))
    yield (
        "batch.recv_too_many",
        Case(
            [
                [batch("w", isend(1, None)), wait("w")],
                [batch("w", irecv(0, None), irecv(0, None)), wait("w")],
            ]
        ),
    )


def message_sizes() -> Iterator[tuple[str, Case]]:
    for label, a, b in (
        ("recv_larger", 4, 8),
        ("recv_smaller", 8, 4),
        ("recv_larger_big", 1 << 18, 1 << 19),
        ("recv_smaller_big", 1 << 19, 1 << 18),
    ):
        for late, name in ((0.0, "size_mismatch"), (0.7, "size_mismatch_posted_first")):
            yield (
                f"p2p.{name}.{label}",
                Case([[pause(late), send(1, a), BARRIER], [recv(0, b), BARRIER]], wrong=a < b),
            )
    yield (
        "p2p.dtype_mismatch_same_bytes",
        Case([[send(1, 2, dtype="int32")], [recv(0, 2)]], wrong=True),
    )
    yield "p2p.dtype_mismatch_other_bytes", Case([[send(1, 2, dtype="float64")], [recv(0, 2)]])
    yield "p2p.shape_mismatch_same_numel", Case([[send(1, 6)], [recv(0, 6)]])
    dtypes = (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "float8_e4m3fn",
    )
    yield (
        "p2p.dtypes_all",
        Case([[send(1, 2, dtype=d) for d in dtypes], [recv(0, 2, dtype=d) for d in dtypes]]),
    )


# --- collectives ---
def collectives() -> Iterator[tuple[str, Case]]:
    yield "coll.one_missing", Case([[REDUCE, REDUCE], [REDUCE, REDUCE], []])
    for label, call, missing in (
        ("broadcast0", coll("broadcast", root=0), 2),
        ("broadcast_root_missing", coll("broadcast", root=0), 0),
        ("reduce0", coll("reduce", root=0), 2),
        ("reduce_nonroot_missing", coll("reduce", root=0), 2),
        ("gather0", coll("gather", root=0), 2),
        ("scatter_root_missing", coll("scatter", root=0), 0),
        ("all_gather", coll("all_gather"), 2),
        ("barrier", BARRIER, 2),
        ("all_to_all_single", coll("all_to_all_single", 3), 2),
        ("reduce_scatter_tensor", coll("reduce_scatter_tensor", 1), 2),
        ("monitored_barrier", coll("monitored_barrier"), 2),
    ):
        yield f"coll.one_missing.{label}", Case([[] if r == missing else [call] for r in range(3)])
    yield "coll.monitored_barrier_missing", Case([*both(coll("monitored_barrier")), []])
    yield "coll.monitored_barrier_root_missing", Case([[], *both(coll("monitored_barrier"))])
    yield (
        "coll.order_swapped_other_size",
        Case([[coll("all_reduce", n) for n in order] for order in ((4, 100), (100, 4))]),
    )
    kinds = {
        "all_reduce": REDUCE,
        "broadcast": coll("broadcast", root=0),
        "barrier": BARRIER,
        "all_gather": coll("all_gather"),
        "reduce": coll("reduce", root=0),
        "all_to_all": coll("all_to_all_single"),
        "gather": coll("gather", root=0),
        "reduce_scatter": coll("reduce_scatter_tensor", 2),
    }
    for a, b in (
        ("all_reduce", "broadcast"),
        ("broadcast", "all_reduce"),
        ("all_reduce", "barrier"),
        ("all_reduce", "all_gather"),
        ("all_reduce", "reduce"),
        ("all_gather", "all_to_all"),
        ("all_reduce", "reduce_scatter"),
        ("broadcast", "barrier"),
        ("broadcast", "gather"),
        ("reduce", "gather"),
    ):
        yield (
            f"coll.kind.{a}_vs_{b}",
            Case([[kinds[a], coll("all_reduce", 2)], [kinds[b], coll("all_reduce", 2)]]),
        )
    yield from collective_contents()
    yield from asynchronous()


def collective_contents() -> Iterator[tuple[str, Case]]:
    for label, a, b in (
        ("4_8", 4, 8),
        ("8_4", 8, 4),
        ("1k_2k", 1000, 2000),
        ("big", 1 << 18, 1 << 19),
    ):
        after = coll("all_reduce", 2)
        yield (
            f"coll.size.all_reduce.{label}",
            Case([[coll("all_reduce", n), after] for n in (a, b)]),
        )
        yield (
            f"coll.size.broadcast.{label}",
            Case([[coll("broadcast", n, root=0)] for n in (a, b)], wrong=a < b),
        )
        yield (
            f"coll.size.all_gather.{label}",
            Case([[coll("all_gather", n)] for n in (a, b)], either=frozenset({0, 1})),
        )
        yield f"coll.size.reduce.{label}", Case([[coll("reduce", n, root=0)] for n in (a, b)])
        yield (
            f"coll.size.reduce_scatter_tensor.{label}",
            Case([[coll("reduce_scatter_tensor", n // 2)] for n in (a, b)]),
        )
    yield "coll.size.all_reduce_n3", Case([[coll("all_reduce", n)] for n in (4, 4, 8)])
    for label, one, other in (
        ("f32_i32", "float32", "int32"),
        ("f32_f64", "float32", "float64"),
        ("f16_bf16", "float16", "bfloat16"),
    ):
        yield (
            f"coll.dtype.all_reduce_{label}",
            Case([[coll("all_reduce", dtype=d)] for d in (one, other)], wrong=label != "f32_f64"),
        )
    ops = (("sum", "max"), ("product", "sum", "sum"))
    yield (
        "coll.redop_differs",
        Case([[coll("all_reduce", reduce_op=op)] for op in ops[0]], wrong=True),
    )
    yield (
        "coll.redop_differs_n3",
        Case([[coll("all_reduce", 7, reduce_op=op)] for op in ops[1]], wrong=True),
    )
    yield (
        "coll.root_differs.broadcast",
        Case([[coll("broadcast", root=r), coll("broadcast", root=1 - r)] for r in range(2)]),
    )
    yield (
        "coll.root_differs.broadcast_crossed",
        Case([[coll("broadcast", root=1 - r)] for r in range(2)]),
    )
    yield "coll.root_differs.reduce", Case([[coll("reduce", root=r)] for r in range(2)])
    uneven = (
        [([1, 3], [1, 2]), ([2, 4], [3, 4])],
        [([1, 3], [1, 3]), ([1, 3], [3, 1])],
        [([1, 0], [1, 1]), ([1, 0], [0, 0])],
    )
    for label, splits in zip(
        ("coll.a2a_uneven_splits", "coll.a2a_split_mismatch", "more.a2a_zero_splits"),
        uneven,
        strict=True,
    ):
        yield (
            label,
            Case(
                [[coll("all_to_all_single", sum(i), in_splits=i, out_splits=o)] for i, o in splits]
            ),
        )
    yield (
        "list.scatter_gather",
        Case(both(coll("scatter", 2, root=0), coll("gather", 2, root=1), n=3)),
    )
    yield (
        "late.avg_on_ints_and_bool_sum",
        Case(both(coll("all_reduce", 2, dtype="int64", reduce_op="avg"))),
    )
    yield (
        "detail.redop",
        Case([[coll("all_reduce", reduce_op=op)] for op in ("sum", "max")], wrong=True),
    )
    yield "detail.root", Case([[coll("broadcast", root=r)] for r in range(2)])
    yield "detail.p2p_no_recv", Case([[recv(1)], []])
    yield (
        "detail.p2p_small_send",
        Case([[send(1), isend(1, "w"), wait("w")], [pause(1.5), recv(0), recv(0)]], timeout_s=6),
    )


def asynchronous() -> Iterator[tuple[str, Case]]:
    def started(handle: str, op: str = "all_reduce", **more: Any) -> dict[str, Any]:
        return coll(op, **{"async": True, "handle": handle, **more})

    ab, ba = ("A", "B"), ("B", "A")
    groups = {"A": [0, 1], "B": [0, 1, 2]}
    in_group = {name: coll("all_reduce", group=name) for name in groups}
    yield (
        "coll.groups_overlap_other_order",
        Case(
            [[in_group[g] for g in ab], [in_group[g] for g in ba], [in_group["B"]]], groups=groups
        ),
    )
    start = {name: started(name, group=name) for name in groups}
    yield (
        "coll.groups_overlap_other_order_async",
        Case(
            [
                [start["A"], start["B"], wait("A"), wait("B")],
                [start["B"], start["A"], wait("A"), wait("B")],
                [start["B"], wait("B")],
            ],
            groups=groups,
        ),
    )
    four = [started(f"w{i}") for i in range(4)]
    yield (
        "coll.async_wait_out_of_order",
        Case([[*four, *(wait(f"w{i}") for i in order)] for order in ((3, 1, 0, 2), (0, 2, 3, 1))]),
    )
    yield "coll.async_never_waited", Case(both(started("w"), pause(1)))
    yield (
        "coll.async_missing_never_waited_then_next",
        Case([[started("w"), coll("broadcast", root=0), wait("w")], [coll("broadcast", root=0)]]),
    )
    yield "coll.wait_timeout_arg", Case([[started("w"), wait("w")], []])
    lone = [started(f"w{i}", group="A") for i in range(4)]
    yield (
        "coll.many_async_more_than_threads",
        Case([[*lone, REDUCE], [REDUCE]], groups={"A": [0, 1]}),
    )
    yield "coll.after_failure_group_usable", Case([[REDUCE, REDUCE], [pause(4.5), REDUCE]])
    yield "coll.after_p2p_timeout_group_usable", Case([[recv(1), REDUCE], [pause(4.5), REDUCE]])
    yield "coll.set_pg_timeout_later", Case([[REDUCE], []], timeout_s=2)
    for k in (1, 2, 3, 5):
        blocked = [
            *(started(f"b{i}", "barrier") for i in range(k)),
            started("x", "broadcast", root=0),
            wait("x"),
        ]
        yield f"more.worker_threads.{k}_blocked", Case([blocked, blocked, []])
    yield "more.destroy_with_pending", Case([[started("w"), {"op": "destroy_process_group"}], []])
    yield "more.collective_rank_late_then_peer_timeout", Case([[REDUCE], [pause(4), REDUCE]])
    yield "late.all_reduce_4", Case([*both(REDUCE, n=3), [pause(1), REDUCE]], timeout_s=8)
    rows = [
        coll("gather", root=0),
        coll("scatter", root=0),
        coll("reduce", root=0),
        coll("all_gather"),
        coll("all_to_all_single"),
        BARRIER,
    ]
    yield "late.gather_scatter_reduce", Case([*both(*rows, n=3), [pause(0.7), *rows]], timeout_s=8)
    yield (
        "late.root_late",
        Case(
            [
                [pause(0.7), coll("broadcast", root=0), *rows[:3]],
                *both(coll("broadcast", root=0), *rows[:3], n=3),
            ]
        ),
    )
    tree = [coll("broadcast", n, root=0) for n in (4, 1 << 22)]
    yield (
        "late.broadcast_root_returns_before_all",
        Case([*both(*tree, n=3), [pause(1), *tree]], timeout_s=8),
    )
    on_g = coll("all_reduce", group="g")
    yield (
        "late.two_groups_one_dies",
        Case(
            [
                [group("g", 0, 1, timeout_s=8), started("w"), on_g, REDUCE],
                [group("g", 0, 1, timeout_s=8), pause(4), on_g, REDUCE],
            ]
        ),
    )
    yield (
        "late.irecv_before_dies_with_collective_timeout",
        Case([[irecv(1, "w"), REDUCE, wait("w")], [pause(4), send(0)]]),
    )


# --- groups, and ranks that end ---
def groups_and_ends() -> Iterator[tuple[str, Case]]:
    def on(name: str) -> dict[str, Any]:
        return coll("all_reduce", 2, group=name)

    pair, rest = group("g", 0, 1), group("h", 0, 1, 2)
    yield (
        "group.members_only_call",
        Case(
            [
                [pair, on("g"), rest, on("h")],
                [pair, on("g"), rest, on("h")],
                [pause(0.5), rest, on("h")],
            ]
        ),
    )
    local = group("g", 0, 1, use_local_synchronization=True)
    yield (
        "group.members_only_local_sync",
        Case([[local, on("g"), rest, on("h")], [local, on("g"), rest, on("h")], [rest, on("h")]]),
    )
    low, high = group("low", 0, 1), group("high", 2, 3)
    yield "group.order_differs", Case([*both(low, high, on("low")), *both(high, low, on("high"))])
    one, two = group("a", 0, 1), group("b", 1, 2)
    yield (
        "group.order_differs_overlapping",
        Case([[one, two, on("a")], [two, one, on("a"), on("b")], [one, two, on("b")]]),
    )
    yield "group.ranks_differ", Case([[pair], [rest], [pair]])
    sub = {"g": [1, 3]}
    outsider = [
        on("g"),
        coll("barrier", group="g"),
        isend(1, None, group="g"),
        coll("broadcast", root=1, group="g"),
        send(1, group="g"),
    ]
    member = [
        coll("broadcast", 2, root=3, group="g"),
        coll("broadcast", 2, root=1, group="g"),
        coll("broadcast", 2, root=0, group="g"),
    ]
    yield "group.rank_args", Case([outsider, member, outsider, member], groups=sub)
    yield "group.unsorted_ranks", Case(both(group("g", 2, 0), group("h", 0, 0, 1), n=3))
    yield "group.p2p_between_groups", Case([[send(1)], [recv(0, group="g")]], groups={"g": [0, 1]})
    slow = [group("g", 0, 1, timeout_s=None), pause(5), on("g")]
    yield "more.new_group_timeout_inherits", Case([[slow[0], on("g")], slow], timeout_s=2)
    leave = {"op": "exit", "code": 3}
    yield "fail.exit_early", Case([*both(pause(1), REDUCE), [pause(0.5), leave]], timeout_s=6)
    yield "fail.clean_return_early", Case([*both(pause(1), REDUCE), []], timeout_s=6)
    at = int(1.5 * SECOND)
    killed = (RankFault(2, "kill", at_ns=at),)
    dying = [pause(0.5), REDUCE]
    yield (
        "fail.sigkill_during_allreduce",
        Case([dying, dying, [pause(9), REDUCE]], timeout_s=6, faults=killed),
    )
    ring = [pause(0.5), coll("all_reduce", 1 << 20)]
    yield (
        "fail.sigkill_n4_ring",
        Case(
            [ring, ring, ring, [pause(9), *ring]],
            timeout_s=6,
            faults=(RankFault(3, "kill", at_ns=at),),
        ),
    )
    yield (
        "fail.sigkill_while_others_recv",
        Case([[recv(2)], [recv(0)], [pause(9)]], timeout_s=6, faults=killed),
    )
    yield "fail.send_to_dead", Case([[pause(1), send(1)], [{"op": "exit", "code": 0}]], timeout_s=6)
    yield (
        "fail.exit_without_destroy_pending",
        Case([[send(1, 4)], [pause(1), recv(0, 4)]], timeout_s=6),
    )
    yield (
        "fail.any_source_dead",
        Case(
            [[pause(0.5), recv(None)], [pause(1.5), send(0)], [{"op": "exit", "code": 0}]],
            timeout_s=6,
        ),
    )
    yield "init.too_few", Case([[], [], []], faults=(RankFault(2, "absent"),))


CASES: dict[str, Case] = {**dict(messages()), **dict(collectives()), **dict(groups_and_ends())}

#: The cases of the lab that are no programs here, and why.
LEFT_OUT: dict[str, str] = {
    "batch.errors": "wrong Python arguments; a file cannot write them",
    "coll.objects": "Python objects: lengths that depend on values",
    "coll.order_swapped_same_size": "equal shapes in another order: a finding about names, not a rule of the backend",
    "coll.async_issue_order_differs_same_size": "as coll.order_swapped_same_size",
    "detail.order_swapped_same": "as coll.order_swapped_same_size",
    "coll.size.all_gather_per_rank_true_sizes": "gloo rejects a list of different sizes with a message; here it is a size mismatch",
    "list.errors_local": "wrong Python arguments; those that a file can contain are rejected before the run",
    "more.coalescing": "covered by test_ops_gloo.py; there is no step with `device=`",
    "more.inference_of_device_meta_fake": "a file cannot contain meta tensors",
    "more.lazy_init": "TORCH_GLOO_LAZY_INIT is not modelled; two different results were observed",
    "more.uneven_reduce_scatter": "distsim has no reduce_scatter with a list of different sizes",
    "p2p.buffer_reuse_isend_not_waited": "a race on a buffer: a verdict on every backend",
    "detail.dtype": "TORCH_DISTRIBUTED_DEBUG=DETAIL is a checker in front of the backend and not modelled",
    "detail.kind.all_reduce_vs_all_gather": "as detail.dtype",
    "detail.kind.all_reduce_vs_barrier": "as detail.dtype",
    "detail.kind.all_reduce_vs_broadcast": "as detail.dtype",
    "detail.one_missing": "as detail.dtype",
    "detail.seqnum_skew": "as detail.dtype",
    "detail.shape_same_numel": "as detail.dtype",
    "detail.size": "as detail.dtype",
    "init.default_timeout_and_config": "not a program; default timeouts are data of the profiles",
    "init.no_master_addr": "the environment of a launch is not part of a simulation",
    "init.same_rank_twice": "ranks of a scenario are unique",
    "init.twice": "rejected as an invalid call before the run",
}
