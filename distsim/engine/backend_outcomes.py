"""What a program comes to under each back end: the outcome, and what it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distsim.backends import BackendProfile, default_cluster
from distsim.common.records import dataclass, gc_paused
from distsim.engine import fill_columns
from distsim.engine.event_driven import simulate_in_order
from distsim.engine.order_search import MismatchNote, ProgramEnd, search_event_orders
from distsim.engine.overlap import has_overlap
from distsim.engine.run_record import OUTCOMES_WORST_FIRST, worst_outcome
from distsim.engine.timeout_check import exceeds_timeout, may_exceed_timeout
from distsim.findings.final_state import FinalState
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.code import Program
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.group_creation import divergent_new_groups
from distsim.semantics.form.instructions import DropRequest
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches
from distsim.semantics.form.nccl_connect import connection_mismatches
from distsim.semantics.form.order_dependence import exits_with_open_requests, why_order_matters
from distsim.semantics.local.blocked_ranks import blocked_state_of_run
from distsim.semantics.local.rank_clocks import RunProgress
from distsim.semantics.local.run import run_local_clocks

#: States that are looked at where a receive may take several senders, unless the caller says
#: otherwise.
MAX_STATES = 2_000
#: Up to so many calls the order of overlapping collectives on a device is looked at (N12); it needs
#: the explicit rules.
MAX_N12_CALLS = 50_000
_NO_BUFFER_BYTES, _UNLIMITED_BUFFER_BYTES = -1, 1 << 62


@dataclass(frozen=True)
class BackendOutcome:
    """What is expected of a program under one back end.

    ``outcome``: in the order of events that simulated time gives, with the program's options.
    ``possible``: all there may be, the worst first. ``ranks``: whom the outcome is about (blocked,
    raising, dead, or with wrong data). ``flips_at_nbytes``: the buffer limit in force, where the
    outcome would be another with less or more of it; None where buffering decides nothing.
    ``variants``: under nccl, the outcome under lazy and under eager init. ``complete``:
    ``possible`` lists all.
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
    """The outcome of a program under a back end, whatever ``backend:`` it names itself.

    ``cost``: prices where the order of events depends on time; left out, those of the back end's
    default cluster. ``max_states`` bounds the search where a receive may take several senders.
    """
    priced = cost or CostModel(
        default_cluster(profile.name), program.world_size, program.local_size, program.link_faults
    )
    with gc_paused():
        if not profile.device:
            return _outcome_with_buffers(program, profile, priced, max_states)
        if _surely_completes(program, profile, priced):
            return BackendOutcome(
                "completes",
                ("completes",),
                (),
                variants={"lazy": "completes", "eager": "completes"},
            )
        chosen = str(program.options.get("init") or "lazy")
        found = {
            chosen: _outcome_with_buffers(
                _with_options(program, init=chosen), profile, priced, max_states
            )
        }
        other = "eager" if chosen == "lazy" else "lazy"
        if found[chosen].outcome == "completes" and not _init_matters(program):
            found[other] = found[chosen]
        else:
            found[other] = _outcome_with_buffers(
                _with_options(program, init=other), profile, priced, max_states
            )
    return replace(
        found[chosen], variants={init: found[init].outcome for init in ("lazy", "eager")}
    )


def _with_options(program: Program, **options: object) -> Program:
    return replace(program, options={**program.options, **options})


def _init_matters(program: Program) -> bool:
    """Could the other way to make communicators go wrong, where one way completes? Messages outside
    batches travel on others (N7), first use is a meeting (N8), and new_group is one or is not
    (2.3)."""
    return (
        any(
            OPERATIONS[call.op].kind in ("p2p", "batch") or call.op == "new_group"
            for code in program.codes
            for call in code.distinct_calls(parts=False)
        )
        or len(program.groups) > 1
    )


# --- buffers ---
def _outcome_with_buffers(
    program: Program, profile: BackendProfile, cost: CostModel, max_states: int
) -> BackendOutcome:
    """The outcome with the limit in force, and whether less or more of it would change it.

    More room never makes a program wait that would not wait with less, if no receive is open to any
    source; so what completes without any buffer completes with every one.
    """
    under = _LinkedRunner(program, profile, cost, max_states)
    if profile.buffer_option is None:
        return under.outcome()
    option, limit = profile.buffer_option.name, profile.buffer_option.limit(program.options)
    strict = under.outcome(**{option: _NO_BUFFER_BYTES})
    if under.all_messages_received or (
        strict.possible == ("completes",)
        and not (has_any_source_receive(program) and profile.any_source)
    ):
        return strict
    free = under.outcome(**{option: _UNLIMITED_BUFFER_BYTES})
    real = under.outcome(**{option: limit})
    decides = (strict.outcome, strict.possible) != (free.outcome, free.possible)
    return replace(real, flips_at_nbytes=limit if decides else None)


