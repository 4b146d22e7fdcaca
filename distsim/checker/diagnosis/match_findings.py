"""Findings about calls that met and mismatch (DS201 to DS210), and the hangs that follow from them.

Key idea: the ranks of a mismatch do nothing meaningful afterwards. Their later hangs are symptoms,
so they become lines of the mismatch instead of findings of their own.

A mismatch may differ in several aspects at once. Its code is that of the gravest aspect, because
the lesser ones often follow: a different operation usually has a different shape, too.

What must agree, and which ranks are the minority, is decided in `distsim.checker.matching`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distsim.checker.diagnosis.collective_advice import collective_advice, models_differ
from distsim.checker.diagnosis.first_divergence import (
    CallDivergence,
    divergence_head,
    divergence_on,
)
from distsim.checker.matching.call_index import CallIndex, part_call
from distsim.checker.matching.call_mismatch import CallMismatch
from distsim.checker.wording import MAX_SHOWN, aligned_columns, call_words, location_text, rank_list
from distsim.findings.codes import CODES
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.checker.diagnosis.awaited_call import TakenMessages

#: Hangs behind a mismatch that are listed one by one.
_MAX_CONSEQUENCES = 3
_CONSEQUENCE_PREFIX = "  as a result, "
_MORE_CONSEQUENCES = " more waits as a result"
#: Findings on habits and leftovers, which an error on the same call explains.
_EXPLAINED_BY_SLIPS = ("DS501", "DS607", "DS608")
#: Findings on ranks that ended early, which the finding on a wait for them explains.
_RANK_END_CODES = ("DS801", "DS802", "DS803", "DS805")
#: Findings on messages that meet in another order than was meant.
_SHIFTED_MESSAGES = ("DS602", "DS610")
#: Errors on calls that raise on some ranks; other ranks then wait for these.
_RAISING_CODES = ("DS804", "DS807")
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


# --- mismatches and the hangs behind them ---
def failure_findings(
    program: Program,
    call_index: CallIndex,
    mismatches: Iterable[CallMismatch],
    final_state: FinalState | None,
    taken: TakenMessages | None = None,
) -> tuple[Finding, ...]:
    """Mismatches and hangs: DS201 to DS210 and DS301 to DS305.

    ``final_state`` has the blocked ranks, if there are any. ``taken``: the messages that any-source
    receives took on the way there.
    """
    mismatches = tuple(mismatches)
    found = mismatch_findings(program, call_index, mismatches)
    if final_state is None:
        return found
    # Imported here, because a program with a mismatch but no blocked rank needs no diagnosis.
    from distsim.checker.diagnosis.hang_findings import diagnose_hang

    hangs = diagnose_hang(program, final_state, call_index.layout, taken)
    return attach_consequences(found, hangs, _ranks_past_mismatch(mismatches, final_state))


def attach_consequences(
    found: Sequence[Finding], hangs: Iterable[Finding], past_mismatch: set[int] | None = None
) -> tuple[Finding, ...]:
    """Findings, with the hangs that follow from one of their mismatches as lines of it.

    ``past_mismatch``: ranks that reached a mismatching call; by default all ranks that the mismatch
    names. Hangs of other ranks stay findings of their own, after ``found``.
    """
    reached_by: dict[Finding, set[int]] = {}
    raised_at: dict[Finding, set[int]] = {}
    for finding in found:
        if finding.code in _RAISING_CODES:
            raised_at[finding] = set(finding.ranks)
        if finding.code.startswith("DS2"):
            ranks = set(finding.ranks)
            reached_by[finding] = ranks if past_mismatch is None else ranks & past_mismatch

    independent: list[Finding] = []
    consequences: dict[Finding, list[str]] = defaultdict(list)
    for hang in hangs:
        cause = _mismatch_that_explains(hang, reached_by) or _error_awaited_by(hang, raised_at)
        if cause is None:
            independent.append(hang)
        else:
            consequences[cause].append(_wait_of(hang))

    explained = [
        _with_consequences(finding, consequences[finding]) if finding in consequences else finding
        for finding in found
    ]
    return (*explained, *independent)


def _wait_of(hang: Finding) -> str:
    """The line of a hang's message that says which ranks wait for which."""
    first, *rest = hang.message.split("\n")
    if rest and rest[0].startswith(_CONSEQUENCE_PREFIX):
        return rest[0].removeprefix(_CONSEQUENCE_PREFIX)
    return first


def _mismatch_that_explains(
    hang: Finding, reached_by: Mapping[Finding, set[int]]
) -> Finding | None:
    """The first mismatch that a rank of the hang's core has reached."""
    # Only the core counts. A victim of another cycle may well have passed a mismatch before, but
    # repairing the mismatch would not release it.
    if not hang.code.startswith("DS3"):
        return None
    for mismatch, ranks in reached_by.items():
        if not ranks.isdisjoint(hang.core):
            return mismatch
    return None


