"""Findings about calls that met and differ, requests never waited for, messages never received, and
ranks that left early.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from distsim.checker.detectors.request_leaks import RequestLeak
from distsim.checker.diagnosis.hang_advice import SAME_MODEL_ADVICE, remedy_for_error
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import CallMismatch, part_call
from distsim.checker.wording import MAX_SHOWN, aligned_columns, call_words, location_text, rank_list
from distsim.findings.codes import CODES
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.checker.diagnosis.awaited_call import TakenMessages

#: Waits behind a mismatch that are told one by one.
_MAX_CONSEQUENCES = 3
#: The code of a difference in a collective, the gravest first.
_ASPECT_CODES = {
    "op": "DS201",
    "ranks": "DS210",
    "backend": "DS210",
    "root": "DS205",
    "numel": "DS202",
    "splits": "DS207",
    "dtype": "DS203",
    "reduce_op": "DS204",
}
_ASPECT_WORDS = {
    "op": "operation",
    "numel": "element count",
    "reduce_op": "reduce op",
    "ranks": "members",
}


def failure_findings(
    program: Program,
    where: CallIndex,
    mismatches: Iterable[CallMismatch],
    final_state: FinalState | None,
    taken: TakenMessages | None = None,
) -> tuple[Finding, ...]:
    """What met and differs, and why ranks stand still: DS201 to DS210 and DS301 to DS305.

    A rank that came to a call that does not fit does nothing meant afterwards: what it then waits
    for is told in a line of that finding.
    """
    mismatches = tuple(mismatches)
    misfits = mismatch_findings(program, where, mismatches)
    if final_state is None:
        return misfits
    from distsim.checker.diagnosis.hang_findings import diagnose_hang

    return attach_consequences(
        misfits,
        diagnose_hang(program, final_state, where.layout, taken),
        _ranks_past_mismatch(mismatches, final_state),
    )


def attach_consequences(
    found: Sequence[Finding], waits: Iterable[Finding], past: set[int] | None = None
) -> tuple[Finding, ...]:
    """Findings, and those of a standstill: what some of the ranks of a mismatch then wait for
    becomes a line of it.

    ``past``: ranks that came to a call that does not fit; left out, all that the mismatch is
    about.
    """
    alone: list[Finding] = []
    wakes: dict[Finding, list[str]] = {}
    misfits = [
        (f, {*f.ranks} if past is None else {*f.ranks} & past)
        for f in found
        if f.code.startswith("DS2")
    ]
    for stuck in waits:
        cause = (
            next((f for f, came in misfits if not came.isdisjoint(stuck.core)), None)
            if stuck.code.startswith("DS3")
            else None
        )
        if cause is None:
            alone.append(stuck)
        else:
            wakes.setdefault(cause, []).append(stuck.message.partition("\n")[0])
    told = (
        replace(f, message="\n".join([f.message, *_consequence_lines(wakes[f])]))
        if f in wakes
        else f
        for f in found
    )
    return (*told, *alone)


def without_repeated_findings(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings without repetition: none twice, and no DS608 about a call that an error has
    explained.
    """
    told = {(p.file, p.line, p.column) for f in found if f.severity == "error" for p in f.slips}
    rest = (
        f
        for f in found
        if f.code != "DS608" or not told & {(p.file, p.line, p.column) for p in f.places}
    )
    return tuple(dict.fromkeys(rest))


def _consequence_lines(heads: list[str]) -> list[str]:
    more = (
        [f"  … and {len(heads) - _MAX_CONSEQUENCES} more waits behind it"]
        if len(heads) > _MAX_CONSEQUENCES
        else []
    )
    return [*(f"  in its wake, {head}" for head in heads[:_MAX_CONSEQUENCES]), *more]


def _ranks_past_mismatch(mismatches: Iterable[CallMismatch], final_state: FinalState) -> set[int]:
    """Ranks that came to a call that does not fit."""
    came: dict[int, int] = {}
    for mismatch in mismatches:
        for rank, position, _ in mismatch.calls:
            came[rank] = min(position, came.get(rank, position))
    return {
        end.rank for end in final_state.ends if end.rank in came and end.position >= came[end.rank]
    }


