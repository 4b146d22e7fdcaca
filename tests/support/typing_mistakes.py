"""A hundred typing mistakes in scenario files, one per file, with distsim's message for each. A person
read them one by one; `tests/data/typing_mistakes.txt` contains them.

    .venv/bin/python -m tests.support.typing_mistakes     # regenerates that file; read it again
"""

from __future__ import annotations

import argparse
from pathlib import Path

from distsim.common.errors import ScenarioErrors
from distsim.scenario import loads

KEPT = Path(__file__).resolve().parents[1] / "data" / "typing_mistakes.txt"
_HEAD = "name: t\nworld: 4\nbackend: gloo\nmesh: {dp: 2, tp: 2}\nvars: {n: 2, step: 3 ms}\ntensors: {x: {shape: [4]}, y: {shape: [4]}}\n"
#: Of the program, after the head.
STEPS = (
    "  - sned: {tensor: x, dst: 1}",
    "  - send: {tensr: x, dst: 1}",
    "  - send: {tensor: xx, dst: 1}",
    "  - send: {tensor: x}",
    "  - send: {tensor: x, dst: 1, dst: 2}",
    "  - send: {tensor: x, dst:1}",
    "  - send:{tensor: x, dst: 1}",
    "  - send(x, 1)",
    "  - dist.send(x, dst=1)",
    "  - all_reduce(x, op=ReduceOp.SUM, async_op=True)",
    "  - send: x, 1",
    "  - send: [x, 1]",
    "  - send: {tensor: x, dst: 4294967296}",
    "  - send: {tensor: x, dst: 1.5}",
    "  - send: {tensor: x, dst: true}",
    "  - send: {tensor: x, dst: one}",
    "  - send: {tensor: x, dst: rank +}",
    "  - send: {tensor: x, dst: (rank + 1}",
    "  - send: {tensor: x, dst: rank + 1) % 4}",
    "  - send: {tensor: x, dst: min(rank + 1, 3)}",
    "  - send: {tensor: x, dst: rank / 2}",
    "  - send: {tensor: x, dst: 2 ** rank}",
    "  - send: {tensor: x, dst: next_rank}",
    "  - send: {tensor: x, dest: 1}",
    "  - send: {tensor: x, to: 1}",
    "  - send: {tensor: x, dst: 1, group_dst: 1}",
    "  - send: {tensor: x, dst: 1, tag: 4294967296}",
    "  - send: {tensor: x, dst: 1, tag: 1.5}",
    "  - recv: {tensor: x, from: 0}",
    "  - recv: {tensor: x, src: 0, group_src: 0}",
    "  - recv: {tensor: x, src: 0, async_op: true}",
    "  - all_reduce: {tensor: x, async_op: true}",
    "  - all_reduce: {tensor: x, async: yes}",
    "  - all_reduce: {tensor: x, as: h}",
    "  - all_reduce: {tensor: x, op: mean}",
    "  - all_reduce: {tensor: x, op: SUMM}",
    "  - all_reduce: {tensor: x, op: ReduceOp.AVERAGE}",
    "  - all_reduce: {tensor: x, group: pp}",
    "  - all_reduce: {tensor: x, group: [dp, pp]}",
    "  - all_reduce: {input: x}",
    "  - all_gather: {tensor_list: y, tensor: x}",
    "  - gather: {tensor: x, gather_list: y, dst: 0}",
    "  - scatter: {tensor: x, scatter_list: y, src: 0}",
    "  - broadcast: {tensor: x}",
    "  - broadcast: {tensor: x, root: 0}",
    "  - all_to_all_single: {input: x, output: y, input_split_sizes: [1, 3]}",
    "  - barier",
    "  - barrier: {group: world}\n    ranks: rank = 0",
    "  - barrier:\n    ranks: rank",
    "  - barrier:\n    ranks: '0'",
    "  - barrier:\n    rank: 0",
    "  - barrier:\n    ranks: [0, -1]",
    "  - barrier:\n    ranks: rank == 0 && dp == 0",
    "  - barrier:\n    ranks: '!(rank == 0)'",
    "  - barrier:\n    group: dp",
    "  - barrier\n   - barrier",
    "  - barrier\n - barrier",
    "  -barrier",
    "  barrier",
    "  - barrier:\n\tgroup: dp",
    "  - sleep: 3",
    "  - sleep: 3 msec",
    "  - sleep: 3 Ms",
    "  - sleep: -3 ms",
    "  - sleep: 10 ms / 4",
    "  - sleep: 3 ms + 1",
    "  - sleep: 4 MiB",
    "  - sleep: 2 * n",
    "  - sleep: rank * step * step",
    "  - compute: {time: 3}",
    "  - compute: {flops: 10}",
    "  - compute: {time: 3 ms, flops: 2 TFLOP}",
    "  - compute: {name: f}",
    "  - compute: {time: 3 ms, reads: x}",
    "  - compute: {time: 3 ms, reads: [z]}",
    "  - compute: {time: 3 ms, dtype: float23}",
    "  - wait: h",
    "  - wait",
    "  - irecv: {tensor: x, src: 0, as: all}",
    "  - batch_isend_irecv: {ops: [{send: {tensor: x, dst: 1}}]}",
    "  - batch_isend_irecv: [{isend: {tensor: x, dst: 1}}]",
    "  - repeat: {steps: [barrier]}",
    "  - repeat: {times: 2}",
    "  - repeat: {times: -1, steps: [barrier]}",
    "  - repeat: {times: 3, index: 1, steps: [barrier]}",
    "  - repeat: {times: 3, index: rank, steps: [barrier]}",
    "  - repeat: 3",
    "  - ranks: 0\n    step: [barrier]",
    "  - ranks: 0\n    steps: barrier",
    "  - ranks: 0",
    "  - send: {tensor: x, dst: 1}\n    recv: {tensor: x, src: 0}",
    "  - send: {tensor: x, dst: 1\n  - barrier",
    "  - send: {tensor: x, dst: 1]",
    "  - send: {tensor: x, dst: 1}}",
    "  - send: {tensor: x, dst: 1},\n  - barrier",
    "  - send: tensor: x",
    "  - send: {tensor: 'x, dst: 1}\n  - barrier",
)
#: Of the rest of the file: all of it.
FILES = (
    "wrld: 4\nprogram: []\n",
    "world: four\nprogram: []\n",
    "world: 0\nprogram: []\n",
    "world:4\nprogram: []\n",
    "world: 4\nprogram\n  - barrier\n",
    "world: 4\n  backend: gloo\nprogram: []\n",
    "world: {nodes: 2}\nprogram: []\n",
    "world: {node: 2, ranks_per_node: 8}\nprogram: []\n",
    "world: 4\nbackend: ncll\nprogram: []\n",
    "world: 4\ncluster: dgx-a10\nprogram: []\n",
    "world: 4\nmesh: {dp: 3}\nprogram: []\n",
    "world: 4\ntensors: {x: {shape: 4}}\nprogram: []\n",
    "world: 4\ntensors: {x: {shape: [4], dtype: float}}\nprogram: []\n",
    "world: 4\ntensors: {x: [4]}\nprogram: []\n",
    "world: 4\ntensors: {x: {like: y}}\nprogram: []\n",
    "world: 4\nvars: {a: b, b: 1}\nprogram: []\n",
    "world: 4\nvars: {rank: 1}\nprogram: []\n",
    "world: 4\nprogram: []\noptions: {timeout: 30}\n",
    "world: 4\nprogram: []\noptions: {timeout: 0 s}\n",
    "world: 4\nprogram: []\nfaults: [{rank: 9, kind: kill}]\n",
    "world: 4\nprogram: []\nfaults: [{rank: 1, kind: slow}]\n",
    "world: 4\nprogram: []\nexpect: {makespan: {at_least: 2 s, at_most: 1 s}}\n",
    "world: 4\nprogram: []\nexpect: {verdict: deadlok}\n",
    "world: 4\nprogram: []\niterations: true\n",
    "world: 4\ngroups: {g: [0, 0]}\nprogram: []\n",
    "world: 4\ngroups: {g: {ranks: [0], by: rank}}\nprogram: []\n",
    "world: 4\nabout: it's: a\nprogram: []\n",
)


def texts() -> list[str]:
    """Every file."""
    return [*(f"{_HEAD}program:\n{step}\n" for step in STEPS), *FILES]


def said(text: str) -> str:
    """What distsim says of a file, as the command line prints it."""
    try:
        loads(text, "f.yaml")
    except ScenarioErrors as errors:
        return str(errors)
    return "nothing: it loads"


def report() -> str:
    """All of them with their messages."""
    parts = [
        f"{(text.partition('program:' + chr(10))[2] if text.startswith(_HEAD) else text).rstrip()}\n{said(text)}"
        for text in texts()
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    KEPT.write_text(report(), encoding="utf-8")
