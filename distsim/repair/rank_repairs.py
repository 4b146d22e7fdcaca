"""The order in which the repairs of a scenario are proposed.

Key idea: all repairs check ok, so what they keep decides: first the data that correct ranks
exchange, read and fill, then the author's words and names, then the calls of most ranks, and at
last the size of the change. Nothing is computed here; `search` collects the measures.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.repair.data_flow import FlowChange
from distsim.repair.exchanged_data import DataLoss
from distsim.repair.filled_tensors import TensorChange
from distsim.repair.proposals import REMOVES_CALLS
from distsim.repair.result_doubts import ResultChange


class RepairDoubts(NamedTuple):
    """Signs that another repair is meant; less is better.

    ``against_words``: changes that contradict names, comments and descriptions. ``conflicting``:
    calls in another order than on other ranks. ``unusual``: calls in another order than that of the
    declarations of their tensors. ``unused_names``: declared names that nothing uses.
    ``warnings``: warnings of `check`, such as a condition that no rank meets. ``unreached``: steps
    that no rank reaches. ``fixed_numbers``: expressions that become numbers.
    """

    against_words: int = 0
    conflicting: int = 0
    unusual: int = 0
    unused_names: int = 0
    warnings: int = 0
    unreached: int = 0
    fixed_numbers: int = 0


class ScenarioRepair(NamedTuple):
    """A repaired file.

    ``kind`` is that of the most intrusive of its steps (see `proposals`). ``words``: what is
    changed, one entry per step. ``completes``: backends on which it completes. ``makespan_ns``: the
    simulated makespan under its own backend. ``text``: the file; ``patch``: its unified diff.
    ``loss``: the data that no longer arrive, and the correct ranks whose calls differ. ``flow``:
    what local work and messages no longer see. ``tensors``: tensors that are no longer filled.
    ``results``: signs that collectives compute something else. ``doubts``: signs that another
    repair is meant.
    """

    kind: int
    words: tuple[str, ...]
    completes: tuple[str, ...]
    makespan_ns: int
    text: str
    patch: str
    loss: DataLoss
    flow: FlowChange
    tensors: TensorChange
    results: ResultChange
    doubts: RepairDoubts

    @property
    def ends_exchanges(self) -> bool:
        """Whether data that correct ranks exchanged no longer arrive.

        Only the author knows whether the program needs them, so `check --fix` writes no such
        repair. A removed call ends an exchange as well, unless it was a wait or local work.
        """
        is_removal = self.kind >= REMOVES_CALLS and self.loss.lost_by_outliers > 0
        return self.loss.ended > 0 or is_removal

    @property
    def changes_results(self) -> bool:
        """Whether the correct ranks may compute something else than before."""
        changed_data = (self.loss.lost, self.loss.changed_reductions, self.flow.lost_reads)
        return any((*changed_data, *self.tensors, *self.results))


def preference(fix: ScenarioRepair) -> tuple[int, ...]:
    """The sort key of a repair; the best one is the smallest."""
    # Local work (a compute, a sleep) is no contribution, so its removal loses none.
    loses_nothing = not fix.loss.lost and not fix.loss.lost_by_outliers
    removes_local_work = fix.kind >= REMOVES_CALLS and loses_nothing
    return (
        fix.flow.empty_sends,
        fix.flow.undefined_reads,
        fix.tensors.unfilled,
        fix.tensors.invented,
        fix.doubts.against_words,
        fix.results.lost_order,
        fix.loss.ended,
        fix.results.repeated_reductions,
        fix.results.unreduced,
        fix.results.changed_types,
        fix.loss.changed_reductions,
        fix.flow.overwritten,
        fix.flow.lost_reads,
        fix.flow.uneven_reads,
        fix.doubts.unreached,
        fix.doubts.unused_names,
        fix.doubts.fixed_numbers,
        fix.loss.lost,
        removes_local_work,
        -len(fix.completes),
        fix.doubts.warnings,
        fix.loss.changed_ranks,
        fix.loss.added,
        fix.flow.hasty_sends,
        fix.loss.fewer_calls,
        fix.loss.lost_by_outliers,
        fix.flow.repeated_sends,
        fix.flow.early_sends,
        fix.flow.unread,
        fix.flow.lost_deliveries,
        fix.flow.renamed,
        fix.loss.tensor_sets,
        fix.flow.duplicate_sends,
        fix.flow.message_arguments,
        fix.flow.edited_ranks,
        fix.flow.edited_before_exit,
        fix.doubts.conflicting,
        fix.doubts.unusual,
        *_patch_size(fix.patch),
        fix.kind,
        fix.makespan_ns,
    )


def _patch_size(patch: str) -> tuple[int, int]:
    """How many more calls the text has, and the lines added, removed, changed or moved."""
    lines = patch.splitlines()
    added = [line for line in lines if line.startswith("+")]
    removed = [line for line in lines if line.startswith("-")]
    more_calls = sum(map(_is_call_line, added)) - sum(map(_is_call_line, removed))
    return max(0, more_calls), max(len(added), len(removed))


def _is_call_line(line: str) -> bool:
    """Whether a line of a patch begins a step, such as `+  - barrier`."""
    return line[1:].lstrip().startswith("- ") and line.lstrip("+- ")[:1].isalpha()


__all__ = ["RepairDoubts", "ScenarioRepair", "preference"]
