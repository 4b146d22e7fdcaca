"""The profiles: each rule by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.ops.records import Buffer, Call, Group
from distsim.profiles import PROFILES, READINGS, Meeting
from distsim.profiles.gloo import parent

GLOO, NCCL, MPI = PROFILES["gloo"], PROFILES["nccl"], PROFILES["mpi"]
PAIR = Group(0, "world", (0, 1))


def call(op: str, dtype: str = "float32", reduce_op: str | None = None, rank: int = 0, numel: int = 4, **more: object) -> Call:
    buffer = (Buffer("x", 0, (numel,), dtype),)
    return replace(Call(op, rank, PAIR, peer=1 - rank, reduce_op=reduce_op, inputs=buffer, outputs=buffer), **more)  # type: ignore[arg-type]


def test_names_are_the_back_ends_and_the_readings() -> None:
    assert list(PROFILES) == ["gloo", "nccl", "mpi"]
    assert list(READINGS) == ["rendezvous", "early", "buffered"]
    assert all(name == profile.name and profile.about for name, profile in {**PROFILES, **READINGS}.items())


def test_broadcast_tree_of_gloo_links_every_rank_to_its_parent_and_children() -> None:
    """Need is mutual, and following parents leads every rank to the root; for 1 to 32 ranks."""
    for n in range(1, 33):
        root = n // 3
        needs = [GLOO.needs("broadcast", n, root, me) or frozenset() for me in range(n)]
        for me in range(n):
            assert all(me in needs[other] for other in needs[me]), (n, me)
            v = (me - root) % n
            if v:
                assert (parent(v) + root) % n in needs[me], (n, me)
                assert parent(v) < v
        assert sum(map(len, needs)) == 2 * (n - 1), n


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_gather_and_scatter_of_gloo_wait_for_the_root_alone(op: str) -> None:
    assert GLOO.needs(op, 4, 2, 0) == frozenset({2})
    assert GLOO.needs(op, 4, 2, 2) is None
    assert NCCL.needs(op, 4, 2, 0) is None


def test_sends_run_ahead_by_limit_and_by_credit() -> None:
    assert not GLOO.credit(0, 0, {})
    assert MPI.credit(4096, 10**9, {})
    assert not MPI.credit(4097, 0, {})
    assert MPI.credit(4097, 0, {"eager_limit": 5000})
    assert NCCL.credit(4 << 20, 0, {})
    assert not NCCL.credit(4 << 20, 1, {})
    assert not NCCL.credit(1, 0, {"buffsize": 0})


@pytest.mark.parametrize(("profile", "made", "text"), [
    ("gloo", call("all_reduce", "float8_e4m3fn", "sum"), "Invalid scalar type"),
    ("gloo", call("broadcast", "int16"), "Invalid scalar type"),
    ("gloo", call("send", "int16"), None),
    ("gloo", call("all_reduce", "float32", "band"), "Cannot use ReduceOp.BAND with non-integral dtype"),
    ("gloo", call("all_reduce", "int32", "avg"), "result type Float can't be cast to the desired output type Int"),
    ("gloo", call("all_reduce", "bfloat16", "avg"), None),
    ("gloo", call("all_reduce", "complex64", "product"), "all_reduce does not support RedOpType.PRODUCT on complex tensors"),
    ("gloo", call("recv", peer=None), None),
    ("nccl", call("recv", peer=None), "ProcessGroupNCCL does not support recvAnysource"),
    ("nccl", call("all_reduce", "int32", "bor"), "Cannot use ReduceOp.BOR with NCCL"),
    ("nccl", call("all_reduce", "int32", "avg"), None),
    ("nccl", call("all_reduce", "float8_e5m2", "sum"), None),
    ("mpi", call("all_reduce", "bfloat16", "sum"), "map::at"),
    ("mpi", call("all_reduce", "float32", "avg"), "map::at"),
    ("mpi", call("all_reduce", "float64", "max"), None),
    ("rendezvous", call("all_reduce", "float32", "band"), None),
])  # fmt: skip
def test_refusals_in_the_back_ends_own_words(profile: str, made: Call, text: str | None) -> None:
    assert {**PROFILES, **READINGS}[profile].refuse(made) == text


def meeting(fields: tuple[str, ...], *nbytes: int, op: str = "all_reduce", is_message: bool = False) -> Meeting:
    return Meeting(fields, tuple(call(op, rank=r, root=0) for r in range(len(nbytes))), nbytes, is_message)


def test_gloo_aborts_the_smaller_buffer_and_lets_equal_bytes_through() -> None:
    assert GLOO.mismatch(meeting(("numel",), 8, 4)).crash == (1,)
    assert GLOO.mismatch(meeting(("numel",), 4, 8, is_message=True)) == ("wrong-data", (), False)
    assert GLOO.mismatch(meeting(("numel",), 8, 4, is_message=True)).crash == (1,)
    assert GLOO.mismatch(meeting(("dtype",), 8, 8)).outcome == "wrong-data"
    assert GLOO.mismatch(meeting(("numel",), 4, 8, op="broadcast")).outcome == "wrong-data"
    assert GLOO.mismatch(meeting(("numel",), 8, 4, op="broadcast")).crash == (1,)


def test_nccl_leaves_other_sizes_and_kinds_undefined_and_hangs_on_another_root() -> None:
    assert NCCL.mismatch(meeting(("numel",), 8, 4)).outcome == "undefined"
    assert NCCL.mismatch(meeting(("op",), 8, 8)).outcome == "undefined"
    assert NCCL.mismatch(meeting(("reduce_op",), 8, 8)).outcome == "wrong-data"
    assert NCCL.mismatch(meeting(("root",), 8, 8)).hangs
