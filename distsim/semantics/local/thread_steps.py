"""A unit's instructions as tuples of numbers, for the driver with local clocks.

Key idea: a rank becomes one thread for its host and one for each stream. Adjacent instructions are
fused (post and wait for the same message, say), and each thread is a list of `ThreadStep`, which
the driver of `distsim.semantics.local.rank_clocks` runs in one loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    KIND_WORK,
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    CompilationUnit,
    ExitRank,
    Instruction,
    LaunchPart,
    OperationLaunch,
    PostLaunch,
    SyncDevice,
    WaitForRows,
)

#: Kinds of steps. The driver compares them (``step <= STEP_MESSAGE``) and asks for the first ones
#: most often, so the order matters; and a step that posts and waits follows the one that only
#: posts (`_post_step` adds 1).
#:
#: Of a host:
#: - POST, JOIN: post a message, or a collective, and continue; MESSAGE, COLLECTIVE: post and wait.
#: - WORK: post local work and run it.
#: - ISSUE: enqueue a launch on a stream.
#: - WAIT: wait for messages and collectives; WAIT_EACH: for one request of several, and note when
#:   it was waited for; WAIT_ENDS: for the ends of launches, one after the other; SYNC: for the ends
#:   of all launches.
#: - RENDEZVOUS: wait for all members. END: the rank ends. NEVER: block for ever.
#:
#: Of a stream, besides POST, JOIN and WORK:
#: - BEGIN: wait until the host has issued a launch and the launches before it have ended.
#: - FINISH: wait until the launch's parts are done; it ends then.
(
    STEP_POST,
    STEP_MESSAGE,
    STEP_WAIT,
    STEP_FINISH,
    STEP_WORK,
    STEP_ISSUE,
    STEP_BEGIN,
    STEP_JOIN,
    STEP_COLLECTIVE,
    STEP_WAIT_EACH,
    STEP_RENDEZVOUS,
    STEP_WAIT_ENDS,
    STEP_SYNC,
    STEP_END,
    STEP_NEVER,
) = range(15)

#: The row of a step that belongs to no call: one at the program's end.
NO_ROW = -1

#: (kind of step, row, rows); see `flatten_to_threads`. A plain tuple, because the driver unpacks
#: one per step, and CPython 3.11 unpacks a NamedTuple three times more slowly.
ThreadStep = tuple[int, int, tuple[int, ...]]


class UnitThreads(NamedTuple):
    """The steps of a unit's host, and those of each stream."""

    host: list[ThreadStep]
    streams: list[list[ThreadStep]]


def flatten_to_threads(
    unit: CompilationUnit, offsets: list[int], wait_one_by_one: bool
) -> UnitThreads:
    """The steps of a unit's threads. Rows count from the rank's first row.

    The row of a wait is that of the call which waits, because its return is recorded there;
    `NO_ROW` at the program's end. The rows of a rendezvous are its numbers. ``wait_one_by_one``:
    the backend waits for one request after the other, and each records when it was waited for
    (`STEP_WAIT_EACH`: its rows are the awaited row, then the recorded ones).
    """
    host: list[ThreadStep] = []
    streams: dict[Hashable, list[ThreadStep]] = {}
    stream_rows: set[int] = set()  # rows of launches that streams run
    instructions = [one for one in unit.instructions if type(one) is not AcquireLock]
    index = 0
    while index < len(instructions):
        instruction = instructions[index]
        if type(instruction) is PostLaunch:
            launch = instruction.launch
            if launch.queue is not None and launch.on_stream:
                stream_rows.add(launch.row)
                host.append((STEP_ISSUE, launch.row, ()))
                streams.setdefault(launch.queue.key, []).extend(_stream_steps(launch))
                index += 1
            else:
                step, used = _post_step(instructions, index, launch, offsets)
                host.append(step)
                index += used
        else:
            is_call = instruction.position < len(offsets) - 1
            row = offsets[instruction.position] if is_call else NO_ROW
            host.append(_waiting_step(instruction, row, stream_rows, wait_one_by_one))
            index += 1
    return UnitThreads(host, list(streams.values()))


def _post_step(
    instructions: Sequence[Instruction], index: int, launch: OperationLaunch, offsets: list[int]
) -> tuple[ThreadStep, int]:
    """The step that posts a launch from the host, and how many instructions it stands for.

    A wait for just this launch is fused into the step.
    """
    position = instructions[index].position
    # The return of a part of a batch is recorded in the batch's row, so it is never fused.
    is_whole_call = launch.row == offsets[position]
    own_wait = WaitForRows(position, (launch.row,))
    waits = is_whole_call and index + 1 < len(instructions) and instructions[index + 1] == own_wait
    used = 2 if waits else 1
    kind = launch.parts[0].kind
    if kind is KIND_WORK:
        return (STEP_WORK, launch.row, ()), used
    step = STEP_JOIN if kind is KIND_COLLECTIVE else STEP_POST
    return (step + waits, launch.row, ()), used


def _waiting_step(
    instruction: Instruction, row: int, stream_rows: set[int], wait_one_by_one: bool
) -> ThreadStep:
    """The step of an instruction that posts nothing."""
    if isinstance(instruction, WaitForRows):
        if not stream_rows.isdisjoint(instruction.rows):
            return (STEP_WAIT_ENDS, row, instruction.rows)
        if wait_one_by_one and instruction.waited:
            return (STEP_WAIT_EACH, row, (*instruction.rows[:1], *instruction.waited))
        return (STEP_WAIT, row, instruction.rows)
    if isinstance(instruction, SyncDevice):
        return (STEP_SYNC, row, instruction.rows)
    if isinstance(instruction, AwaitRendezvous):
        return (STEP_RENDEZVOUS, row, instruction.numbers)
    if isinstance(instruction, BlockForever):
        return (STEP_NEVER, row, ())
    if isinstance(instruction, ExitRank):
        return (STEP_END, row, ())
    # A `DropRequest` changes nothing here: only ordered drivers follow its effects.
    return (STEP_WAIT, row, ())


def _stream_steps(launch: OperationLaunch) -> list[ThreadStep]:
    parts: tuple[LaunchPart, ...] = launch.parts
    begin = (STEP_BEGIN, launch.row, launch.after)
    if parts[0].kind is KIND_WORK:
        return [begin, (STEP_WORK, launch.row, ())]
    posts: list[ThreadStep] = [
        (STEP_JOIN if part.kind is KIND_COLLECTIVE else STEP_POST, part.row, ()) for part in parts
    ]
    return [begin, *posts, (STEP_FINISH, launch.row, tuple([part.row for part in parts]))]
