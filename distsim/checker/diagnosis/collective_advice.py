"""What to change in the code if the members of a collective make calls that differ.

Key idea: the same mismatch may come from a wrong argument, from another order of calls, or from a
call that one rank skips or adds. The first divergence of the members distinguishes these cases.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from distsim.checker.diagnosis.first_divergence import (
    CallDivergence,
    divergence_places,
    is_in_backward,
)
from distsim.checker.diagnosis.hang_advice import SAME_MODEL_ADVICE
from distsim.checker.matching.call_mismatch import CallMismatch
from distsim.checker.wording import (
    call_words,
    location_text,
    parenthesised,
    rank_list,
)
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.operation_base import Operation
from distsim.operations.object_collectives import object_collective
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: What to do, by the aspect that differs.
_ASPECT_ADVICE = {
    "op": "make the same calls on all members: find the branch where the members diverge",
    "ranks": "create every group on all ranks, with the same members and in the same order",
    "backend": "use the same backend on all ranks",
    "root": "the root is a global rank; use the same one on all members",
    "numel": (
        "use tensors of the same shape on all members: pad them, or use all_to_all_single with "
        "splits"
    ),
    "splits": (
        "set output_splits[i] of rank j to input_splits[j] of rank i, or exchange the counts with "
        "all_to_all_single first"
    ),
    "dtype": "cast to the same dtype on all members before the call",
    "reduce_op": "use the same reduce operation (`op`) on all members",
}
_COALESCED_ADVICE = (
    "coalesce the same tensors in the same order on all members, including tensors that a member "
    "does not need"
)
_OBJECT_LIST_ADVICE = (
    "pass a list of the same length on all members: receivers pass [None] * n for n objects"
)
_EQUAL_SHAPES_ADVICE = (
    "use tensors of the same shape on all members: the same model, the same frozen layers, and "
    "batches of the same size"
)
#: Labels of the tensors with a model's parameter shapes, which DistributedDataParallel compares
#: when it is constructed (`ddp_calls`).
_DDP_SHAPES = re.compile(r"ddp\d*_shapes")


class CollectiveAdvice(NamedTuple):
    """Help lines, and the places of extra or missing calls that explain the mismatch."""

    help_lines: tuple[str, ...]
    places: tuple[SourceLocation, ...] = ()


def models_differ(program: Program, mismatch: CallMismatch) -> bool:
    """Whether the calls compare the parameter shapes of models, and the models differ."""
    for rank, position, _ in mismatch.calls:
        inputs = program.call(rank, position).inputs
        if not inputs or not _DDP_SHAPES.fullmatch(inputs[0].label):
            return False
    return True


def collective_advice(
    program: Program,
    mismatch: CallMismatch,
    aspect: str,
    divergence: CallDivergence | None,
) -> CollectiveAdvice:
    """What to do about a mismatch whose gravest aspect is ``aspect``.

    ``divergence``: the extra, missing or swapped calls that explain it.
    """
    minority = mismatch.minority
    operation = _operation_of(program, mismatch)
    if aspect == "numel" and operation.coalesces is not None and not mismatch.order:
        return CollectiveAdvice((_COALESCED_ADVICE,))
    if models_differ(program, mismatch):
        return CollectiveAdvice(SAME_MODEL_ADVICE)
    if divergence is not None:
        return divergence_advice(program, divergence)
    if mismatch.order:
        has = "has" if len(minority) == 1 else "have"
        other = f"; {rank_list(minority)} {has} a different order" if minority else ""
        return CollectiveAdvice((f"make the calls in the same order on all members{other}",))
    if aspect == "numel" and _is_object_call(program, mismatch):
        return CollectiveAdvice((_OBJECT_LIST_ADVICE,))
    # Padding helps only if the parts of several ranks are concatenated.
    reduces = operation.input_parts == "one" and operation.output_parts != "n"
    if aspect == "numel" and reduces:
        return CollectiveAdvice((_EQUAL_SHAPES_ADVICE,))
    differs = "differs" if len(minority) == 1 else "differ"
    outliers = f"; {rank_list(minority)} {differs} from the rest" if minority else ""
    return CollectiveAdvice((_ASPECT_ADVICE[aspect] + outliers,))


def _operation_of(program: Program, mismatch: CallMismatch) -> type[Operation]:
    rank, position, _ = mismatch.calls[0]
    return OPERATIONS[program.call(rank, position).op]


def _is_object_call(program: Program, mismatch: CallMismatch) -> bool:
    """Whether the calls are parts of an object collective."""
    rank, position, _ = mismatch.calls[0]
    return bool(object_collective(program.call(rank, position)))


# --- extra, missing and swapped calls ---
def divergence_advice(program: Program, divergence: CallDivergence) -> CollectiveAdvice:
    """What to do about calls that some members add, skip or swap."""
    if divergence.kind == "swapped":
        has = "has" if len(divergence.ranks) == 1 else "have"
        order = f"; {rank_list(divergence.ranks)} {has} a different order"
        words = f"make the calls in the same order on all members{order}"
        return CollectiveAdvice((words,), divergence_places(program, divergence))
    if is_in_backward(program, divergence.calls[0]):
        return _backward_advice(program, divergence)
    if divergence.kind == "extra":
        return _extra_calls_advice(program, divergence)
    return _missing_calls_advice(program, divergence)


def _backward_advice(program: Program, divergence: CallDivergence) -> CollectiveAdvice:
    """What to do if some members make more, or fewer, calls of backward passes."""
    place = program.place(*divergence.calls[0])
    who, is_single = rank_list(divergence.ranks), len(divergence.ranks) == 1
    amount = "fewer" if divergence.kind == "missing" else "more"
    makes = "makes" if is_single else "make"
    line = (
        f"run the backward pass{parenthesised(location_text(place))} equally often on all ranks: "
        f"{who} {makes} {amount} of its calls. Common causes: uneven batches, a step that only "
        "some ranks skip, unused parameters"
    )
    return CollectiveAdvice((line,), (place,))


def _missing_calls_advice(program: Program, divergence: CallDivergence) -> CollectiveAdvice:
    missing, who = divergence.calls, rank_list(divergence.ranks)
    is_single = len(divergence.ranks) == 1
    words = call_words(program.call(*missing[0]))
    place = program.place(*missing[0])
    at_line = parenthesised(location_text(place))
    skips, its = ("it skips", "its") if is_single else ("they skip", "their")
    if len(missing) == 1:
        line = (
            f"call {words}{at_line} on {who} too: {skips} the call, so {its} later calls "
            "are shifted by one"
        )
    elif len({program.code_call(*call).site for call in missing}) > 1:
        line = (
            f"make these {len(missing)} calls on {who} too (first: {words}{_with_comma(place)}), "
            "with empty input if there is no data. Common causes: a pass, an iteration or a branch "
            f"that only {who} {'skips' if is_single else 'skip'}"
        )
    else:
        line = f"call {words}{at_line} on {who} too: {skips} this call {len(missing)} times"
    return CollectiveAdvice((line,), (place,))


def _extra_calls_advice(program: Program, divergence: CallDivergence) -> CollectiveAdvice:
    extra, who = divergence.calls, rank_list(divergence.ranks)
    words = call_words(program.call(*extra[0]))
    place = program.place(*extra[0])
    call, it = f"the extra call {words}{parenthesised(location_text(place))}", "it"
    if len(extra) > 1:
        call, it = f"the {len(extra)} extra calls (first: {words}{_with_comma(place)})", "them"
    takes = "takes" if len(divergence.ranks) == 1 else "take"
    line = (
        f"move {call} out of the branch that only {who} {takes}, or remove {it}: all "
        "members of the group must make the same calls"
    )
    return CollectiveAdvice((line,), (place,))


def _with_comma(place: SourceLocation) -> str:
    location = location_text(place)
    return f", {location}" if location else ""
