"""Scenario to program: who makes which calls, with which peers, groups, buffers and requests."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads


def program(text: str) -> Program:
    return lower(loads(text))


def ops(p: Program, rank: int) -> list[str]:
    return [call.op for _, call in p.calls_of(rank)]


def codes_of(p: Program) -> list[str]:
    return sorted({finding.code for finding in p.findings})


RING = """
name: ring
world: 64
backend: gloo
tensors: {a: {shape: [4]}, b: {like: a}}
program:
  - repeat:
      times: 1000
      steps:
        - isend: {tensor: a, dst: (rank + 1) % world_size, as: s}
        - irecv: {tensor: b, src: (rank - 1) % world_size, as: r}
        - wait: [s, r]
"""


def test_ranks_with_the_same_calls_share_one_code_and_repeats_share_the_calls() -> None:
    p = program(RING)

    assert len(p.codes) == 1
    assert len(p.codes[0].calls) == 3000
    assert len({id(call) for call in p.codes[0].calls}) == 3
    assert [p.call(rank, 0).peer for rank in (0, 63)] == [1, 0]
    assert p.code_call(5, 2).waits == (2, 1)


def test_distinct_calls_are_listed_once_in_order_with_the_messages_of_a_batch_after_it() -> None:
    code = program(
        "world: 2\ntensors: {a: {shape: [1]}, b: {shape: [1]}}\nprogram:\n"
        "  - repeat: {times: 3, steps: [barrier, batch_isend_irecv: {ops: [isend: {tensor: a, dst: 1 - rank},"
        " irecv: {tensor: b, src: 1 - rank}]}]}\n  - all_reduce: {tensor: a, on: side}\n"
        "  - compute: {time: 1 ms, on: host}\n"
    ).codes[0]

    assert [call.op for call in code.calls] == ["barrier", "batch_isend_irecv"] * 3 + [
        "all_reduce",
        "compute",
    ]
    alone = [call.op for call in code.distinct_calls(parts=False)]
    assert alone == ["barrier", "batch_isend_irecv", "all_reduce", "compute"]
    assert [call.op for call in code.distinct_calls()] == [*alone[:2], "isend", "irecv", *alone[2:]]
    assert [call.stream for call in code.distinct_calls(parts=False)] == ["", "", "side", ""]


def test_a_steady_repeat_equals_its_unrolled_rounds() -> None:
    """Handles that live from one round into the next keep their distances."""
    text = """
name: carried
world: 2
backend: gloo
tensors: {a: {shape: [1]}}
program:
  - all_reduce: {tensor: a, async: true, as: h}
  - repeat:
      times: 5
      steps:
        - wait: h
        - all_reduce: {tensor: a, async: true, as: h}
  - wait: h
"""
    p = program(text)

    assert ops(p, 0) == ["all_reduce"] + ["wait", "all_reduce"] * 5 + ["wait"]
    assert [call.waits for call in p.codes[0].calls if call.op == "wait"] == [(1,)] * 6
    assert not p.findings


def test_a_selector_splits_the_code_unless_it_uses_a_loop_index_and_then_guards_the_call() -> None:
    p = program("""
name: turns
world: 4
backend: gloo
tensors: {a: {shape: [1]}}
program:
  - repeat:
      times: world_size
      index: i
      steps:
        - {compute: {time: 1 ms}, ranks: rank == i}
  - {compute: {time: 2 ms}, ranks: rank < 2}
""")

    assert [code.ranks for code in p.codes] == [(0, 1), (2, 3)]
    assert ops(p, 0) == ["compute", "compute"]
    assert next(p.calls_of(1))[0] != next(p.calls_of(0))[0]
    assert ops(p, 3) == ["compute"]


def test_a_handle_index_that_differs_by_rank_splits_the_code() -> None:
    p = program("""
name: by_rank
world: 2
backend: gloo
tensors: {a: {shape: [1], copies: 2}}
program:
  - all_reduce: {tensor: a@0, async: true, as: h@0}
  - all_reduce: {tensor: a@1, async: true, as: h@1}
  - wait: h@rank
  - wait: all
