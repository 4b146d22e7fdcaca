"""What the back ends take: the table, its page, and gloo itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distsim.backends import BACKEND_PROFILES, SUPPORT_BY_BACKEND, reduction_support
from distsim.backends.profile import COMMUNICATION_OPS, SHAPE_CHECKED_OPS, TORCH_SCALAR_TYPES
from distsim.cli.commands.explain import explain_page
from distsim.operations.core.resolved_call import (
    DTYPE_BYTES,
    REDUCE_OPS,
    RankGroup,
    ResolvedCall,
    TensorBuffer,
    reduce_refusal,
)
from distsim.operations.registry import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
OBSERVED = ROOT / "tests" / "data" / "agreed" / "gloo_takes.yaml"
SIDES = ("input_parts", "output_parts")
GLOO_SUPPORT, NCCL_SUPPORT, MPI_SUPPORT = (
    SUPPORT_BY_BACKEND[name] for name in ("gloo", "nccl", "mpi")
)


def test_each_backend_refuses_what_its_table_excludes() -> None:
    pair = RankGroup(0, "world", (0, 1))
    for name, profile in BACKEND_PROFILES.items():
        for op in COMMUNICATION_OPS:
            for dtype in DTYPE_BYTES:
                for reduce_op in REDUCE_OPS if OPERATIONS[op].reduces else (None,):
                    one, two = (TensorBuffer("x", 0, (n,), dtype) for n in (2, 4))
                    inputs, outputs = (
                        (two,)
                        if op in SHAPE_CHECKED_OPS and getattr(OPERATIONS[op], side) == "n"
                        else (one,)
                        for side in SIDES
                    )
                    call = ResolvedCall(
                        op, 0, pair, peer=1, reduce_op=reduce_op, inputs=inputs, outputs=outputs
                    )
                    assert profile.refuse(call) == SUPPORT_BY_BACKEND[name].refusal(
                        op, dtype, reduce_op
                    )


@pytest.mark.parametrize(("op", "side"), [("send", "inputs"), ("recv", "outputs")])
def test_a_message_is_refused_for_its_dtype_on_the_sender_and_on_the_receiver(
    op: str, side: str
) -> None:
    """A send has only inputs and a receive only outputs."""
    buffers: dict[str, Any] = {side: (TensorBuffer("x", 0, (1,), "bfloat16"),)}
    call = ResolvedCall(op, 0, RankGroup(0, "world", (0, 1)), peer=1, **buffers)

    assert BACKEND_PROFILES["mpi"].refuse(call) == "map::at"


def test_support_tables_follow_the_order_of_backends_and_cover_every_dtype() -> None:
    assert list(SUPPORT_BY_BACKEND) == list(BACKEND_PROFILES)
    assert set(TORCH_SCALAR_TYPES) == set(DTYPE_BYTES)
    for support in SUPPORT_BY_BACKEND.values():
        assert support.messages | support.moved <= set(DTYPE_BYTES)
        assert set(support.reduced) == set(REDUCE_OPS)
        assert all(dtypes <= support.moved for dtypes in support.reduced.values())
        assert {*support.bindings} <= set(OPERATIONS)


def test_no_backend_accepts_a_dtype_that_the_operation_excludes() -> None:
    forbidden = [
        (d, r) for d in DTYPE_BYTES for r in REDUCE_OPS if reduce_refusal(d, r) is not None
    ]

    assert forbidden
    assert [pair for pair in forbidden if set(reduction_support(pair[0])[pair[1]]) != {"-"}] == []


def test_combinations_that_older_tables_denied_are_supported() -> None:
    """gloo has reduce_scatter, all_to_all and avg now, nccl gather and scatter, mpi reduce_scatter
    (pytorch#150162).
    """
    assert GLOO_SUPPORT.on("reduce_scatter", "gpu") == GLOO_SUPPORT.on("all_to_all", "cpu") == "yes"
    assert GLOO_SUPPORT.takes("all_reduce", "float16", "avg")
    assert NCCL_SUPPORT.on("gather", "gpu") == NCCL_SUPPORT.on("send", "gpu") == "yes"
    assert NCCL_SUPPORT.on("broadcast", "cpu") == "no"
    assert MPI_SUPPORT.on("reduce_scatter", "cpu") == "yes"
    assert MPI_SUPPORT.on("send", "gpu") == "built"
    assert GLOO_SUPPORT.on("send", "gpu") == "no"


@pytest.mark.parametrize(
    ("backend", "op", "dtype", "reduce_op", "text"),
    [
        (
            "gloo",
            "all_reduce",
            "int8",
            "avg",
            "result type Float can't be cast to the desired output type Char",
        ),
        ("gloo", "reduce", "complex64", "max", "reduce does not supporton complex tensors"),
        ("gloo", "gather", "complex64", None, "Invalid scalar type"),
        ("nccl", "send", "int16", None, "Unconvertible NCCL type Short"),
        (
            "nccl",
            "broadcast",
            "int16",
            None,
            "Input tensor data type is not supported for NCCL process group: Short",
        ),
        ("nccl", "all_reduce", "bool", "avg", "Cannot use ReduceOp.AVG with boolean inputs"),
        ("nccl", "all_reduce", "bool", "sum", None),
        ("mpi", "send", "bool", None, "map::at"),
        ("mpi", "broadcast", "complex64", None, None),
        ("mpi", "reduce", "complex64", "sum", "map::at"),
        ("mpi", "all_reduce", "complex64", "avg", "map::at"),
    ],
)
def test_refusals_use_the_wording_of_torch(
    backend: str, op: str, dtype: str, reduce_op: str | None, text: str | None
) -> None:
    assert SUPPORT_BY_BACKEND[backend].refusal(op, dtype, reduce_op) == text


def test_support_page_shows_every_operation_and_dtype_in_80_columns() -> None:
    lines = explain_page("backends").splitlines()
    first = {line.split()[0] for line in lines if line.startswith("  ")}

    assert max(map(len, lines)) <= 80
    assert {*COMMUNICATION_OPS, *DTYPE_BYTES} <= first
    assert ["int32", *reduction_support("int32").values()] in [line.split() for line in lines]


@pytest.mark.slow
def test_real_gloo_accepts_and_refuses_the_dtypes_in_the_table() -> None:
    """All operations, dtypes and reduce ops, on two processes."""
    pytest.importorskip("torch", reason="needs torch, to ask gloo itself")
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "gloo_support.py"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    unlike = [
        (op, d, r, said)
        for op, d, r, said in answers
        if not _agrees(GLOO_SUPPORT.refusal(op, d, r), said)
    ]

    assert (found.returncode, len(answers)) == (0, 6 * 14 * 8 + 12 * 14), found.stderr[-500:]
    assert unlike == []


def test_real_gloo_accepts_and_refuses_the_shapes_in_the_table() -> None:
    """The larger tensor must begin with n times the first dimension of the smaller, of a single call and
    of a coalesced one.
    """
    pytest.importorskip("torch", reason="needs torch, to ask gloo itself")
    found = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "gloo_support.py", "shapes"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    told = [(_refused(op, share, shares), said) for op, share, shares, said in answers]

    assert (found.returncode, len(answers)) == (0, 4 * 6), found.stderr[-500:]
    assert [
        pair
        for pair in told
        if (pair[0] is None) != (pair[1] is None) or (pair[0] or "") not in (pair[1] or "")
    ] == []
    assert {bool(reason) for reason, _ in told} == {True, False}


def _refused(op: str, share: list[int], shares: list[int]) -> str | None:
    one, many = (TensorBuffer("x", 0, tuple(shape), "float32") for shape in (share, shares))
    given, got = (one, many) if OPERATIONS[op].output_parts == "n" else (many, one)
    return GLOO_SUPPORT.refuse(
        ResolvedCall(
            op, 0, RankGroup(0, "world", (0, 1)), reduce_op="sum", inputs=(given,), outputs=(got,)
        )
    )


def _agrees(expected: str | None, said: str | None) -> bool:
    """Messages of torch may carry a stack behind the text, and control characters in it."""
    if expected is None or said is None:
        return expected is said
    return "".join(c for c in said if c.isprintable()).startswith(expected)


def test_combinations_observed_to_work_on_gloo_are_accepted() -> None:
    """Messages of every dtype, reductions of bool; and it refuses the average of integers in the
    words that were seen.
    """
    observed = yaml.safe_load(OBSERVED.read_text(encoding="utf-8"))

    assert len(observed["sent"]) == 12
    assert [dtype for dtype in observed["sent"] if not GLOO_SUPPORT.takes("send", dtype)] == []
    assert [
        by for by in observed["bool_reduced_by"] if not GLOO_SUPPORT.takes("all_reduce", "bool", by)
    ] == []
    assert GLOO_SUPPORT.refusal("all_reduce", "int64", "avg") == observed["int64_reduced_by_avg"]
