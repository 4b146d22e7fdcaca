"""The outcome of a program under a backend, and what it depends on.

Key idea: one run gives the outcome in simulated time. Further runs show whether it depends on how
much the backend buffers (none, the limit in force, everything) and on how communicators are created
(lazily or eagerly). A search over event orders finds all possible outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distsim.backends import BackendProfile, default_cluster
from distsim.common.records import dataclass, gc_paused
from distsim.engine.event_driven import simulate_in_order
from distsim.engine.local_run_columns import fill_columns
from distsim.engine.order_search import MismatchNote, ProgramEnd, search_event_orders
from distsim.engine.overlap import has_overlap
from distsim.engine.run_record import OUTCOMES_WORST_FIRST, worst_outcome
from distsim.engine.timeout_check import exceeds_timeout, may_exceed_timeout
from distsim.findings.final_state import FinalState
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.group_creation import divergent_new_groups
from distsim.semantics.form.instructions import DropRequest
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches, RowMismatch
from distsim.semantics.form.nccl_connect import connection_mismatches
from distsim.semantics.form.order_dependence import (
    exits_change_result,
    exits_with_open_requests,
    why_order_matters,
)
from distsim.semantics.local.blocked_ranks import blocked_state_of_run
from distsim.semantics.local.rank_clocks import RunProgress
from distsim.semantics.local.run import run_local_clocks

#: The default limit of states in the search over the senders that any-source receives may take.
MAX_STATES = 2_000
#: For programs of more calls the order of overlapping collectives on a device (N12) is not checked:
#: that may need the event-driven engine.
MAX_N12_CALLS = 50_000
_NO_BUFFER_BYTES, _UNLIMITED_BUFFER_BYTES = -1, 1 << 62


@dataclass(frozen=True)
class BackendOutcome:
    """The expected outcome of a program under one backend.

    - ``outcome``: in the order of events that simulated time gives, with the program's options.
    - ``possible``: all possible outcomes, the worst first; ``complete``: whether it lists all.
    - ``ranks``: the ranks that are blocked, raise, are dead, or have wrong data.
    - ``flips_at_nbytes``: the buffer limit in force, if a smaller or larger one would change the
      outcome; None if buffering decides nothing.
    - ``variants``: under nccl, the outcome with lazy and with eager init.
    """

    outcome: str
    possible: tuple[str, ...]
    ranks: tuple[int, ...]
    flips_at_nbytes: int | None = None
    variants: Mapping[str, str] | None = None
    complete: bool = True


def backend_outcome(
    program: Program,
    profile: BackendProfile,
    cost: CostModel | None = None,
    *,
    max_states: int = MAX_STATES,
) -> BackendOutcome:
    """The outcome of a program under a backend, whatever ``backend:`` the program names.

    ``cost`` decides where the order of events depends on time (default: that of the backend's
    default cluster). ``max_states`` limits the search where a receive may take several senders.
    """
    cost = cost or CostModel(
        default_cluster(profile.name), program.world_size, program.local_size, program.link_faults
    )
    with gc_paused():
        if not profile.device:
            return _outcome_with_buffers(program, profile, cost, max_states)
        if _surely_completes(program, profile, cost):
            variants = {"lazy": "completes", "eager": "completes"}
            return BackendOutcome("completes", ("completes",), (), variants=variants)
        return _outcome_with_both_inits(program, profile, cost, max_states)


def _outcome_with_both_inits(
    program: Program, profile: BackendProfile, cost: CostModel, max_states: int
) -> BackendOutcome:
    """The outcome with the chosen way to create communicators, and what the other one gives."""
    chosen = str(program.options.get("init") or "lazy")
    other = "eager" if chosen == "lazy" else "lazy"
    with_chosen = _with_options(program, init=chosen)
    outcome = _outcome_with_buffers(with_chosen, profile, cost, max_states)
    other_outcome = outcome
    if outcome.outcome != "completes" or _init_matters(program):
        with_other = _with_options(program, init=other)
        other_outcome = _outcome_with_buffers(with_other, profile, cost, max_states)
    by_init = {chosen: outcome.outcome, other: other_outcome.outcome}
    return replace(outcome, variants={init: by_init[init] for init in ("lazy", "eager")})


def _with_options(program: Program, **options: object) -> Program:
    return replace(program, options={**program.options, **options})


def _init_matters(program: Program) -> bool:
    """Whether the other way to create communicators might fail where one way completes.

    Messages outside of batches use other communicators (N7), the first use of one is a rendezvous
    or is not (N8), and so is new_group (2.3).
    """
    if len(program.groups) > 1:
        return True
    return any(
        OPERATIONS[call.op].kind in ("p2p", "batch") or call.op == "new_group"
        for call in _distinct_calls(program)
    )


def _distinct_calls(program: Program) -> Iterator[CodeCall]:
    """The distinct calls of all codes, batches as one."""
    for code in program.codes:
        yield from code.distinct_calls(parts=False)


# --- buffers ---
def _outcome_with_buffers(
    program: Program, profile: BackendProfile, cost: CostModel, max_states: int
) -> BackendOutcome:
    """The outcome with the buffer limit in force, and whether another limit would change it.

    Without any-source receives, more room never makes a program wait. So a program that completes
    without any buffer completes with every one.
    """
    runner = _LinkedRunner(program, profile, cost, max_states)
    if profile.buffer_option is None:
        return runner.outcome()
    option, limit = profile.buffer_option.name, profile.buffer_option.limit(program.options)
    without_buffer = runner.outcome(**{option: _NO_BUFFER_BYTES})
    if runner.all_messages_received:
        return without_buffer
    has_any_source = has_any_source_receive(program) and profile.any_source
    if without_buffer.possible == ("completes",) and not has_any_source:
        return without_buffer
    unlimited = runner.outcome(**{option: _UNLIMITED_BUFFER_BYTES})
    in_force = runner.outcome(**{option: limit})
    strict_result = (without_buffer.outcome, without_buffer.possible)
    buffering_decides = strict_result != (unlimited.outcome, unlimited.possible)
    return replace(in_force, flips_at_nbytes=limit if buffering_decides else None)


# --- one run ---
#: All ranks end, and all calls that matched agree. Compared by identity.
_CLEAN_END = ProgramEnd(FinalState((), ()), frozenset())


def _surely_completes(program: Program, profile: BackendProfile, cost: CostModel) -> bool:
    """Whether a program completes on a device whatever the options; False if that is not known.

    It does if it completes under the strictest options: one launch at a time, no buffers, and a
    rendezvous at the first use of a communicator. Less strict options let it complete too, and no
    later. There are exceptions: messages in batches may match others outside of batches under eager
    init; and where the strict run exceeds a timeout nothing is known, because a less strict one
    enqueues earlier, and its timeouts start earlier (2.4).
    """
    # new_group is a rendezvous under eager init only. A process that exits with an error does not
    # wait for what it launched, which the strictest options hide.
    if any(call.op in ("new_group", "exit") for call in _distinct_calls(program)):
        return False
    options: dict[str, object] = {"init": "lazy", "serial": True}
    if profile.buffer_option is not None:
        options[profile.buffer_option.name] = _NO_BUFFER_BYTES
    strictest = _with_options(program, **options)
    runner = _LinkedRunner(strictest, profile, cost)
    if runner.linked.mixes_batches or runner.ordered:
        return False
    return runner.completes_before_any_timeout()


class _LinkedRunner:
    """A program under a backend, linked only once for all sizes of buffers.

    ``ordered``: the order of events must be followed. ``all_messages_received``: the last run
    failed although each message was received, so no buffer changes its outcome.
    """

    def __init__(
        self,
        program: Program,
        profile: BackendProfile,
        cost: CostModel,
        max_states: int = MAX_STATES,
    ) -> None:
        self.linked, self.cost, self.max_states = LinkedProgram(program, profile), cost, max_states
        self.mismatches = ProgramMismatches(self.linked)
        self.ordered = why_order_matters(self.linked, self.mismatches) is not None
        self.all_messages_received = False
        self._by_buffered_sends: dict[bytes, BackendOutcome] = {}

    def outcome(self, **options: object) -> BackendOutcome:
        """The outcome with these options.

        Buffers that hold the same sends, and have room for all of them, give the same outcome.
        """
        linked = self.linked.under(None, **options)
        conditions = self._conditions(linked)
        if conditions.some_wait_for_space:
            return _outcome_of_end(linked, self.end(conditions), self.cost, self.max_states)
        key = conditions.buffered.tobytes()
        if key not in self._by_buffered_sends:
            end = self.end(conditions)
            outcome = _outcome_of_end(linked, end, self.cost, self.max_states)
            self._by_buffered_sends[key] = outcome
        return self._by_buffered_sends[key]

    def _conditions(self, linked: LinkedProgram) -> CompletionConditions:
        """With costs only if they are needed: calls of an order-dependent program may have none."""
        return CompletionConditions(linked, None if self.ordered else self.cost)

    def end(self, conditions: CompletionConditions | None = None) -> ProgramEnd:
        """One run, by the fastest way that is exact."""
        conditions = conditions or self._conditions(self.linked)
        end = None
        if not self.ordered:
            end = self._local_end(conditions)
        return end or _ordered_end(conditions.linked, self.cost)

    def completes_before_any_timeout(self) -> bool:
        """Whether a program that does not depend on order completes before the shortest timeout."""
        done = run_local_clocks(self.linked, self._conditions(self.linked))
        if may_exceed_timeout(done, self.cost.cluster.shared_links):
            return False
        return self._end_of(done, blocked_state_of_run(done)) is _CLEAN_END

    def _local_end(self, conditions: CompletionConditions) -> ProgramEnd | None:
        """The end of a run with local clocks; None if a wait may exceed its timeout."""
        linked = conditions.linked
        done = run_local_clocks(linked, conditions)
        if may_exceed_timeout(done, self.cost.cluster.shared_links):
            columns = fill_columns(done)
            if exceeds_timeout(linked.program, linked.profile, columns):
                return None
            if has_overlap(conditions, columns, self.cost):
                return None
        final_state = blocked_state_of_run(done)
        if exits_change_result(linked, final_state, done.has_open_collective):
            return None
        return self._end_of(done, final_state)

    def _end_of(self, done: RunProgress, final_state: FinalState) -> ProgramEnd:
        notes = _mismatch_notes(done.linked, self.mismatches.in_run(done.posted))
        failed = bool(final_state.blocked or notes)
        self.all_messages_received = failed and not final_state.unreceived
        return ProgramEnd(final_state, notes) if failed else _CLEAN_END


def _ordered_end(linked: LinkedProgram, cost: CostModel) -> ProgramEnd:
    if linked.program.representative_of is not None:
        raise FoldingError
    run = simulate_in_order(linked.program, linked.profile, cost, linked=linked)
    notes = _mismatch_notes(linked, run.mismatches)
    if run.undefined:
        notes |= {MismatchNote("undefined", ("ranks",), run.undefined)}
    return ProgramEnd(run.final_state, notes)


def _mismatch_notes(
    linked: LinkedProgram, mismatches: Iterable[RowMismatch]
) -> frozenset[MismatchNote]:
    notes: set[MismatchNote] = set()
    for mismatch in mismatches:
        ranks = sorted(int(linked.rank[row]) for row in mismatch.rows)
        notes.add(MismatchNote(mismatch.outcome, mismatch.fields, tuple(ranks)))
    return frozenset(notes)


def _outcome_of_end(
    linked: LinkedProgram, end: ProgramEnd, cost: CostModel, max_states: int
) -> BackendOutcome:
    """The outcome of a run that ended so, with everything else that is possible."""
    program, profile = linked.program, linked.profile
    outcome, ranks = _worst_outcome_and_ranks(end)
    possible, complete = {outcome}, True
    # What a rank still has open when it exits, or drops, depends on what others did before.
    every_step_matters = _may_cancel_open_requests(linked)
    has_any_source = has_any_source_receive(program) and profile.any_source
    if every_step_matters or has_any_source:
        if program.representative_of is not None:
            raise FoldingError
        search = search_event_orders(linked, max_states, every_step_matters)
        possible |= {_worst_outcome_and_ranks(other)[0] for other in search.ends}
        complete = search.complete
    if profile.device and outcome == "completes":
        undefined = undefined_behaviour(program, profile, cost)
        if undefined is not None:
            outcome, ranks = "undefined", undefined.ranks
            possible = {"undefined", *undefined.possible}
    if profile.device and outcome == "hangs" and connection_mismatches(program, profile):
        possible.add("raises")  # N9: over sockets it raises
    possible |= _alternative_outcomes(program, profile, outcome, end)
    worst_first = tuple(word for word in OUTCOMES_WORST_FIRST if word in possible)
    return BackendOutcome(outcome, worst_first, ranks, complete=complete)


def _may_cancel_open_requests(linked: LinkedProgram) -> bool:
    profile = linked.profile
    if profile.dropped == "cancels" and _drops_requests(linked):
        return True
    return profile.peer_death == "raises" and exits_with_open_requests(linked)


def _drops_requests(linked: LinkedProgram) -> bool:
    """Whether a program drops the handle of a message's request."""
    instructions = (one for unit in linked.units for one in unit.instructions)
    return any(isinstance(instruction, DropRequest) for instruction in instructions)