""")

    assert [p.code_call(rank, 2).waits for rank in (0, 1)] == [(2,), (1,)]
    assert [p.code_call(rank, 3).waits for rank in (0, 1)] == [(2,), (3,)]


def test_an_axis_is_a_group_of_the_ranks_that_differ_only_in_it() -> None:
    p = program("""
name: mesh
world: 8
backend: gloo
mesh: {dp: 2, pp: 2, tp: 2}
tensors: {a: {shape: [1]}}
program:
  - all_reduce: {tensor: a, group: dp}
  - all_reduce: {tensor: a, group: [dp, tp]}
  - {send: {tensor: a, group: pp, group_dst: pp + 1}, ranks: pp == 0}
  - {recv: {tensor: a, group: pp, group_src: pp - 1}, ranks: pp == 1}
""")

    assert p.call(3, 0).group.ranks == (3, 7)
    assert p.call(3, 1).group.ranks == (2, 3, 6, 7)
    assert (p.call(1, 2).peer, p.call(3, 2).peer) == (3, 1)


def test_per_rank_values_and_uneven_splits_belong_to_each_rank() -> None:
    p = program("""
name: uneven
world: 2
backend: gloo
tensors: {a: {shape: [{0: 5, else: 3}]}, b: {shape: auto}}
program:
  - compute: {time: {0: 1 ms, 1: 2 ms}}
  - all_to_all_single: {input: a, output: b, input_splits: {0: [2, 3], 1: [1, 2]}}
""")

    assert [p.call(rank, 0).time_ns for rank in (0, 1)] == [1_000_000, 2_000_000]
    assert [p.call(rank, 1).input_splits for rank in (0, 1)] == [(2, 3), (1, 2)]
    assert [p.call(rank, 1).output_splits for rank in (0, 1)] == [(2, 1), (3, 2)]
    assert [p.call(rank, 1).outputs[0].shape for rank in (0, 1)] == [(3,), (5,)]


def test_iterations_repeat_the_program_and_count_from_0() -> None:
    p = program("""
name: it
world: 2
backend: gloo
iterations: 4
tensors: {a: {shape: [1]}}
program: [{all_reduce: {tensor: a}}, {compute: {time: 1 ms}}]
faults: [{rank: 1, iteration: 3, kind: kill}, {rank: 0, kind: slow, factor: 2}]
""")

    assert p.codes[0].iterations == (0, 2, 4, 6, 8)
    assert [(f.rank, f.kind, f.position) for f in p.faults] == [(1, "kill", 6), (0, "slow", None)]


def test_new_group_creates_one_group_for_ranks_that_name_the_same_members_in_turn() -> None:
    p = program("""
name: groups
world: 4
backend: gloo
tensors: {a: {shape: [1]}}
program:
  - new_group: {name: low, ranks: [0, 1]}
  - new_group: {name: high, ranks: [2, 3]}
  - {all_reduce: {tensor: a, group: low}, ranks: rank < 2}
  - {all_reduce: {tensor: a, group: high}, ranks: rank >= 2}
""")

    assert p.call(0, 2).group is p.call(1, 2).group
    assert p.call(3, 2).group.ranks == (2, 3)
    assert not p.findings


INVALID: dict[str, tuple[str, str]] = {
    "a peer outside the world": ("DS101", "send: {tensor: a, dst: rank + 3}"),
    "a peer outside the group": ("DS101", "send: {tensor: a, group: pair, dst: 2}"),
    "a group rank outside the group": ("DS101", "send: {tensor: a, group: pair, group_dst: 2}"),
    "a send to oneself": ("DS102", "send: {tensor: a, dst: rank}"),
    "a root outside the group": ("DS103", "broadcast: {tensor: a, group: pair, src: 2}"),
    "a group the caller is not in": ("DS104", "all_reduce: {tensor: a, group: others}"),
    "splits that do not add up": (
        "DS107",
        "all_to_all_single: {input: b, output: b, input_splits: [1, 1, 1], output_splits: [1, 2, 3]}",
    ),
    "a handle never bound on this rank": ("DS106", "wait: late"),
    "buffers that do not fit": ("DS110", "all_gather_into_tensor: {input: a, output: a}"),
    "new_group with a rank outside": ("DS111", "new_group: {name: g, ranks: [0, 7]}"),
    "initialised twice": ("DS109", "init_process_group"),
    "a batched receive from any source": (
        "DS112",
        "batch_isend_irecv: {ops: [{irecv: {tensor: a}}]}",
    ),
    "an empty batch": ("DS112", "batch_isend_irecv: {ops: []}"),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_call_that_no_rank_may_make_is_a_finding_with_its_line(case: str) -> None:
    code, step = INVALID[case]
    ready = ["init_process_group"] if "init" in step else []
    p = program(
        f"""
