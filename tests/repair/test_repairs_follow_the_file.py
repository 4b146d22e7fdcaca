"""The first repair is what the rest of the file shows: its names, its siblings, its order."""

from __future__ import annotations

import pytest

from distsim.repair.expression_text import (
    conjuncts,
    name_order,
    negated,
    with_name_replaced,
    without_names,
)
from distsim.repair.search import find_repairs

_HEAD = "name: program\nbackend: gloo\n"
#: A faulty program, and a line that the first patch adds or removes.
_PROGRAMS = {
    "an unused var counts the iterations of all ranks": (
        "world: 2\nvars: {mine: 4 + 4 * rank, fewest: 4, steps: mine // 2}\n"
        "tensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - repeat: {times: steps, steps: [{all_reduce: {tensor: x}}]}\n",
        "steps: fewest // 2",
    ),
    "an unused var decides when all ranks exit": (
        "world: 2\niterations: 4\nvars: {mine: 1 + rank, earliest: 1}\n"
        "tensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: x}\n"
        "  # early stopping\n"
        "  - exit: 0\n"
        "    ranks: iteration >= mine\n",
        "ranks: iteration >= earliest",
    ),
    "a tag that no other call uses": (
        "world: 2\nvars: {request: 1, answer: 2}\ntensors: {x: {shape: [4]}, y: {shape: [4]}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - send: {tensor: x, dst: 1, tag: request}\n"
        "      - recv: {tensor: y, src: 1, tag: answer}\n"
        "  - ranks: 1\n"
        "    steps:\n"
        "      - recv: {tensor: x, src: 0, tag: request}\n"
        "      - send: {tensor: y, dst: 0, tag: request}\n",
        "dst: 0, tag: answer",
    ),
    "the root that has the data, as other ranks name it": (
        "world: 3\nmesh: {stage: 3}\ntensors: {x: {shape: [2], value: 1}}\n"
        "program:\n"
        "  - ranks: stage == stage_size - 1\n"
        "    steps: [{assign: {tensor: x, value: 7}}, {broadcast: {tensor: x, src: rank}}]\n"
        "  - ranks: stage < stage_size - 1\n"
        "    steps:\n"
        "      - broadcast: {tensor: x, src: 0}\n",
        "src: stage_size - 1",
    ),
    "the index of the loop as the root, like the sibling": (
        "world: 4\nmesh: {row: 2, column: 2}\n"
        "tensors: {a: {shape: [2]}, b: {shape: [2]}}\n"
        "program:\n"
        "  - repeat:\n"
        "      times: 2\n"
        "      index: k\n"
        "      steps:\n"
        "        - assign: {tensor: a, value: rank}\n"
        "        - broadcast: {tensor: a, group: column, group_src: k}\n"
        "        - assign: {tensor: b, value: rank}\n"
        "        - broadcast: {tensor: b, group: row, group_src: row}\n",
        "group: row, group_src: k",
    ),
    "a group that no call uses": (
        "world: 3\niterations: 2\nvars: {stays: rank < 2}\ngroups: {stayers: [0, 1]}\n"
        "tensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - {all_reduce: {tensor: x}, ranks: iteration == 0}\n"
        "  - {all_reduce: {tensor: x}, ranks: iteration == 1 and stays}\n",
        "group: stayers",
    ),
    "a block in other iterations than its sibling": (
        "world: 2\niterations: 4\ntensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: x}\n"
        "  - ranks: rank == 0 and (iteration + 1) % 2 == 0\n"
        "    steps: [{compute: {name: save, time: 1 ms, reads: [x]}}, barrier]\n"
        "  - ranks: rank != 0 and iteration % 2 == 0\n"
        "    steps: [barrier, {compute: {name: verify, time: 1 ms}}]\n",
        "ranks: rank != 0 and (iteration + 1) % 2 == 0",
    ),
    "ranks that agree on a flag skip together": (
        "world: 2\niterations: 2\n"
        "tensors: {bad: {shape: [1]}, x: {shape: [4]}}\n"
        "program:\n"
        "  - assign: {tensor: bad, value: 1 if rank == 1 and iteration == 1 else 0}\n"
        "  - all_reduce: {tensor: bad, op: max}\n"
        "  - ranks: not (rank == 1 and iteration == 1)\n"
        "    steps: [{all_reduce: {tensor: x}}]\n"
        "  - all_reduce: {tensor: x, op: avg}\n",
        "ranks: iteration != 1",
    ),
    "a server answers the worker that asked": (
        "world: 3\ntensors: {q: {shape: [4]}, a: {shape: [4]}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - repeat:\n"
        "          times: 2\n"
        "          index: w\n"
        "          steps:\n"
        "            - recv: {tensor: q}\n"
        "            - send: {tensor: a, dst: w + 1}\n"
        "  - ranks: rank > 0\n"
        "    steps: [{send: {tensor: q, dst: 0}}, {recv: {tensor: a, src: 0}}]\n",
        "src: w + 1",
    ),
    "one rank reduces a tensor that is reduced already": (
        "world: 3\ntensors: {n: {shape: [1], value: 1}}\n"
        "program:\n"
        "  - all_reduce: {tensor: n}\n"
        "  - ranks: 0\n"
        "    steps: [{all_reduce: {tensor: n}}, {compute: {name: log, time: 1 ms, reads: [n]}}]\n",
        "-    steps: [{all_reduce: {tensor: n}}",
    ),
    "the odd rank reduces another tensor": (
        "world: 3\ntensors: {half: {shape: [4], dtype: bfloat16}, full: {shape: [4], value: 0}}\n"
        "program:\n"
        "  - assign: {tensor: half, value: rank}\n"
        "  - {all_reduce: {tensor: full}, ranks: 0}\n"
        "  - {all_reduce: {tensor: half}, ranks: rank > 0}\n"
        "  - assign: {tensor: full, value: half}\n",
        "+  - all_reduce: {tensor: half}",
    ),
    "a collection keeps the root's own part": (
        "world: 3\ntensors: {x: {shape: [4], value: rank}, parts: {shape: [4], copies: 3}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - assign: {tensor: parts@0, value: x}\n"
        "      - repeat:\n"
        "          times: world_size - 2\n"
        "          index: i\n"
        "          steps: [{recv: {tensor: parts@(i + 1), src: i + 1}}]\n"
        "      - compute: {name: save, time: 1 ms, reads: [parts@0, parts@1, parts@2]}\n"
        "  - {send: {tensor: x, dst: 0}, ranks: rank > 0}\n",
        "times: world_size - 1",
    ),
    "ranks wait for the work of another one": (
        "world: 3\ntensors: {x: {shape: [1]}}\n"
        "program:\n"
        "  - {barrier: {}, ranks: rank != 0}\n"
        "  - {compute: {name: download, time: 1 s}, ranks: 0}\n"
        "  - compute: {name: load, time: 1 ms}\n"
        "  - barrier\n"
        "  - all_reduce: {tensor: x}\n",
        "ranks: rank == 0",
    ),
    "a number of iterations is written as the var": (
        "world: 2\nvars: {batches: 3}\ntensors: {x: {shape: [4]}}\n"
        "program:\n"
        "  # every rank sees the same number of batches (padded)\n"
        "  - repeat:\n"
        "      times: {1: batches - 1, else: batches}\n"
        "      steps: [{all_reduce: {tensor: x}}]\n",
        "times: batches",
    ),
    "a shape is written with the size of the axis": (
        "world: 4\nmesh: {dp: 2, tp: 2}\ntensors: {x: {shape: [2]}, y: {shape: [2 * world_size]}}\n"
        "program:\n"
        "  - all_gather_into_tensor: {input: x, output: y, group: tp}\n",
        "2 * tp_size",
    ),
    "each worker receives what a server sends to all": (
        "world: 3\ntensors: {p: {shape: [4], value: 1}, g: {shape: [4], value: 2}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - repeat: {times: 2, index: w, steps: [{recv: {tensor: g, src: w + 1}}]}\n"
        "      - repeat: {times: 2, index: w, steps: [{send: {tensor: p, dst: w + 1}}]}\n"
        "  - ranks: rank > 0\n"
        "    steps:\n"
        "      - send: {tensor: g, dst: 0}\n",
        "recv: {tensor: p, src: 0}",
    ),
    "a reduction of one rank keeps its condition on the iteration": (
        "world: 3\nvars: {steps: 4}\ntensors: {g: {shape: [4]}, loss: {shape: [1]}}\n"
        "program:\n"
        "  - repeat:\n"
        "      times: steps\n"
        "      index: step\n"
        "      steps:\n"
        "        - all_reduce: {tensor: g}\n"
        "        - {all_reduce: {tensor: loss}, ranks: rank == 0 and step % 2 == 0}\n",
        "+          ranks: step % 2 == 0\n",
    ),
    "a var that is the same on all ranks does not replace the rank of a condition": (
        "world: 3\nvars: {steps: 4}\ntensors: {g: {shape: [4]}}\n"
        "program:\n"
        "  - repeat:\n"
        "      times: steps\n"
        "      index: step\n"
        "      steps:\n"
        "        - ranks: step > 0 and rank > 0\n"
        "          steps: [{compute: {time: 1 ms}}, {all_reduce: {tensor: g}}]\n",
        "+        - ranks: step > 0\n",
    ),
    "the rank that no data parallel group lists replaces the doubled one": (
        "world: 6\ntensors: {g: {shape: [4]}}\n"
        "groups: {dp0: {ranks: [0, 2, 4]}, dp1: {ranks: [1, 3, 4]}}\n"
        "program:\n"
        "  - {all_reduce: {tensor: g, group: dp0}, ranks: rank % 2 == 0}\n"
        "  - {all_reduce: {tensor: g, group: dp1}, ranks: rank % 2 == 1}\n",
        "    ranks: [1, 3, 5]\n",
    ),
    "a stage sends what the next one receives": (
        "world: 3\ntensors: {x: {shape: [4], value: 1}, y: {shape: [4]}}\n"
        "program:\n"
        "  - {recv: {tensor: x, src: rank - 1}, ranks: rank > 0}\n"
        "  - assign: {tensor: y, value: 2 * x}\n",
        "send: {tensor: y, dst: rank + 1}",
    ),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_first_repair_is_what_the_rest_of_the_file_shows(name: str) -> None:
    text, changed = _PROGRAMS[name]

    repairs = find_repairs(_HEAD + text, "program.yaml")

    assert repairs
    assert changed in repairs[0].patch


def test_a_stream_waits_for_the_stream_whose_tensor_it_reads() -> None:
    program = (
        "name: program\nbackend: nccl\nworld: 2\ntensors: {g: {shape: [4]}, w: {shape: [4]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: g, on: comm}\n"
        "  - assign: {tensor: w, value: g}\n"
    )

    (repair, *_) = find_repairs(program, "program.yaml")

    assert "wait_stream: {stream: comm, 'on': current}" in repair.patch
    assert repair.text.index("wait_stream") < repair.text.index("assign")


def test_a_double_buffer_receives_into_its_other_half() -> None:
    program = (
        "world: 2\ntensors: {s: {shape: [4], value: 1}, b: {shape: [4], copies: 2}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps: [{repeat: {times: 3, steps: [{send: {tensor: s, dst: 1}}]}}]\n"
        "  - ranks: 1\n"
        "    steps:\n"
        "      - irecv: {tensor: b@0, src: 0, as: got@0}\n"
        "      - repeat:\n"
        "          times: 3\n"
        "          index: k\n"
        "          steps:\n"
        "            - wait: got@k\n"
        "            - irecv: {tensor: b@(k % 2), src: 0, as: got@(k + 1)}\n"
        "              ranks: k < 2\n"
        "            - compute: {name: train, time: 1 ms, reads: [b@(k % 2)]}\n"
    )

    (repair, *_) = find_repairs(_HEAD + program, "program.yaml")

    assert "b@((k + 1) % 2)" in repair.patch


def test_the_text_of_an_expression_can_be_changed() -> None:
    assert with_name_replaced("samples // size", "samples", "fewest + 1") == "(fewest + 1) // size"
    assert name_order("b + a * b") == ["b", "a"]
    assert conjuncts("rank > 0 and (a or b)") == ["rank > 0", "(a or b)"]
    assert without_names("not (rank == 2 and step == 1)", {"rank"}) == "step != 1"
    assert without_names("rank == 2", {"rank"}) == ""
    assert negated("rank != 0") == "rank == 0"
