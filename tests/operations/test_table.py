"""Walks the table of operations: no row may lack a column, and no two columns of a row may tell
different stories.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from distsim.common.errors import UsageError
from distsim.operations.core import colours
from distsim.operations.core.collective_results import apply_effect, numpy_dtype, reduce_arrays
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import (
    DTYPE_BYTES,
    REDUCE_OPS,
    RankGroup,
    ResolvedCall,
    TensorBuffer,
    reduce_refusal,
)
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS

COLLECTIVES = [
    pytest.param(row, id=op) for op, row in OPERATIONS.items() if row.kind == "collective"
]
MOVING = [
    pytest.param(row, id=op)
    for op, row in OPERATIONS.items()
    if row.kind == "collective" and row.gets != "none"
]
#: design section 3, "Steps"; `repeat` is a block of the loader.
STEPS = """compute assign synchronize wait_stream sleep send recv isend irecv batch_isend_irecv wait broadcast all_reduce reduce all_gather
all_gather_into_tensor gather scatter reduce_scatter reduce_scatter_tensor
all_reduce_coalesced all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced all_to_all all_to_all_single barrier monitored_barrier
new_group init_process_group destroy_process_group exit fail"""
PALETTE = {value for name, value in vars(colours).items() if name.isupper()}
NAMES_THAT_MAY_START_A_SENTENCE = {
    "torchrun",
    "gloo",
    "nccl",
    "torch",
    "avg",
    "on:",
    "output_splits",
}
WORLD = RankGroup(0, "world", (0, 1, 2, 3))


def buffer(*shape: int, name: str = "x", dtype: str = "float32") -> TensorBuffer:
    return TensorBuffer(name, 0, shape, dtype)


def call(
    op: str,
    inputs: tuple[TensorBuffer, ...] = (),
    outputs: tuple[TensorBuffer, ...] | None = None,
    **more: Any,
) -> ResolvedCall:
    made = ResolvedCall(
        op=op, rank=0, group=WORLD, inputs=inputs, outputs=inputs if outputs is None else outputs
    )
    return replace(made, **more)


# --- the table ---


def test_the_table_contains_the_designed_operations() -> None:
    assert set(STEPS.split()) <= set(OPERATIONS)
    renamed = {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    }
    assert (
        renamed | {f"{new}_coalesced": f"{old}_coalesced" for new, old in renamed.items()}
        == OPERATION_ALIASES
    )
    assert not set(OPERATION_ALIASES) & set(OPERATIONS)


def test_every_row_has_a_description() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong = {
            op: (row.op, row.kind, row.first_field, row.direction)
            for op, row in OPERATIONS.items()
            if row.op != op
            or row.kind not in ("p2p", "collective", "remote", "batch", "wait", "local", "group")
            or (row.first_field is not None and row.first_field not in row.model_fields)
            or (row.kind == "p2p") != (row.direction is not None)
            or row.model_json_schema()["type"] != "object"
        }
    assert wrong == {}


def test_rows_are_listed_by_kind_and_name() -> None:
    kinds = list(dict.fromkeys(row.kind for row in OPERATIONS.values()))

    assert list(OPERATIONS) == sorted(
        OPERATIONS, key=lambda op: (kinds.index(OPERATIONS[op].kind), op)
    )
    assert set(kinds) <= {"p2p", "collective", "remote", "batch", "wait", "local", "group"}


@pytest.mark.parametrize("row", COLLECTIVES)
@pytest.mark.parametrize("n", range(1, 9))
def test_data_sources_of_a_rank_match_the_effect_of_the_operation(
    row: type[Operation], n: int
) -> None:
    """`takes_from` and `gives_to` are two sides of one thing; where nothing moves, everybody waits
    for everybody.
    """
    for root in range(n if row.root_field else 1):
        others = [frozenset(range(n)) - {me} for me in range(n)]
        takes = [
            others[me] if (found := row.takes_from(n, root, me)) is None else found
            for me in range(n)
        ]
        gives = [
            others[me] if (found := row.gives_to(n, root, me)) is None else found for me in range(n)
        ]
        held = [
            {source.rank for part in parts or () for source in part}
            for parts in row.effect(n, root)
        ]
        assert takes == (
            [frozenset(ranks) - {me} for me, ranks in enumerate(held)]
            if row.gets != "none"
            else others
        )
        assert gives == [
            frozenset(other for other in range(n) if me in takes[other]) for me in range(n)
        ]


def is_a_sentence(text: str) -> bool:
    begins = (
        text[0].isupper() or text[0] == "`" or text.split()[0] in NAMES_THAT_MAY_START_A_SENTENCE
    )
    return begins and text.endswith(".") and len(text.split()) > 2


def test_descriptions_are_sentences_and_signatures_are_those_of_the_function() -> None:
    said = [
        (op, text)
        for op, row in OPERATIONS.items()
        for text in (row.words.before, row.words.after, row.words.waits, *row.words.notes)
    ]
    signatures = {op: row.words.signature for op, row in OPERATIONS.items()}

    assert [pair for pair in said if not is_a_sentence(pair[1])] == []
    assert [
        s
        for s in signatures.values()
        if not re.fullmatch(r"[\w. ]+\(.*\).*|raise RuntimeError\(message\)", s)
    ] == []
    assert [
        op
        for op, row in OPERATIONS.items()
        if row.torch_name is not None and row.torch_name not in signatures[op]
    ] == []


def test_the_examples_validate() -> None:
    """Each is YAML, uses its operation, and each of its steps is a step of its row."""
    for row in OPERATIONS.values():
        used = []
        for entry in yaml.safe_load(row.words.example):
            step = (
                {entry: {}}
                if isinstance(entry, str)
                else {k: v for k, v in entry.items() if k != "ranks"}
            )
            ((op, fields),) = step.items()
            OPERATIONS[op].model_validate(
                fields if isinstance(fields, dict) else {OPERATIONS[op].first_field: fields}
            )
            used.append(op)
        assert row.op in used


def test_colours_are_distinguishable() -> None:
    assert {op: row.colour for op, row in OPERATIONS.items() if row.colour not in PALETTE} == {}


@pytest.mark.parametrize("row", [pytest.param(row, id=op) for op, row in OPERATIONS.items()])
def test_a_row_has_a_torch_call_unless_it_is_local_work(row: type[Operation]) -> None:
    """Local steps are no call on torch.distributed; all others that torch has override
    `torch_call`, and the rest refuse.
    """
    overridden = row.torch_call.__func__ is not Operation.torch_call.__func__  # type: ignore[attr-defined]
    assert overridden == (row.torch_name is not None)
    if row.kind == "local":
        assert not overridden
    elif row.op in STEPS.split():
        assert overridden
    else:
        with pytest.raises(UsageError, match=f"torch.distributed has no {row.op}"):
            row.torch_call(None, call(row.op), {}, None)


def test_torch_has_the_functions_named_by_the_rows() -> None:
    dist = pytest.importorskip("torch.distributed", reason="torch is not installed (extra `real`)")
    for row in OPERATIONS.values():
        owner = dist.Work if row.op == "wait" else dist
        assert row.torch_name is None or hasattr(owner, row.torch_name), row.op


# --- columns that must agree with each other ---


@pytest.mark.parametrize("row", COLLECTIVES)
def test_a_collective_has_every_column(row: type[Operation]) -> None:
    assert row.algorithms
    assert row.nccl_tests is None or row.gets != "none"
    assert row.nccl_tests or row.gets == "none" or row.op not in STEPS.split()
    assert (row.busbw_factor(8) > 0) == (row.gets != "none")
    buffers = () if row.gets == "none" else (buffer(4, 2),)
    made = call(row.op, buffers, root=1, reduce_op="sum")
    assert row.parties(made) == WORLD.ranks
    agreed = row.agreement(made)
    assert agreed["op"] == row.op
    assert ("reduce_op" in agreed) == row.reduces
    assert ("root" in agreed) == (row.root_field is not None)
    assert ("dtype" in agreed) == (row.gets != "none")
    assert "not in the group" in (row.faults(replace(made, rank=9)) or "")


@pytest.mark.parametrize("row", MOVING)
def test_the_effect_agrees_with_the_declared_facts(row: type[Operation]) -> None:
    for n, root in ((1, 0), (2, 1), (5, 3)):
        effect = row.effect(n, root)
        assert len(effect) == n
        assert [parts is not None for parts in effect] == [
            row.gets == "all" or r == root for r in range(n)
        ]
        taken = [
            n if (takes := row.takes_from(n, root, me)) is None else len(takes | {me})
            for me in range(n)
        ]
        parts = [
            (taken[me], sources)
            for me, parts in enumerate(effect)
            if parts is not None
            for sources in parts
        ]
        assert len(parts) == sum(e is not None for e in effect) * (
            n if row.output_parts == "n" else 1
        )
        assert all(len(sources) == (many if row.reduces else 1) for many, sources in parts)
        assert {s.rank for _, sources in parts for s in sources} == (
            {root} if row.gives == "root" else set(range(n))
        )
        assert {s.part for _, sources in parts for s in sources} == set(
            range(n if row.input_parts == "n" else 1)
        )


def test_a_rooted_collective_has_both_torch_names_of_the_root() -> None:
    rows = [row for row in OPERATIONS.values() if row.kind == "collective"]
    named = {
        row.op: {name for name in row.model_fields if name.removeprefix("group_") in ("src", "dst")}
        for row in rows
    }

    assert named == {
        row.op: {row.root_field, f"group_{row.root_field}"} if row.root_field else set()
        for row in rows
    }


def test_in_place_operations_have_one_tensor_and_others_input_and_output() -> None:
    in_place = {
        op
        for op, row in OPERATIONS.items()
        if "tensor" in row.model_fields and row.kind != "remote"
    }
    assert in_place == {
        "assign",
        "send",
        "recv",
        "isend",
        "irecv",
        "broadcast",
        "all_reduce",
        "reduce",
        "all_reduce_coalesced",
    }
    others = {
        op for op, row in OPERATIONS.items() if row.kind == "collective" and row.gets != "none"
    } - in_place
    assert all({"input", "output"} <= set(OPERATIONS[op].model_fields) for op in others)


def test_busbw_factors_are_those_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md and src/*.cu, for eight ranks."""
    assert {op: row.busbw_factor(8) for op, row in OPERATIONS.items() if row.nccl_tests} == {
        "send": 1,
        "recv": 1,
        "isend": 1,
        "irecv": 1,
        "put": 1,
        "get": 1,
        "broadcast": 1,
        "reduce": 1,
        "all_reduce": 14 / 8,
        "all_gather": 7 / 8,
        "all_gather_into_tensor": 7 / 8,
        "reduce_scatter": 7 / 8,
        "reduce_scatter_tensor": 7 / 8,
        "gather": 7 / 8,
        "scatter": 7 / 8,
        "all_to_all": 7 / 8,
        "all_to_all_single": 7 / 8,
        "all_reduce_coalesced": 14 / 8,
        "all_gather_into_tensor_coalesced": 7 / 8,
        "reduce_scatter_tensor_coalesced": 7 / 8,
    }


