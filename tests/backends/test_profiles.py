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
from distsim.backends.profile import MismatchOutcome
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
    "trace/recordings",
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


def test_a_backend_name_occurs_only_in_its_own_file_and_in_operation_rows() -> None:
    """Elsewhere a rule is asked for. Rooms that drive torch itself, show texts about back ends or
    read options name them too.
    """
    named = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        if NAMING.isdisjoint(map(str, path.relative_to(PACKAGE).parents))
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in BACKEND_PROFILES
    ]

    assert named == []


def test_a_profile_states_whether_sends_wait_and_how_it_counts_credit() -> None:
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


def test_only_gloo_and_mpi_finish_open_collectives_when_a_process_exits() -> None:
    profiles = {**BACKEND_PROFILES, **CONTRACT_READINGS}
    joining = [name for name, profile in profiles.items() if profile.joins_collectives_at_exit]

    assert sorted(joining) == ["gloo", "mpi"]


def test_only_a_backend_with_synchronous_sends_skips_the_first_pass_of_the_check(
    tmp_path: Path,
) -> None:
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
def test_an_operation_without_row_or_backend_binding_is_refused(op: str) -> None:
    """A back end takes what a row says of it, or what its own file says besides; nothing of
    itself.
    """
    bare = replace(SUPPORT_BY_BACKEND["mpi"], backend="other")
    assert bare.refusal(op, "float32") == f"Backend other does not support {op}"
    assert bare.on(op, "cpu") == "no"
    bound = replace(bare, bindings={op: BackendBinding()})
    assert bound.refusal(op, "float32") is None
    assert bound.on(op, "cpu") == "yes"


def test_gloo_mismatches_may_also_complete_with_wrong_bits_or_crash_at_absent_peers() -> None:
    assert GLOO.alternative_outcomes("wrong-data", [("dtype",)], False) == {"completes"}
    assert GLOO.alternative_outcomes("wrong-data", [("dtype",), ("numel",)], False) == frozenset()
    assert GLOO.alternative_outcomes("hangs", [], True) == {"crashes"}
    assert (
        GLOO.alternative_outcomes("hangs", [], False)
        == GLOO.alternative_outcomes("raises", [], True)
        == frozenset()
    )
    assert NCCL.alternative_outcomes("hangs", [], True) == frozenset()


def test_backend_names_are_the_backends_and_their_variants() -> None:
    assert list(BACKEND_PROFILES) == ["gloo", "nccl", "mpi"]
    assert list(CONTRACT_READINGS) == ["rendezvous", "early", "buffered"]
    assert all(
        name == profile.name and profile.about
        for name, profile in {**BACKEND_PROFILES, **CONTRACT_READINGS}.items()
    )


def test_in_a_gloo_broadcast_every_rank_waits_for_its_ancestors_and_children() -> None:
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
def test_gloo_gather_and_scatter_wait_only_for_the_root(op: str) -> None:
    assert GLOO.needs(op, 4, 2, 0) == frozenset({2})
    assert GLOO.needs(op, 4, 2, 2) is None
    assert NCCL.needs(op, 4, 2, 0) is None


def test_sends_run_ahead_within_limit_and_credit() -> None:
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
def test_refusals_use_the_wording_of_the_backend(
    profile: str, made: ResolvedCall, text: str | None
) -> None:
    assert {**BACKEND_PROFILES, **CONTRACT_READINGS}[profile].refuse(made) == text


def meeting(
    fields: tuple[str, ...], *nbytes: int, op: str = "all_reduce", is_message: bool = False
) -> MismatchedCalls:
    return MismatchedCalls(
        fields, tuple(call(op, rank=r, root=0) for r in range(len(nbytes))), nbytes, is_message
    )


def test_gloo_aborts_on_a_smaller_buffer_and_accepts_equal_bytes() -> None:
    assert GLOO.mismatch(meeting(("numel",), 4, 8, is_message=True)) == MismatchOutcome(
        "wrong-data"
    )
    assert GLOO.mismatch(meeting(("numel",), 8, 4, is_message=True)).crash == (1,)
    assert GLOO.mismatch(meeting(("dtype",), 8, 8)).outcome == "wrong-data"
    assert GLOO.mismatch(meeting(("numel",), 4, 8, op="broadcast")).outcome == "wrong-data"
    assert GLOO.mismatch(meeting(("numel",), 8, 4, op="broadcast")).crash == (1,)


def test_in_scatter_and_gather_only_the_data_of_the_root_can_be_too_large() -> None:
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


def test_all_to_all_parts_are_too_large_by_bytes() -> None:
    """Run: 16 int64 for each on two ranks and 64 int8 on the third, which aborts."""
    group = RankGroup(0, "world", (0, 1, 2))
    calls = tuple(
        call("all_to_all", dtype, rank=rank, numel=3 * numel, peer=None, group=group)
        for rank, (numel, dtype) in enumerate(((16, "int64"), (64, "int8"), (16, "int64")))
    )
    assert GLOO.mismatch(
        MismatchedCalls(("dtype", "splits"), calls, (384, 192, 384), False)
    ).crash == (1,)


def test_nccl_leaves_different_sizes_and_kinds_undefined_and_hangs_on_different_roots() -> None:
    assert NCCL.mismatch(meeting(("numel",), 8, 4)).outcome == "undefined"
    assert NCCL.mismatch(meeting(("op",), 8, 8)).outcome == "undefined"
    assert NCCL.mismatch(meeting(("reduce_op",), 8, 8)).outcome == "wrong-data"
    assert NCCL.mismatch(meeting(("root",), 8, 8)).hangs
