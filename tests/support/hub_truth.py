"""Scenarios as real programs on the hub: each rank runs the worker's own calls of torch, and
capture hears them.

`benchmarks/capture_truth.py` prints every scenario whose calls or verdict on the hub differ from
those of `simulate`. A call is made from a line of code that lies in the scenario's file, at the
step's own line: capture's findings point there.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import CallTimeTable, ProgressFile
from distsim.real.worker.rank_tensors import tensor_bytes
from distsim.real.worker.runner import RankExit, RankRunner
from distsim.scenario import load
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.launch.rank_process import ChildOptions
from distsim.script_capture.result.evaluation import CaptureResult, evaluate_capture
from distsim.simulation.simulate_scenario import Simulation, simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
#: The most processes of a scenario; tensors of more bytes than this have sizes alone.
RANKS, LARGEST = 8, 1 << 26
#: What makes no call to anybody.
_LOCAL = (
    "compute",
    "sleep",
    "assign",
    "synchronize",
    "wait_stream",
    "init_process_group",
    "destroy_process_group",
    "new_group",
)


def on_the_hub(simulation: Simulation, timeout_s: float | None = None) -> CaptureResult:
    """Run a simulated scenario's program on the hub, judged by the same rules."""
    program, backend = simulation.program, simulation.program.backend
    with tempfile.TemporaryDirectory() as folder:
        job = WorkerJob(
            program,
            backend,
            folder,
            "127.0.0.1",
            29500,
            "env://",
            True,
            group_timeout_ns=None,  # type: ignore[arg-type]
            busy=False,
            local_ranks=tuple(r % program.local_size for r in range(program.world_size)),
        )
        target = CaptureTarget(program.name, function=lambda: _rank(job), home=program.file)
        child_options = ChildOptions(
            fakes=tensor_bytes(program, range(program.world_size)) > LARGEST
        )
        capture_options = CaptureRunOptions(
            target,
            program.world_size,
            program.nodes,
            backend=backend,
            timeout_s=timeout_s,
            keep_output=True,
            child_options=child_options,
        )
        return evaluate_capture(
            run_capture(capture_options), backend=backend, cluster=simulation.scenario.cluster
        )


def _rank(job: WorkerJob) -> None:
    rank = int(os.environ["RANK"])
    if any(f.rank == rank and f.kind == "absent" for f in job.program.faults):
        return
    runner = RankRunner(job, rank, ProgressFile(job.progress_path(rank), create=True))
    runner._run_by_kind = {
        kind: _lined(job.program, do) for kind, do in runner._run_by_kind.items()
    }
    runner.load.compute = runner.load.spend = lambda *args, **kwargs: None  # type: ignore[method-assign]  # what is alone takes no time
    runner.memory._fill = lambda tensor, numbers: None  # type: ignore[method-assign]  # nor have its numbers
    runner.memory.assign = lambda call: None  # type: ignore[method-assign]
    runner.prepare()
    if not runner.calls_init_process_group:
        runner.groups.start()
    runner.ready(CallTimeTable(job.times(rank, 0), job.program.code(rank).offsets[-1]))
    try:
        runner.run()
    except RankExit as end:
        sys.exit(end.code)


