"""What a program comes to under each back end: the outcome, and what it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from distsim.cost import CostModel
from distsim.engine import fill
from distsim.engine.general import simulate_in_order
from distsim.engine.orders import End, Note, ends_of_orders
from distsim.engine.outlasting import may_outlast, outlasts
from distsim.engine.overlap import shares
from distsim.engine.record import WORST_FIRST, worst_of
from distsim.ops.table import OPS
from distsim.profiles import Profile, default_cluster
from distsim.program.records import Program
from distsim.records import dataclass, no_collection
from distsim.semantics.blocked import standstill
from distsim.semantics.conditions import Conditions
from distsim.semantics.contacts import bad_contacts
from distsim.semantics.creation import unlike_groups
from distsim.semantics.form import Drop
from distsim.semantics.link import Linked
from distsim.semantics.local import Progress, go
from distsim.semantics.misfits import Misfits, leaves_open, why_ordered
from distsim.semantics.section import Unfold
from distsim.standstill import Standstill

#: States that are looked at where a receive may take several senders, unless the caller says otherwise.
MAX_STATES = 2_000
#: Up to so many calls the order of overlapping collectives on a device is looked at (N12); it needs the explicit rules.
N12_CALLS = 50_000
_NOTHING, _EVERYTHING = -1, 1 << 62


@dataclass(frozen=True)
class ProfileOutcome:
    """What is expected of a program under one back end.

    ``outcome``: in the order of events that simulated time gives, with the program's options. ``possible``: all there may be, the
    worst first. ``ranks``: whom the outcome is about (blocked, raising, dead, or with wrong data).
    ``flips_at_nbytes``: the buffer limit in force, where the outcome would be another with less or more of it; None where buffering
    decides nothing. ``variants``: under nccl, the outcome under lazy and under eager init. ``complete``: ``possible`` lists all.
    """

    outcome: str
    possible: tuple[str, ...]
    ranks: tuple[int, ...]
    flips_at_nbytes: int | None = None
    variants: Mapping[str, str] | None = None
    complete: bool = True


def outcome_under(
    program: Program, profile: Profile, cost: CostModel | None = None, *, max_states: int = MAX_STATES
) -> ProfileOutcome:
    """The outcome of a program under a back end, whatever ``backend:`` it names itself.

    ``cost``: prices where the order of events depends on time; left out, those of the back end's default cluster.
    ``max_states`` bounds the search where a receive may take several senders.
    """
    priced = cost or CostModel(default_cluster(profile.name), program.world_size, program.local_size, program.link_faults)
    with no_collection():
        if not profile.device:
            return _buffered(program, profile, priced, max_states)
        if _surely(program, profile, priced):
            return ProfileOutcome("completes", ("completes",), (), variants={"lazy": "completes", "eager": "completes"})
        chosen = str(program.options.get("init") or "lazy")
        found = {chosen: _buffered(_with(program, init=chosen), profile, priced, max_states)}
        other = "eager" if chosen == "lazy" else "lazy"
        if found[chosen].outcome == "completes" and not _init_matters(program):
            found[other] = found[chosen]
        else:
            found[other] = _buffered(_with(program, init=other), profile, priced, max_states)
    return replace(found[chosen], variants={init: found[init].outcome for init in ("lazy", "eager")})


def _with(program: Program, **options: object) -> Program:
    return replace(program, options={**program.options, **options})


def _init_matters(program: Program) -> bool:
    """Could the other way to make communicators go wrong, where one way completes? Messages outside batches travel on others (N7),
    first use is a meeting (N8), and new_group is one or is not (2.3)."""
    return (
        any(
            OPS[call.op].kind in ("p2p", "batch") or call.op == "new_group"
            for code in program.codes
            for call in code.distinct_calls(parts=False)
        )
        or len(program.groups) > 1
    )


# --- buffers ---
def _buffered(program: Program, profile: Profile, cost: CostModel, max_states: int) -> ProfileOutcome:
    """The outcome with the limit in force, and whether less or more of it would change it.

    More room never makes a program wait that would not wait with less, if no receive is open to any source; so what completes without
    any buffer completes with every one.
    """
    under = _Under(program, profile, cost, max_states)
    if profile.buffer_option is None:
        return under.outcome()
    option, limit = profile.buffer_option.name, profile.buffer_option.limit(program.options)
    strict = under.outcome(**{option: _NOTHING})
    if under.none_waits or (strict.possible == ("completes",) and not (any_source(program) and profile.any_source)):
        return strict
    free = under.outcome(**{option: _EVERYTHING})
    real = under.outcome(**{option: limit})
    decides = (strict.outcome, strict.possible) != (free.outcome, free.possible)
    return replace(real, flips_at_nbytes=limit if decides else None)


# --- one run ---
#: All ranks end, and all that met fits.
_FINE = End(Standstill((), ()), frozenset())


def _surely(program: Program, profile: Profile, cost: CostModel) -> bool:
    """It completes on a device whatever the options: it does with one launch at a time, no buffers and meetings at first use, and
    whatever is laxer completes too, and no later. (Messages in batches and outside may meet under eager init; then this says nothing.
    Nor does it where this run goes on for longer than a timeout: a laxer one enqueues earlier, and its clocks start earlier, 2.4.)"""
    if any(call.op == "new_group" for code in program.codes for call in code.distinct_calls(parts=False)):
        return False  # a meeting under eager init alone
    under = _Under(_with(program, init="lazy", buffsize=_NOTHING, serial=True), profile, cost)
    return not under.linked.mixes_batches and not under.ordered and under.fine_before_any_timeout()


class _Under:
    """A program under a back end, linked once, however much its buffers hold.

    ``ordered``: the order of events must be followed. ``none_waits``: in the last run, which went wrong, each message was received, so
    that no buffer changes what came of it.
    """

    def __init__(self, program: Program, profile: Profile, cost: CostModel, max_states: int = MAX_STATES) -> None:
        self.linked, self.cost, self.max_states = Linked(program, profile), cost, max_states
        self.misfits = Misfits(self.linked)
        self.ordered = why_ordered(self.linked, self.misfits) is not None
        self.none_waits = False
        self._known: dict[bytes, ProfileOutcome] = {}

    def outcome(self, **options: object) -> ProfileOutcome:
        """What it comes to with these options. All buffers that hold the same sends, with room for all of them, are one."""
        linked = self.linked.under(None, **options)
        conditions = self._conditions(linked)
        if conditions.has_room:
            return _outcome(linked, self.end(conditions), self.cost, self.max_states)
        buffered = conditions.ahead.tobytes()
        if buffered not in self._known:
            self._known[buffered] = _outcome(linked, self.end(conditions), self.cost, self.max_states)
        return self._known[buffered]

    def _conditions(self, linked: Linked) -> Conditions:
        """Priced where that is needed; a program that is not free of order may have calls that have no price."""
        return Conditions(linked, None if self.ordered else self.cost)

    def end(self, conditions: Conditions | None = None) -> End:
        """One run, by the fastest way that is exact."""
        found = conditions or self._conditions(self.linked)
        return (None if self.ordered else self._free_end(found)) or _ordered_end(found.linked, self.cost)

    def fine_before_any_timeout(self) -> bool:
        """Of a program that is free of order: all goes well, and all is over before the shortest timeout."""
        done = go(self.linked, self._conditions(self.linked))
        return not may_outlast(done, self.cost.cluster.shared_links) and self._end_of(done) is _FINE

    def _free_end(self, conditions: Conditions) -> End | None:
        """How a program ends that is free of order; None where a wait may outlast its timeout."""
        linked = conditions.linked
        done = go(linked, conditions)
        if may_outlast(done, self.cost.cluster.shared_links):
            columns = fill(done)
            if outlasts(linked.program, linked.profile, columns) or shares(conditions, columns, self.cost):
                return None
        return self._end_of(done)

    def _end_of(self, done: Progress) -> End:
        linked = done.linked
        end = End(standstill(done), _notes(linked, self.misfits.met(done.posted)))
        wrong = bool(end.standstill.blocked or end.notes)
        self.none_waits = wrong and not end.standstill.unreceived
        return end if wrong else _FINE


def _ordered_end(linked: Linked, cost: CostModel) -> End:
    if linked.program.stands_for is not None:
        raise Unfold
    left = simulate_in_order(linked.program, linked.profile, cost, linked=linked)
    open_to = (Note("undefined", ("ranks",), left.undefined),) if left.undefined else ()
    return End(left.standstill, _notes(linked, left.mismatches).union(open_to))


def _notes(linked: Linked, met: Iterable[tuple[Sequence[int], tuple[str, ...], str]]) -> frozenset[Note]:
    """(rows that met, fields in which they differ, outcome) of all that did not fit."""
    rank = linked.rank
    return frozenset(Note(outcome, fields, tuple(sorted(int(rank[row]) for row in rows))) for rows, fields, outcome in met)


def _outcome(linked: Linked, end: End, cost: CostModel, max_states: int) -> ProfileOutcome:
    program, profile = linked.program, linked.profile
    outcome, ranks = _judge(end)
    possible, complete = {outcome}, True
    cancels = (profile.dropped == "cancels" and _drops(linked)) or (profile.peer_death == "raises" and leaves_open(linked))
    if cancels or (any_source(program) and profile.any_source):
        if program.stands_for is not None:
            raise Unfold
        ends = ends_of_orders(linked, max_states, cancels)
        possible |= {_judge(one)[0] for one in ends.ends}
        complete = ends.complete
    if profile.device and outcome == "completes":
        doubt = left_open(program, profile, cost)
        if doubt is not None:
            outcome, ranks, possible = "undefined", doubt.ranks, {"undefined", *doubt.possible}
    if profile.device and outcome == "hangs" and bad_contacts(program, profile):
        possible |= {"raises"}  # N9: as it does over sockets
    possible |= _besides(program, profile, outcome, end)
    return ProfileOutcome(outcome, tuple(word for word in WORST_FIRST if word in possible), ranks, complete=complete)


def _drops(linked: Linked) -> bool:
    """A request for a message is dropped."""
    return any(isinstance(i, Drop) for unit in linked.units for i in unit.instructions)


def any_source(program: Program) -> bool:
    """Whether some receive takes a message of any sender."""
    return any(np.any(np.asarray(port.peer) < 0) for code in program.codes for port in code.ports)


def _judge(end: End) -> tuple[str, tuple[int, ...]]:
    """The outcome of one end, and the ranks it is about."""
    if end is _FINE:
        return "completes", ()
    standstill, notes = end
    outcome = worst_of(standstill, (note.outcome for note in notes))
    if outcome == "hangs":
        return outcome, standstill.stuck
    if outcome in ("wrong-data", "undefined"):
        return outcome, tuple(sorted({rank for note in notes if note.outcome == outcome for rank in note.ranks}))
    status = {"raises": ("raised",), "crashes": ("crashed", "killed")}.get(outcome, ())
    return outcome, tuple(e.rank for e in standstill.ends if e.status in status)


class Open(NamedTuple):
    """What NCCL leaves open in a program that completes if all goes well: whom it is about, and what may come of it."""

    ranks: tuple[int, ...]
    possible: tuple[str, ...]


def left_open(program: Program, profile: Profile, cost: CostModel) -> Open | None:
    """Of a program that completes under a back end with a device: what makes that luck, None where nothing does.

    N9: launches that connect other directions than each other are undefined.
    N12: asynchronous collectives of overlapping groups may stand in each other's way
    on the device; they do if it stands still when launches follow the host's order, as on one hardware queue.
    """
    if not profile.device:
        return None
    contacts = bad_contacts(program, profile)
    if contacts:
        return Open(tuple(sorted({rank for one in contacts for rank in one.pair})), ("hangs", "raises", "completes"))
    if program.call_count <= N12_CALLS and _overlap(program) and not program.options.get("launch_order_implicit"):
        in_order = _Under(_with(program, one_queue=True), profile, cost).end()
        if in_order.standstill.blocked:
            return Open(in_order.standstill.stuck, ("hangs", "completes"))
    return None


def _overlap(program: Program) -> bool:
    """Asynchronous collectives on more than one group of some rank."""
    for code in program.codes:
        used = {call.group for call in code.distinct_calls(parts=False) if OPS[call.op].kind == "collective"}
        if len(used) > 1 and any(
            call.is_async and OPS[call.op].kind == "collective" for call in code.distinct_calls(parts=False)
        ):
            return True
    return False


def _besides(program: Program, profile: Profile, outcome: str, end: End) -> set[str]:
    """Outcomes that the numbers or the memory decide, which a program's text does not tell."""
    outside = any(finding.code == "DS101" for finding in program.findings)
    again = (
        {"completes"} if outcome == "hangs" and any(made.again for made in unlike_groups(program, profile).values()) else set()
    )
    return again | set(profile.besides(outcome, [note.fields for note in end.notes if note.outcome == outcome], outside))
