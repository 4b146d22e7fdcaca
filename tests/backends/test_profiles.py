"""The profiles: each rule by itself."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import distsim
from distsim.backends import (
    BACKEND_PROFILES,
    CONTRACT_READINGS,
    SUPPORT_BY_BACKEND,
    MismatchedCalls,
)
from distsim.operations.core.algorithms import binomial_parent
from distsim.operations.core.operation_base import BackendBinding
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.scenario.format.models.sections import ProcessGroupOptions
from tests.support.source_trees import MODULES, PACKAGE, nodes

GLOO, NCCL, MPI = BACKEND_PROFILES["gloo"], BACKEND_PROFILES["nccl"], BACKEND_PROFILES["mpi"]
#: Packages that may name a backend: they define it, print it, run it on torch, or read what torch
#: and its libraries wrote. All others ask for a rule of the profile instead.
NAMING = {
    "backends",
    "cli",
    "findings",
    "hang_doctor",
    "hardware",
    "operations",
    "output",
    "real",
    "scenario",
    "script_capture",
}
PAIR = RankGroup(0, "world", (0, 1))


def call(
    op: str,
    dtype: str = "float32",
    reduce_op: str | None = None,
    rank: int = 0,
    numel: int = 4,
    **more: object,
) -> ResolvedCall:
    buffer = (TensorBuffer("x", 0, (numel,), dtype),)
    return replace(
        ResolvedCall(
            op, rank, PAIR, peer=1 - rank, reduce_op=reduce_op, inputs=buffer, outputs=buffer
        ),
        **more,
    )  # type: ignore[arg-type]


def test_a_back_ends_name_stands_in_its_own_file_and_in_the_rows_of_operations() -> None:
    """Elsewhere a rule is asked for. Rooms that drive torch itself, show texts about back ends or
    read options name them too.
    """
    named = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] not in NAMING
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in BACKEND_PROFILES
    ]

    assert named == []


def test_a_profile_says_whether_every_send_waits_and_what_its_credit_goes_by() -> None:
    assert [p.rendezvous for p in (*BACKEND_PROFILES.values(), *CONTRACT_READINGS.values())] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    for profile in BACKEND_PROFILES.values():
        assert (profile.buffer_option is None) == profile.rendezvous
        if profile.buffer_option is not None:
            name, default = profile.buffer_option[:2]
            assert profile.credit(default, 0, {})
            assert not profile.credit(default + 1, 0, {})
            assert profile.credit(default + 1, 0, {name: default + 1})
            assert getattr(ProcessGroupOptions(), name) == default


def test_only_a_back_end_whose_sends_wait_spares_the_verdict_its_first_pass(tmp_path: Path) -> None:
    """Two small sends that cross complete on mpi, which buffers them; the program is a deadlock all
    the same.
    """
    file = tmp_path / "crossing.yaml"
    file.write_text(
        "world: 2\nbackend: mpi\ntensors: {x: {shape: [4]}, y: {shape: [4]}}\n"
        "program:\n  - send: {tensor: x, dst: 1 - rank}\n  - recv: {tensor: y, src: 1 - rank}\n"
    )
    result = distsim.simulate(file)

    assert (result.outcome, result.verdict) == ("completes", "deadlock")


@pytest.mark.parametrize("op", ["send", "all_reduce"])
def test_an_operation_that_no_row_and_no_back_end_binds_is_refused(op: str) -> None:
    """A back end takes what a row says of it, or what its own file says besides; nothing of
    itself.
    """
    bare = replace(SUPPORT_BY_BACKEND["mpi"], backend="other")
    assert bare.refusal(op, "float32") == f"Backend other does not support {op}"
    assert bare.on(op, "cpu") == "no"
    bound = replace(bare, bindings={op: BackendBinding()})
    assert bound.refusal(op, "float32") is None
    assert bound.on(op, "cpu") == "yes"


def test_besides_wrong_data_gloo_may_complete_where_only_bits_differ_and_die_where_a_partner_is_outside() -> (
    None
):
    assert GLOO.alternative_outcomes("wrong-data", [("dtype",)], False) == {"completes"}
    assert GLOO.alternative_outcomes("wrong-data", [("dtype",), ("numel",)], False) == frozenset()
    assert GLOO.alternative_outcomes("hangs", [], True) == {"crashes"}
    assert (
        GLOO.alternative_outcomes("hangs", [], False)
        == GLOO.alternative_outcomes("raises", [], True)
        == frozenset()
    )
    assert NCCL.alternative_outcomes("hangs", [], True) == frozenset()


def test_names_are_the_back_ends_and_the_readings() -> None:
    assert list(BACKEND_PROFILES) == ["gloo", "nccl", "mpi"]
    assert list(CONTRACT_READINGS) == ["rendezvous", "early", "buffered"]
    assert all(
        name == profile.name and profile.about
        for name, profile in {**BACKEND_PROFILES, **CONTRACT_READINGS}.items()
    )


def test_broadcast_tree_of_gloo_makes_every_rank_wait_for_all_above_it_and_for_its_children() -> (
    None
):
    """What a parent needs to have the data its child needs, and each parent needs its child; for 1
    to 32 ranks.
    """
    for n in range(1, 33):
        root = n // 3
        needs = [GLOO.needs("broadcast", n, root, me) or frozenset() for me in range(n)]
        below = 0
        for me in range(n):
            v, above = (me - root) % n, set[int]()
            while v:
                assert binomial_parent(v) < v
                v = binomial_parent(v)
                above.add((v + root) % n)
            assert above <= needs[me], (n, me)
            children = needs[me] - above
            assert all((binomial_parent((w - root) % n) + root) % n == me for w in children), (
                n,
                me,
            )
            below += len(children)
        assert below == n - 1, n


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
    assert NCCL.credit(8 << 20, 0, {})
    assert not NCCL.credit(8 << 20, 1, {})
    assert not NCCL.credit(1, 0, {"buffsize": 0})


@pytest.mark.parametrize(
    ("profile", "made", "text"),
    [
        ("gloo", call("all_reduce", "float8_e4m3fn", "sum"), "Invalid scalar type"),
        ("gloo", call("broadcast", "int16"), "Invalid scalar type"),
        ("gloo", call("send", "int16"), None),
        (
            "gloo",
            call("all_reduce", "float32", "band"),
            "Cannot use ReduceOp.BAND with non-integral dtype",
        ),
        (
            "gloo",
            call("all_reduce", "int32", "avg"),
            "result type Float can't be cast to the desired output type Int",
        ),
        ("gloo", call("all_reduce", "bfloat16", "avg"), None),
        (
            "gloo",
            call("all_reduce", "complex64", "product"),
            "all_reduce does not support RedOpType.PRODUCT on complex tensors",
        ),
        ("gloo", call("recv", peer=None), None),
        ("gloo", call("recv", numel=0), None),
        (
            "gloo",
            call("recv", numel=0, peer=None),
            "[enforce fail at gloo/transport/tcp/unbound_buffer.cc] offset < this->size. 0 vs 0",
        ),
        ("nccl", call("recv", peer=None), "ProcessGroupNCCL does not support recvAnysource"),
        ("nccl", call("all_reduce", "int32", "bor"), "Cannot use ReduceOp.BOR with NCCL"),
        ("nccl", call("all_reduce", "int32", "avg"), None),
        ("nccl", call("all_reduce", "float8_e5m2", "sum"), None),
        ("mpi", call("all_reduce", "bfloat16", "sum"), "map::at"),
        ("mpi", call("all_reduce", "float32", "avg"), "map::at"),
        ("mpi", call("all_reduce", "float64", "max"), None),
        ("rendezvous", call("all_reduce", "float32", "band"), None),
    ],
)
def test_refusals_in_the_back_ends_own_words(
    profile: str, made: ResolvedCall, text: str | None
) -> None:
    assert {**BACKEND_PROFILES, **CONTRACT_READINGS}[profile].refuse(made) == text


def meeting(
    fields: tuple[str, ...], *nbytes: int, op: str = "all_reduce", is_message: bool = False
) -> MismatchedCalls:
    return MismatchedCalls(
        fields, tuple(call(op, rank=r, root=0) for r in range(len(nbytes))), nbytes, is_message
    )


def test_gloo_aborts_the_smaller_buffer_and_lets_equal_bytes_through() -> None:
    assert GLOO.mismatch(meeting(("numel",), 4, 8, is_message=True)) == ("wrong-data", (), False)
    assert GLOO.mismatch(meeting(("numel",), 8, 4, is_message=True)).crash == (1,)
    assert GLOO.mismatch(meeting(("dtype",), 8, 8)).outcome == "wrong-data"
    assert GLOO.mismatch(meeting(("numel",), 4, 8, op="broadcast")).outcome == "wrong-data"
    assert GLOO.mismatch(meeting(("numel",), 8, 4, op="broadcast")).crash == (1,)


def test_of_a_scatter_and_a_gather_only_what_the_root_sends_or_gets_is_too_large_for_somebody() -> (
    None
):
    """Run: takers of a scatter whose root makes another operation wait, whatever they have room
    for.
    """
    group = RankGroup(0, "world", (0, 1, 2))

    def ends(op: str, sizes: dict[int, int]) -> tuple[int, ...]:
        calls = tuple(
            call(op, rank=rank, numel=numel, root=1, peer=None, group=group)
            for rank, numel in sizes.items()
        )
        return GLOO.mismatch(
            MismatchedCalls(("numel",), calls, tuple(4 * numel for numel in sizes.values()), False)
        ).crash

    assert ends("scatter", {0: 1, 2: 8}) == ()
    assert ends("scatter", {0: 1, 1: 4, 2: 8}) == (0,)
    assert ends("gather", {0: 1, 2: 8}) == ()
    assert ends("gather", {0: 1, 1: 4, 2: 8}) == (1,)
    assert ends("gather", {0: 1, 1: 4, 2: 2}) == ()


def test_parts_of_an_all_to_all_are_too_large_by_their_bytes() -> None:
    """Run: 16 int64 for each on two ranks and 64 int8 on the third, which aborts."""
    group = RankGroup(0, "world", (0, 1, 2))
    calls = tuple(
        call("all_to_all", dtype, rank=rank, numel=3 * numel, peer=None, group=group)
        for rank, (numel, dtype) in enumerate(((16, "int64"), (64, "int8"), (16, "int64")))
    )
    assert GLOO.mismatch(
        MismatchedCalls(("dtype", "splits"), calls, (384, 192, 384), False)
    ).crash == (1,)


def test_nccl_leaves_other_sizes_and_kinds_undefined_and_hangs_on_another_root() -> None:
    assert NCCL.mismatch(meeting(("numel",), 8, 4)).outcome == "undefined"
    assert NCCL.mismatch(meeting(("op",), 8, 8)).outcome == "undefined"
    assert NCCL.mismatch(meeting(("reduce_op",), 8, 8)).outcome == "wrong-data"
    assert NCCL.mismatch(meeting(("root",), 8, 8)).hangs