# --- one run ---
#: All ranks end, and all that met fits.
_CLEAN_END = ProgramEnd(FinalState((), ()), frozenset())


def _surely_completes(program: Program, profile: BackendProfile, cost: CostModel) -> bool:
    """It completes on a device whatever the options: it does with one launch at a time, no buffers
    and meetings at first use, and whatever is laxer completes too, and no later. (Messages in
    batches and outside may meet under eager init; then this says nothing. Nor does it where this
    run goes on for longer than a timeout: a laxer one enqueues earlier, and its clocks start
    earlier, 2.4.)"""
    if any(
        call.op == "new_group"
        for code in program.codes
        for call in code.distinct_calls(parts=False)
    ):
        return False  # a meeting under eager init alone
    under = _LinkedRunner(
        _with_options(program, init="lazy", buffsize=_NO_BUFFER_BYTES, serial=True), profile, cost
    )
    return (
        not under.linked.mixes_batches
        and not under.ordered
        and under.completes_before_any_timeout()
    )


class _LinkedRunner:
    """A program under a back end, linked once, however much its buffers hold.

    ``ordered``: the order of events must be followed. ``none_waits``: in the last run, which went
    wrong, each message was received, so that no buffer changes what came of it.
    """

    def __init__(
        self,
        program: Program,
        profile: BackendProfile,
        cost: CostModel,
        max_states: int = MAX_STATES,
    ) -> None:
        self.linked, self.cost, self.max_states = LinkedProgram(program, profile), cost, max_states
        self.misfits = ProgramMismatches(self.linked)
        self.ordered = why_order_matters(self.linked, self.misfits) is not None
        self.all_messages_received = False
        self._known: dict[bytes, BackendOutcome] = {}

    def outcome(self, **options: object) -> BackendOutcome:
        """What it comes to with these options. All buffers that hold the same sends, with room for
        all of them, are one.
        """
        linked = self.linked.under(None, **options)
        conditions = self._conditions(linked)
        if conditions.has_room:
            return _outcome_of_end(linked, self.end(conditions), self.cost, self.max_states)
        buffered = conditions.ahead.tobytes()
        if buffered not in self._known:
            self._known[buffered] = _outcome_of_end(
                linked, self.end(conditions), self.cost, self.max_states
            )
        return self._known[buffered]

    def _conditions(self, linked: LinkedProgram) -> CompletionConditions:
        """Priced where that is needed; a program that is not free of order may have calls that have
        no price.
        """
        return CompletionConditions(linked, None if self.ordered else self.cost)

    def end(self, conditions: CompletionConditions | None = None) -> ProgramEnd:
        """One run, by the fastest way that is exact."""
        found = conditions or self._conditions(self.linked)
        return (None if self.ordered else self._free_end(found)) or _ordered_end(
            found.linked, self.cost
        )

    def completes_before_any_timeout(self) -> bool:
        """Of a program that is free of order: all goes well, and all is over before the shortest
        timeout.
        """
        done = run_local_clocks(self.linked, self._conditions(self.linked))
        return (
            not may_exceed_timeout(done, self.cost.cluster.shared_links)
            and self._end_of(done) is _CLEAN_END
        )

    def _free_end(self, conditions: CompletionConditions) -> ProgramEnd | None:
        """How a program ends that is free of order; None where a wait may outlast its timeout."""
        linked = conditions.linked
        done = run_local_clocks(linked, conditions)
        if may_exceed_timeout(done, self.cost.cluster.shared_links):
            columns = fill_columns(done)
            if exceeds_timeout(linked.program, linked.profile, columns) or has_overlap(
                conditions, columns, self.cost
            ):
                return None
        return self._end_of(done)

    def _end_of(self, done: RunProgress) -> ProgramEnd:
        linked = done.linked
        end = ProgramEnd(
            blocked_state_of_run(done), _mismatch_notes(linked, self.misfits.in_run(done.posted))
        )
        wrong = bool(end.final_state.blocked or end.notes)
        self.all_messages_received = wrong and not end.final_state.unreceived
        return end if wrong else _CLEAN_END


def _ordered_end(linked: LinkedProgram, cost: CostModel) -> ProgramEnd:
    if linked.program.representative_of is not None:
        raise FoldingError
    left = simulate_in_order(linked.program, linked.profile, cost, linked=linked)
    open_to = (MismatchNote("undefined", ("ranks",), left.undefined),) if left.undefined else ()
    return ProgramEnd(left.final_state, _mismatch_notes(linked, left.mismatches).union(open_to))


def _mismatch_notes(
    linked: LinkedProgram, met: Iterable[tuple[Sequence[int], tuple[str, ...], str]]
) -> frozenset[MismatchNote]:
    """(rows that met, fields in which they differ, outcome) of all that did not fit."""
    rank = linked.rank
    return frozenset(
        MismatchNote(outcome, fields, tuple(sorted(int(rank[row]) for row in rows)))
        for rows, fields, outcome in met
    )


