"""Speed of the time-ordered engine on programs that only it can simulate.

    python benchmarks/ordered.py

The programs have any-source receives, a pool of workers that fills, a rank that is killed, or
shared cards. The output shows calls per CPU second, without lowering, and the time that the search
over event orders takes for its states.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

from distsim.backends import BACKEND_PROFILES
from distsim.engine.event_driven import simulate_in_order
from distsim.engine.order_search import search_event_orders
from distsim.hardware.cluster import preset
from distsim.hardware.cost import CostModel
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.semantics.form.linked_program import LinkedProgram

ROUNDS = 3
STATES = 2_000
ANY_SOURCE = """
name: any-source
world: 64
tensors: {x: {shape: [1024]}, y: {like: x}}
program:
  - repeat:
      times: 200
      index: i
      steps:
        - isend: {tensor: x, dst: (rank + 1) % world_size, tag: i % 4, as: a}
        - isend: {tensor: x, dst: (rank + 7) % world_size, tag: i % 4, as: b}
        - compute: {time: 20 us}
        - recv: {tensor: y, tag: i % 4}
        - recv: {tensor: y, tag: i % 4}
        - wait: [a, b]
"""
POOL = """
name: pool
world: 32
tensors: {a: {shape: [1024]}, b: {shape: [1024]}, c: {shape: [1024]}, d: {shape: [1024]}}
program:
  - repeat:
      times: 200
      steps:
        - all_reduce: {tensor: a, async: true, as: ha}
        - all_reduce: {tensor: b, async: true, as: hb}
        - all_reduce: {tensor: c, async: true, as: hc}
        - all_reduce: {tensor: d, async: true, as: hd}
        - compute: {time: 50 us}
        - wait: [ha, hb, hc, hd]
"""
KILLED = """
name: killed
world: 64
tensors: {x: {shape: [1024]}, y: {like: x}, g: {shape: [256]}}
faults: [{kind: kill, rank: 5, at: 500 ms}]
program:
  - repeat:
      times: 200
      steps:
        - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}
        - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}
        - wait: [s, r]
        - compute: {time: 1 ms, reads: [y], writes: [x]}
        - all_reduce: {tensor: g}
"""
BOUND = """
name: bound
world: 9
tensors: {x: {shape: [4]}, y: {shape: [4]}}
program:
  - ranks: rank > 0
    steps: [{repeat: {times: 3, index: i, steps: [{send: {tensor: x, dst: 0, tag: i}}, {recv: {tensor: y, src: 0, tag: i}}]}}]
  - ranks: 0
    steps:
      - repeat:
          times: 3
          index: i
          steps:
            - {repeat: {times: 8, index: j, steps: [{recv: {tensor: y, tag: i}}]}}
            - {repeat: {times: 8, index: j, steps: [{send: {tensor: x, dst: j + 1, tag: i}}]}}
"""


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the fastest of some rounds, and what the last one returned."""
    taken = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.process_time()
        result = work()
        taken.append(time.process_time() - start)
    return min(taken), result


def rate(text: str, backend: str, shared: bool = False) -> None:
    program: Program = lower(loads(text))
    cluster = preset("cpu-10gbe").model_copy(update={"shared_links": shared})
    cost = CostModel(cluster, program.world_size, program.local_size)
    took, left = seconds(lambda: simulate_in_order(program, BACKEND_PROFILES[backend], cost))
    name = f"{program.name}{' shared' if shared else ''}"
    made = sum(ns >= 0 for ns in left.columns.posted)
    print(
        f"{name:20} {backend:5} {made:7} calls  {made / took:9,.0f} calls/s  end {left.end_ns} ns"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    gc.disable()
    for backend in ("gloo", "mpi"):
        rate(ANY_SOURCE, backend)
    rate(POOL, "gloo")
    for backend in ("gloo", "mpi"):
        rate(KILLED, backend)
    rate(KILLED.replace("500 ms}", "400 ms}"), "gloo", shared=True)
    program = lower(loads(BOUND))
    took, found = seconds(
        lambda: search_event_orders(LinkedProgram(program, BACKEND_PROFILES["gloo"]), STATES)
    )
    print(
        f"{program.name:20} {'gloo':5} {STATES} states at most: {took:.2f} s, {len(found.ends)} ends"
    )


if __name__ == "__main__":
    main()