name: invalid
world: 3
backend: gloo
groups: {{pair: [0, 1], others: [1, 2]}}
tensors: {{a: {{shape: [2]}}, b: {{shape: [6]}}}}
program:
  - barrier
{"".join(f"  - {r}{chr(10)}" for r in ready)}  - {{{step if ":" in step else step + ": {}"}, ranks: 0}}
  - {{irecv: {{tensor: a, src: 0, as: late}}, ranks: 5 < rank}}
""".replace("  - barrier\n  - init", "  - init")
    )

    found = [f for f in p.findings if f.code == code]

    assert found, codes_of(p)
    assert found[0].ranks == (0,)
    assert found[0].places[0].line > 0
    position = next(k for k, call in enumerate(p.code(0).calls) if call.invalid is not None)
    assert p.code_call(0, position).invalid is not None


@pytest.mark.parametrize("leaves", ["exit: 0", "fail: {}"])
def test_a_call_that_a_rank_would_make_after_its_end_is_no_finding(leaves: str) -> None:
    p = program(
        f"""
name: leaver
world: 4
iterations: 4
groups: {{rest: [0, 1, 2]}}
tensors: {{a: {{shape: [2]}}}}
program:
  - {{{leaves}, ranks: rank == 3 and iteration == 2}}
  - {{all_reduce: {{tensor: a, group: rest}}, ranks: rank == 2 or iteration >= 2}}
"""
    )

    assert codes_of(p) == []


def test_a_call_that_a_rank_makes_in_the_round_before_its_end_is_a_finding() -> None:
    p = program(
        """
name: leaver
world: 4
iterations: 2
groups: {rest: [0, 1, 2]}
tensors: {a: {shape: [2]}}
program:
  - {all_reduce: {tensor: a, group: rest}, ranks: rank == iteration + 2}
  - {exit: 0, ranks: rank == 3 and iteration == 1}
"""
    )

    assert codes_of(p) == ["DS104"]
    assert p.findings[0].ranks == (3,)


def test_a_handle_is_consumed_by_its_first_wait() -> None:
    p = program("""
name: spent
world: 2
backend: gloo
tensors: {a: {shape: [1]}}
program:
  - all_reduce: {tensor: a, async: true, as: h}
  - wait: h
  - wait: h
""")

    assert codes_of(p) == ["DS105"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_call_without_a_process_group_is_invalid(order: str) -> None:
    steps = {
        "before": ["barrier", "init_process_group"],
        "after": ["init_process_group", "destroy_process_group", "barrier"],
    }[order]
    p = program(
        "name: early\nworld: 2\nbackend: gloo\nprogram:\n" + "".join(f"  - {s}\n" for s in steps)
    )

    assert codes_of(p) == ["DS108"]


def test_a_selector_that_selects_no_rank_is_a_warning() -> None:
    p = program(
        "name: nobody\nworld: 2\nbackend: gloo\nprogram:\n  - {barrier: {}, ranks: rank > 7}\n"
    )

    assert [(f.code, f.severity) for f in p.findings] == [("DS901", "warning")]


FILE_ERRORS: dict[str, tuple[str, str]] = {
    "a selector that is a number": ("{barrier: {}, ranks: rank + 1}", "true or false"),
    "a division by zero": ("send: {tensor: a, dst: 1 // (rank - rank)}", "zero"),
    "a rank that a mapping leaves out": ("compute: {time: {0: 1 ms}}", "rank 1 has no entry"),
    "a copy that does not exist": ("all_reduce: {tensor: a@3}", "copies 0 to 0"),
}


@pytest.mark.parametrize("case", FILE_ERRORS)
def test_an_error_that_appears_only_on_some_rank_is_reported_with_its_place(case: str) -> None:
    step, words = FILE_ERRORS[case]

    with pytest.raises(ScenarioErrors) as caught:
        program(
            f"name: bad\nworld: 2\nbackend: gloo\ntensors: {{a: {{shape: [1]}}}}\nprogram:\n  - {step}\n"
        )

    problem: Any = caught.value.problems[0]
    assert problem.line == 6
    assert words in problem.message


def test_a_batch_in_a_loop_follows_a_recreated_group_even_if_it_is_not_in_its_first_part() -> None:
    p = program("""