def _error_awaited_by(hang: Finding, raised_at: Mapping[Finding, set[int]]) -> Finding | None:
    """The finding on the call at which all ranks raised that a hang waits for."""
    if not hang.awaited:
        return None
    for finding, ranks in raised_at.items():
        if ranks.issuperset(hang.awaited):
            return finding
    return None


def _with_consequences(mismatch: Finding, heads: list[str]) -> Finding:
    lines = [mismatch.message]
    lines += [f"{_CONSEQUENCE_PREFIX}{head}" for head in heads[:_MAX_CONSEQUENCES]]
    if len(heads) > _MAX_CONSEQUENCES:
        lines.append(f"  … and {len(heads) - _MAX_CONSEQUENCES}{_MORE_CONSEQUENCES}")
    return replace(mismatch, message="\n".join(lines))


def is_consequence_line(line: str) -> bool:
    """Whether a line of a mismatch's message is about a hang that follows from it."""
    return line.startswith(_CONSEQUENCE_PREFIX) or line.endswith(_MORE_CONSEQUENCES)


def _ranks_past_mismatch(mismatches: Iterable[CallMismatch], final_state: FinalState) -> set[int]:
    """The ranks that reached a mismatching call.

    A rank that stopped before its call of the mismatch is blocked for another reason, so its hang
    is no consequence and stays a finding of its own.
    """
    first_position: dict[int, int] = {}
    for mismatch in mismatches:
        for rank, position, _ in mismatch.calls:
            first_position[rank] = min(position, first_position.get(rank, position))
    return {
        end.rank
        for end in final_state.ends
        if end.rank in first_position and end.position >= first_position[end.rank]
    }


