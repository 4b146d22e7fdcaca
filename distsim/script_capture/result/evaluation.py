"""Evaluate a captured run: simulate its calls, and add what only the run itself knows.

The simulation says what a backend makes of the calls. The run knows which process raised, exited or
was killed outside of all calls, which rank waits for a key of the store, and whether time ran out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from distsim.checker.diagnosis.match_findings import is_consequence_line
from distsim.checker.verdict import Verdict
from distsim.common.records import gc_paused
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.hardware.cluster import Cluster
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.script_capture.hub.matching import calls_agree
from distsim.script_capture.hub.state import RankProcess
from distsim.script_capture.launch.parent_process import CapturedRun
from distsim.script_capture.protocol.message_types import (
    SERVER_KEY_PREFIX,
    WORKERS_KEY_PREFIX,
    CallOrigin,
)
from distsim.script_capture.result.build_program import build_program, world_backend
from distsim.script_capture.result.future_calls import incomplete_calls
from distsim.script_capture.result.random_state_checks import random_state_findings
from distsim.script_capture.result.rank_status import (
    STORE_KEY,
    CapturedRankStatus,
    rank_statuses,
)
from distsim.script_capture.result.stream_races import stream_race_findings
from distsim.script_capture.result.thread_order import (
    ThreadOrder,
    calling_threads,
    is_multithreaded,
)
from distsim.script_capture.result.torch_messages import (
    in_torch_terms,
    with_backward_explanation,
    with_kill_advice,
)
from distsim.script_capture.result.value_checks import value_findings
from distsim.simulation.simulate_scenario import (
    EACH_RANK_RAN_ALONE,
    Simulation,
    cost_model,
    simulate_program,
)

#: What a user may name as a cluster.
ClusterArgument = str | Mapping[str, object] | Cluster | None

#: Steps of a program that are no call of the script.
_UNCALLED_OPS: Final = ("compute", "wait_stream", "synchronize", "fail", "exit")
#: Findings on requests without a wait and on messages without a receive.
_LEAK_CODES: Final = ("DS501", "DS502")


@dataclass(frozen=True)
class CaptureResult:
    """``simulation`` has the calls under the backend's rules, ``calls`` is how many ranks made.

    ``stands`` is where each rank is. ``threaded`` are ranks of which several threads made calls;
    one order of these was evaluated. ``worlds`` is how many the script started, one after the
    other; the result is that of the first world that does not complete, or of the last.
    """

    captured: CapturedRun
    simulation: Simulation
    stands: tuple[CapturedRankStatus, ...]
    calls: int
    threaded: tuple[int, ...] = ()
    worlds: int = 1

    @property
    def outcome(self) -> str:
        """The outcome of the simulation, corrected by what the run showed."""
        return self.simulation.outcome


def evaluate_capture(
    captured: CapturedRun,
    *,
    backend: str | None = None,
    cluster: ClusterArgument = None,
) -> CaptureResult:
    """Evaluate the captured calls under the rules of ``backend``.

    By default, the backend is the one that the script asked for.
    """
    worlds = len(captured.past) + 1
    for world in captured.past:
        result = evaluate_capture(world, backend=backend, cluster=cluster)
        if result.outcome != "completes" or not _completes(result.simulation):
            return replace(result, worlds=worlds)

    backend = backend or world_backend(captured.ranks.values())
    with gc_paused():
        simulation = _simulate_capture(captured, backend, cluster)
    outcome = _capture_outcome(captured, simulation)
    statuses = rank_statuses(captured, simulation.program.world_size)

    findings = with_backward_explanation(in_torch_terms(simulation.findings), statuses)
    findings = with_kill_advice(findings, statuses)
    wrong_values = [*value_findings(captured.ranks), *random_state_findings(captured.ranks)]
    races = stream_race_findings(captured.ranks)
    findings = (*wrong_values, *races, *findings)
    findings = _without_unknown_future(findings, captured)
    found = replace(simulation, findings=findings)
    if _contradicts_verdict(captured, found, outcome):
        found = replace(found, outcome=outcome, verdict=None)
    is_blocked = captured.ended == "stalled" and _all_exited_normally(captured, outcome)
    if outcome == "hangs" or is_blocked:
        found = with_store_key_findings(found, statuses)
    if outcome == "completes" and (wrong_values or races):
        found = replace(found, outcome="wrong-data", verdict=None)
    if outcome == "completes" and _each_rank_ran_alone(captured):
        found = _without_communication(captured, found)
    calls = _count_calls(simulation.program)
    return CaptureResult(captured, found, statuses, calls, _multithreaded_ranks(captured), worlds)


# --- outcome ---
def _capture_outcome(captured: CapturedRun, simulation: Simulation) -> str:
    """The simulation's, unless the run did not complete for a reason that is no call."""
    if captured.ended == "late":
        return "undecided"
    if simulation.outcome != "completes":
        return simulation.outcome
    processes = _all_processes(captured)
    exits = {process.ended.how for process in processes if process.ended is not None}
    if "raised" in exits or "exited" in exits:  # outside of all calls, for example on import
        return "raises"
    if "killed" in exits:
        return "crashes"
    if captured.ended == "stalled" and not has_mismatched_collective(captured):
        return "hangs"
    return "completes"


