"""Find the function in which two ranks diverge, from the stacks of the calls that do not match.

The lines of the script may show nothing: both ranks are in one line, such as `trainer.train()`, and
a library takes another way on one rank. The stacks of both calls then begin with the same
functions. The last common function shows the divergence: either the ranks are at different lines of
it, or one line calls different functions. torch's own frames are not compared.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final

from distsim.findings.finding_types import Finding
from distsim.script_capture.rank.call_sites import package_path, source_text
from distsim.script_capture.rank.line_trace import StackFrame
from distsim.script_capture.result.divergence_point import compared_ranks, divergent_finding
from distsim.script_capture.result.trace_difference import statements_of_kinds

#: Findings on calls of two ranks that do not match. Elsewhere, a rank may have made its last call
#: long before.
_MISMATCH_PREFIX: Final = "DS2"


def with_stack_divergence(
    findings: Sequence[Finding], stacks: Mapping[int, Sequence[StackFrame]]
) -> tuple[Finding, ...]:
    """Findings whose first one names the function in which the ranks diverge, if there is one.

    ``stacks``: by rank, the stack of its last call, the outermost frame first.
    """
    finding = divergent_finding(findings)
    if finding is None or not finding.code.startswith(_MISMATCH_PREFIX) or finding.slips:
        return tuple(findings)
    ranks = sorted(compared_ranks(finding))
    own, other = (stacks.get(rank, ()) for rank in ranks)
    pairs = list(zip(own, other, strict=False))
    common = list(takewhile(lambda pair: _are_in_one_function(*pair), pairs))
    for frames in common:
        if frames[0].line != frames[1].line:
            explained = _with_different_lines(finding, dict(zip(ranks, frames, strict=True)))
            return (explained, *findings[1:])
    if not common or len(common) == len(pairs):
        return tuple(findings)
    called = dict(zip(ranks, pairs[len(common)], strict=True))
    return (_with_different_callees(finding, common[-1][0], called), *findings[1:])


def _are_in_one_function(own: StackFrame, other: StackFrame) -> bool:
    return (own.file, own.function) == (other.file, other.function)


# --- one function, different lines ---
def _with_different_lines(finding: Finding, frames: Mapping[int, StackFrame]) -> Finding:
    function = next(iter(frames.values()))
    lines = [
        f"    rank {rank} is at line {frame.line}: {source_text(frame.file, frame.line)}"
        for rank, frame in frames.items()
    ]
    where = f"  the ranks diverge in {function.function}() of {package_path(function.file)}:"
    message = "\n".join([finding.message, where, *lines])
    return replace(finding, message=message, help=(_remedy_for_lines(frames),))


def _remedy_for_lines(frames: Mapping[int, StackFrame]) -> str:
    """What to do if the ranks are at different lines of a function."""
    (behind, first), (ahead, second) = sorted(frames.items(), key=lambda item: item[1].line)
    file = package_path(first.file)
    loops = statements_of_kinds(first.file, (ast.For, ast.While))
    loops_of_first = [loop for loop in loops if loop.first <= first.line <= loop.last]
    left = [loop for loop in loops_of_first if loop.last < second.line]
    causes = (
        "Common causes: data loaders of unequal length, or a condition that ends the loop early on "
        "one rank"
    )
    if left:
        return (
            f"run the loop at {file}:{left[-1].first} the same number of times on all ranks: rank "
            f"{ahead} has left it, and rank {behind} has not. {causes}"
        )
    text = source_text(first.file, first.line)
    return (
        f"make the same calls on all ranks in `{text}` ({file}:{first.line}): rank {ahead} has "
        f"left it, and rank {behind} has not. {causes}"
    )


# --- one line, different functions ---
def _with_different_callees(
    finding: Finding, caller: StackFrame, called: Mapping[int, StackFrame]
) -> Finding:
    where = f"{package_path(caller.file)}:{caller.line}"
    calls = [
        f"    rank {rank} calls {frame.function}() of {package_path(frame.file)}"
        for rank, frame in called.items()
    ]
    head = f"  the ranks diverge at {where}: {source_text(caller.file, caller.line)}"
    message = "\n".join([finding.message, head, *calls])
    names = " or ".join(f"{frame.function}()" for frame in called.values())
    remedy = (
        f"call the same functions in the same order at {where} on all ranks, for example handlers, "
        f"hooks or layers: check where the script adds {names} on some ranks only"
    )
    return replace(finding, message=message, help=(remedy,))


__all__ = ["with_stack_divergence"]