def has_any_source_receive(program: Program) -> bool:
    """Whether some receive accepts a message of any sender."""
    return any(
        np.any(np.asarray(endpoint.peer) < 0)
        for code in program.codes
        for endpoint in code.endpoints
    )


def _worst_outcome_and_ranks(end: ProgramEnd) -> tuple[str, tuple[int, ...]]:
    """The outcome of one end, and the ranks that it concerns."""
    if end is _CLEAN_END:
        return "completes", ()
    final_state, notes = end
    outcome = worst_outcome(final_state, (note.outcome for note in notes))
    if outcome == "hangs":
        return outcome, final_state.stuck
    if outcome in ("wrong-data", "undefined"):
        worst_notes = [note for note in notes if note.outcome == outcome]
        return outcome, tuple(sorted({rank for note in worst_notes for rank in note.ranks}))
    statuses = {"raises": ("raised",), "crashes": ("crashed", "killed")}.get(outcome, ())
    return outcome, tuple(end.rank for end in final_state.ends if end.status in statuses)


class UndefinedBehaviour(NamedTuple):
    """What NCCL leaves undefined in a program that completes by luck.

    ``ranks``: the ranks that it concerns; ``possible``: the possible outcomes.
    """

    ranks: tuple[int, ...]
    possible: tuple[str, ...]