def _each_rank_ran_alone(captured: CapturedRun) -> bool:
    """Whether several ranks ended without a single call that involves another rank.

    A test function is exempt: the caller decided that it runs on N ranks, and its assertions are
    the check.
    """
    is_function = captured.capture_options.target.function is not None
    if is_function or captured.world < 2 or captured.uses_store:
        return False
    worlds = (captured, *captured.past)
    return not any(_communicates(process) for world in worlds for process in world.ranks.values())


def _communicates(process: RankProcess) -> bool:
    """Whether the process made a call on a group with another member."""
    calls = (event.call for event in process.events)
    return any(call is not None and len(call.group.ranks) > 1 for call in calls)


def _without_communication(captured: CapturedRun, simulation: Simulation) -> Simulation:
    """The simulation as one that checked nothing, with a finding that says so."""
    ranks = tuple(range(captured.world))
    message = f"the {len(ranks)} ranks never communicated: each rank ran alone\n"
    if captured.ranks:
        message += "  they called init_process_group, but no collective or message followed"
        remedy = "wrap the model in DistributedDataParallel or FSDP, or call a collective"
    else:
        message += "  no rank called init_process_group"
        remedy = "call init_process_group, or add --cuda if the script does so only on GPUs"
    finding = Finding("DS903", "error", message, ranks, ranks, (remedy,))
    return replace(
        simulation,
        outcome=EACH_RANK_RAN_ALONE,
        verdict=None,
        findings=(finding, *simulation.findings),
    )


def has_mismatched_collective(captured: CapturedRun) -> bool:
    """Whether the run stopped where the calls of a collective do not agree.

    A real backend may continue there, with undefined data.
    """
    for process in captured.ranks.values():
        for call in incomplete_calls(process):
            if call.collective is None:
                continue
            arrived = call.collective.arrived.values()
            if not all(calls_agree(call, other) for other in arrived):
                return True
    return False


def _without_unknown_future(
    findings: Sequence[Finding], captured: CapturedRun
) -> tuple[Finding, ...]:
    """The findings without what may follow from the end of the run: what follows is not known.

    The run stopped at a mismatch, or a rank failed. The mismatch or the error is the cause of
    requests that a rank could no longer wait for.
    """
    if has_mismatched_collective(captured):
        known = [finding for finding in findings if finding.code != "DS501"]
        return tuple(map(_without_consequences, known))
    failed = _failed_ranks(captured)
    return tuple(
        finding
        for finding in findings
        if finding.code != "DS501" or not failed.issuperset(finding.ranks)
    )


def _without_consequences(finding: Finding) -> Finding:
    lines = finding.message.split("\n")
    message = "\n".join(line for line in lines if not is_consequence_line(line))
    return replace(finding, message=message)


def _failed_ranks(captured: CapturedRun) -> set[int]:
    """The ranks that did not reach the end of the script by themselves."""
    ends = {rank: process.ended for rank, process in captured.evaluated_ranks.items()}
    return {rank for rank, end in ends.items() if end is not None and end.how != "ended"}


def _contradicts_verdict(captured: CapturedRun, simulation: Simulation, outcome: str) -> bool:
    """Whether the simulation's verdict says nothing about this run.

    A cause that no rule knows ended a rank or blocked it, or time ran out.
    """
    if outcome != simulation.outcome:
        return True
    if _all_exited_normally(captured, simulation.outcome):
        return False
    if simulation.verdict is None:
        return False
    is_leak = any(finding.code in _LEAK_CODES for finding in simulation.findings)
    return simulation.verdict.verdict == "ok" or (
        simulation.verdict.verdict == "leak" and not is_leak
    )


def _all_exited_normally(captured: CapturedRun, outcome: str) -> bool:
    """Whether every process reached its end by itself.

    Or is blocked where the backend would have raised (``outcome``) before, and ended a rank.
    """
    is_refused = captured.ended == "stalled" and outcome == "raises"
    if captured.ended != "ended" and not is_refused:
        return False
    exits = [process.ended for process in _all_processes(captured)]
    return all(end is None or end.how == "ended" for end in exits)


def _all_processes(captured: CapturedRun) -> tuple[RankProcess, ...]:
    return (*captured.ranks.values(), *captured.others)