def mismatch_findings(
    program: Program, where: CallIndex, mismatches: Iterable[CallMismatch]
) -> tuple[Finding, ...]:
    """DS201 to DS210. Messages of the same places that differ in the same way are one finding."""
    found = [_collective_finding(program, where, u) for u in mismatches if u.sequence >= 0]
    groups: dict[tuple[object, ...], list[CallMismatch]] = {}
    for mismatch in mismatches:
        if mismatch.sequence < 0:
            (s, p, _), (r, q, _) = mismatch.calls
            key = (
                program.code_call(s, p).site,
                program.code_call(r, q).site,
                tuple(mismatch.aspects.items()),
            )
            groups.setdefault(key, []).append(mismatch)
    return (*found, *(_message_finding(program, group) for group in groups.values()))


def _collective_finding(program: Program, where: CallIndex, mismatch: CallMismatch) -> Finding:
    aspect, code = next((a, c) for a, c in _ASPECT_CODES.items() if a in mismatch.aspects)
    layout = where.layout
    name, ranks = layout.sequence_names[mismatch.sequence], mismatch.ranks
    if mismatch.order and code != "DS205":
        code = "DS210" if name == "new_group" else "DS206"
    what = difference_words(mismatch.aspects)
    order = ", although they make the same calls in another order" if mismatch.order else ""
    head = f"call {mismatch.number + 1} of {'new_group' if name == 'new_group' else f'group {name}'} differs in {what}{order}"
    calls = _minority_first(mismatch)
    rows, left = _rows_of_equal_calls(program, mismatch, calls)
    more = [f"  … and {left} more"] if left else []
    more += [f"  {mismatch.note}"] if mismatch.note else []
    more += (
        [f"  {mismatch.later} later call{'s differ' if mismatch.later > 1 else ' differs'} too"]
        if mismatch.later
        else []
    )
    if _models_differ(program, mismatch):
        head = f"the models that ddp wraps differ by rank: {head}"
    help_lines, slip = _collective_advice(program, where, mismatch, aspect)
    places = [*slip, *(program.place(r, p) for r, p, _ in calls)]
    return Finding(
        code,
        "error",
        "\n".join([head, *aligned_columns(rows), *more]),
        ranks,
        mismatch.minority,
        help_lines,
        tuple(dict.fromkeys(places)),
        slip,
    )