def test_collective_bytes_are_those_of_the_large_buffer() -> None:
    """As nccl-tests counts them: four ranks, ten float32 each."""
    small, large = (buffer(10),), (buffer(4, 10),)
    for op in ("all_gather", "all_gather_into_tensor", "gather"):
        assert OPERATIONS[op].nbytes(call(op, small, large, root=0)) == 160, op
    for op in ("reduce_scatter", "reduce_scatter_tensor", "scatter"):
        assert OPERATIONS[op].nbytes(call(op, large, small, root=0)) == 160, op
    for op in ("all_to_all", "all_to_all_single"):
        assert OPERATIONS[op].nbytes(call(op, large, large)) == 160, op
    for op in ("all_reduce", "broadcast", "reduce", "send", "irecv"):
        assert OPERATIONS[op].nbytes(call(op, small, root=0)) == 40, op
    assert OPERATIONS["gather"].nbytes(call("gather", small, (), rank=1, root=0)) == 160
    assert OPERATIONS["barrier"].nbytes(call("barrier")) == 0


def test_the_share_that_ranks_must_agree_on() -> None:
    """One rank's share where parts are shared out, the whole input for all_to_all."""
    small, large = (buffer(10),), (buffer(4, 10),)
    assert OPERATIONS["all_gather"].agreement(call("all_gather", small, large))["numel"] == 10
    assert OPERATIONS["gather"].agreement(call("gather", small, (), root=1))["numel"] == 10
    assert OPERATIONS["scatter"].agreement(call("scatter", (), small, root=1))["numel"] == 10
    assert (
        OPERATIONS["reduce_scatter"].agreement(call("reduce_scatter", large, small))["numel"] == 10
    )
    assert OPERATIONS["all_to_all"].agreement(call("all_to_all", large, large))["numel"] == 40
    uneven = tuple(buffer(k, name=f"p{k}") for k in (1, 2, 3, 4))
    assert OPERATIONS["reduce_scatter"].agreement(call("reduce_scatter", uneven, (buffer(1),)))[
        "numel"
    ] == (1, 2, 3, 4)


