"""Scenarios as real programs on the hub: each rank runs the worker's own calls of torch, and capture hears them.

    python tests/hub_truth.py [pattern]

prints every scenario whose calls or verdict on the hub differ from those of `simulate`. A call is made from a line of code that lies in
the scenario's file, at the step's own line, so that what capture says of lines can be compared as well.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from distsim.capture.child import Target
from distsim.capture.judge import Judged, judge
from distsim.capture.launch import Wish, capture
from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.program.records import Program
from distsim.real.board import Board, CallTimes
from distsim.real.job import Job
from distsim.real.memory import tensor_bytes
from distsim.real.runner import Leave, Runner
from distsim.scenario import Scenario, load
from distsim.simulation import Simulation, simulate

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
#: The most processes of a scenario, and the most bytes of its tensors.
RANKS, LARGEST = 8, 1 << 28
#: What makes no call to anybody.
_LOCAL = ("compute", "sleep", "assign", "synchronize", "wait_stream", "init_process_group", "destroy_process_group", "new_group")


def on_the_hub(simulation: Simulation, timeout_s: float | None = None) -> Judged:
    """Run a simulated scenario's program on the hub, judged by the same rules."""
    program, backend = simulation.program, simulation.program.backend
    with tempfile.TemporaryDirectory() as folder:
        job = Job(program, backend, folder, "127.0.0.1", 29500, "env://", True, group_timeout_ns=None,  # type: ignore[arg-type]
                  busy=False, local_ranks=tuple(r % program.local_size for r in range(program.world_size)))  # fmt: skip
        target = Target(program.name, function=lambda: _rank(job), home=program.file)
        wish = Wish(target, program.world_size, program.nodes, backend=backend, timeout_s=timeout_s, keep_output=True)
        return judge(capture(wish), backend=backend, cluster=simulation.scenario.cluster)


def _rank(job: Job) -> None:
    rank = int(os.environ["RANK"])
    if any(f.rank == rank and f.kind == "absent" for f in job.program.faults):
        return
    runner = Runner(job, rank, Board(job.board(rank), create=True))
    runner._kinds = {kind: _lined(job.program, do) for kind, do in runner._kinds.items()}
    runner.load.compute = runner.load.spend = lambda *args, **kwargs: None  # type: ignore[method-assign]  # what is alone takes no time
    runner.prepare()
    if not runner.starts_itself:
        runner.groups.start()
    runner.ready(CallTimes(job.times(rank, 0), job.program.code(rank).offsets[-1]))
    try:
        runner.run()
    except Leave as end:
        sys.exit(end.code)


def _lined(program: Program, do: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same, called from a line of code that stands at the call's place in the scenario."""
    known: dict[int, CodeType] = {}

    def run(planned: Any) -> None:
        number = planned.code_call.site
        if number not in known:
            site = program.sites[number]
            known[number] = compile("\n" * (site.line - 1) + "do(planned)", os.path.abspath(site.file), "exec")
        exec(known[number], {"do": do, "planned": planned})

    return run


# --- what both sides called ---
class Said(NamedTuple):
    """A call as both sides can say it, whoever waits for it where."""

    op: str
    group: tuple[int, ...]
    facts: tuple[object, ...]
    parts: tuple[tuple[object, ...], ...] = ()


def said(program: Program, rank: int) -> list[Said]:
    """The calls of a rank without what it does alone, and without those that others only wait for."""
    found: list[Said] = []
    for position, call in program.calls_of(rank):
        code_call = program.code_call(rank, position)
        if call.op not in _LOCAL and program.sites[code_call.site].line:
            found.append(Said(_name(call), call.group.ranks, _facts(call), tuple((p.op, *_facts(p)) for p in call.parts)))
    return found


def _name(call: Call) -> str:
    return call.op.removeprefix("i") if OPS[call.op].kind == "p2p" else call.op


def _facts(call: Call) -> tuple[object, ...]:
    """What a call of torch says to the group: partner, root, what is reduced how, elements and dtype."""
    if call.op == "batch_isend_irecv":
        return ()
    if OPS[call.op].kind == "p2p":
        mine = call.inputs or call.outputs
        return (call.peer, call.tag, *((b.numel, b.dtype) for b in mine[:1]))
    sizes = tuple((sum(b.numel for b in side), side[0].dtype) for side in (call.inputs, call.outputs) if side)
    return (call.root, call.reduce_op, *sizes)


def called(one: Program, other: Program, rank: int, cut: bool) -> str:
    """How the calls of a rank differ; "" where they do not. ``cut``: the other may have ended early."""
    mine, theirs = ([call for call in said(p, rank) if call.op not in ("wait", "fail", "exit")] for p in (one, other))
    for k, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return f"rank {rank}, call {k + 1}: {a} is {b}"
    short = len(theirs) < len(mine) and cut
    return "" if short or len(mine) == len(theirs) else f"rank {rank}: {len(mine)} calls are {len(theirs)}"


def differences(simulation: Simulation, judged: Judged) -> list[str]:
    """What the hub says otherwise than the simulation."""
    mine, theirs = simulation, judged.simulation
    found = []
    a, b = (s.verdict.verdict if s.verdict is not None else None for s in (mine, theirs))
    if a != b:
        found.append(f"verdict {a} is {b}")
    if mine.outcome != theirs.outcome:
        found.append(f"outcome {mine.outcome} is {theirs.outcome}")
    stuck = theirs.outcome != "completes"
    of = range(min(mine.program.world_size, theirs.program.world_size))
    found += [d for r in of if (d := called(mine.program, theirs.program, r, stuck))]
    return found


def skipped(scenario: Scenario) -> str:
    if scenario.world.size > RANKS:
        return "more than 8 ranks"
    return ""


def main() -> None:
    import torch.distributed  # noqa: F401

    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    same = wrong = left = 0
    for path in sorted(SCENARIOS.rglob("*.yaml")):
        name = str(path.relative_to(SCENARIOS).with_suffix(""))
        if not re.search(pattern, name):
            continue
        scenario = load(str(path))
        why = skipped(scenario)
        if why:
            left += 1
            continue
        simulation = simulate(scenario, with_values=False)
        if tensor_bytes(simulation.program, range(scenario.world.size)) > LARGEST:
            left += 1
            print("LARGE  ", name)
            continue
        began = time.monotonic()
        try:
            judged = on_the_hub(simulation)
        except Exception as error:
            print("ERROR ", name, type(error).__name__, str(error)[:300], flush=True)
            wrong += 1
            continue
        found = differences(simulation, judged)
        same, wrong = same + (not found), wrong + bool(found)
        if found:
            print(f"DIFFERS {name} ({time.monotonic() - began:.1f} s)", *found[:4], sep="\n    ", flush=True)
            if "-v" in sys.argv:
                for stand in judged.stands:
                    print("      ", stand)
    print(f"{same} alike, {wrong} differ, {left} left out")


if __name__ == "__main__":
    main()