name: anew
world: 3
backend: nccl
tensors: {x: {shape: [4]}}
program:
  - repeat:
      times: 2
      index: i
      steps:
        - new_group: {name: g, ranks: [0, 1 + i]}
        - batch_isend_irecv:
            ops:
              - {isend: {tensor: x, dst: 0}, ranks: 1 == 2}
              - {isend: {tensor: x, group_dst: 1, group: g}, ranks: 0}
            as: h
          ranks: 0
        - wait: h
          ranks: 0
""")

    sends = [part for _, call in p.calls_of(0) for part in call.parts if part.op == "isend"]
    assert [(send.peer, send.group.ranks) for send in sends] == [(1, (0, 1)), (2, (0, 2))]


def test_the_number_of_a_copy_is_that_of_its_round_rank_and_group() -> None:
    p = program("""
world: 4
mesh: {dp: 2, tp: 2}
tensors: {x: {shape: [4], copies: 12}}
vars: {own: rank}
program:
  - repeat:
      times: 3
      index: i
      steps:
        - repeat:
            times: 2
            index: j
            steps:
              - all_reduce: {tensor: x@(i + 3 * j)}
        - {all_reduce: {tensor: x@(i + own), group: tp}, ranks: i < 2}
        - broadcast: {tensor: x@group_rank, group_src: 0, group: tp}
        - broadcast: {tensor: x@group_rank, group_src: 0, group: dp}
""")
    for rank in range(4):
        said = [
            call.inputs[0].index if call.inputs else call.outputs[0].index
            for _, call in p.calls_of(rank)
        ]
        rounds = [[i, i + 3, *([i + rank] if i < 2 else []), rank % 2, rank // 2] for i in range(3)]
        assert said == [number for one in rounds for number in one]


@pytest.mark.parametrize(
    "lines",
    [
        "program: [{ranks: [0, 7], steps: [barrier]}]",
        "program: [{barrier: {}, ranks: 7}]",
        "program: [barrier]\nfaults: [{ranks: [0, 7], kind: raise}]",
        "program: [barrier]\nmemory: {a: {ranks: [0, 7], parameters: 1 GiB}}",
    ],
)
def test_a_listed_rank_outside_the_world_is_an_error_with_its_place(lines: str) -> None:
    with pytest.raises(ScenarioErrors) as caught:
        loads(f"world: 2\nbackend: gloo\n{lines}", "a.yaml", ())

    (problem,) = caught.value.problems
    assert problem.message == "rank 7 is outside the world of 2 ranks (0 to 1)"
    assert problem.line == lines.count("\n") + 3


def test_a_value_is_evaluated_only_for_the_ranks_that_a_loop_index_selects() -> None:
    """Rank 0 makes no call, so it divides by nothing."""
    p = program("""
world: 3
program:
  - repeat:
      times: 2
      index: i
      steps:
        - {compute: {time: 6 ms // rank}, ranks: rank > i}
""")

    times = [[call.time_ns for _, call in p.calls_of(rank)] for rank in range(3)]
    assert times == [[], [6_000_000], [3_000_000, 3_000_000]]


def test_the_ranks_of_absent_processes_are_absent_from_the_startup() -> None:
    p = program("""
world: 3
faults: [{rank: 2, kind: absent}]
program: [init_process_group, barrier]
""")

    assert p.startup is not None
    assert [process.absent for process in p.startup.entrances] == [False, False, True]


@pytest.mark.parametrize(("times", "shown"), [("rank < 2", "True"), ("rank > 5", "False")])
def test_the_times_of_a_repeat_must_be_an_integer(times: str, shown: str) -> None:
    text = f"world: 2\nprogram: [repeat: {{times: {times}, steps: [barrier]}}]\n"

    with pytest.raises(ScenarioErrors, match=f"times must be an integer, found {shown}"):
        program(text)
