"""Whether the order of events can change the outcome of a program. If not, local clocks are exact.

Key idea: times never decide anything by themselves. Only a few things do depend on which event
comes first: any-source receives, ranks that fail, queues of workers that fill up, a contended lock,
and calls that match but differ. Each of these is recognised in the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from distsim.findings.final_state import FinalState
from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    KIND_RECEIVE,
    KIND_WORK,
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    CompilationUnit,
    DropRequest,
    ExitRank,
    Instruction,
    LaunchPart,
    PostLaunch,
    SyncDevice,
    WaitForRows,
)
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches

#: Faults that do not end a rank.
_HARMLESS_FAULTS = ("slow", "late", "absent")


def why_order_matters(
    linked: LinkedProgram, mismatches: ProgramMismatches | None = None
) -> str | None:
    """The reason why the order of events must be followed; None if it does not matter.

    ``mismatches``: those of the program, if the caller has them.
    """
    if linked.open_boxes.size:
        return "a receive is open to any source"
    faults = [fault.kind for fault in linked.program.faults]
    if any(kind not in _HARMLESS_FAULTS for kind in faults):
        return "a rank fails"
    if "absent" in faults and linked.profile.peer_death == "raises":
        return "a rank is missing"
    for unit in linked.units:
        reason = _why_order_matters_in_unit(linked, unit)
        if reason is not None:
            return reason
    return (mismatches or ProgramMismatches(linked)).why_order_matters()


def _why_order_matters_in_unit(linked: LinkedProgram, unit: CompilationUnit) -> str | None:
    last = unit.instructions[-1]
    if isinstance(last, ExitRank) and last.gone:
        if last.status != "ended" or last.message:
            return "a rank fails, or exits in a call"
        if _loses_requests_at_exit(linked, unit):
            return "a process ends while a request is open"
    for instruction in unit.instructions:
        if isinstance(instruction, DropRequest):
            return "a request is dropped"
        if isinstance(instruction, BlockForever):
            return "a call is invalid"
        if isinstance(instruction, AwaitRendezvous) and (instruction.uneven or instruction.lost):
            return "the ranks made different groups"
    if _worker_queue_fills(unit):
        return "a queue of collectives fills up"
    if linked.profile.lock and _lock_contended(unit):
        return "the process's one lock decides who comes first"
    return None


def _worker_queue_fills(unit: CompilationUnit) -> bool:
    """Whether a queue ever holds more open launches than it has workers."""
    open_rows: dict[Hashable, set[int]] = {}
    queue_of: dict[int, Hashable] = {}
    for instruction in unit.instructions:
        if isinstance(instruction, PostLaunch) and instruction.launch.pooled:
            launch = instruction.launch
            assert launch.queue is not None
            in_queue = open_rows.setdefault(launch.queue.key, set())
            if len(in_queue) >= launch.queue.width:
                return True
            in_queue.add(launch.row)
            queue_of[launch.row] = launch.queue.key
        elif isinstance(instruction, WaitForRows):
            for row in instruction.rows:
                if row in queue_of:
                    open_rows[queue_of[row]].discard(row)
    return False


def _lock_contended(unit: CompilationUnit) -> bool:
    """Whether an asynchronous collective overlaps with anything else that takes the lock.

    Messages, the wait for one, and collectives of the host itself take it.
    """
    open_rows: set[int] = set()
    for instruction in unit.instructions:
        if isinstance(instruction, PostLaunch) and instruction.launch.pooled:
            open_rows.add(instruction.launch.row)
        elif isinstance(instruction, WaitForRows):
            open_rows.difference_update(instruction.rows)
        elif open_rows and _takes_lock(instruction):
            return True
    return False


def _takes_lock(instruction: Instruction) -> bool:
    if isinstance(instruction, AcquireLock):
        return True
    if not isinstance(instruction, PostLaunch):
        return False
    launch = instruction.launch
    kind = launch.parts[0].kind
    is_message = kind <= KIND_RECEIVE
    is_host_collective = launch.queue is None and kind is KIND_COLLECTIVE  # a new_group, say
    return is_message or is_host_collective


def exits_with_open_requests(linked: LinkedProgram) -> bool:
    """Whether a process ends with requests for which it never waited, and which it loses then.

    Then it matters which of their partners arrived before.
    """
    return any(_loses_requests_at_exit(linked, unit) for unit in linked.units)


def _loses_requests_at_exit(linked: LinkedProgram, unit: CompilationUnit) -> bool:
    last = unit.instructions[-1]
    if not isinstance(last, ExitRank) or not last.gone:
        return False
    if "requests" not in linked.program.features and not linked.profile.device:
        return False
    kinds = {part.kind for part in requests_open_at_end(unit)}
    exits_by_itself = last.status in ("ended", "raised")
    if exits_by_itself and linked.profile.joins_collectives_at_exit:
        kinds.discard(KIND_COLLECTIVE)
    return bool(kinds)


def requests_open_at_end(unit: CompilationUnit) -> list[LaunchPart]:
    """The messages and collectives for which the host never waits."""
    if len(unit.instructions) > 1 and isinstance(unit.instructions[-2], SyncDevice):
        return []
    waited: set[int] = set()
    found: list[LaunchPart] = []
    for instruction in unit.instructions:
        if isinstance(instruction, WaitForRows):
            waited.update(instruction.rows)
        elif isinstance(instruction, SyncDevice):
            found.clear()
        elif isinstance(instruction, PostLaunch):
            found += instruction.launch.parts
    return [part for part in found if part.kind is not KIND_WORK and part.row not in waited]


def exits_change_result(
    linked: LinkedProgram, final_state: FinalState, has_open_collective: Callable[[], bool]
) -> bool:
    """Whether a run whose processes stay may end in another way if they end with their programs.

    Peers of a process that has ended raise instead of being blocked for ever, if the backend
    detects it. A process does not end while a collective of it is open, if the backend waits for
    them at exit (``has_open_collective``: one has been called, and some member has not joined).
    Otherwise no rank needs one that has ended.
    """
    ended = (end.rank for end in final_state.ends if end.status == "ended")
    if not any(_process_ends(linked.unit_of[rank]) for rank in ended):
        return False
    if final_state.blocked and linked.profile.peer_death == "raises":
        return True
    joins_collectives = linked.profile.joins_collectives_at_exit
    return joins_collectives and "requests" in linked.program.features and has_open_collective()


def _process_ends(unit: CompilationUnit) -> bool:
    last = unit.instructions[-1]
    return isinstance(last, ExitRank) and last.gone