def test_participants_of_a_message_are_sender_and_receiver() -> None:
    assert OPERATIONS["send"].parties(call("send", (buffer(1),), peer=2)) == (0, 2)
    assert OPERATIONS["recv"].parties(call("recv", (buffer(1),), peer=2)) == (2, 0)
    assert OPERATIONS["recv"].parties(call("recv", (buffer(1),), peer=None)) == (0,)
    assert OPERATIONS["new_group"].parties(call("new_group", ranks=(1, 2))) == WORLD.ranks
    assert OPERATIONS["new_group"].parties(call("new_group", ranks=(1, 2), local_sync=True)) == (
        1,
        2,
    )


# --- faults ---

_SMALL, _LARGE, _SIX, _HALF = (
    (buffer(3),),
    (buffer(4, 3),),
    (buffer(6),),
    (buffer(3, dtype="float16", name="y"),),
)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call("send", _SMALL, peer=0), "rank 0 is its own peer"),
        (call("send", _SMALL, peer=7), "rank 7 is not in the group world (ranks 0, 1, 2, 3)"),
        (call("irecv", _SMALL, peer=None, assume_src=5), "rank 5 is not in the group world"),
        (call("isend", _SMALL, peer=1, tag=-1), "a tag must not be negative, found -1"),
        (call("batch_isend_irecv"), "the batch contains no messages"),
        (call("batch_isend_irecv", parts=(call("isend", _SMALL, peer=0),)), "is its own peer"),
        (call("broadcast", _SMALL, root=4), "src is rank 4, which is not in the group world"),
        (
            call("all_reduce", _SMALL, reduce_op="band"),
            "reduce op band is only defined for integers, not for float32",
        ),
        (call("all_gather", _SMALL, _HALF), "x is float32, but y is float16"),
        (
            call("all_gather", _SMALL, (buffer(3, 3),)),
            ("its first dimension must have the size of the group, 4"),
        ),
        (
            call("all_gather", _SMALL, (buffer(4, 2),)),
            "part 0 of the output has 2 elements, but rank 0 gives 3",
        ),
        (
            call("all_gather", _SMALL, (buffer(3), buffer(3))),
            "output has 2 tensors, but the group has 4 ranks",
        ),
        (
            call("all_gather_into_tensor", _SMALL, (buffer(10),)),
            "output has 10 elements, but 4 ranks contribute 3 each, in total 12",
        ),
        (
            call("reduce_scatter_tensor", (buffer(10),), _SMALL),
            "input has 10 elements, but 4 ranks receive 3 each, in total 12",
        ),
        (
            call("reduce_scatter", _LARGE, (buffer(2),)),
            "output has 2 elements, but part 0 of the input has 3",
        ),
        (call("gather", _SMALL, (), root=0), "rank 0 is dst, so it needs an output"),
        (
            call("gather", _SMALL, (buffer(4, 2),), root=0),
            "part 0 of the output has 2 elements, but an input has 3",
        ),
        (call("scatter", (), _SMALL, root=0), "rank 0 is src, so it needs an input"),
        (
            call("scatter", (buffer(3, 3),), _SMALL, root=0),
            "its first dimension must have the size of the group, 4",
        ),
        (
            call("all_to_all", _LARGE, (buffer(4, 2),)),
            "part 0 of the output has 2 elements, but part 0 of the input has 3",
        ),
        (
            call("all_to_all_single", _SIX),
            "the first dimension of input, 6, is not divisible by 4 ranks",
        ),
        (
            call("all_to_all_single", _SIX, input_splits=(1, 2, 3, 4)),
            "add up to 10, but the first dimension of input is 6",
        ),
        (
            call("all_to_all_single", _SIX, input_splits=(3, 3)),
            "input_splits has 2 numbers, but the group has 4 ranks",
        ),
        (call("all_to_all_single", _SIX, input_splits=(-1, 2, 2, 3)), "a part cannot be negative"),
        (call("new_group", name="g", ranks=(1, 1)), "list a rank twice"),
        (
            call("new_group", name="g", ranks=(1, 4)),
            "rank 4 of the new group g is outside the world",
        ),
        (call("new_group", name="g"), "the new group g has no ranks"),
    ],
    ids=lambda value: value.op if isinstance(value, ResolvedCall) else "",
)
def test_a_call_that_no_backend_supports_is_a_fault(made: ResolvedCall, reason: str) -> None:
    assert reason in (OPERATIONS[made.op].faults(made) or "no fault")