def _count_calls(program: Program) -> int:
    """The calls of all ranks that have a line in the script."""
    count = 0
    for code in program.codes:
        for call in code.calls:
            if program.sites[call.site].line and call.op not in _UNCALLED_OPS:
                count += 1
    return count


# --- simulation ---
def _simulate_capture(captured: CapturedRun, backend: str, cluster: ClusterArgument) -> Simulation:
    """Simulate the calls of each rank in the order in which they matched.

    With threads, that order is one of many. If it does not complete although the run did, another
    order is used that does complete. It must not hide a hang of a single thread: the order
    "apart" counts only if no thread would be blocked if no other thread ever waited.
    """
    as_matched = _simulate_in_order(captured, backend, cluster, "met")
    if captured.ended != "ended" or _completes(as_matched):
        return as_matched
    if not _multithreaded_ranks(captured):
        return as_matched
    early = _simulate_in_order(captured, backend, cluster, "early")
    if _completes(early):
        return early
    apart = _simulate_in_order(captured, backend, cluster, "apart")
    if not _completes(apart):
        return as_matched
    for thread in calling_threads(captured.evaluated_ranks.values()):
        if not _completes(_simulate_in_order(captured, backend, cluster, thread)):
            return as_matched
    return apart


def _completes(simulation: Simulation) -> bool:
    if simulation.outcome == "hangs":
        return False
    return simulation.verdict is None or simulation.verdict.verdict != "deadlock"


def _multithreaded_ranks(captured: CapturedRun) -> tuple[int, ...]:
    ranks = captured.evaluated_ranks
    return tuple(rank for rank, process in ranks.items() if is_multithreaded(process))


def _simulate_in_order(
    captured: CapturedRun, backend: str, cluster: ClusterArgument, order: ThreadOrder
) -> Simulation:
    options = captured.capture_options
    file = script_name(captured)
    program = build_program(captured, backend, os.path.basename(file), file, order)
    world: object = program.world_size
    if options.nodes > 1:
        world = {"nodes": options.nodes, "ranks_per_node": program.local_size}
    scenario = Scenario(name=program.name, world=world, backend=backend, program=[], file=file)
    return simulate_program(
        scenario, program, cost_model(scenario, program, cluster), with_values=False
    )


def script_name(captured: CapturedRun) -> str:
    """The script, module or function that was captured."""
    return captured.capture_options.target.name


# --- keys of the store ---
def with_store_key_findings(
    simulation: Simulation, statuses: Sequence[CapturedRankStatus]
) -> Simulation:
    """Add a finding for each line on which ranks wait for a key that no rank sets.

    They come first, since they are the cause: other ranks wait for these.
    """
    ranks_by_wait: dict[tuple[str, CallOrigin], list[int]] = {}
    for status in statuses:
        if status.state == "waits" and status.what.startswith(STORE_KEY):
            keys = status.what.removeprefix(f"{STORE_KEY}: ")
            ranks_by_wait.setdefault((keys, status.place), []).append(status.rank)
    if not ranks_by_wait:
        return simulation
    blocked = tuple(dict.fromkeys(s.rank for s in statuses if s.state == "waits"))
    findings = [
        _store_key_finding(keys, place, tuple(ranks), blocked)
        for (keys, place), ranks in ranks_by_wait.items()
    ]
    core = {rank for ranks in ranks_by_wait.values() for rank in ranks}
    verdict = simulation.verdict
    if verdict is None:
        verdict = Verdict("deadlock", ranks=blocked, core=tuple(sorted(core)))
    return replace(simulation, findings=(*findings, *simulation.findings), verdict=verdict)


def _store_key_finding(
    keys: str, place: CallOrigin, ranks: tuple[int, ...], blocked: tuple[int, ...]
) -> Finding:
    waiting = _ranks_label(ranks)
    verb = "wait" if len(ranks) > 1 else "waits"
    message = f"{waiting} {verb} for {_awaited_key_text(keys)}"
    others = sorted(set(blocked) - set(ranks))
    if others:
        message += f"\n  also blocked: {_ranks_label(others)}"
    locations: tuple[SourceLocation, ...] = ()
    if place.line:
        locations = (SourceLocation(place.file, place.line, 1, "store", ranks[0]),)
    remedy = f"set the key before any call that waits for {waiting}"
    return Finding("DS306", "error", message, blocked, ranks, (remedy,), locations)


def _awaited_key_text(keys: str) -> str:
    """What a wait for keys lacks; some keys stand for the server and the workers of a TCPStore."""
    if keys.startswith(SERVER_KEY_PREFIX):
        return f"{keys}, which no rank starts"
    if keys.startswith(WORKERS_KEY_PREFIX):
        return f"{keys}, which never connect"
    return f"the store key {keys}, which no rank sets"


def _ranks_label(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"
