"""Collects what the ranks of all machines left, and builds the `RealRun` from it.

Each launcher packs the records of its own ranks as bytes (`local_records`), because they travel
through the store to the first launcher. There they are merged, with the clocks of the machines
aligned, and judged: first whether the environment failed (which is not the scenario's fault), then
how the run ended compared with its simulation.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distsim.checker.wording import rank_list
from distsim.common.errors import EnvironmentFault
from distsim.findings.final_state import FinalState, RankEnd
from distsim.program.model import Program
from distsim.real.launch.monitor import MonitorResult
from distsim.real.launch.session import LaunchSession
from distsim.real.results.merge_tables import RankTimeTable, merge_rank_tables
from distsim.real.results.posted_calls import PostedRequest, diverging_receives
from distsim.real.results.postmortem import PostmortemResult, postmortem
from distsim.real.results.rank_ends import is_consequence
from distsim.real.results.real_run import RealRun
from distsim.real.results.simulated_vs_real import (
    SimulatedVsReal,
    compare_with_simulation,
    outcome_of,
)
from distsim.real.results.value_check import BufferCheck, check_values
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import RankPhase, read_call_times
from distsim.trace.model import Trace
from distsim.trace.packed_values import RankTensorValue, header_values

#: An interrupted run counts as hanging if nothing had moved for this long.
_NO_PROGRESS_NS = 1_000_000_000
#: The last bytes of a rank's output that are kept.
_MAX_OUTPUT_BYTES = 4000

#: (what to add to the clock of a machine, largest error), at the start and at the end of the run.
ClockOffsets = tuple[tuple[int, int], tuple[int, int]]


# --- records of one machine ---


def local_records(
    session: LaunchSession, job: WorkerJob, watched: MonitorResult, clocks: ClockOffsets
) -> dict[str, bytes]:
    """Everything that the ranks of this machine left, as bytes that can travel."""
    simulated_values = session.simulation.wide_values
    records: dict[str, bytes] = {}
    buffers: list[BufferCheck] = []
    known_values: list[RankTensorValue] = []
    overhead_ns = 0
    for rank in session.ranks:
        for repetition in range(len(watched.starts_ns) or 1):
            path = job.times(rank, repetition)
            if path.exists():
                records[f"times {rank} {repetition}"] = path.read_bytes()
        checked = check_values(
            job.program, simulated_values, rank, job.result(rank), session.backend
        )
        buffers += checked.buffers
        known_values += checked.known_values
        overhead_ns = max(overhead_ns, checked.overhead_ns)
        if job.output(rank).exists():
            records[f"output {rank}"] = job.output(rank).read_bytes()[-_MAX_OUTPUT_BYTES:]
        if rank in watched.stacks:
            records[f"stack {rank}"] = watched.stacks[rank].encode()
    facts = {"buffers": buffers, "kept": known_values, "overhead_ns": overhead_ns, "clocks": clocks}
    return {"facts": json.dumps(facts).encode(), **records}


# --- records of all machines ---


@dataclass
class _GatheredRecords:
    """The records of all launchers. ``tables``: by repetition, then by rank."""

    tables: dict[int, dict[int, RankTimeTable]] = field(default_factory=dict)
    buffers: list[BufferCheck] = field(default_factory=list)
    known_values: list[RankTensorValue] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    overhead_ns: int = 0
    clock_error_ns: int = 0
    device_error_ns: int = 0


def _merge_records(
    records: Sequence[Mapping[str, bytes]], starts_ns: Sequence[int]
) -> _GatheredRecords:
    gathered = _GatheredRecords()
    for record in records:
        facts = json.loads(record["facts"])
        (first_offset, first_error), (last_offset, last_error) = facts["clocks"]
        # Clocks drift apart during the run: use the middle, and count half the drift as an error.
        offset = (first_offset + last_offset) // 2
        drift = abs(first_offset - last_offset) // 2
        gathered.clock_error_ns = max(gathered.clock_error_ns, first_error, last_error, drift)
        gathered.overhead_ns = max(gathered.overhead_ns, facts["overhead_ns"])
        gathered.buffers += [BufferCheck(*row) for row in facts["buffers"]]
        gathered.known_values += [RankTensorValue(*row) for row in facts["kept"]]
        for name, data in record.items():
            _add_record(gathered, name, data, starts_ns, offset)
    return gathered


def _add_record(
    gathered: _GatheredRecords, name: str, data: bytes, starts_ns: Sequence[int], offset: int
) -> None:
    """Add one named piece of `local_records`. ``offset``: of the clock of its machine."""
    kind, _, numbers = name.partition(" ")
    if kind == "times":
        rank, repetition = map(int, numbers.split())
        start_ns = starts_ns[repetition] if repetition < len(starts_ns) else 0
        table = RankTimeTable(data, start_ns - offset)
        gathered.tables.setdefault(repetition, {})[rank] = table
    elif kind == "stack":
        gathered.stacks[int(numbers)] = data.decode(errors="replace")
    elif kind == "output":
        gathered.outputs[int(numbers)] = data.decode(errors="replace")


# --- failures of the environment ---


def check_environment_faults(
    session: LaunchSession, job: WorkerJob, watched: MonitorResult
) -> None:
    """Raise EnvironmentFault for a failure that is not the scenario's.

    Such failures are: ranks that never started or never met, and ranks that broke before their
    program began.
    """
    snapshots = sorted(watched.seen.items())
    broken = [snapshot for snapshot in watched.seen.values() if snapshot.phase == RankPhase.BROKEN]
    if broken:
        hint = "" if watched.starts_ns else f"ranks meet {_meeting_place(session, job)}"
        raise EnvironmentFault(
            f"rank {broken[0].rank} could not continue: {broken[0].message}", hint
        )
    for rank, snapshot in snapshots:
        exit_code = watched.exits.get(rank)
        if exit_code is not None and snapshot.phase in (RankPhase.NEW, RankPhase.LOADING):
            raise EnvironmentFault(
                f"rank {rank} ended before it had started, with status {exit_code}",
                "try another --launcher",
            )
    if watched.reason == "start":
        late = [
            rank
            for rank, snapshot in snapshots
            if snapshot.phase in (RankPhase.NEW, RankPhase.LOADING)
        ]
        raise EnvironmentFault(
            f"too few ranks arrived: {late} did not start in time",
            "try again with a longer --timeout",
        )
    hung_at_startup = watched.reason == "standstill" and not watched.starts_ns
    if hung_at_startup and not _startup_should_hang(job.program):
        connecting = [
            rank for rank, snapshot in snapshots if snapshot.phase == RankPhase.CONNECTING
        ]
        raise EnvironmentFault(
            f"{rank_list(connecting)} did not connect {_meeting_place(session, job)}",
            "the host must be that of rank 0, and its port must be free and open",
        )


def _startup_should_hang(program: Program) -> bool:
    """The scenario itself makes the start-up fail: by an absent rank, or by its settings."""
    if any(fault.kind == "absent" for fault in program.faults):
        return True
    return program.startup is not None and program.startup.failed


def _meeting_place(session: LaunchSession, job: WorkerJob) -> str:
    """Where ranks find each other, as the user has named it."""
    if job.init_method.startswith("env://"):
        return f"at {session.address}:{session.port}"
    return f"through {job.init_method}"


# --- the result ---


def build_real_run(
    session: LaunchSession,
    job: WorkerJob,
    watched: MonitorResult,
    records: Sequence[Mapping[str, bytes]],
) -> RealRun:
    """The result of the run. ``records``: what `local_records` returned on each machine."""
    gathered = _merge_records(records, watched.starts_ns)
    gathered.device_error_ns = max(
        (snapshot.clock_error_ns for snapshot in watched.seen.values()), default=0
    )
    simulation = session.simulation
    start_ns = watched.starts_ns[-1] if watched.starts_ns else 0
    sources = _any_source_senders(job.program, gathered)
    diverging = diverging_receives(sources, simulation.run.trace)
    left = postmortem(simulation, watched.seen, watched.exits, start_ns, sources)

    made_progress = watched.reason == "interrupted" and watched.still_ns < _NO_PROGRESS_NS
    if made_progress:
        # Which rank waited for which at the moment of the interruption means nothing.
        left = PostmortemResult(left.final_state, (), ())
        outcome = ""
        comparison = SimulatedVsReal(())
    else:
        ends = left.final_state.ends
        outcome = outcome_of(ends, gathered.buffers, simulation.outcome, diverging)
        comparison = compare_with_simulation(simulation, outcome, ends, gathered.buffers, diverging)

    end_header = _end_header(watched, left, made_progress, outcome, start_ns)
    traces = [
        _repetition_trace(session, job, gathered, repetition, left.final_state, outcome, end_header)
        for repetition in sorted(gathered.tables) or [0]
    ]
    counted = _without_warmup(traces, job.repeats)
    return RealRun(
        simulation=simulation,
        backend=session.backend,
        launcher=session.external_rank.launcher if session.external_rank else session.launcher,
        outcome=outcome,
        reason=watched.reason,
        final_state=left.final_state,
        findings=left.findings,
        culprits=left.culprits,
        differences=comparison.differences,
        # Of a run that failed, the last repetition shows the failure.
        trace=_median_trace(counted) if outcome == "completes" else traces[-1],
        makespans_ns=tuple(trace.makespan_ns for trace in counted),
        values=tuple(gathered.buffers),
        stacks=gathered.stacks,
        outputs=_outputs_of_failed_ranks(gathered, left.final_state.ends),
        overhead_ns=gathered.overhead_ns,
        clock_error_ns=gathered.clock_error_ns,
        timeout_ns=session.options.timeout_ns,
        notes=tuple(session.notes),
        agreement=comparison.agreement,
        ended_by=watched.ended_by,
        taken=diverging,
    )


def _any_source_senders(program: Program, gathered: _GatheredRecords) -> dict[PostedRequest, int]:
    """The sources that receives from any source reported in the last repetition."""
    if not gathered.tables:
        return {}
    last_repetition = gathered.tables[max(gathered.tables)]
    senders = {}
    for rank, times in last_repetition.items():
        code = program.code(rank)
        for row, source in enumerate(read_call_times(times.table)["source"]):
            if source >= 0:
                position = bisect_right(code.offsets, row) - 1
                # The row of a call is followed by those of its parts, so this gives -1
                # (`WHOLE_CALL`) for the call itself.
                part = row - code.offsets[position] - 1
                senders[PostedRequest(rank, position, part)] = source
    return senders


def _without_warmup(traces: list[Trace], repetitions: int) -> list[Trace]:
    """All repetitions but the first, which is a warm-up, if the run completed all of them."""
    completed_all = len(traces) == repetitions
    return traces[1:] if len(traces) > 1 and completed_all else traces


def _median_trace(traces: Sequence[Trace]) -> Trace:
    """The trace with the median makespan, the faster one of two."""
    by_makespan = sorted(traces, key=lambda trace: trace.makespan_ns)
    return by_makespan[(len(by_makespan) - 1) // 2]


def _outputs_of_failed_ranks(gathered: _GatheredRecords, ends: Sequence[RankEnd]) -> dict[int, str]:
    failed = [end for end in ends if end.status in ("raised", "crashed")]
    causes = {end.rank for end in failed if not is_consequence(end)}
    printed = {rank: text for rank, text in gathered.outputs.items() if text.strip()}
    return {rank: text for rank, text in printed.items() if rank in causes}


def _end_header(
    watched: MonitorResult,
    left: PostmortemResult,
    made_progress: bool,
    outcome: str,
    start_ns: int,
) -> dict[str, object]:
    """Header fields of a run that did not come to its end: why it was over, when, and the blame."""
    if outcome in ("completes", "wrong-data") and watched.reason == "done":
        return {}
    until_ns = max(time.monotonic_ns() - start_ns, 0) if start_ns else 0
    header: dict[str, object] = {"reason": watched.reason}
    if watched.ended_by:
        header["ended_by"] = watched.ended_by
    header["until_ns"] = until_ns
    header["culprits"] = [] if made_progress else list(left.culprits)
    return header


def _repetition_trace(
    session: LaunchSession,
    job: WorkerJob,
    gathered: _GatheredRecords,
    repetition: int,
    final_state: FinalState,
    outcome: str,
    end_header: Mapping[str, object],
) -> Trace:
    """The trace of one repetition. The order of the header fields is the order in the file."""
    import torch

    header: dict[str, object] = {"backend": session.backend}
    if job.devices.kind == "cuda":
        header["times"] = "device"
        header["device_clock_error_ns"] = gathered.device_error_ns
    header |= {
        "cluster": "",
        "launcher": session.launcher,
        "torch": torch.__version__,
        "repetition": repetition,
        "clock_error_ns": gathered.clock_error_ns,
        "recording_ns_per_call": gathered.overhead_ns,
        "compute": "busy" if job.busy else "asleep",
        "cores": os.cpu_count(),
    }
    if session.simulation.has_values:
        header |= header_values(gathered.known_values)
    header |= end_header
    tables = gathered.tables.get(repetition, {})
    return merge_rank_tables(job.program, tables, final_state, outcome, header)