@pytest.mark.parametrize(
    "made",
    [
        call("gather", _SMALL, (), rank=1, root=0),
        call("scatter", (), _SMALL, rank=1, root=0),
        call("gather", _SMALL, (buffer(1),), rank=1, root=0),
        call("all_gather", _SMALL, tuple(buffer(3, name=f"part{i}") for i in range(4))),
        call(
            "all_to_all_single",
            (buffer(6, 2),),
            (buffer(6, 2),),
            input_splits=(0, 1, 2, 3),
            output_splits=(0, 1, 2, 3),
        ),
        call("all_to_all_single", (buffer(4, 5),), (buffer(20),)),
        call("recv", _SMALL, peer=None, assume_src=2),
        call("barrier"),
    ],
    ids=lambda made: made.op,
)
def test_a_correct_call_is_no_fault(made: ResolvedCall) -> None:
    """gather's output is read on dst alone, scatter's input on src alone."""
    assert OPERATIONS[made.op].faults(made) is None


def test_splits_are_compared_pair_by_pair() -> None:
    """What rank i sends to rank j must be what j expects from i; equal splits on both sides say
    nothing about that.
    """
    row = OPERATIONS["all_to_all_single"]
    pair = RankGroup(0, "world", (0, 1))
    splits = [((2, 3), (2, 4)), ((4, 1), (3, 1))]
    right = [
        ResolvedCall(
            "all_to_all_single",
            r,
            pair,
            inputs=(buffer(sum(i)),),
            outputs=(buffer(sum(o)),),
            input_splits=i,
            output_splits=o,
        )
        for r, (i, o) in enumerate(splits)
    ]
    wrong = [right[0], replace(right[1], outputs=(buffer(3),), output_splits=(2, 1))]

    assert [row.faults(c) for c in right + wrong] == [None] * 4
    assert row.mismatched_pairs(right) == []
    assert row.mismatched_pairs(wrong) == [
        (0, 1, "rank 0 sends 3 elements to rank 1, which expects 2")
    ]
    assert row.pairwise
    assert "numel" not in row.agreement(right[0])


