"""The first repair follows from the rest of the file, and `check --fix` may write it."""

from __future__ import annotations

import pytest

from distsim.repair.search import find_repairs

#: A faulty program, and a part of the repaired one.
_PROGRAMS = {
    "a group lists the ranks that call its collectives": (
        "world: 6\ntensors: {g: {shape: [4]}, n: {shape: [1]}}\n"
        "groups: {leaders: [0, 2]}\n"
        "program:\n"
        "  - ranks: rank % 3 == 0\n"
        "    steps:\n"
        "      - all_reduce: {tensor: g, group: leaders}\n"
        "      - all_reduce: {tensor: n, group: leaders, op: max}\n",
        "leaders: [0, 3]",
    ),
    "even and odd ranks divide the world": (
        "world: 4\ntensors: {loss: {shape: [1]}}\n"
        "groups:\n"
        "  even: [0, 2]\n"
        "  odd: [1, 2]\n"
        "program:\n"
        "  - {all_reduce: {tensor: loss, group: even}, ranks: rank % 2 == 0}\n"
        "  - {all_reduce: {tensor: loss, group: odd}, ranks: rank % 2 == 1}\n",
        "odd: [1, 3]",
    ),
    "a wrong var is corrected instead of the shape that it does not fit": (
        "world: 4\nvars: {rows: 64, shard: rows // (world_size - 1)}\n"
        "tensors: {part: {shape: [shard, 2]}, all_rows: {shape: [rows, 2]}}\n"
        "program:\n"
        "  - all_gather_into_tensor: {input: part, output: all_rows}\n",
        "shard: rows // world_size",
    ),
    "the workers are all ranks but one": (
        "world: 3\nvars: {workers: world_size}\n"
        "tensors: {g: {shape: [4]}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - repeat:\n"
        "          times: workers\n"
        "          index: w\n"
        "          steps: [{recv: {tensor: g, src: w + 1}}]\n"
        "  - {send: {tensor: g, dst: 0}, ranks: rank > 0}\n",
        "workers: world_size - 1",
    ),
    "the second wait for a request waits for the other request": (
        "world: 2\ntensors: {a: {shape: [4]}, b: {shape: [4]}}\n"
        "program:\n"
        "  - all_reduce: {tensor: a, async: true, as: work_a}\n"
        "  - all_reduce: {tensor: b, async: true, as: work_b}\n"
        "  - wait: work_a\n"
        "  - compute: {name: first, time: 1 ms, reads: [a]}\n"
        "  - wait: work_a\n"
        "  - compute: {name: second, time: 1 ms, reads: [b]}\n",
        "wait: work_b",
    ),
    "the root is the rank that holds the data, although most ranks name another": (
        'world: 4\ntensors: {w: {shape: [4], value: "9 if rank == 0 else 0"}}\n'
        "program:\n"
        "  - {broadcast: {tensor: w, src: 0}, ranks: rank == 0}\n"
        "  - {broadcast: {tensor: w, src: 1}, ranks: rank != 0}\n",
        "src: 0}\n    ranks: rank != 0\n",
    ),
    "the root is the rank whose work names the tensor": (
        "world: 4\ntensors: {weights: {shape: [4]}}\n"
        "program:\n"
        "  - ranks: rank == 0\n"
        "    steps:\n"
        "      - compute: {name: read weights, time: 1 ms}\n"
        "      - broadcast: {tensor: weights, src: 0}\n"
        "  - {broadcast: {tensor: weights, src: 1}, ranks: rank != 0}\n",
        "src: 0}\n    ranks: rank != 0\n",
    ),
    "the root of a scatter gives the tensor that other ranks name": (
        "world: 3\ntensors: {table: {shape: [3, 2], value: index}, row: {shape: [2]}}\n"
        "program:\n"
        "  - {scatter: {output: row, src: 0}, ranks: 0}\n"
        "  - {scatter: {input: table, output: row, src: 0}, ranks: rank > 0}\n",
        "scatter: {output: row, src: 0, input: table}",
    ),
    "a collective is added before the work that reads its result": (
        "world: 4\niterations: 2\n"
        "tensors: {g: {shape: [4], value: rank}, n: {shape: [1], value: rank}}\n"
        "program:\n"
        "  - all_reduce: {tensor: g}\n"
        "  - ranks: rank < world_size - 1\n"
        "    steps: [{all_reduce: {tensor: n, op: max}}]\n"
        "  - compute: {name: update, time: 1 ms, reads: [g, n]}\n",
        "  - steps:\n    - all_reduce: {tensor: n, op: max}\n  - compute: {name: update",
    ),
    "of two receives, one is turned into a send": (
        "world: 2\ntensors: {edge: {shape: [4], value: rank}, halo: {shape: [4]}}\n"
        "program:\n"
        "  - ranks: 0\n"
        "    steps:\n"
        "      - send: {tensor: edge, dst: 1}\n"
        "      - recv: {tensor: halo, src: 1}\n"
        "  - ranks: 1\n"
        "    steps:\n"
        "      - recv: {tensor: halo, src: 0}\n"
        "      - recv: {tensor: edge, src: 0}\n",
        "      - send: {tensor: edge, dst: 0}\n",
    ),
    "a description tells which tensor is summed": (
        "about: Sums the correct answers and takes the maximum of the latencies.\n"
        "world: 3\ntensors: {correct: {shape: [1]}, latency: {shape: [8]}}\n"
        "program:\n"
        "  - ranks: rank == 0\n"
        "    steps:\n"
        "      - all_reduce: {tensor: correct, op: sum}\n"
        "      - all_reduce: {tensor: latency, op: max}\n"
        "  - ranks: rank > 0\n"
        "    steps:\n"
        "      - all_reduce: {tensor: latency, op: sum}\n"
        "      - all_reduce: {tensor: correct, op: max}\n",
        "rank > 0\n    steps:\n      - all_reduce: {tensor: correct, op: sum}\n",
    ),
    "a condition loses the part that the receives contradict": (
        "world: 3\nvars: {has_left: rank > 0, has_right: rank < world_size - 1}\n"
        "tensors: {edge: {shape: [4], value: rank}, halo: {shape: [4], value: 0}}\n"
        "program:\n"
        "  - {irecv: {tensor: halo, src: rank + 1, as: got}, ranks: has_right}\n"
        "  - {send: {tensor: edge, dst: rank - 1}, ranks: has_left and has_right}\n"
        "  - {wait: got, ranks: has_right}\n",
        "dst: rank - 1}\n    ranks: has_left\n",
    ),
    "all ranks of a training step have as many batches as most": (
        "world: 4\nprogram:\n"
        "  - ddp:\n"
        "      layers: [{params: 1024, forward: 1 ms, backward: 2 ms}]\n"
        "      inputs: {3: 2, else: 3}\n"
        "  - barrier\n",
        "inputs: 3\n",
    ),
    "a model with unused layers searches for them": (
        "world: 2\niterations: 2\nprogram:\n"
        "  - ddp:\n"
        "      layers:\n"
        "        - {params: 1024, forward: 1 ms, backward: 2 ms}\n"
        "        - {params: 1024, forward: 1 ms, backward: 2 ms}\n"
        "      unused: {1: [1]}\n",
        "find_unused_parameters: true",
    ),
    "the input splits follow from the output splits and the shape of the output": (
        "world: 2\ntensors: {x: {shape: [5]}, y: {shape: [{0: 4, 1: 6}]}}\n"
        "program:\n"
        "  - all_to_all_single:\n"
        "      input: x\n"
        "      output: y\n"
        "      input_splits: [3, 2]\n"
        "      output_splits: {0: [2, 2], 1: [3, 3]}\n",
        "input_splits: [2, 3]",
    ),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_first_repair_is_what_the_rest_of_the_file_shows(name: str) -> None:
    program, part = _PROGRAMS[name]

    (first, *_) = find_repairs(f"backend: gloo\n{program}", "program.yaml")

    assert part in first.text
    assert not first.ends_exchanges