def without_repeated_findings(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings without repetition: none twice, and none that another finding contains.

    An error explains requests without a wait on its slips, and the ends of the ranks that it waits
    for. It also explains calls that its ranks exclude or lack (DS608): that note is for calls which
    no run has reached yet. DS501 says the same as DS607 on one call, so it takes over its effect. A
    mismatch explains an error that the same step of the same rank raises later.
    """
    errors = [finding for finding in found if finding.severity == "error"]
    slips = {_position(slip) for finding in errors for slip in finding.slips}
    awaited = {rank for finding in errors for rank in finding.awaited}
    failing = {rank for finding in errors for rank in finding.ranks}
    invalid = {rank for finding in errors if _is_invalid_call(finding) for rank in finding.ranks}
    lost = [each for each in errors if each.code == "DS304" or _is_invalid_call(each)]
    unwaited = {
        _position(place) for finding in found for place in finding.places if finding.code == "DS501"
    }
    mismatches = [finding for finding in errors if finding.code.startswith("DS2")]
    effects: dict[_Position, str] = {}
    rest: list[Finding] = []
    for finding in found:
        places = {_position(place) for place in finding.places}
        is_on_slip = not slips.isdisjoint(places)
        if finding.code in _EXPLAINED_BY_SLIPS and is_on_slip:
            continue
        if _follows_from_invalid_call(finding, invalid):
            continue
        if _is_shifted_message(finding, lost):
            continue
        if finding.code == "DS608" and not failing.isdisjoint(finding.ranks):
            continue
        if finding.code in _RANK_END_CODES and awaited.issuperset(finding.ranks):
            continue
        if finding.code == "DS802" and _is_raised_after(finding, mismatches):
            continue
        if finding.code == "DS607" and not unwaited.isdisjoint(places):
            effects |= dict.fromkeys(places, finding.message.rpartition(": ")[2])
            continue
        rest.append(finding)
    return tuple(dict.fromkeys(_with_effect(finding, effects) for finding in rest))


def _is_invalid_call(finding: Finding) -> bool:
    """Whether a call has an invalid argument (DS101 to DS119); the others are start-up failures."""
    return finding.code in CODES and CODES[finding.code].verdict == "invalid"


def _follows_from_invalid_call(finding: Finding, invalid: set[int]) -> bool:
    """Whether calls mismatch or block because one of these ranks has made no valid call there."""
    is_failure = finding.code.startswith(("DS2", "DS3"))
    return is_failure and not invalid.isdisjoint(finding.core or finding.ranks)


def _is_raised_after(finding: Finding, mismatches: list[Finding]) -> bool:
    """Whether a strategy raises an error on ranks whose calls in the same step mismatch.

    A rank that raises an error makes no call afterwards, so it made the mismatched call before.
    """
    places = set(map(_position, finding.places))
    return bool(places) and any(
        places.issubset(map(_position, each.places)) and set(finding.ranks) <= set(each.ranks)
        for each in mismatches
    )


def _is_shifted_message(finding: Finding, lost: list[Finding]) -> bool:
    """Whether messages meet wrongly because an earlier one of their ranks was lost."""
    if finding.code in _SHIFTED_MESSAGES:
        return any(set(each.ranks) & set(finding.ranks) for each in lost)
    if finding.code not in ("DS208", "DS209"):
        return False
    places = {_position(place) for place in finding.places}
    return any(_position(slip) in places for each in lost for slip in each.slips)


#: File, line and column of a place.
_Position = tuple[str, int, int]


def _position(place: SourceLocation) -> _Position:
    return place.file, place.line, place.column


def _with_effect(finding: Finding, effects: Mapping[_Position, str]) -> Finding:
    """DS501 with what the backend does to a message whose request is dropped."""
    if finding.code != "DS501":
        return finding
    texts = [effects[_position(p)] for p in finding.places if _position(p) in effects]
    if not texts:
        return finding
    return replace(finding, message=f"{finding.message}\n  {texts[0]}")


def mismatch_findings(
    program: Program, call_index: CallIndex, mismatches: Iterable[CallMismatch]
) -> tuple[Finding, ...]:
    """DS201 to DS210. Messages of the same places that differ in the same way are one finding."""
    collectives: list[Finding] = []
    messages: dict[tuple[object, ...], list[CallMismatch]] = defaultdict(list)
    for mismatch in mismatches:
        if mismatch.is_collective:
            collectives.append(_collective_finding(program, call_index, mismatch))
            continue
        (sender, send, _), (receiver, receive, _) = mismatch.calls
        sites = (program.code_call(sender, send).site, program.code_call(receiver, receive).site)
        messages[(*sites, tuple(mismatch.aspects.items()))].append(mismatch)
    return (*collectives, *(_message_finding(program, group) for group in messages.values()))


# --- collectives ---
def _collective_finding(program: Program, call_index: CallIndex, mismatch: CallMismatch) -> Finding:
    aspect = next(aspect for aspect in _ASPECT_CODES if aspect in mismatch.aspects)
    code = _ASPECT_CODES[aspect]
    name = call_index.layout.sequence_names[mismatch.sequence]
    # The same calls in another order is the better explanation of most differences. A different
    # root is the exception: equal calls with different roots are no reordering.
    if mismatch.order and code != "DS205":
        code = "DS210" if name == "new_group" else "DS206"
    calls = _minority_first(mismatch)
    rows, omitted = _rows_of_equal_calls(program, mismatch, calls)
    lines = [_collective_head(name, mismatch)]
    divergence = _divergence_behind(program, call_index, mismatch)
    if models_differ(program, mismatch):
        lines = [f"DistributedDataParallel wraps different models on different ranks: {lines[0]}"]
    elif divergence is not None:
        # The calls that differ come later, shifted by the divergence: they are its evidence.
        evidence = (
            f"  therefore, call {mismatch.number + 1} on group {name} differs in the "
            f"{difference_words(mismatch.aspects)}"
        )
        lines = [divergence_head(program, divergence, len(mismatch.ranks)), evidence]
    notes = _collective_notes(mismatch, omitted, is_shifted=divergence is not None)
    message = "\n".join([*lines, *aligned_columns(rows), *notes])
    advice = collective_advice(program, mismatch, aspect, divergence)
    call_places = [program.place(rank, position) for rank, position, _ in calls]
    return Finding(
        code,
        "error",
        message,
        mismatch.ranks,
        mismatch.minority,
        advice.help_lines,
        tuple(dict.fromkeys([*advice.places, *call_places])),
        advice.places,
    )


def _divergence_behind(
    program: Program, call_index: CallIndex, mismatch: CallMismatch
) -> CallDivergence | None:
    """The extra, missing or swapped call by which the calls of a mismatch came to meet."""
    found = divergence_on(call_index, mismatch.sequence)
    if found is None or not found.is_shift or found.number > mismatch.number:
        return None
    if mismatch.order and found.kind != "swapped":
        return None
    return found


def _collective_head(name: str, mismatch: CallMismatch) -> str:
    call = f"{difference_words(mismatch.aspects)} of call {mismatch.number + 1} on group {name}"
    if name == "new_group":
        difference = difference_words(mismatch.aspects)
        call = f"{difference} passed to new_group (call {mismatch.number + 1})"
    order = "; they make the same calls in different orders" if mismatch.order else ""
    if "splits" in mismatch.aspects and "op" not in mismatch.aspects:
        return f"the {call} do not match{order}"
    who = rank_list(mismatch.minority or mismatch.ranks)
    if not mismatch.minority:
        return f"{who} differ in the {call}{order}"
    differ = "differs" if len(mismatch.minority) == 1 else "differ"
    return f"{who} {differ} from the other ranks in the {call}{order}"


def _collective_notes(mismatch: CallMismatch, omitted: int, *, is_shifted: bool) -> Iterator[str]:
    if omitted:
        yield f"  … and {omitted} more"
    if mismatch.note:
        yield f"  {mismatch.note}"
    if mismatch.later and not is_shifted:
        calls_differ = "calls differ" if mismatch.later > 1 else "call differs"
        yield f"  {mismatch.later} later {calls_differ} too"


def _rows_of_equal_calls(
    program: Program, mismatch: CallMismatch, calls: Sequence[tuple[int, int, int]]
) -> tuple[list[tuple[str, ...]], int]:
    """A row for each set of calls that read the same, and how many calls have no row.

    Rows are in the order of the first call of each.
    """
    ranks_by_text: dict[tuple[str, ...], list[int]] = defaultdict(list)
    index = {call: i for i, call in enumerate(mismatch.calls)}
    for rank, position, part in calls:
        text = (
            call_words(program.call(rank, position)),
            location_text(program.place(rank, position)),
            _aspect_values(mismatch, index[rank, position, part]),
        )
        ranks_by_text[text].append(rank)
    rows = [(rank_list(sorted(ranks)), *text) for text, ranks in ranks_by_text.items()]
    without_row = list(ranks_by_text.values())[MAX_SHOWN:]
    return rows[:MAX_SHOWN], sum(len(ranks) for ranks in without_row)


def difference_words(aspects: Iterable[str]) -> str:
    """What differs, for example `element count and dtype`.

    If the operation differs, the other aspects follow from it and are omitted.
    """
    names = list(aspects)
    if "op" in names:
        names = ["op"]
    return " and ".join(_ASPECT_WORDS.get(name, name) for name in names)


def _minority_first(mismatch: CallMismatch) -> list[tuple[int, int, int]]:
    """The calls: first those of the minority, then the rest; of each, one of every kind first.

    Only the first rows are shown, so they must contain each variant once. Otherwise 100 equal calls
    would hide the two that differ.
    """
    minority = set(mismatch.minority)
    values = list(zip(*mismatch.aspects.values(), strict=True))
    first_of_kind = {values.index(value) for value in dict.fromkeys(values)}

    def sort_key(i: int) -> tuple[bool, bool, int]:
        rank = mismatch.calls[i][0]
        return rank not in minority, i not in first_of_kind, i

    return [mismatch.calls[i] for i in sorted(range(len(mismatch.calls)), key=sort_key)]


def _aspect_values(mismatch: CallMismatch, i: int) -> str:
    """The i-th call's values of the aspects that the words of the call do not show."""
    if "op" in mismatch.aspects:
        return ""
    texts = []
    for name, values in mismatch.aspects.items():
        value = values[i]
        if name not in ("numel", "dtype") or value is None:
            continue
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
        if name == "numel":
            text += " element" if value == 1 else " elements"
        texts.append(text)
    return ", ".join(texts)


# --- messages ---
def _message_finding(program: Program, group: list[CallMismatch]) -> Finding:
    """One finding on messages of the same places that differ in the same way."""
    mismatch = group[0]
    sender, receiver = mismatch.calls
    send, receive = part_call(program, *sender), part_call(program, *receiver)
    sent = f"{send.inputs[0].numel} {send.inputs[0].dtype}"
    expected = f"{receive.inputs[0].numel} {receive.inputs[0].dtype}"
    head = (
        f"rank {sender[0]} sends {sent} elements, but rank {receiver[0]} receives into {expected} "
        "elements"
    )
    places = [program.place(rank, position) for rank, position, _ in mismatch.calls]
    number = f"message {mismatch.number + 1}"
    rows = [
        (f"rank {sender[0]}", call_words(send), location_text(places[0]), number),
        (f"rank {receiver[0]}", call_words(receive), location_text(places[1]), number),
    ]
    lines = [head, *aligned_columns(rows)]
    if len(group) > 1:
        plural = "s" if len(group) > 2 else ""
        lines.append(f"  … and {len(group) - 1} more pair{plural} like this")
    code, help_line = "DS209", "use the same dtype on both ends"
    if "numel" in mismatch.aspects:
        code = "DS208"
        help_line = (
            f"use the same shape on both ends; if two receives on rank {receiver[0]} are in the "
            "wrong order, swap them or use tags"
        )
    ranks = tuple(sorted({rank for each in group for rank in each.ranks}))
    unique_places = tuple(dict.fromkeys(places))
    return Finding(code, "error", "\n".join(lines), ranks, (), (help_line,), unique_places)
