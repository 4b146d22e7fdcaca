"""Convert paths of the explorer to schedules, and follow a schedule with the explorer's rules.

The record itself (`ReplaySchedule`, with its JSON form) is in `checker.replay_schedule`; its other
users do not need the explorer.
"""

from __future__ import annotations

from collections.abc import Iterator

from distsim.checker.explore.encoding import ProgramEncoding
from distsim.checker.explore.persistent_sets import BranchChooser
from distsim.checker.explore.steps import SearchState, StateMachine, released_rank
from distsim.checker.explore.terminal_states import final_state_at
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.replay_schedule import BufferChoice, CallId, ReplaySchedule, TakeChoice
from distsim.common.errors import UsageError
from distsim.findings.final_state import FinalState
from distsim.program.model import Program


def schedule_from_path(machine: StateMachine, path: list[int]) -> ReplaySchedule:
    """The schedule that names the calls of a path's choices."""
    state, encoding = machine.initial(), machine.encoding
    choices: list[TakeChoice | BufferChoice] = []
    for choice in path:
        rank = released_rank(choice)
        if rank is None:
            choices.append(_take_choice(machine, state, choice))
        else:
            position = encoding.stops[rank][state[rank]].position
            choices.append(BufferChoice(CallId(rank, position)))
        machine.apply(state, choice)
    return ReplaySchedule(encoding.reading, tuple(choices))


def _take_choice(machine: StateMachine, state: SearchState, pair: int) -> TakeChoice:
    """The calls that meet if the pair is taken now."""
    encoding, box = machine.encoding, machine.box_of_pair[pair]
    receive = encoding.boxes[box].any_source_receives[state[encoding.served + box]]
    message = machine.messages[pair][state[encoding.consumed + pair]]
    return TakeChoice(
        CallId(machine.receiver[box], receive.position, receive.part),
        CallId(machine.sender_of[pair], message.position, message.part),
    )


def follow_schedule(program: Program, schedule: ReplaySchedule) -> FinalState:
    """Follow a schedule and return the state in which it ends.

    After the schedule's last choice, each any-source receive takes the message of the lowest sender
    that has one.

    Raises UsageError if a choice is impossible in this program.
    """
    absent = frozenset(fault.rank for fault in program.faults if fault.kind == "absent")
    machine = StateMachine(ProgramEncoding(build_channel_layout(program), schedule.reading, absent))
    state = machine.initial()
    for number, choice in enumerate(schedule.choices):
        if isinstance(choice, BufferChoice):
            _apply_buffer_choice(machine, state, number, choice)
        else:
            _apply_take_choice(machine, state, number, choice)

    chooser = BranchChooser(machine)
    while pairs := chooser.branches(state).pairs:
        machine.take(state, pairs[0])
    return final_state_at(machine, state)


def _possible_takes(machine: StateMachine, state: SearchState) -> Iterator[int]:
    for box in range(len(machine.encoding.boxes)):
        yield from machine.takes(state, box)


def _apply_take_choice(
    machine: StateMachine, state: SearchState, number: int, choice: TakeChoice
) -> None:
    for pair in _possible_takes(machine, state):
        if _take_choice(machine, state, pair) == choice:
            machine.take(state, pair)
            return
    receiver, sender = choice.receive.rank, choice.send.rank
    raise _impossible_choice(
        number, f"rank {receiver} cannot take that message of rank {sender} here"
    )


def _apply_buffer_choice(
    machine: StateMachine, state: SearchState, number: int, choice: BufferChoice
) -> None:
    rank = choice.call.rank
    if not 0 <= rank < machine.size or not machine.can_release(state, rank):
        raise _impossible_choice(number, f"rank {rank} waits for nothing that could be buffered")
    if machine.encoding.stops[rank][state[rank]].position != choice.call.position:
        raise _impossible_choice(number, f"rank {rank} waits in another call")
    machine.release(state, rank)


def _impossible_choice(number: int, why: str) -> UsageError:
    return UsageError(
        f"choice {number} of the schedule does not fit this program: {why}",
        "check the file again for a new schedule",
    )
