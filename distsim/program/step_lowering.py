"""Lowering of one step to one call, for one class of ranks.

Key idea: steps repeat (in loops, and where strategies write the same step again), so equal steps
give the same `CodeCall` object. Two caches answer most steps: `_calls_of_steps` by the step itself,
if nothing around it matters; `_made_calls` by everything that the call depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from distsim.operations.core.field_types import NameReference
from distsim.operations.core.kernel_work import KernelWorkEntry
from distsim.operations.core.operation_base import Operation
from distsim.program.call_builder import (
    NO_REQUESTS,
    CallDraft,
    CallRequests,
    Handle,
    InvalidCall,
)
from distsim.program.code import BoolVector, CallSite, CodeCall, RankValues
from distsim.program.communication_lowering import rounded_ns
from distsim.program.group_lowering import GroupLowering
from distsim.program.rank_class import LoopIndices, RankClassState
from distsim.program.resolver import ResolveContext, group_identity
from distsim.program.step_traits import StepTraits, field_names_of, local_fields
from distsim.program.symbol_table import contains_bool
from distsim.scenario.format.models.entries import ScenarioStep

_AMOUNT_TEXTS = {"time": "a duration (in ns)", "flops": "a count", "bytes": "a count"}
_EMPTY_BATCH = (
    "batch_isend_irecv has an empty list\n"
    "skip the call if there is no message: torch raises IndexError"
)
_ANY_SOURCE_BATCH = (
    "irecv from any source in a batch\ngive `src`, or receive outside the batch: P2POp needs a peer"
)
#: Kinds of calls that need the default process group.
_KINDS_ON_GROUPS = ("p2p", "collective", "remote", "batch")


class StepLowering(GroupLowering):
    """Lowers steps for one class of ranks."""

    def __init__(self, state: RankClassState) -> None:
        super().__init__(state)
        self._made_calls: dict[Hashable, CodeCall] = {}
        #: By id of a step that makes this call in every round. Valid until groups are made or end.
        self._calls_of_steps: dict[int, CodeCall] = {}

    def add(self, step: ScenarioStep, indices: LoopIndices, guard: BoolVector | None) -> None:
        """Append the call that a step makes in one round of its loops."""
        builder = self.state.builder
        if guard is None:
            known = self._calls_of_steps.get(id(step))
            if known is not None:
                builder.append(known, None)
                return
        traits = self.state.names.traits(step)
        is_group_step = traits.row.kind == "group"
        if guard is not None and not guard.all() and _changes_state(traits):
            # The state (open handles, groups) is one for the class, so all its ranks must agree.
            self._split(guard)
        group = self._group(traits.group)
        context = ResolveContext(step, indices, guard, group)
        requests, invalid = self._requests(context, traits, len(builder.calls))
        key = self._call_key(context, traits, requests)
        call = None
        if not invalid and not is_group_step:
            call = self._made_calls.get(key)
        if call is None:
            call = self._made_calls[key] = self._make(context, traits.row, invalid, requests)
        if is_group_step:
            self._calls_of_steps.clear()
        elif guard is None and _is_context_free(traits, indices):
            self._calls_of_steps[id(step)] = call
        builder.append(call, guard)

    def _call_key(
        self, context: ResolveContext, traits: StepTraits, requests: CallRequests
    ) -> Hashable:
        """Everything on which the call of a step depends.

        Lists inside ``tuple`` because they are faster than generators, and the empty tuples spare
        most steps both.
        """
        indices: Hashable = ()
        if context.indices and traits.names:
            indices = tuple([item for item in context.indices.items() if item[0] in traits.names])
        groups_of_parts: Hashable = ()
        if traits.others:
            groups_of_parts = tuple([group_identity(self._group(name)) for name in traits.others])
        return (
            traits.key,
            indices,
            None if context.guard is None else context.guard.tobytes(),
            group_identity(context.group),
            groups_of_parts,
            self._is_initialized,
            self._destroyed_at,
            requests,
        )

    def _make(
        self,
        context: ResolveContext,
        row: type[Operation],
        invalid: list[InvalidCall],
        requests: CallRequests,
    ) -> CodeCall:
        draft = self._draft(context, row, invalid)
        _LOWERING_BY_KIND[row.kind](self, context, draft)
        if row.kind != "local" and "on" in field_names_of(row) and context.op.on:
            draft.fields["queue"] = context.op.on
        return self.state.builder.make(draft, requests)

    def _draft(
        self, context: ResolveContext, row: type[Operation], invalid: list[InvalidCall]
    ) -> CallDraft:
        step, names = context.step, self.state.names
        site = names.tables.site(CallSite(names.file, step.line, step.column, row.op))
        asked_async = "is_async" in field_names_of(row) and context.op.is_async
        draft = CallDraft(
            row,
            site,
            context.group,
            is_async=bool(asked_async) or row.nonblocking,
            guard=context.guard,
            invalid=list(invalid),
        )
        needs_group = row.kind in _KINDS_ON_GROUPS or row.op == "new_group"
        if needs_group and not self._is_initialized:
            reason = (
                f"{row.op} is called without a process group\n"
                f"call {row.op} after init_process_group and before destroy_process_group"
            )
            if self._destroyed_at:
                reason = (
                    f"{row.op} is called after destroy_process_group{self._destroyed_at}\n"
                    f"move destroy_process_group{self._destroyed_at} after {row.op}"
                )
            draft.invalid.append(InvalidCall(True, "DS108", reason))
        return draft

    # --- requests ---
    def _requests(
        self, context: ResolveContext, traits: StepTraits, position: int
    ) -> tuple[CallRequests, list[InvalidCall]]:
        """What the call at ``position`` does with requests, and why it may be invalid."""
        invalid: list[InvalidCall] = []
        handles = self.state.handles
        if traits.waits is not None:
            awaited = None
            if not _is_wait_for_all(traits.waits):
                awaited = [self._handle(context, reference) for reference in traits.waits]
            return handles.wait(awaited, position, invalid), invalid
        if traits.handle is None:
            return NO_REQUESTS, invalid
        return handles.bind(self._handle(context, traits.handle), position), invalid

    def _handle(self, context: ResolveContext, reference: NameReference) -> Handle:
        if reference.index is None:
            return (reference.name, None)
        index = self._index_of(context, reference)
        if isinstance(index, np.ndarray):
            self._split(index)
        return (reference.name, int(index))

    # --- batches ---
    def _batch(self, context: ResolveContext, draft: CallDraft) -> None:
        op = context.op
        parts = [self._part(context, part) for part in op.ops if self._takes_part(context, part)]
        draft.parts = tuple(parts)
        draft.is_async = op.handle is not None
        for part in parts:
            if part.invalid is not None:
                draft.invalid.append(InvalidCall(*part.invalid))
        if not parts:
            draft.invalid.append(InvalidCall(True, "DS112", _EMPTY_BATCH))
        if any(_receives_from_any_source(part) for part in op.ops):
            draft.invalid.append(InvalidCall(True, "DS112", _ANY_SOURCE_BATCH))

    def _takes_part(self, context: ResolveContext, part: ScenarioStep) -> bool:
        """Whether the class makes a part of a batch; a class whose ranks differ in it is split."""
        if part.ranks is None:
            return True
        mask = self.state.selected_ranks(part, context.indices, context.guard)
        if not mask.any():
            return False
        is_guard = context.guard is not None and (mask == context.guard).all()
        if not mask.all() and not is_guard:
            self._split(mask)
        return True

    def _part(self, context: ResolveContext, part: ScenarioStep) -> CodeCall:
        group = self._group(getattr(part.op, "group", None))
        inner = ResolveContext(part, context.indices, context.guard, group)
        return self._make(inner, type(part.op), [], NO_REQUESTS)

    # --- local steps ---
    def _local(self, context: ResolveContext, draft: CallDraft) -> None:
        op, fields = context.op, draft.fields
        for name, source in local_fields(draft.row):
            value = getattr(op, source)
            if value is None or value == "":
                continue
            if source == "code":
                fields[name] = self._integer(context, value, source)
            else:
                fields[name] = self._value(context, value)
        for name, source in (("time_ns", "time"), ("flops", "flops"), ("mem_bytes", "bytes")):
            self._check_amount(context, fields.get(name, 0), source)
        if draft.row.op == "compute" and op.work:
            fields["work"] = tuple([self._kernel_work(context, entry) for entry in op.work])
        if "time_ns" in fields:
            fields["time_ns"] = rounded_ns(fields["time_ns"])
        if "reads" in field_names_of(draft.row):
            for name in ("reads", "writes", "adds"):
                if getattr(op, name):
                    fields[name] = self._buffers_of(context, getattr(op, name))
        if draft.row.op == "assign":
            self._assign(context, draft)

    def _kernel_work(
        self, context: ResolveContext, entry: KernelWorkEntry
    ) -> tuple[RankValues, RankValues, int, str]:
        """An entry as the fields of `KernelWork`, whose amounts may differ by rank."""
        flops = self._value(context, entry.flops)
        nbytes = self._value(context, entry.nbytes)
        self._check_amount(context, flops, "flops")
        self._check_amount(context, nbytes, "bytes")
        return flops, nbytes, entry.kernels, entry.dtype

    def _assign(self, context: ResolveContext, draft: CallDraft) -> None:
        op = context.op
        draft.fields.update(
            writes=self._buffers_of(context, op.tensor),
            value=op.value,
            indices=tuple(context.indices.items()),
        )
        if draft.fields["writes"][0].dtype != "bool" and contains_bool(op.value):
            self.state.names.problem(
                context.step,
                f"value: {op.tensor} contains numbers; expected numbers, found true or false",
            )

    def _check_amount(self, context: ResolveContext, amount: object, field: str) -> None:
        """The value of an expression may be no valid amount."""
        if type(amount) in (int, float) and amount >= 0:  # type: ignore[operator]
            return
        found = np.asarray(amount)
        if found.dtype == np.bool_ or not bool(np.all(found >= 0)):
            lowest = np.ravel(found)[np.argmin(found)]
            self.state.names.problem(
                context.step,
                f"{field}: expected {_AMOUNT_TEXTS[field]} of zero or more, found {lowest}",
            )


def _changes_state(traits: StepTraits) -> bool:
    """Whether a step binds or uses handles, or makes or ends groups."""
    return traits.handle is not None or traits.row.kind in ("wait", "group")


def _is_context_free(traits: StepTraits, indices: LoopIndices) -> bool:
    """Whether a step makes the same call in every round, as long as no group is made or ends."""
    if traits.handle is not None or traits.waits is not None:
        return False
    return traits.names.isdisjoint(indices)


def _is_wait_for_all(references: tuple[NameReference, ...]) -> bool:
    """``wait: all``."""
    return len(references) == 1 and references[0].name == "all" and references[0].index is None


def _receives_from_any_source(part: ScenarioStep) -> bool:
    op: Any = part.op
    return op.direction == "recv" and op.src is None and op.group_src is None


def _lower_wait(steps: StepLowering, context: ResolveContext, draft: CallDraft) -> None:
    """A wait has no arguments but its handles, which `StepLowering._requests` resolves."""


#: What lowers a step of each kind. A table of the module, not of the object, which would otherwise
#: refer to itself and stay in memory until the garbage collector runs.
_LOWERING_BY_KIND: dict[str, Callable[[StepLowering, ResolveContext, CallDraft], None]] = {
    "p2p": StepLowering._message,
    "collective": StepLowering._collective,
    "local": StepLowering._local,
    "batch": StepLowering._batch,
    "remote": StepLowering._remote,
    "wait": _lower_wait,
    "group": StepLowering._group_step,
}