def undefined_behaviour(
    program: Program, profile: BackendProfile, cost: CostModel
) -> UndefinedBehaviour | None:
    """What makes it luck that a program completes under a backend with a device; None: nothing.

    N9: launches that connect different directions than their partners are undefined. N12:
    asynchronous collectives of overlapping groups may block each other on the device. They do if
    the program hangs when launches run in the host's order, as on one hardware queue.
    """
    if not profile.device:
        return None
    mismatches = connection_mismatches(program, profile)
    if mismatches:
        ranks = {rank for mismatch in mismatches for rank in mismatch.pair}
        return UndefinedBehaviour(tuple(sorted(ranks)), ("hangs", "raises", "completes"))
    if program.call_count > MAX_N12_CALLS or program.options.get("launch_order_implicit"):
        return None
    if _has_overlapping_collectives(program):
        end = _LinkedRunner(_with_options(program, one_queue=True), profile, cost).end()
        if end.final_state.blocked:
            return UndefinedBehaviour(end.final_state.stuck, ("hangs", "completes"))
    return None


def _has_overlapping_collectives(program: Program) -> bool:
    """Whether some rank calls collectives on several groups, and any of them asynchronously."""
    for code in program.codes:
        calls = code.distinct_calls(parts=False)
        collectives = [call for call in calls if OPERATIONS[call.op].kind == "collective"]
        groups = {call.group for call in collectives}
        if len(groups) > 1 and any(call.is_async for call in collectives):
            return True
    return False


def _alternative_outcomes(
    program: Program, profile: BackendProfile, outcome: str, end: ProgramEnd
) -> set[str]:
    """Outcomes that depend on numbers or memory, which the program does not determine."""
    has_invalid_rank = any(finding.code == "DS101" for finding in program.findings)
    fields = [note.fields for note in end.notes if note.outcome == outcome]
    alternatives = set(profile.alternative_outcomes(outcome, fields, has_invalid_rank))
    if outcome == "hangs":
        divergent = divergent_new_groups(program, profile).values()
        if any(new_group.again for new_group in divergent):
            # Whether stale addresses in the store let the ranks connect depends on ports.
            alternatives.add("completes")
        if any(new_group.may_connect for new_group in divergent):
            alternatives |= {"completes", "raises"}
    return alternatives
