"""Signs that the collectives of a program compute something else than its author meant.

Key ideas:

- Most ranks show the element type of a collective. A repair that changes it on them, instead of
  that of the odd rank, changes what the program computes.
- A tensor that holds a reduced value on most ranks should hold one on all ranks that write it.
- A reduction of a tensor that the same ranks have reduced already, without a new value in between,
  counts every rank's share several times.

Values are not computed here. `exchanged_data` covers which tensors travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.program.step_traits import expression_names
from distsim.repair.barrier_order import BarrierOrder

#: Reductions that give the same result again if all ranks hold the result already.
_IDEMPOTENT = ("max", "min", "avg", "band", "bor")


class ResultChange(NamedTuple):
    """How the results of a changed program may differ; less is better.

    ``repeated_reductions``: reductions of what the same ranks have reduced already, beyond those of
    most ranks before the change.
    ``changed_types``: collective shares and messages of correct ranks with another element type.
    ``unreduced``: tensors of single ranks whose last value is no longer reduced, but is on most.
    ``lost_order``: local work that no longer waits at a barrier for the work of other ranks.
    """

    repeated_reductions: int = 0
    changed_types: int = 0
    unreduced: int = 0
    lost_order: int = 0


class ProgramResults:
    """The element types and the repeated reductions of a program, in program order."""

    def __init__(self, program: Program) -> None:
        self._repeated: dict[int, int] = {}
        self._reduced = {rank: _reduced_tensors(program, rank) for rank in program.present}
        self._barrier_order = BarrierOrder(program)
        self._types: dict[int, Counter[tuple[object, ...]]] = {}
        for rank in program.present:
            self._types[rank] = Counter(_typed_calls(program, rank))
            self._repeated[rank] = _repeated_reductions(program, rank)

    def change_in(self, changed: ProgramResults, outliers: frozenset[int]) -> ResultChange:
        """How ``changed`` differs. ``outliers``: ranks that may have had a wrong type."""
        types = 0
        for rank, before in self._types.items():
            if rank not in outliers:
                types += _retyped(before, changed._types.get(rank, Counter()))
        lost_order = self._barrier_order.lost_in(changed._barrier_order)
        repeated = self._repeated_in(changed)
        return ResultChange(repeated, types, self._unreduced_in(changed), lost_order)

    def _repeated_in(self, changed: ProgramResults) -> int:
        """How many more repeated reductions the ranks make than most ranks made before."""
        counts = Counter(self._repeated.values())
        usual = max(counts, key=lambda count: (counts[count], count))
        return sum(max(0, count - usual) for count in changed._repeated.values())

    def _unreduced_in(self, changed: ProgramResults) -> int:
        """How many tensors of single ranks are no longer reduced at the end, but are on most."""
        on_most = Counter[str]()
        for reduced in changed._reduced.values():
            on_most.update({name: 1 if is_reduced else -1 for name, is_reduced in reduced.items()})
        return sum(
            was_reduced and on_most[name] > 0 and not changed._reduced.get(rank, {}).get(name)
            for rank, reduced in self._reduced.items()
            for name, was_reduced in reduced.items()
        )


def _calls(program: Program, rank: int) -> Iterator[ResolvedCall]:
    for _, call in program.calls_of(rank):
        yield from call.parts or (call,)


def _typed_calls(program: Program, rank: int) -> Iterator[tuple[object, ...]]:
    """Operation, partners, tensor and element type of what a rank exchanges."""
    for call in _calls(program, rank):
        if OPERATIONS[call.op].kind in ("collective", "p2p"):
            partner = call.group.ranks if call.peer is None else call.peer
            for buffer in call.inputs or call.outputs:
                yield call.op, partner, buffer.name, buffer.dtype


def _retyped(before: Counter[tuple[object, ...]], after: Counter[tuple[object, ...]]) -> int:
    """How many calls differ in the element type of the same tensor alone."""
    missing = Counter(key[:-1] for key in (before - after).elements())
    additional = Counter(key[:-1] for key in (after - before).elements())
    return (missing & additional).total()


def _repeated_reductions(program: Program, rank: int) -> int:
    repeated = 0
    reduced_by: dict[tuple[str, int], tuple[int, ...]] = {}
    for call in _calls(program, rank):
        is_sum = call.op == "all_reduce" and call.reduce_op not in _IDEMPOTENT
        for buffer in (*call.outputs, *call.writes, *call.adds):
            key = buffer.name, buffer.index
            repeated += is_sum and reduced_by.get(key) == call.group.ranks
            reduced_by.pop(key, None)
            if call.op == "all_reduce":
                reduced_by[key] = call.group.ranks
    return repeated


def _reduced_tensors(program: Program, rank: int) -> dict[str, bool]:
    """For each tensor that a rank writes, whether its last value comes from an all_reduce."""
    reduced: dict[str, bool] = {}
    for call in _calls(program, rank):
        if call.op == "all_reduce":
            reduced.update({buffer.name: True for buffer in call.outputs})
        elif call.op == "assign":
            read = expression_names(call.value)
            comes_from_reduction = any(reduced.get(name, False) for name in read)
            reduced.update({buffer.name: comes_from_reduction for buffer in call.writes})
    return reduced


__all__ = ["ProgramResults", "ResultChange"]