def _rows_of_equal_calls(
    program: Program, mismatch: CallMismatch, calls: Sequence[tuple[int, int, int]]
) -> tuple[list[tuple[str, ...]], int]:
    """A row for the calls that read the same, in the order of the first of them; how many calls
    have no row.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    index = {call: i for i, call in enumerate(mismatch.calls)}
    for rank, position, part in calls:
        told = (
            call_words(program.call(rank, position)),
            location_text(program.place(rank, position)),
        )
        groups.setdefault(
            (*told, _aspect_values(mismatch, index[rank, position, part])), []
        ).append(rank)
    rows = [(rank_list(sorted(ranks)), *told) for told, ranks in groups.items()]
    return rows[:MAX_SHOWN], sum(map(len, list(groups.values())[MAX_SHOWN:]))


def difference_words(aspects: Iterable[str]) -> str:
    """`operation`, `element count and dtype`: what differs, without what follows from another
    operation.
    """
    names = list(aspects)
    names = ["op"] if "op" in names else names
    return " and ".join(_ASPECT_WORDS.get(name, name) for name in names)


def _minority_first(mismatch: CallMismatch) -> list[tuple[int, int, int]]:
    """The calls, one of each kind up front: first of the minority, then the rest."""
    odd = set(mismatch.minority)
    said = list(zip(*mismatch.aspects.values(), strict=True))
    first = {said.index(value) for value in dict.fromkeys(said)}
    ranked = sorted(
        range(len(mismatch.calls)),
        key=lambda i: (mismatch.calls[i][0] not in odd, i not in first, i),
    )
    return [mismatch.calls[i] for i in ranked]


def _aspect_values(mismatch: CallMismatch, i: int) -> str:
    """What its i-th call says of the aspects that the call's own words don't show."""
    if "op" in mismatch.aspects:
        return ""
    shown = {k: v[i] for k, v in mismatch.aspects.items() if k in ("numel", "dtype")}
    counts = {
        k: ", ".join(map(str, v)) if isinstance(v, tuple) else v
        for k, v in shown.items()
        if v is not None
    }
    return ", ".join(
        f"{v} element{'' if v == 1 else 's'}" if k == "numel" else f"{v}" for k, v in counts.items()
    )


#: What to do, by what differs.
_ASPECT_ADVICE = {
    "op": "find the branch that makes the members part here, and let all of them make the same calls",
    "ranks": "every rank must make every group, with the same members and in the same order",
    "backend": "give the same backend on all ranks",
    "root": "name one root, the same global rank on all members",
    "numel": "give tensors of one shape on all members: pad them, or use all_to_all_single with splits",
    "splits": "make output_splits the transpose of input_splits (left out, it is), or exchange the counts first",
    "dtype": "cast to one dtype before the call",
    "reduce_op": "give the same op on all members",
}


#: The numbers of a model's parameters, which DistributedDataParallel compares when it is made
#: (`ddp_calls`).
_DDP_SHAPES = re.compile(r"ddp\d*_shapes")
_HelpAndPlaces = tuple[tuple[str, ...], tuple[SourceLocation, ...]]


def _models_differ(program: Program, mismatch: CallMismatch) -> bool:
    """Members that compare the shapes of models which have others."""
    calls = (program.call(rank, position) for rank, position, _ in mismatch.calls)
    return all(call.inputs and _DDP_SHAPES.fullmatch(call.inputs[0].label) for call in calls)


def _collective_advice(
    program: Program, where: CallIndex, mismatch: CallMismatch, aspect: str
) -> _HelpAndPlaces:
    """What to do, and the places of calls too many or too few that explain the difference."""
    if mismatch.order:
        has = "has" if len(mismatch.minority) == 1 else "have"
        who = f"; {rank_list(mismatch.minority)} {has} another" if mismatch.minority else ""
        return (f"make the calls in one order on all members{who}",), ()
    if (
        aspect == "numel"
        and OPERATIONS[program.call(*mismatch.calls[0][:2]).op].coalesces is not None
    ):
        return (
            "coalesce the same tensors in one order on all members, also those that a member does not need",
        ), ()
    if _models_differ(program, mismatch):
        return SAME_MODEL_ADVICE, ()
    if slip := _extra_or_missing_calls(where, mismatch):
        return slip
    if (
        aspect == "numel"
        and OPERATIONS[program.call(*mismatch.calls[0][:2]).op].input_parts == "one"
        and not _concatenates_parts(program, mismatch)
    ):
        return (_EQUAL_SHAPES_ADVICE,), ()
    differs = "differs" if len(mismatch.minority) == 1 else "differ"
    odd = f"{rank_list(mismatch.minority)} {differs} from the rest: " if mismatch.minority else ""
    return (odd + _ASPECT_ADVICE[aspect],), ()


_EQUAL_SHAPES_ADVICE = "give tensors of one shape on all members: the same model with the same layers frozen on each, and batches of one size"


def _concatenates_parts(program: Program, mismatch: CallMismatch) -> bool:
    """Parts of several ranks come together, so that padding helps."""
    return OPERATIONS[program.call(*mismatch.calls[0][:2]).op].output_parts == "n"


class _SequenceCall(NamedTuple):
    """A call that a rank's program makes on a sequence."""

    site: int
    signature: int
    position: int


def _extra_or_missing_calls(where: CallIndex, mismatch: CallMismatch) -> _HelpAndPlaces | None:
    """Calls too few or too many on the minority, where they alone explain the difference."""
    if not mismatch.minority:
        return None
    odd = mismatch.minority[0]
    most = next(r for r in mismatch.ranks if r not in mismatch.minority)
    mine, theirs = (_calls_on_sequence(where, rank, mismatch.sequence) for rank in (odd, most))
    program = where.layout.program
    if left := _surplus(theirs, mine, mismatch.number):
        words, place = (
            call_words(program.call(most, left[0].position)),
            program.place(most, left[0].position),
        )
        if len(left) == 1:
            return (
                f"rank {odd} leaves out {words}, {location_text(place)}; its later calls are shifted by one",
            ), (place,)
        if len({call.site for call in left}) > 1:
            return (
                f"rank {odd} leaves out {len(left)} calls that the others make, the first {words}: a pass, an iteration or a branch",
                "that it skips; let it make them too, with nothing to give where it has nothing",
            ), (place,)
        return (f"rank {odd} leaves out {words}, {location_text(place)}, {len(left)} times",), (
            place,
        )
    if more := _surplus(mine, theirs, mismatch.number):
        words, place = (
            call_words(program.call(odd, more[0].position)),
            program.place(odd, more[0].position),
        )
        head = (
            f"makes one call more, {words}"
            if len(more) == 1
            else f"makes {len(more)} calls more, the first {words}"
        )
        return (
            f"rank {odd} {head}, {location_text(place)}, which the others do not have",
            _MEMBERSHIP_RULE,
        ), (place,)
    return None


