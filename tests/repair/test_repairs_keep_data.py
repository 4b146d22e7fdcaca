"""The first repair keeps the data that most ranks exchange, and the conditions that are right."""

from __future__ import annotations

import pytest

from distsim.repair.search import find_repairs

_HEAD = "name: program\nbackend: gloo\n"
_PROGRAMS = {
    "one rank gathers fewer rows": (
        "world: 3\n"
        "tensors: {x: {shape: ['1 if rank == 2 else 2', 4]}, all: {shape: [3, 2, 4]}}\n"
        "program:\n"
        "  - all_gather: {input: x, output: all}\n",
        "shape: [2, 4]",
    ),
    "a block of one rank in some iterations": (
        "world: 3\niterations: 2\ntensors: {x: {shape: [4]}, n: {shape: [1]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: x}\n"
        "  - ranks: rank == 0 and iteration % 2 == 1\n"
        "    steps: [{all_reduce: {tensor: n}}]\n",
        "ranks: iteration % 2 == 1",
    ),
    "another rank than a member": (
        "world: 3\ngroups: {g: [0, 2]}\ntensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: x, group: g}\n"
        "    ranks: rank < 2\n"
        "  - barrier\n",
        "ranks: [0, 2]",
    ),
    "a batch in which one rank does not receive": (
        "world: 3\ntensors: {x: {shape: [4]}, y: {shape: [4]}}\n"
        "program:\n"
        "  - batch_isend_irecv:\n"
        "      ops:\n"
        "        - isend: {tensor: x, dst: (rank + 1) % 3}\n"
        "        - irecv: {tensor: y, src: (rank - 1) % 3}\n"
        "          ranks: rank > 0\n",
        "-          ranks: rank > 0",
    ),
    "outputs of an all_to_all that do not fit": (
        "world: 2\n"
        "program:\n"
        "  - all_to_all: {input: [{shape: [1]}, {shape: [2]}], output: [{shape: [1]}, {shape: [3]}]}\n"
        "    ranks: 0\n"
        "  - all_to_all: {input: [{shape: [3]}, {shape: [4]}], output: [{shape: [3]}, {shape: [4]}]}\n"
        "    ranks: 1\n",
        "shape: [2]",
    ),
    "groups of one name with different members": (
        "world: 4\n"
        "program:\n"
        "  - ranks: [0, 3]\n"
        "    steps: [{new_group: {name: g, ranks: [0, 3]}}, {barrier: g}]\n"
        "  - ranks: [1, 2]\n"
        "    steps: [{new_group: {name: g, ranks: [1, 2]}}, {barrier: g}]\n",
        "use_local_synchronization",
    ),
    "the way back of a dispatch": (
        "world: 2\n"
        "tensors:\n"
        "  done: {shape: [{0: 1, 1: 3}], value: rank}\n"
        "  out: {shape: [2]}\n"
        "program:\n"
        "  - all_to_all_single:\n"
        "      input: done\n"
        "      output: out\n"
        "      input_splits: {0: [1, 1], 1: [0, 2]}\n"
        "      output_splits: {0: [1, 0], 1: [1, 2]}\n",
        "+        0: [1, 0]",
    ),
    "a padded tensor that no call uses": (
        "world: 2\n"
        "tensors:\n"
        "  x: {shape: [{0: 3, 1: 2}], value: index}\n"
        "  padded: {shape: [3], value: {0: [0, 1, 2], 1: [0, 1, -1]}}\n"
        "  all: {shape: [2, 3]}\n"
        "program:\n"
        "  - all_gather: {input: x, output: all}\n",
        "input: padded",
    ),
    "a root whose tensor no call has written": (
        "world: 3\ntensors: {loss: {shape: [1], value: -1}}\n"
        "program:\n"
        "  - ranks: 2\n"
        "    steps: [{assign: {tensor: loss, value: 7}}, {broadcast: {tensor: loss, src: 2}}]\n"
        "  - ranks: rank < 2\n"
        "    steps: [{broadcast: {tensor: loss, src: 0}}]\n",
        "+    - broadcast: {tensor: loss, src: 2}",
    ),
    "a dtype that would lose precision": (
        "world: 2\ntensors: {x: {shape: [4], dtype: bfloat16}, y: {shape: [4], dtype: float32}}\n"
        "program:\n"
        "  - {all_reduce: {tensor: y}, ranks: 0}\n"
        "  - {all_reduce: {tensor: x}, ranks: 1}\n",
        "dtype: float32",
    ),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_first_repair_keeps_the_data_of_most_ranks(name: str) -> None:
    text, changed = _PROGRAMS[name]

    repairs = find_repairs(_HEAD + text, "program.yaml")

    assert repairs
    assert changed in repairs[0].patch
    assert not any("remove" in words for words in repairs[0].words)


def test_both_reductions_are_shown_if_ranks_differ() -> None:
    program = (
        "world: 3\ntensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - {all_reduce: {tensor: x, op: max}, ranks: 0}\n"
        "  - {all_reduce: {tensor: x, op: sum}, ranks: rank > 0}\n"
    )

    words = [repair.words[0] for repair in find_repairs(_HEAD + program, "program.yaml")]

    assert "set op to sum" in words[0]
    assert "set op to max" in words[1]


def test_a_request_is_awaited_before_the_group_is_destroyed() -> None:
    program = (
        "world: 2\ntensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - isend: {tensor: x, dst: 1, as: sent}\n"
        "      - destroy_process_group\n"
        "  - ranks: 1\n"
        "    steps:\n"
        "      - sleep: 1 s\n"
        "      - recv: {tensor: x, src: 0}\n"
    )

    (repair, *_) = find_repairs(_HEAD + program, "program.yaml")

    assert repair.text.index("wait") < repair.text.index("destroy_process_group")


def test_all_open_requests_are_awaited_before_a_step_that_reads_their_tensors() -> None:
    program = (
        "world: 2\ntensors: {a: {shape: [1]}, b: {shape: [1]}, c: {shape: [1]}, w: {shape: [1]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: a, async: true, as: ha}\n"
        "  - all_reduce: {tensor: b, async: true, as: hb}\n"
        "  - all_reduce: {tensor: c, async: true, as: hc}\n"
        "  - wait: hc\n"
        "  - assign: {tensor: w, value: a + b + c}\n"
    )

    (repair, *_) = find_repairs(_HEAD + program, "program.yaml")

    assert "handles: [hc, ha, hb]" in repair.patch
