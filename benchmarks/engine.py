"""Speed of the engine, compared with the lower bound (`floor.py`) on the same calls.

    python benchmarks/engine.py            # ring.yaml and pipeline.yaml

Both run in one process, in alternating rounds, and are measured by CPU time. The output shows the
calls per second of both and their ratio (median of the rounds). It also shows whether both reach
the same simulated end time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floor

from distsim.backends import BACKEND_PROFILES
from distsim.engine import run_program
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import load

ROUNDS = 5


def floor_calls(program: Program) -> list[list[tuple[Any, ...]]]:
    """The same calls, as the floor takes them."""
    out = []
    for rank in range(program.world_size):
        calls: list[tuple[Any, ...]] = []
        for _, call in program.calls_of(rank):
            if OPERATIONS[call.op].kind == "p2p":
                calls.append((call.op, call.peer, call.input_nbytes))
            elif call.op == "wait":
                calls.append(("wait", len(program.code_call(rank, len(calls)).waits)))
            elif call.op == "compute":
                calls.append(("compute", call.time_ns))
            else:
                calls.append((call.op, call.group.id, call.input_nbytes, call.group.size))
        out.append(calls)
    return out


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call, and what it returned."""
    gc.collect()
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def compare(path: Path) -> float:
    """Print one file's rates; the ratio."""
    scenario = load(str(path))
    program = lower(scenario)
    cost = CostModel(cluster_from(scenario.cluster), program.world_size, program.local_size)
    calls = floor_calls(program)
    group = next(
        (g for g in program.groups[1:] if g.size == program.mesh.get("dp")), program.groups[0]
    )
    reduce_ns = cost.collective_ns(
        OPERATIONS["all_reduce"],
        group.ranks,
        program.resolve(0, program.codes[0].calls[-1]).input_nbytes,
    )
    ours, bare = [], []
    for _ in range(ROUNDS):
        took, result = seconds(lambda: run_program(program, BACKEND_PROFILES["gloo"], cost))
        ours.append(took)
        took, makespan = seconds(lambda: floor.run(calls, 5000, 25.0, reduce_ns))
        bare.append(took)
        if makespan != result.makespan_ns:
            print(
                f"  simulated end times differ: engine {result.makespan_ns} ns, floor {makespan} ns"
            )
    ratio = statistics.median(b / o for o, b in zip(ours, bare, strict=True))
    count = program.call_count
    print(
        f"{path.name}: {count} calls; engine {count / statistics.median(ours):,.0f} calls/s, "
        f"floor {count / statistics.median(bare):,.0f} calls/s, ratio {ratio:.2f}"
    )
    return ratio


if __name__ == "__main__":
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="[default: ring.yaml pipeline.yaml]")
    files = parser.parse_args().files or [here / "ring.yaml", here / "pipeline.yaml"]
    for file in files:
        compare(file)
