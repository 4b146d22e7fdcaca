"""Speed of the verdict: states per CPU second for programs with any-source receives, and the time of a
large program without such receives.

    python benchmarks/orders.py

For each program, the output shows the number of states stored, whether the search was complete, and
states per CPU second.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from distsim.checker.explore.search import StateSearch
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.verdict import verdict_of
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads

MOST = 200_000
LARGE = """
name: large
world: 64
tensors: {x: {shape: [1024]}, y: {like: x}, g: {shape: [256]}}
program:
  - repeat:
      times: 2000
      steps:
        - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}
        - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}
        - wait: [s, r]
        - compute: {time: 1 ms, reads: [y], writes: [x]}
        - all_reduce: {tensor: g}
"""


def send(peer: int, tag: int = 0, **more: Any) -> dict[str, Any]:
    return {"op": "send", "peer": peer, "tag": tag, "numel": 4, **more}


def recv(peer: int | None = None, tag: int = 0) -> dict[str, Any]:
    return {"op": "recv", "peer": peer, "tag": tag, "numel": 4}


def alike() -> Program:
    """12 receives of one rank that are alike, 4 senders with 12 messages each."""
    sends = [send(0, op="isend", handle=f"h{i}") for i in range(12)]
    return build_program(5, {0: [recv()] * 12, **dict.fromkeys(range(1, 5), sends)})


def unlike() -> Program:
    """12 receives with tags of their own, 4 senders that differ and wait at their end: nothing is
    symmetric.
    """
    ranks = {
        r: [
            *(send(0, t, op="isend", handle=f"h{t}") for t in range(12)),
            {"op": "wait", "handles": "all"},
            send(0, 50 + r),
        ]
        for r in range(1, 5)
    }
    rest = [recv(tag=t) for t in range(12) for _ in range(3)] + [
        recv(r, 50 + r) for r in range(1, 5)
    ]
    return build_program(5, {0: [*(recv(tag=t) for t in range(12)), *rest], **ranks})


def stuck() -> Program:
    """12 receivers that serve one of 4 senders each; the others stay behind."""
    senders = {r: [send(4 + (r + i) % 12) for i in range(12)] for r in range(4)}
    return build_program(16, {**senders, **{r: [recv()] for r in range(4, 16)}})


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for program, what in ((alike(), "alike"), (unlike(), "unlike"), (stuck(), "stuck")):
        for reading in ("rendezvous", "mixed"):
            search, start = StateSearch(build_channel_layout(program), reading), time.process_time()
            search.run(MOST)
            seconds = time.process_time() - start
            end = "complete" if search.finished else "stopped at the limit"
            print(
                f"{what:8} {reading:10} {search.stored:7} states  {end:9}  {search.stored / seconds:9.0f} states/s"
            )
    start = time.process_time()
    program = lower(loads(LARGE))
    found = verdict_of(program)
    print(
        f"large    {program.call_count} calls: {found.verdict} in {time.process_time() - start:.2f} s"
    )


if __name__ == "__main__":
    main()