def _lined(program: Program, do: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same, called from a line of code that stands at the call's place in the scenario."""
    known: dict[int, CodeType] = {}

    def run(planned: Any) -> None:
        number = planned.code_call.site
        if number not in known:
            site = program.sites[number]
            known[number] = compile(
                "\n" * (site.line - 1) + "do(planned)", os.path.abspath(site.file), "exec"
            )
        FunctionType(known[number], {"do": do, "planned": planned})()

    return run


# --- what both sides called ---
class Said(NamedTuple):
    """A call as both sides can say it, whoever waits for it where."""

    op: str
    group: tuple[int, ...]
    facts: tuple[object, ...]
    parts: tuple[tuple[object, ...], ...] = ()


def said(program: Program, rank: int) -> list[Said]:
    """The calls of a rank without what it does alone, and without those that others only wait
    for.
    """
    found: list[Said] = []
    for position, call in program.calls_of(rank):
        code_call = program.code_call(rank, position)
        if call.op not in _LOCAL and program.sites[code_call.site].line:
            found.append(
                Said(
                    _name(call),
                    call.group.ranks,
                    _facts(call),
                    tuple((p.op, *_facts(p)) for p in call.parts),
                )
            )
    return found


def _name(call: ResolvedCall) -> str:
    return call.op.removeprefix("i") if OPERATIONS[call.op].kind == "p2p" else call.op


def _facts(call: ResolvedCall) -> tuple[object, ...]:
    """What a call of torch says to the group: partner, root, what is reduced how, elements and
    dtype.
    """
    if call.op == "batch_isend_irecv":
        return ()
    if OPERATIONS[call.op].kind == "p2p":
        mine = call.inputs or call.outputs
        return (call.peer, call.tag, *((b.numel, b.dtype) for b in mine[:1]))
    sizes = tuple(
        (sum(b.numel for b in side), side[0].dtype) for side in (call.inputs, call.outputs) if side
    )
    return (call.root, call.reduce_op, *sizes)


def called(one: Program, other: Program, rank: int, cut: bool) -> str:
    """How the calls of a rank differ; "" where they do not. ``cut``: the other may have ended
    early.
    """
    mine, theirs = (
        [call for call in said(p, rank) if call.op not in ("wait", "fail", "exit")]
        for p in (one, other)
    )
    for k, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return f"rank {rank}, call {k + 1}: {a} is {b}"
    short = len(theirs) < len(mine) and cut
    return (
        ""
        if short or len(mine) == len(theirs)
        else f"rank {rank}: {len(mine)} calls are {len(theirs)}"
    )


def differences(simulation: Simulation, judged: CaptureResult) -> list[str]:
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


#: Where the hub says otherwise, by a pattern of the scenario's name, and why.
REASONS: Mapping[str, str] = {
    r"startup/|findings/ds12\d|findings/ds129": "there are no addresses, ports and stores to miss: the hub brings every rank together",
    r"assumed_sender$|ds401": "on whom a receive counts is no call of torch; that senders can change places is a note",
    r"buffer_of_open_receive|ds402|ds403": "who reads or writes a tensor while its request is open is no call of torch",
    r"collectives_swapped_equal|ds601|ds610|pipeline_chunks_swapped": "calls are judged, not the numbers that they carry",
    r"ds104": "torch warns and makes no call",
    r"ds105": "a Work may be waited for again in torch",
    r"ds106": "in Python, a request that another rank has is a NameError, which is no call",
    r"ds101_": "the hub's group refuses the rank, where Gloo would look for it and hang",
    r"ds501_never|ds607_handle": "who comes first to a message whose request is dropped is a tie",
    r"ds704|ds802|ds803|frozen_on_one_rank": "a rank that raises or leaves by itself never gets the verdict ok",
    r"ds404|ds611|get_before_signal|put_and_signal|signal_other_channel": "torch.distributed has no one-sided calls: the worker refuses",
    r"ds804_late|z26_": "what a rank does alone takes no time here",
}


def reason(name: str) -> str:
    """Why a scenario may differ; "" where it must not."""
    return next((why for pattern, why in REASONS.items() if re.search(pattern, name)), "")


def scenarios(pattern: str = "") -> list[tuple[str, Path]]:
    """Names and files of those that have few enough ranks."""
    found = (
        (str(p.relative_to(SCENARIOS).with_suffix("")), p)
        for p in sorted(SCENARIOS.rglob("*.yaml"))
    )
    return [
        (name, path)
        for name, path in found
        if re.search(pattern, name) and load(str(path)).world.size <= RANKS
    ]


def compared(path: Path) -> list[str]:
    """How a scenario on the hub differs from its simulation."""
    simulation = simulate(load(str(path)), with_values=False)
    return differences(simulation, on_the_hub(simulation))
