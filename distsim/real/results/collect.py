"""What the ranks left, brought together from all machines and judged."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distsim.checker.wording import rank_list
from distsim.common.errors import EnvironmentFault
from distsim.findings.final_state import FinalState
from distsim.program.model import Program
from distsim.real.launch.monitor import MonitorResult
from distsim.real.results.merge_tables import RankTimeTable, merge_rank_tables
from distsim.real.results.posted_calls import PostedRequest, diverging_receives
from distsim.real.results.postmortem import (
    PostmortemResult,
    SimulatedVsReal,
    compare_with_simulation,
    is_consequence,
    outcome_of,
    postmortem,
)
from distsim.real.results.real_run import LaunchSession, RealRun
from distsim.real.results.value_check import BufferCheck, check_values
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import RankPhase, read_call_times
from distsim.trace.model import Trace
from distsim.trace.packed_values import RankTensorValue, header_values

#: A run that was ended from outside stood still if nothing had moved for so long.
_NO_PROGRESS_NS = 1_000_000_000


def local_records(
    session: LaunchSession,
    job: WorkerJob,
    watched: MonitorResult,
    clocks: tuple[tuple[int, int], tuple[int, int]],
) -> dict[str, bytes]:
    """All that the ranks of this machine left, as bytes that can travel."""
    values = session.simulation.wide_values
    left: dict[str, bytes] = {}
    buffers: list[BufferCheck] = []
    kept: list[RankTensorValue] = []
    overhead_ns = 0
    for rank in session.ranks:
        for repetition in range(len(watched.starts_ns) or 1):
            path = job.times(rank, repetition)
            if path.exists():
                left[f"times {rank} {repetition}"] = path.read_bytes()
        found = check_values(job.program, values, rank, job.result(rank), session.backend)
        buffers += found.buffers
        kept += found.kept
        overhead_ns = max(overhead_ns, found.overhead_ns)
        if job.output(rank).exists():
            left[f"output {rank}"] = job.output(rank).read_bytes()[-4000:]
        if rank in watched.stacks:
            left[f"stack {rank}"] = watched.stacks[rank].encode()
    facts = {"buffers": buffers, "kept": kept, "overhead_ns": overhead_ns, "clocks": clocks}
    return {"facts": json.dumps(facts).encode(), **left}


@dataclass
class _GatheredRecords:
    """The records of all launchers together."""

    tables: dict[int, dict[int, RankTimeTable]] = field(
        default_factory=dict
    )  # repetition -> rank -> table
    buffers: list[BufferCheck] = field(default_factory=list)
    kept: list[RankTensorValue] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    overhead_ns: int = 0
    error_ns: int = 0
    device_error_ns: int = 0


def _merge_records(
    records: Sequence[Mapping[str, bytes]], starts_ns: Sequence[int]
) -> _GatheredRecords:
    out = _GatheredRecords()
    for record in records:
        facts = json.loads(record["facts"])
        (first, error), (last, later) = facts["clocks"]
        offset = (first + last) // 2
        out.error_ns = max(out.error_ns, error, later, abs(first - last) // 2)
        out.overhead_ns = max(out.overhead_ns, facts["overhead_ns"])
        out.buffers += [BufferCheck(*one) for one in facts["buffers"]]
        out.kept += [RankTensorValue(*one) for one in facts["kept"]]
        for name, data in record.items():
            what, _, who = name.partition(" ")
            if what == "times":
                rank, repetition = map(int, who.split())
                zero_ns = starts_ns[repetition] if repetition < len(starts_ns) else 0
                out.tables.setdefault(repetition, {})[rank] = RankTimeTable(data, zero_ns - offset)
            elif what == "stack":
                out.stacks[int(who)] = data.decode(errors="replace")
            elif what == "output":
                out.outputs[int(who)] = data.decode(errors="replace")
    return out


def check_environment_faults(
    session: LaunchSession, job: WorkerJob, watched: MonitorResult
) -> None:
    """What is no fault of the scenario: ranks that never came or never met, or broke before their
    program began.
    """
    broken = [s for s in watched.seen.values() if s.phase == RankPhase.BROKEN]
    place = _meeting_place(session, job)
    if broken:
        where = "" if watched.starts_ns else f"ranks meet {place}"
        raise EnvironmentFault(f"rank {broken[0].rank} could not go on: {broken[0].message}", where)
    for rank, board in sorted(watched.seen.items()):
        code = watched.exits.get(rank)
        if code is not None and board.phase in (RankPhase.NEW, RankPhase.LOADING):
            raise EnvironmentFault(
                f"rank {rank} ended before it had started, with status {code}",
                "try another --launcher",
            )
    if watched.reason == "start":
        late = [
            r
            for r, s in sorted(watched.seen.items())
            if s.phase in (RankPhase.NEW, RankPhase.LOADING)
        ]
        raise EnvironmentFault(
            f"too few ranks came: {late} did not start in time",
            "try again, or give a longer --timeout",
        )
    startup, absent = (
        job.program.startup,
        any(fault.kind == "absent" for fault in job.program.faults),
    )
    if (
        watched.reason == "standstill"
        and not watched.starts_ns
        and not absent
        and not (startup is not None and startup.failed)
    ):
        apart = [r for r, s in sorted(watched.seen.items()) if s.phase == RankPhase.CONNECTING]
        raise EnvironmentFault(
            f"{rank_list(apart)} did not meet {place}",
            "the host must be the one of rank 0, and its port free and open",
        )


def _meeting_place(session: LaunchSession, job: WorkerJob) -> str:
    """Where ranks find each other, as a user has named it."""
    return (
        f"at {session.address}:{session.port}"
        if job.init_method.startswith("env://")
        else f"through {job.init_method}"
    )


def build_real_run(
    session: LaunchSession,
    job: WorkerJob,
    watched: MonitorResult,
    records: Sequence[Mapping[str, bytes]],
) -> RealRun:
    """What the run came to. ``records``: what `record` gave on each machine."""
    got = _merge_records(records, watched.starts_ns)
    got.device_error_ns = max((board.clock_error_ns for board in watched.seen.values()), default=0)
    simulation, program = session.simulation, job.program
    start_ns = watched.starts_ns[-1] if watched.starts_ns else 0
    sources = _any_source_senders(program, got)
    left = postmortem(simulation, watched.seen, watched.exits, start_ns, sources)
    running = watched.reason == "interrupted" and watched.still_ns < _NO_PROGRESS_NS
    if running:
        left = PostmortemResult(
            left.final_state, (), ()
        )  # it was getting on: who waited for whom just then says nothing
    taken, ends = diverging_receives(sources, simulation.run.trace), left.final_state.ends
    outcome = "" if running else outcome_of(ends, got.buffers, simulation.outcome, taken)
    both = (
        SimulatedVsReal(())
        if running
        else compare_with_simulation(simulation, outcome, ends, got.buffers, taken)
    )
    end = _end_header(watched, left, running, outcome, start_ns)
    traces = [
        _repetition_trace(session, job, got, k, left.final_state, outcome, end)
        for k in sorted(got.tables) or [0]
    ]
    counted = traces[1:] if len(traces) > 1 and len(traces) == job.repeats else traces
    ordered = sorted(counted, key=lambda t: t.makespan_ns)
    trace = ordered[(len(ordered) - 1) // 2] if outcome == "completes" else traces[-1]
    bad = {
        e.rank
        for e in left.final_state.ends
        if e.status in ("raised", "crashed") and not is_consequence(e)
    }
    return RealRun(
        simulation,
        session.backend,
        session.started.launcher if session.started else session.launcher,
        outcome,
        watched.reason,
        left.final_state,
        left.findings,
        left.culprits,
        both.differences,
        trace,
        tuple(t.makespan_ns for t in counted),
        tuple(got.buffers),
        got.stacks,
        {r: text for r, text in got.outputs.items() if r in bad and text.strip()},
        got.overhead_ns,
        got.error_ns,
        session.wish.timeout_ns,
        tuple(session.notes),
        both.agreement,
        watched.ended_by,
        taken,
    )


def _end_header(
    watched: MonitorResult, left: PostmortemResult, running: bool, outcome: str, start_ns: int
) -> dict[str, object]:
    """What the header says of a run that did not come to its end: why it was over, when, and whom
    to blame.
    """
    if outcome in ("completes", "wrong-data") and watched.reason == "done":
        return {}
    until_ns = max(time.monotonic_ns() - start_ns, 0) if start_ns else 0
    signalled = {"ended_by": watched.ended_by} if watched.ended_by else {}
    return {
        "reason": watched.reason,
        **signalled,
        "until_ns": until_ns,
        "culprits": [] if running else list(left.culprits),
    }


def _any_source_senders(program: Program, got: _GatheredRecords) -> dict[PostedRequest, int]:
    """Whom receives from any source met in the last repetition, as they say themselves."""
    found = {}
    for rank, times in (got.tables[max(got.tables)] if got.tables else {}).items():
        code, column = program.code(rank), read_call_times(times.table)["source"]
        for row, source in enumerate(column):
            if source >= 0:
                position = bisect_right(code.offsets, row) - 1
                found[PostedRequest(rank, position, row - code.offsets[position] - 1)] = source
    return found


def _repetition_trace(
    session: LaunchSession,
    job: WorkerJob,
    got: _GatheredRecords,
    repetition: int,
    left: FinalState,
    outcome: str,
    end: Mapping[str, object],
) -> Trace:
    import torch

    device = (
        {"times": "device", "device_clock_error_ns": got.device_error_ns}
        if job.devices.kind == "cuda"
        else {}
    )
    header = {
        "backend": session.backend,
        **device,
        "cluster": "",
        "launcher": session.launcher,
        "torch": torch.__version__,
        "repetition": repetition,
        "clock_error_ns": got.error_ns,
        "recording_ns_per_call": got.overhead_ns,
        "compute": "busy" if job.busy else "asleep",
        "cores": os.cpu_count(),
        **(header_values(got.kept) if session.simulation.has_values else {}),
        **end,
    }
    return merge_rank_tables(job.program, got.tables.get(repetition, {}), left, outcome, header)