_MEMBERSHIP_RULE = "a collective is a call of all members of its group: take it out of the branch, or let the others make it too"


def _calls_on_sequence(where: CallIndex, rank: int, sequence: int) -> list[_SequenceCall]:
    calls = zip(where.joins(rank, sequence), where.signatures(rank, sequence), strict=True)
    return [
        _SequenceCall(where.layout.program.code_call(rank, p).site, signature, p)
        for p, signature in calls
    ]


def _surplus(
    longer: list[_SequenceCall], shorter: list[_SequenceCall], number: int
) -> list[_SequenceCall]:
    """The calls of one rank without which it would do what another does: those of places where the
    other makes none, else the ones from where they part on."""
    if len(longer) <= len(shorter):
        return []
    known, wanted = {call.site for call in shorter}, [call.signature for call in shorter]
    if [call.signature for call in longer if call.site in known] == wanted:
        return [call for call in longer if call.site not in known]
    rest, end = [call.signature for call in longer], number + len(longer) - len(shorter)
    return longer[number:end] if rest[end:] == wanted[number:] else []


def _message_finding(program: Program, group: list[CallMismatch]) -> Finding:
    mismatch = group[0]
    sender, receiver = mismatch.calls
    out, into = part_call(program, *sender), part_call(program, *receiver)
    code = "DS208" if "numel" in mismatch.aspects else "DS209"
    size, room = (f"{b.inputs[0].numel} {b.inputs[0].dtype}" for b in (out, into))
    head = f"rank {sender[0]} sends {size}, but rank {receiver[0]} receives into {room}"
    rows = [
        (
            f"rank {r}",
            call_words(c),
            location_text(program.place(r, p)),
            f"message {mismatch.number + 1} of its kind",
        )
        for (r, p, _), c in zip(mismatch.calls, (out, into), strict=True)
    ]
    more = (
        [f"  … and {len(group) - 1} more pair{'s' if len(group) > 2 else ''} like this"]
        if len(group) > 1
        else []
    )
    help_line = (
        "give both ends the same shape; if two receives from one peer are swapped, swap them back or tag them"
        if code == "DS208"
        else "give both ends the same dtype"
    )
    ranks = tuple(sorted({r for u in group for r in u.ranks}))
    places = tuple(dict.fromkeys(program.place(r, p) for r, p, _ in mismatch.calls))
    return Finding(
        code,
        "error",
        "\n".join([head, *aligned_columns(rows), *more]),
        ranks,
        (),
        (help_line,),
        places,
    )


def leak_findings(program: Program, found: Iterable[RequestLeak]) -> tuple[Finding, ...]:
    """DS501, one per place."""
    out = []
    for leak in found:
        rank = leak.ranks[0]
        call, place = program.call(rank, leak.position), program.place(rank, leak.position)
        times = f" ({leak.count} requests)" if leak.count > len(leak.ranks) else ""
        why = (
            "its handle is bound again before"
            if leak.overwritten
            else "it has no handle"
            if leak.dropped
            else "no wait names its handle"
        )
        message = (
            f"{call.op} of {rank_list(leak.ranks)} is never waited for{times}: {why}\n"
            + aligned_columns([(f"rank {rank}", call_words(call), location_text(place))])[0]
        )
        advice = (
            "give each request a handle of its own, `as: h@i` in a loop, and wait for each"
            if leak.overwritten
            else "keep it with `as: h` and wait for h before its tensor is used and before the end"
        )
        out.append(Finding("DS501", "warning", message, leak.ranks, (), (advice,), (place,)))
    return tuple(out)


