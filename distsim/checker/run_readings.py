"""Determine how a program's executions end under every reading, in the cheapest sufficient way.

Programs with any-source receives are searched over all event orders (`explore`). All others need a
single run per reading (`reading_run`), or one run per possible early exit (`early_exit`). If a run
is already known, it can replace the run under ``rendezvous``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from distsim.checker.checked_program import CheckedProgram
from distsim.checker.reading_result import (
    ContractResult,
    ExampleExecution,
    ReadingResult,
    union_of_ranks,
)
from distsim.findings.final_state import FinalState
from distsim.program.model import Program
from distsim.semantics.classes.representatives import FoldingError

if TYPE_CHECKING:
    from distsim.checker.matching.call_mismatch import CallMismatch
    from distsim.checker.reading_run import ContractProgram, Reading, ReadingRun

_PLAIN_READINGS: tuple[Reading, ...] = ("rendezvous", "early", "buffered")


def run_all_readings(
    subject: CheckedProgram, max_states: int, known_end: FinalState | None
) -> ContractResult:
    """The results of all readings. ``known_end``: see `verdict.verdict_of`."""
    program = subject.program
    starts = not (program.faults and _blocks_at_start_up(program))
    if "any source" in program.features and starts and subject.layout.any_source:
        # Imported here, because most programs need no search.
        from distsim.checker.explore.all_readings import explore_all_readings

        return explore_all_readings(subject.layout, max_states)
    if known_end is not None and starts:
        examples = {"end": ExampleExecution(known_end)}
        result = ReadingResult({}, True, (), True, examples)
        return ContractResult({"rendezvous": result}, 0, True)
    from distsim.checker.reading_run import ContractProgram

    contract = ContractProgram(subject.layout, subject.call_index)
    return ContractResult(_single_runs(contract), 0, True)


def _blocks_at_start_up(program: Program) -> bool:
    """Whether a rank is absent, so that no other rank passes the start-up of the world."""
    for code in program.codes:
        if any(call.op == "init_process_group" for call in code.calls):
            # The scenario writes the start-up as a call, which blocks like any other.
            return False
    return any(fault.kind == "absent" for fault in program.faults)


def _single_runs(contract: ContractProgram) -> dict[str, ReadingResult]:
    """The results of the plain readings.

    The others get at least as far as ``rendezvous``, so they are run only if that one hangs.
    """
    results = {"rendezvous": _single_result(contract, "rendezvous")}
    if not results["rendezvous"].blocked_sets:
        return results
    for previous, reading in pairwise(_PLAIN_READINGS):
        if contract.has_same_result(previous, reading, results[previous]):
            results[reading] = results[previous]
        else:
            results[reading] = _single_result(contract, reading)
    return results


def _single_result(contract: ContractProgram, reading: Reading) -> ReadingResult:
    """The result of one reading: of one run or, after early exits, of all their outcomes."""
    blocked_sets: dict[tuple[int, ...], tuple[int, ...]] = {}
    mismatches: dict[object, CallMismatch] = {}
    examples: dict[str, ExampleExecution] = {}
    has_completing_run = has_matching_run = False
    for run in _runs(contract, reading):
        final_state, run_mismatches = run.final_state(), run.mismatches()
        examples.setdefault("end", ExampleExecution(final_state))
        if run_mismatches:
            # Mismatches of earlier runs keep their description; the new ones are listed first.
            by_calls = {mismatch.calls: mismatch for mismatch in run_mismatches}
            mismatches = by_calls | mismatches
            examples.setdefault("mismatch", ExampleExecution(final_state))
        else:
            has_matching_run = True
        if final_state.blocked:
            from distsim.checker.diagnosis.wait_for_graph import build_wait_for_graph

            blocked_sets.setdefault(final_state.stuck, build_wait_for_graph(final_state).core)
            examples.setdefault("deadlock", ExampleExecution(final_state))
        else:
            has_completing_run = True
    return ReadingResult(
        blocked_sets,
        has_completing_run,
        tuple(mismatches.values()),
        has_matching_run,
        examples,
        mismatch_ranks=union_of_ranks(mismatch.ranks for mismatch in mismatches.values()),
    )


def _runs(contract: ContractProgram, reading: Reading) -> Iterable[ReadingRun]:
    """One run or, if ranks exit early, one for each way in which their open requests may meet."""
    from distsim.checker.reading_run import early_exit_ranks

    if not early_exit_ranks(contract.linked):
        return [contract.run(reading)]
    if contract.linked.program.representative_of is not None:
        # Which requests are open when a process ends may differ between the ranks.
        raise FoldingError
    from distsim.checker.early_exit import early_exit_runs

    return early_exit_runs(contract, reading)