# --- numbers ---


def test_every_backend_refuses_the_common_errors() -> None:
    refused = {
        (dtype, op) for dtype in DTYPE_BYTES for op in REDUCE_OPS if reduce_refusal(dtype, op)
    }
    assert ("float32", "bxor") in refused
    assert ("complex64", "product") in refused
    assert ("bool", "avg") in refused
    assert (
        not {
            ("int32", "avg"),
            ("bool", "sum"),
            ("int8", "band"),
            ("complex64", "sum"),
            ("float32", "max"),
        }
        & refused
    )


@pytest.mark.parametrize(
    ("dtype", "op", "given", "expected"),
    [
        ("int8", "sum", ([100], [100]), [-56]),
        ("uint8", "product", ([16], [16]), [0]),
        ("bool", "sum", ([True, False], [True, False]), [True, False]),
        ("bool", "product", ([True, True], [True, False]), [True, False]),
        ("int32", "avg", ([-3, 3], [-4, 4]), [-3, 3]),
        ("uint8", "avg", ([3], [4]), [3]),
        ("float32", "avg", ([1.0], [2.0]), [1.5]),
        ("int64", "bxor", ([6], [3]), [5]),
        ("float64", "max", ([1.0, 5.0], [2.0, 4.0]), [2.0, 5.0]),
    ],
)
def test_reductions_keep_the_dtype(
    dtype: str, op: str, given: tuple[list[float], ...], expected: list[float]
) -> None:
    """Integers wrap, booleans or, averages of integers are cut off towards zero."""
    found = reduce_arrays(op, [np.array(g, dtype=dtype) for g in given])
    assert found.dtype == np.dtype(dtype)
    assert found.tolist() == expected


def test_half_precision_rounds_at_every_step() -> None:
    """256 + 1 is 256 in bfloat16, as often as one adds."""
    one, large = (np.array([v], dtype=numpy_dtype("bfloat16")) for v in (1, 256))
    assert reduce_arrays("sum", [large, one, one, one]).tolist() == [256]
    assert reduce_arrays("sum", [one, one, one, large]).tolist() == [260]