def unreceived_findings(program: Program, final_state: FinalState) -> tuple[Finding, ...]:
    """DS502, one per place of the sends."""
    groups: dict[int, list[tuple[int, int, int]]] = {}
    for rank, position, part in final_state.unreceived:
        made = program.code_call(rank, position)
        groups.setdefault((made.parts[part] if part >= 0 else made).site, []).append(
            (rank, position, part)
        )
    out = []
    for site, sends in sorted(groups.items()):
        call = part_call(program, *sends[0])
        ranks = tuple(sorted({rank for rank, _, _ in sends}))
        place: SourceLocation = program.sites[site].place(sends[0][0])
        number = f"{len(sends)} messages" if len(sends) > 1 else "a message"
        head = (
            f"{rank_list(ranks)} send{'s' if len(ranks) == 1 else ''} {number} that nobody receives"
        )
        advice = f"receive it on rank {call.peer}, or do not send it"
        if OPERATIONS[call.op].signals:
            head = f"{rank_list(ranks)} leave{'s' if len(ranks) == 1 else ''} {number.replace('message', 'signal')} that nobody waits for"
            advice = f"wait for it on rank {call.peer}: the next wait on this channel would take it, too early"
        message = "\n".join(
            [
                head,
                *aligned_columns([(f"rank {sends[0][0]}", call_words(call), location_text(place))]),
            ]
        )
        out.append(Finding("DS502", "warning", message, ranks, (), (advice,), (place,)))
    return tuple(out)


def open_receive_findings(
    program: Program, choices: Iterable[tuple[int, int, int]]
) -> tuple[Finding, ...]:
    """DS605, one per place: receives from any source (rank, position, part) that could take more
    than one sender's message.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for rank, position, _ in choices:
        groups.setdefault(program.code_call(rank, position).site, []).append((rank, position))
    found = []
    for receives in groups.values():
        ranks = tuple(dict.fromkeys(rank for rank, _ in receives))
        place = program.place(*receives[0])
        message = f"a receive from any source of {rank_list(ranks)} may take more than one sender's message, {location_text(place)}"
        found.append(
            Finding(
                "DS605",
                "note",
                message,
                ranks,
                (),
                ("if one sender is meant, say so with `src`",),
                (place,),
            )
        )
    return tuple(found)


def rank_end_findings(program: Program, final_state: FinalState) -> tuple[Finding, ...]:
    """DS801 to DS805: ranks that a fault, a `fail` or an `exit` with a code ended, by kind and
    place.
    """
    groups: dict[tuple[str, SourceLocation | None, str], list[int]] = {}
    for end in final_state.ends:
        code = _end_code(program, end.rank, end.status, end.position, end.message)
        if code:
            at_call = end.status != "absent" and end.position < len(program.code(end.rank).calls)
            place = program.place(end.rank, end.position) if at_call else None
            key = (
                code,
                None
                if place is None
                else SourceLocation(place.file, place.line, place.column, place.op),
                end.message,
            )
            groups.setdefault(key, []).append(end.rank)
    out = []
    for (code, place, text), ranks in groups.items():
        at_place = (
            f" at {location_text(place)}" if place is not None and location_text(place) else ""
        )
        message = f"{rank_list(ranks)} {_end_words(code, text, len(ranks) == 1)}{at_place}"
        places = () if place is None else (place,)
        out.append(
            Finding(
                code,
                CODES[code].severity,
                message,
                tuple(ranks),
                (),
                remedy_for_error(text),
                places,
            )
        )
    return tuple(out)


def _end_words(code: str, text: str, lone: bool) -> str:
    if code == "DS802":
        return (
            "raised by a fault of the file"
            if text == "fault"
            else f"raised: {text}"
            if text
            else "raised an error"
        )
    was = "was" if lone else "were"
    return {
        "DS801": f"{was} killed by a fault of the file",
        "DS803": "left by exit with an error code",
        "DS805": "never started",
    }[code]


def _end_code(program: Program, rank: int, status: str, position: int, text: str) -> str:
    if status == "absent":
        return "DS805"
    if status == "killed":
        return "DS801"
    calls = program.code(rank).calls
    if position >= len(calls):
        return ""
    if status == "raised":
        return "DS802" if text == "fault" or OPERATIONS[calls[position].op].op == "fail" else ""
    return "DS803" if calls[position].op == "exit" and program.call(rank, position).code else ""
