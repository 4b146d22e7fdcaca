"""What a program says of itself: features, sizes, groups and calls, however it was built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distsim.common.errors import UsageError
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.from_calls import build_program, plain_calls
from distsim.program.groups import group_ids_from_steps, groups_from_file
from distsim.program.lower import lower
from distsim.program.model import Program, RankFault
from distsim.program.size_limits import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_CALLS,
    DEFAULT_MAX_RANKS,
    check_program_size,
    check_world_size,
    is_within_size_limit,
)
from distsim.scenario import loads

HEAD = """
world: 4
groups: {g: [0, 2], all: [0, 1, 2, 3]}
tensors:
  x: {shape: [3]}
  one: {shape: [1]}
  long: {shape: [12]}
  list: {shape: [4, 3]}
  pair: {shape: [2, 3]}
  i: {shape: [8], dtype: int64}
  o: {shape: [4], dtype: int64}
program:
"""
#: A step of a file, and the call that says the same in Python. Rank 0 or all ranks make it.
SAME_CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "{isend: {tensor: x, dst: 1, tag: 3, as: s}, ranks: 0}",
        {"op": "isend", "peer": 1, "tag": 3, "numel": 3, "tensor": "x", "handle": "s"},
    ),
    ("{recv: {tensor: one}, ranks: 0}", {"op": "recv", "peer": None, "tensor": "one"}),
    (
        "{irecv: {tensor: i, group: g, src: 2, as: r}, ranks: 0}",
        {
            "op": "irecv",
            "peer": 2,
            "group": "g",
            "numel": 8,
            "dtype": "int64",
            "tensor": "i",
            "handle": "r",
        },
    ),
    ("{wait: s, ranks: 0}", {"op": "wait", "handle": "s"}),
    (
        "{batch_isend_irecv: {ops: [isend: {tensor: x, dst: 1}, irecv: {tensor: one, src: 3}], as: b}, "
        "ranks: 0}",
        {
            "op": "batch",
            "ops": [
                {"op": "isend", "peer": 1, "numel": 3, "tensor": "x"},
                {"op": "irecv", "peer": 3, "tensor": "one"},
            ],
            "handle": "b",
        },
    ),
    ("{wait: [b, r], ranks: 0}", {"op": "wait", "handles": ["b", "r"]}),
    (
        "all_reduce: {tensor: x, op: max, async: true, as: h}",
        {
            "op": "all_reduce",
            "numel": 3,
            "reduce_op": "max",
            "tensor": "x",
            "async": True,
            "handle": "h",
        },
    ),
    ("wait: all", {"op": "wait", "handles": "all"}),
    ("{barrier: {group: g}, ranks: rank % 2 == 0}", {"op": "barrier", "group": "g"}),
    (
        "broadcast: {tensor: x, src: 2}",
        {"op": "broadcast", "root": 2, "numel": 3, "tensor": "x"},
    ),
    ("reduce: {tensor: x, dst: 0}", {"op": "reduce", "numel": 3, "tensor": "x"}),
    ("all_gather: {input: x, output: list}", {"op": "all_gather", "numel": 3}),
    (
        "all_gather_into_tensor: {input: x, output: long}",
        {"op": "all_gather_into_tensor", "numel": 3},
    ),
    (
        "{all_gather: {input: x, output: pair, group: g}, ranks: rank % 2 == 0}",
        {"op": "all_gather", "numel": 3, "group": "g"},
    ),
    ("gather: {input: x, output: list, dst: 1}", {"op": "gather", "numel": 3, "root": 1}),
    ("scatter: {input: list, output: x, src: 1}", {"op": "scatter", "numel": 3, "root": 1}),
    ("reduce_scatter: {input: list, output: x}", {"op": "reduce_scatter", "numel": 3}),
    (
        "reduce_scatter_tensor: {input: long, output: x}",
        {"op": "reduce_scatter_tensor", "numel": 3},
    ),
    ("all_to_all: {input: list, output: list}", {"op": "all_to_all", "numel": 12}),
    (
        "{all_to_all_single: {input: i, output: o, input_splits: [1, 3, 2, 2], output_splits: [1, 1, 1, 1]}, ranks: 0}",
        {
            "op": "all_to_all_single",
            "numel": 8,
            "dtype": "int64",
            "in_splits": [1, 3, 2, 2],
            "out_splits": [1, 1, 1, 1],
        },
    ),
    (
        "all_reduce_coalesced: {tensor: [x, one]}",
        {"op": "all_reduce_coalesced", "numels": [3, 1], "tensors": ["x", "one"]},
    ),
    ("compute: {time: 5 ns, name: c}", {"op": "compute", "time_ns": 5, "name": "c"}),
    (
        "compute: {time: 5 ns, reads: [x], on: host}",
        {"op": "compute", "time_ns": 5, "buf": "x", "numel": 3, "queue": "host"},
    ),
    (
        "compute: {time: 5 ns, writes: [x]}",
        {"op": "compute", "time_ns": 5, "buf": "x", "numel": 3, "writes": True},
    ),
    (
        "new_group: {name: n, ranks: [2, 0], timeout: 9 s}",
        {"op": "new_group", "name": "n", "ranks": [2, 0], "timeout_ns": 9 * 10**9},
    ),
    (
        "{all_reduce: {tensor: x, group: n}, ranks: rank % 2 == 0}",
        {"op": "all_reduce", "numel": 3, "group": "n", "tensor": "x"},
    ),
    (
        "{new_group: {name: m, ranks: [0, 3], use_local_synchronization: true}, ranks: rank % 3 == 0}",
        {"op": "new_group", "name": "m", "ranks": [0, 3], "use_local_synchronization": True},
    ),
    (
        "{broadcast: {tensor: x, group: m, src: 3}, ranks: rank % 3 == 0}",
        {"op": "broadcast", "numel": 3, "group": "m", "root": 3, "tensor": "x"},
    ),
]


def essence(call: ResolvedCall) -> dict[str, object]:
    """What both ways to build a program can express; only a file names the buffers of all calls."""
    buffers = {
        side: [(b.shape, b.dtype) for b in getattr(call, side)]
        for side in ("inputs", "outputs", "reads", "writes")
    }
    names = [b.name for b in (*call.inputs, *call.outputs, *call.reads, *call.writes)]
    fields = ("op", "peer", "tag", "is_async", "root", "reduce_op", "input_splits", "output_splits")
    local = ("name", "time_ns", "queue", "ranks", "local_sync", "timeout_ns")
    return {
        **{name: getattr(call, name) for name in (*fields, *local)},
        "group": (call.group.name, call.group.ranks),
        "parts": [essence(part) for part in call.parts],
        "tensors": names if call.op in NAMED else [],
        **buffers,
    }


NAMED = ("isend", "irecv", "recv", "all_reduce", "broadcast", "reduce", "compute")


def test_a_file_and_plain_calls_that_say_the_same_give_the_same_program() -> None:
    from_file = lower(loads(HEAD + "".join(f"  - {step}\n" for step, _ in SAME_CALLS)))
    built = build_program(
        4,
        {0: [call for _, call in SAME_CALLS]},
        groups={"g": [0, 2], "all": [0, 1, 2, 3]},
    )

    assert from_file.findings == built.findings == ()
    of_file = [call for _, call in from_file.calls_of(0)]
    of_calls = plain_calls(built, 0)
    for (step, _), expected, found in zip(SAME_CALLS, of_file, of_calls, strict=True):
        assert essence(found) == essence(expected), step
    positions = range(len(SAME_CALLS))
    assert [built.code_call(0, k).waits for k in positions] == [
        from_file.code_call(0, k).waits for k in positions
    ]
    assert [built.place(0, k).line for k in (0, 5)] == [1, 6]
    assert [list(built.calls_of(rank)) for rank in (1, 2, 3)] == [[], [], []]


# --- features ---
@pytest.mark.parametrize(
    ("step", "features"),
    [
        ("barrier", set()),
        ("all_reduce: {tensor: x, async: true, as: h}", {"requests"}),
        ("send: {tensor: x, dst: 1 - rank}", {"messages"}),
        ("recv: {tensor: x, src: 1 - rank}", {"messages"}),
        ("recv: {tensor: x, src: 1 - rank, tag: 1}", {"messages", "tags"}),
        ("recv: {tensor: x, src: 1 - rank, tag: rank}", {"messages", "tags"}),
        ("recv: {tensor: x}", {"messages", "any source"}),
        ("isend: {tensor: x, dst: 1 - rank, as: h}", {"messages", "requests"}),
        (
            "batch_isend_irecv: {ops: [irecv: {tensor: x}]}",
            {"messages", "requests", "any source"},
        ),
        ("put: {tensor: x, into: x, dst: 1 - rank}", {"remote"}),
        ("put_signal: {dst: 1 - rank}", {"messages", "signals", "tags"}),
        ("wait_signal: {src: 1 - rank}", {"messages", "signals", "tags"}),
        ("all_reduce: {tensor: x, on: side}", {"streams"}),
        ("wait_stream: {stream: side}", {"streams"}),
        ("sleep: 1 ms", {"host work"}),
        ("compute: {time: 1 ms}", set()),
        ("compute: {time: 1 ms, on: host}", {"host work"}),
        ("new_group: {name: g, ranks: [0, 1]}", {"new groups"}),
        ("new_group: {name: g, ranks: [0, 1], timeout: 1 s}", {"new groups", "timeouts"}),
        ("init_process_group: {}", {"new groups"}),
        ("init_process_group: {timeout: 1 s}", {"new groups", "timeouts"}),
        ("monitored_barrier: {}", {"timeouts"}),
        ("assign: {tensor: x, value: 3}", {"numbers"}),
        ("all_reduce: c@rank", {"branches"}),
        ("all_gather: {input: x, output: both}", set()),
        ("{barrier: {}, ranks: 0}", {"branches"}),
        ("repeat: {times: 2, index: k, steps: [{barrier: {}, ranks: rank == k}]}", {"branches"}),
    ],
)
def test_the_features_of_a_step(step: str, features: set[str]) -> None:
    program = lower(loads(f"{TWO_RANKS}  - {step}\n"))

    assert set(program.features) == features


TWO_RANKS = """
world: 2
tensors: {x: {shape: [3]}, c: {like: x, copies: 2}, both: {shape: [2, 3]}}
program:
"""


def test_a_timeout_or_a_value_outside_of_the_steps_is_a_feature_too() -> None:
    text = TWO_RANKS.replace("copies: 2", "copies: 2, value: 1") + "  - barrier\n"

    assert set(lower(loads(text)).features) == {"numbers"}
    text = f"{TWO_RANKS}  - barrier\noptions: {{timeout: 1 s}}\n"
    assert set(lower(loads(text)).features) == {"timeouts"}
    text = f"{TWO_RANKS}  - barrier\ngroups: {{g: {{ranks: [0, 1], timeout: 1 s}}}}\n"
    assert set(lower(loads(text)).features) == {"timeouts"}


# --- groups ---
def test_groups_are_from_the_file_or_from_a_step_and_only_used_ones_count() -> None:
    program = lower(
        loads(
            "world: 4\ntensors: {x: {shape: [1]}}\nmesh: {dp: 2, tp: 2}\n"
            "groups: {used: [0, 1], unused: [2, 3]}\nprogram:\n"
            "  - new_group: {name: made, ranks: [3, 1]}\n"
            "  - {all_reduce: {tensor: x, group: made}, ranks: rank % 2 == 1}\n"
            "  - {all_reduce: {tensor: x, group: used}, ranks: rank < 2}\n"
            "  - all_reduce: {tensor: x, group: tp}\n  - barrier\n"
        )
    )

    assert [(g.name, g.ranks) for g in groups_from_file(program)] == [
        ("tp[dp=0]", (0, 1)),
        ("tp[dp=1]", (2, 3)),
        ("used", (0, 1)),
    ]
    made = [program.groups[number] for number in group_ids_from_steps(program)]
    assert [(g.name, g.ranks) for g in made] == [("made", (1, 3))]


# --- sizes ---
def repeated(calls: int, ranks: int) -> Program:
    """A program in which all ranks share a code of so many calls."""
    return lower(loads(f"world: {ranks}\nprogram: [repeat: {{times: {calls}, steps: [barrier]}}]"))


def test_a_program_may_have_as_many_calls_as_the_user_says() -> None:
    program = repeated(20, 3)

    assert [is_within_size_limit(program, limit) for limit in (59, 60, None)] == [False, True, True]
    check_program_size(program, 60)
    with pytest.raises(UsageError) as error:
        check_program_size(program, 59)
    # 60 calls of 400 B, 20 of a code of 1 200 B and 3 ranks of 3 000 B are less than 50 MB.
    assert error.value.message == (
        "<text>: 60 calls on 3 ranks: about 0 B of memory and 1 s if it completes, more if it "
        "hangs; the limit is 59 calls"
    )
    assert error.value.remedy == (
        "use fewer ranks, iterations or repeats, or continue with `--max-calls 60`"
    )


@pytest.mark.parametrize(
    ("calls", "ranks"), [(900_000, 1), (900_000, 3), (2_000, 2_500), (2_000, 2_501)]
)
def test_the_default_limits_are_calls_and_estimated_memory(calls: int, ranks: int) -> None:
    """A call takes 400 B on each rank and 1 200 B in its code, a rank 3 000 B."""
    nbytes = 400 * calls * ranks + 1_200 * calls + 3_000 * ranks
    fits = calls * ranks <= DEFAULT_MAX_CALLS and nbytes <= DEFAULT_MAX_BYTES
    program = repeated(calls, 1)
    many = replace(program, world_size=ranks, codes=[replace(program.codes[0])] * 1)
    many.codes[0] = replace(program.codes[0], ranks=tuple(range(ranks)))

    assert is_within_size_limit(many, None) is fits


def test_a_world_of_too_many_ranks_is_refused_unless_the_user_sets_a_limit() -> None:
    most, more = (
        loads(f"world: {size}\nprogram: []") for size in (DEFAULT_MAX_RANKS, DEFAULT_MAX_RANKS + 1)
    )

    check_world_size(most, None)
    check_world_size(more, 1)
    with pytest.raises(UsageError, match=r"131,073 ranks: about 381.5 MiB of memory and 12 s") as e:
        check_world_size(more, None)
    assert "the limit is 131,072 ranks" in e.value.message
    assert "`--max-calls 131073`" in e.value.remedy


# --- model ---
def uneven() -> Program:
    """Six ranks on three nodes, which make one or two of four calls."""
    return lower(
        loads(
            "world: {nodes: 3, ranks_per_node: 2}\ngroups: {g: [0, 2, 4], far: [1, 2]}\n"
            "tensors: {x: {shape: [1]}}\nvars: {twice: 2 * rank}\nprogram:\n"
            "  - barrier\n  - {barrier: {}, ranks: rank == 4}\n"
            "  - repeat: {times: 2, index: k, steps: [{barrier: {}, ranks: rank == k}]}\n"
        )
    )


def test_a_folded_program_counts_the_ranks_that_others_represent() -> None:
    whole = uneven()
    part = replace(whole, representative_of=np.array([0, 0, 0, 0, 4, 5]))

    assert (list(whole.present), list(part.present)) == ([0, 1, 2, 3, 4, 5], [0, 4, 5])
    assert [whole.members(group) for group in (0, 1, 2)] == [tuple(range(6)), (0, 2, 4), (1, 2)]
    assert [part.members(group) for group in (0, 1, 2, 0)] == [(0, 4, 5), (0, 4), (), (0, 4, 5)]
    assert (whole.alike([5, 1]), part.alike([5, 0]), part.alike([4])) == (
        (1, 5),
        (0, 1, 2, 3, 5),
        (4,),
    )
    assert [whole.node(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_calls_are_counted_by_rank_as_the_ranks_make_them() -> None:
    whole = uneven()
    made = [[call.op for _, call in whole.calls_of(rank)] for rank in range(6)]

    assert [len(calls) for calls in made] == [2, 2, 1, 1, 2, 1]
    assert whole.call_count == whole.present_calls == 9
    assert whole.rows() == [len(whole.code(rank).calls) for rank in range(6)]
    assert whole.names_of(3)["twice"] == 6
    part = replace(
        whole,
        codes=[replace(code, ranks=code.ranks) for code in whole.codes],
        representative_of=np.array([0, 0, 0, 0, 4, 5]),
    )
    assert part.rows() == [whole.rows()[0], 0, 0, 0, *whole.rows()[4:]]


def test_faults_delay_a_rank_by_their_sum_and_timeouts_have_defaults() -> None:
    built = build_program(
        3,
        {1: [{"op": "new_group", "name": "n", "ranks": [1, 2], "timeout_ns": 7}]},
        groups={"g": [0, 1]},
        nodes=2,
        options={"timeout_ns": 5},
        faults=(
            RankFault(1, "late", delay_ns=3),
            RankFault(1, "late", delay_ns=4),
            RankFault(2, "slow", factor=2.0),
        ),
    )

    assert built.delays == {1: 7}
    assert built.group_timeouts_ns(11) == [5, 11, 7]
    assert replace(built, options={}).group_timeouts_ns(11) == [11, 11, 7]
    starts = lower(loads("world: 2\nprogram: [init_process_group: {timeout: 2 s}, barrier]"))
    assert starts.group_timeouts_ns(11) == [2 * 10**9]
    assert (built.local_size, [built.node(rank) for rank in range(3)]) == (2, [0, 0, 1])


def test_an_invalid_plain_message_has_its_place() -> None:
    built = build_program(2, {1: [{"op": "barrier"}, {"op": "send", "peer": -1}]})

    assert [(f.code, f.message, f.places[0].file) for f in built.findings] == [
        ("DS101", "send names rank -1, but the world has ranks 0 to 1", "rank 1")
    ]
    assert built.call(1, 1).peer is None