def _outcome_of_end(
    linked: LinkedProgram, end: ProgramEnd, cost: CostModel, max_states: int
) -> BackendOutcome:
    program, profile = linked.program, linked.profile
    outcome, ranks = _worst_outcome_and_ranks(end)
    possible, complete = {outcome}, True
    cancels = (profile.dropped == "cancels" and _drops_requests(linked)) or (
        profile.peer_death == "raises" and exits_with_open_requests(linked)
    )
    if cancels or (has_any_source_receive(program) and profile.any_source):
        if program.representative_of is not None:
            raise FoldingError
        ends = search_event_orders(linked, max_states, cancels)
        possible |= {_worst_outcome_and_ranks(one)[0] for one in ends.ends}
        complete = ends.complete
    if profile.device and outcome == "completes":
        doubt = undefined_behaviour(program, profile, cost)
        if doubt is not None:
            outcome, ranks, possible = "undefined", doubt.ranks, {"undefined", *doubt.possible}
    if profile.device and outcome == "hangs" and connection_mismatches(program, profile):
        possible |= {"raises"}  # N9: as it does over sockets
    possible |= _alternative_outcomes(program, profile, outcome, end)
    return BackendOutcome(
        outcome,
        tuple(word for word in OUTCOMES_WORST_FIRST if word in possible),
        ranks,
        complete=complete,
    )


def _drops_requests(linked: LinkedProgram) -> bool:
    """A request for a message is dropped."""
    return any(isinstance(i, DropRequest) for unit in linked.units for i in unit.instructions)


def has_any_source_receive(program: Program) -> bool:
    """Whether some receive takes a message of any sender."""
    return any(np.any(np.asarray(port.peer) < 0) for code in program.codes for port in code.ports)


def _worst_outcome_and_ranks(end: ProgramEnd) -> tuple[str, tuple[int, ...]]:
    """The outcome of one end, and the ranks it is about."""
    if end is _CLEAN_END:
        return "completes", ()
    final_state, notes = end
    outcome = worst_outcome(final_state, (note.outcome for note in notes))
    if outcome == "hangs":
        return outcome, final_state.stuck
    if outcome in ("wrong-data", "undefined"):
        return outcome, tuple(
            sorted({rank for note in notes if note.outcome == outcome for rank in note.ranks})
        )
    status = {"raises": ("raised",), "crashes": ("crashed", "killed")}.get(outcome, ())
    return outcome, tuple(e.rank for e in final_state.ends if e.status in status)


class UndefinedBehaviour(NamedTuple):
    """What NCCL leaves open in a program that completes if all goes well: whom it is about, and
    what may come of it.
    """

    ranks: tuple[int, ...]
    possible: tuple[str, ...]


def undefined_behaviour(
    program: Program, profile: BackendProfile, cost: CostModel
) -> UndefinedBehaviour | None:
    """Of a program that completes under a back end with a device: what makes that luck, None where
    nothing does.

    N9: launches that connect other directions than each other are undefined. N12: asynchronous
    collectives of overlapping groups may stand in each other's way on the device; they do if it
    stands still when launches follow the host's order, as on one hardware queue.
    """
    if not profile.device:
        return None
    contacts = connection_mismatches(program, profile)
    if contacts:
        return UndefinedBehaviour(
            tuple(sorted({rank for one in contacts for rank in one.pair})),
            ("hangs", "raises", "completes"),
        )
    if (
        program.call_count <= MAX_N12_CALLS
        and _has_overlapping_collectives(program)
        and not program.options.get("launch_order_implicit")
    ):
        in_order = _LinkedRunner(_with_options(program, one_queue=True), profile, cost).end()
        if in_order.final_state.blocked:
            return UndefinedBehaviour(in_order.final_state.stuck, ("hangs", "completes"))
    return None


def _has_overlapping_collectives(program: Program) -> bool:
    """Asynchronous collectives on more than one group of some rank."""
    for code in program.codes:
        used = {
            call.group
            for call in code.distinct_calls(parts=False)
            if OPERATIONS[call.op].kind == "collective"
        }
        if len(used) > 1 and any(
            call.is_async and OPERATIONS[call.op].kind == "collective"
            for call in code.distinct_calls(parts=False)
        ):
            return True
    return False


def _alternative_outcomes(
    program: Program, profile: BackendProfile, outcome: str, end: ProgramEnd
) -> set[str]:
    """Outcomes that the numbers or the memory decide, which a program's text does not tell."""
    outside = any(finding.code == "DS101" for finding in program.findings)
    again = (
        {"completes"}
        if outcome == "hangs"
        and any(made.again for made in divergent_new_groups(program, profile).values())
        else set()
    )
    return again | set(
        profile.alternative_outcomes(
            outcome, [note.fields for note in end.notes if note.outcome == outcome], outside
        )
    )