def test_apply_effect_moves_the_parts() -> None:
    parts = [[np.array([10 * r + k]) for k in range(3)] for r in range(3)]
    exchanged = apply_effect(OPERATIONS["all_to_all"], 3, 0, None, parts)
    assert [[int(a[0]) for a in mine or ()] for mine in exchanged] == [
        [0, 10, 20],
        [1, 11, 21],
        [2, 12, 22],
    ]
    reduced = apply_effect(OPERATIONS["reduce"], 3, 2, "sum", [[np.array([r])] for r in range(3)])
    assert reduced[:2] == [None, None]
    assert [a.tolist() for a in reduced[2] or ()] == [[3]]


# --- the fields of a step ---


@pytest.mark.parametrize(
    ("op", "fields", "message"),
    [
        (
            "broadcast",
            {"tensor": "x"},
            "expected `src` (a global rank) or `group_src` (a group rank) in broadcast",
        ),
        ("reduce", {"tensor": "x", "dst": 0, "group_dst": 0}, "in reduce, found both"),
        (
            "send",
            {"tensor": "x"},
            "expected either `dst` (a global rank) or `group_dst` (a group rank) in send",
        ),
        ("recv", {"tensor": "x", "src": 0, "assume_src": 0}, "without `src` and `group_src`"),
        ("all_reduce", {"tensor": "x", "op": "mean"}, "did you mean 'avg'?"),
        ("all_reduce", {"tensor": "x", "as": "h"}, "`as` needs `async: true`"),
        ("all_reduce", {"tensor": "x", "async": "yes"}, "valid boolean"),
        ("all_reduce", {"tensor": "x", "root": 0}, "Extra inputs are not permitted"),
        ("compute", {"name": "f"}, "expected either `time`, or `flops` and `bytes`"),
        (
            "compute",
            {"time": "1 ms", "flops": "1 GFLOP"},
            "expected either `time`, or `flops` and `bytes`",
        ),
        (
            "compute",
            {"flops": 5},
            ("expected a count with its unit, such as `2 TFLOP`, or an expression"),
        ),
        (
            "compute",
            {"bytes": "5"},
            ("expected a size with its unit, such as `4 MiB`, or an expression"),
        ),
        ("sleep", {"time": 3}, "expected a duration with a unit"),
    ],
)
def test_a_step_with_missing_or_surplus_fields_is_refused(
    op: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        OPERATIONS[op].model_validate(fields)


def test_gather_and_scatter_need_no_root() -> None:
    """torch takes global rank 0 there."""
    assert OPERATIONS["gather"].model_validate({"input": "x", "output": "all"}).dst is None  # type: ignore[attr-defined]
    assert OPERATIONS["scatter"].model_validate({"output": "x"}).src is None  # type: ignore[attr-defined]


def test_python_keywords_are_aliases_of_plain_names() -> None:
    """A file says `async`, `as` and `op`; Python says is_async, handle and reduce_op."""
    row = OPERATIONS["all_reduce"]
    read = row.model_validate({"tensor": "x", "async": True, "as": "h@i", "op": "max"})
    built = row(tensor="x", is_async=True, handle="h@i", reduce_op="max")  # type: ignore[call-arg]
    assert read == built
    assert read.model_dump(by_alias=True, exclude_defaults=True) == {
        "tensor": "x",
        "async": True,
        "as": "h@i",
        "op": "max",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"time": "3 ms"},
        {"flops": "2 TFLOP", "bytes": "4 MiB"},
        {"flops": "2 * rank"},
        {"bytes": {0: "1 KiB", "else": "rank * 8"}},
    ],
)
def test_compute_costs_survive_writing_and_reading(fields: dict[str, object]) -> None:
    row = OPERATIONS["compute"]
    read = row.model_validate(fields)
    assert row.model_validate(read.model_dump(by_alias=True, exclude_defaults=True)) == read


def test_the_busbw_factor_never_decreases_with_the_group_size() -> None:
    """More ranks move no fewer bytes each."""
    for row in OPERATIONS.values():
        assert all(row.busbw_factor(a) <= row.busbw_factor(b) for a, b in pairwise(range(1, 33))), (
            row.op
        )


def test_dtypes_have_the_element_sizes_of_torch() -> None:
    torch = pytest.importorskip("torch")

    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES
