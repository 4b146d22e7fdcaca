"""What to change in the code if the members of a collective make calls that differ.

Key idea: the same mismatch may come from a wrong argument, from another order of calls, or from a
call that one rank skips or adds. The whole programs of the minority and of another member are
compared to tell these cases apart.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from distsim.checker.diagnosis.hang_advice import SAME_MODEL_ADVICE
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import CallMismatch
from distsim.checker.wording import call_words, location_text, parenthesised, rank_list
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: What to do, by the aspect that differs.
_ASPECT_ADVICE = {
    "op": "make the same calls on all members: find the branch where the members diverge",
    "ranks": "create every group on all ranks, with the same members and in the same order",
    "backend": "use the same backend on all ranks",
    "root": "use the same root on all members: one global rank",
    "numel": (
        "use tensors of the same shape on all members: pad them, or use all_to_all_single with "
        "splits"
    ),
    "splits": (
        "make output_splits the transpose of input_splits (the default), "
        "or exchange the counts first"
    ),
    "dtype": "cast to the same dtype on all members before the call",
    "reduce_op": "use the same reduce operation (`op`) on all members",
}
_COALESCED_ADVICE = (
    "coalesce the same tensors in the same order on all members, including tensors that a member "
    "does not need"
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


class _SequenceCall(NamedTuple):
    """A call that a rank's program makes on a sequence."""

    site: int
    signature: int
    position: int


def models_differ(program: Program, mismatch: CallMismatch) -> bool:
    """Whether the calls compare the parameter shapes of models, and the models differ."""
    for rank, position, _ in mismatch.calls:
        inputs = program.call(rank, position).inputs
        if not inputs or not _DDP_SHAPES.fullmatch(inputs[0].label):
            return False
    return True


def collective_advice(
    program: Program, call_index: CallIndex, mismatch: CallMismatch, aspect: str
) -> CollectiveAdvice:
    """What to do about a mismatch whose gravest aspect is ``aspect``."""
    minority = mismatch.minority
    if mismatch.order:
        has = "has" if len(minority) == 1 else "have"
        other = f"; {rank_list(minority)} {has} a different order" if minority else ""
        return CollectiveAdvice((f"make the calls in the same order on all members{other}",))
    operation = _operation_of(program, mismatch)
    if aspect == "numel" and operation.coalesces is not None:
        return CollectiveAdvice((_COALESCED_ADVICE,))
    if models_differ(program, mismatch):
        return CollectiveAdvice(SAME_MODEL_ADVICE)
    shifted = _extra_or_missing_calls(call_index, mismatch)
    if shifted is not None:
        return shifted
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


def _extra_or_missing_calls(
    call_index: CallIndex, mismatch: CallMismatch
) -> CollectiveAdvice | None:
    """Calls that the minority skips or adds, if these alone explain the difference."""
    if not mismatch.minority:
        return None
    outlier = mismatch.minority[0]
    other = next(rank for rank in mismatch.ranks if rank not in mismatch.minority)
    outlier_calls = _calls_on_sequence(call_index, outlier, mismatch.sequence)
    other_calls = _calls_on_sequence(call_index, other, mismatch.sequence)
    program = call_index.layout.program
    missing = _surplus(other_calls, outlier_calls, mismatch.number)
    if missing:
        return _missing_calls_advice(program, outlier, other, missing)
    extra = _surplus(outlier_calls, other_calls, mismatch.number)
    if extra:
        return _extra_calls_advice(program, outlier, extra)
    return None


def _missing_calls_advice(
    program: Program, outlier: int, other: int, missing: list[_SequenceCall]
) -> CollectiveAdvice:
    words = call_words(program.call(other, missing[0].position))
    place = program.place(other, missing[0].position)
    at_line = parenthesised(location_text(place))
    if len(missing) == 1:
        line = (
            f"call {words}{at_line} on rank {outlier} too: it skips the call, so its later calls "
            "are shifted by one"
        )
    elif len({call.site for call in missing}) > 1:
        line = (
            f"rank {outlier} skips {len(missing)} calls that the other ranks make (first: "
            f"{words}{_with_comma(place)}), for example a pass, an iteration or a branch: call "
            f"them on rank {outlier} too, with empty input if it has no data"
        )
    else:
        line = f"call {words}{at_line} on rank {outlier} too: it skips it {len(missing)} times"
    return CollectiveAdvice((line,), (place,))


def _extra_calls_advice(
    program: Program, outlier: int, extra: list[_SequenceCall]
) -> CollectiveAdvice:
    words = call_words(program.call(outlier, extra[0].position))
    place = program.place(outlier, extra[0].position)
    call, it = f"the extra call {words}{parenthesised(location_text(place))}", "it"
    if len(extra) > 1:
        call, it = f"the {len(extra)} extra calls (first: {words}{_with_comma(place)})", "them"
    line = (
        f"move {call} out of the branch that only rank {outlier} takes, or remove {it}: all "
        "members of the group must make the same calls"
    )
    return CollectiveAdvice((line,), (place,))


def _with_comma(place: SourceLocation) -> str:
    location = location_text(place)
    return f", {location}" if location else ""


def _calls_on_sequence(call_index: CallIndex, rank: int, sequence: int) -> list[_SequenceCall]:
    program = call_index.layout.program
    positions = call_index.joins(rank, sequence)
    signatures = call_index.signatures(rank, sequence)
    return [
        _SequenceCall(program.code_call(rank, position).site, signature, position)
        for position, signature in zip(positions, signatures, strict=True)
    ]


def _surplus(
    longer: list[_SequenceCall], shorter: list[_SequenceCall], number: int
) -> list[_SequenceCall]:
    """The calls of one rank without which it would make the same calls as another rank.

    These are the calls at places where the other rank makes none or, failing that, the calls from
    the first difference (``number``) on. Empty if removing them does not make the rest equal.
    """
    if len(longer) <= len(shorter):
        return []
    wanted = [call.signature for call in shorter]
    shared_sites = {call.site for call in shorter}
    at_shared_sites = [call.signature for call in longer if call.site in shared_sites]
    if at_shared_sites == wanted:
        return [call for call in longer if call.site not in shared_sites]
    end = number + len(longer) - len(shorter)
    after_surplus = [call.signature for call in longer[end:]]
    return longer[number:end] if after_surplus == wanted[number:] else []
