"""One step, for one class of ranks, to one call: buffers, peers, roots, groups and handles
resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distsim.operations.core.field_types import (
    NameReference,
    PerRank,
    ScalarExpression,
    SplitExpressions,
)
from distsim.operations.core.operation_base import Operation
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.program.call_builder import CallDraft, CallRequests, Handle, InvalidCall
from distsim.program.code import (
    BoolVector,
    CallSite,
    CodeCall,
    FieldValue,
    RankValues,
    Vec,
    collapse_uniform,
)
from distsim.program.memo_keys import StepTraits, field_names_of, local_fields
from distsim.program.resolver import (
    LoopIndices,
    NameResolver,
    ResolveContext,
    auto_shape,
    transposed_splits,
)
from distsim.program.symbol_table import contains_bool
from distsim.scenario.format.models.entries import ScenarioStep

if TYPE_CHECKING:
    from distsim.program.lower import RankClassWalker


_NO_REQUESTS = CallRequests()

_AMOUNT_TEXTS = {"time": "a duration (in ns)", "flops": "a count", "bytes": "a count"}
_EMPTY_BATCH = "batch_isend_irecv with an empty list\ntorch raises IndexError; leave the call out where there is nothing to do"
_ANY_SOURCE_BATCH = (
    "irecv from any source in a batch\nP2POp needs a peer: give `src`, or receive outside the batch"
)


class StepLowering(NameResolver):
    """Lowers steps for one walker; equal steps give the same call object."""

    def __init__(self, walker: RankClassWalker) -> None:
        super().__init__(walker)
        self._made: dict[Hashable, CodeCall] = {}
        self._plain: dict[
            int, CodeCall
        ] = {}  # by a step's id: it makes this call wherever it stands, until groups are made or end
        self._new_groups = 0
        self._ready = not walker.names.has_init

    def add(self, step: ScenarioStep, indices: LoopIndices, guard: BoolVector | None) -> None:
        builder = self.walker.builder
        if guard is None and (call := self._plain.get(id(step))) is not None:
            builder.append(call, None)
            return
        traits = self.walker.names.traits(step)
        row, handle = traits.row, traits.handle
        if (
            guard is not None
            and not guard.all()
            and (handle is not None or row.kind in ("wait", "group"))
        ):
            self._split(guard)
        group = self._group(traits.group)
        here = ResolveContext(step, indices, guard, group)
        requests, invalid = self._handles(here, traits, len(builder.calls))
        key = (
            traits.key,
            tuple([(name, value) for name, value in indices.items() if name in traits.names])
            if indices and traits.names
            else (),
            None if guard is None else guard.tobytes(),
            _group_key(group),
            tuple([_group_key(self._group(other)) for other in traits.others])
            if traits.others
            else (),
            self._ready,
            requests,
        )
        call = None if invalid or row.kind == "group" else self._made.get(key)
        if call is None:
            call = self._made[key] = self._make(here, row, invalid, requests)
        if row.kind == "group":
            self._plain.clear()
        elif (
            guard is None
            and handle is None
            and traits.waits is None
            and traits.names.isdisjoint(indices)
        ):
            self._plain[id(step)] = call
        builder.append(call, guard)

    def _make(
        self,
        here: ResolveContext,
        row: type[Operation],
        invalid: list[InvalidCall],
        requests: CallRequests,
    ) -> CodeCall:
        draft = self._draft(here, row, invalid)
        _LOWERING_BY_KIND[row.kind](self, here, draft)
        op: Any = here.step.op
        stream = op.on if row.kind != "local" and "on" in field_names_of(row) else None
        if stream:
            draft.fields["queue"] = stream
        return self.walker.builder.make(draft, requests)

    def _draft(
        self, here: ResolveContext, row: type[Operation], invalid: list[InvalidCall]
    ) -> CallDraft:
        step = here.step
        site = self.walker.names.shelf.site(
            CallSite(self.walker.names.file, step.line, step.column, row.op)
        )
        op: Any = step.op
        is_async = bool("is_async" in field_names_of(row) and op.is_async) or row.nonblocking
        draft = CallDraft(
            row, site, here.group, is_async=is_async, guard=here.guard, invalid=list(invalid)
        )
        if (not self._ready and row.kind in ("p2p", "collective", "remote", "batch")) or (
            not self._ready and row.op == "new_group"
        ):
            help_text = "call init_process_group before it, destroy_process_group after it"
            draft.invalid.append(
                InvalidCall(True, "DS108", f"{row.op} while there is no process group\n{help_text}")
            )
        return draft

    # --- handles ---
    def _handles(
        self, here: ResolveContext, traits: StepTraits, position: int
    ) -> tuple[CallRequests, list[InvalidCall]]:
        invalid: list[InvalidCall] = []
        if traits.waits is not None:
            refs = traits.waits
            everything = len(refs) == 1 and refs[0].name == "all" and refs[0].index is None
            names = None if everything else [self._handle(here, ref) for ref in refs]
            waits = self.walker.handles.wait(names, position, invalid)
            return CallRequests(waits=waits, again=self.walker.handles.again), invalid
        if traits.handle is None:
            return _NO_REQUESTS, invalid
        handled, drops = self.walker.handles.bind(self._handle(here, traits.handle), position)
        return CallRequests(handled=handled, drops=drops), invalid

    def _handle(self, here: ResolveContext, ref: NameReference) -> Handle:
        if ref.index is None:
            return (ref.name, None)
        index = self._number(here, ref)
        if isinstance(index, np.ndarray):
            self._split(index)
        return (ref.name, int(index))

    # --- kinds of steps ---
    def _message(self, here: ResolveContext, draft: CallDraft) -> None:
        op: Any = here.step.op
        if not self._reject_missing_group(here, draft):
            draft.peer = self._peer(
                here,
                draft,
                *(
                    (op.dst, op.group_dst)
                    if draft.row.direction == "send"
                    else (op.src, op.group_src)
                ),
            )
        if draft.row.signals:
            draft.tag = FIRST_SIGNAL_TAG + self._integer(here, op.channel, "channel")
            return
        draft.tag = self._integer(here, op.tag, "tag")
        buffer = self._buffer(here, op.tensor)
        draft.fields.update(inputs=(buffer,), outputs=(buffer,))
        if "assume_src" in field_names_of(draft.row) and op.assume_src is not None:
            draft.fields["assume_src"] = self._integer(here, op.assume_src, "assume_src")

    def _remote(self, here: ResolveContext, draft: CallDraft) -> None:
        """A put or a get: both tensors, named on this rank."""
        op: Any = here.step.op
        if not self._reject_missing_group(here, draft):
            draft.peer = self._peer(
                here,
                draft,
                *((op.dst, op.group_dst) if draft.row.gives == "all" else (op.src, op.group_src)),
            )
        read = self._buffer(here, op.tensor)
        draft.fields.update(
            inputs=(read,), outputs=(read if op.into is None else self._buffer(here, op.into),)
        )

    def _peer(
        self,
        here: ResolveContext,
        draft: CallDraft,
        peer: ScalarExpression,
        group_peer: ScalarExpression,
    ) -> Vec:
        side = "dst" if draft.row.direction == "send" or draft.row.gives == "all" else "src"
        if peer is not None:
            found = self._integer(here, peer, side)
            return self._none_is_any(draft, found)
        if group_peer is None:
            return -1
        return self._global(
            here, self._integer(here, group_peer, f"group_{side}"), draft, f"group_{side}"
        )

    def _none_is_any(self, draft: CallDraft, peer: Vec) -> Vec:
        """-1 stands for any source inside distsim; a file that writes it means a rank that is not
        there.
        """
        if not np.any(np.equal(peer, -1)):
            return peer
        side, world = (
            "to" if draft.row.direction == "send" or draft.row.gives == "all" else "from",
            self.walker.names.world_size,
        )
        reason = f"{draft.row.op} {side} rank -1, but the world has ranks 0 to {world - 1}"
        draft.invalid.append(
            InvalidCall(
                np.broadcast_to(np.equal(peer, -1), len(self.walker.ranks)), "DS101", reason
            )
        )
        return (
            collapse_uniform(np.where(np.equal(peer, -1), -2, peer))
            if isinstance(peer, np.ndarray)
            else -2
        )

    def _collective(self, here: ResolveContext, draft: CallDraft) -> None:
        op: Any = here.step.op
        self._reject_missing_group(here, draft)
        if draft.row.root_field is not None:
            draft.fields["root"] = self._root(here, draft, op)
        if draft.row.reduces:
            draft.fields["reduce_op"] = op.reduce_op
        for name in ("input_splits", "output_splits"):
            if getattr(op, name, None) is not None:
                draft.fields[name] = self._splits(here, getattr(op, name), name)
        if "input_splits" in draft.fields and op.output_splits is None:
            self._transpose(here, draft)
        self._torch_arguments(here, draft)
        if hasattr(op, "tensor"):
            draft.fields.update(inputs=self._buffers_of(here, op.tensor))
            draft.fields["outputs"] = draft.fields["inputs"]
        elif draft.row.gives != "none":
            draft.fields["inputs"] = self._buffers_of(here, op.input)
            self._write_auto(draft, op.output)
            draft.fields["outputs"] = self._buffers_of(here, op.output)

    def _transpose(self, here: ResolveContext, draft: CallDraft) -> None:
        ranks = self.walker.builder.ranks
        groups = np.broadcast_to(np.asarray(draft.group), len(ranks)).tolist()
        lists = transposed_splits(
            self.walker.names, ranks, groups, here.step.op.input_splits, here.indices, here.step
        )  # type: ignore[attr-defined]
        if len({len(items or ()) for items in lists}) > 1:
            self._split([len(items or ()) for items in lists])
        if lists[0] is not None:
            draft.fields["output_splits"] = tuple(
                collapse_uniform(np.array(column, dtype=np.int64))
                for column in zip(*lists, strict=True)
            )

    def _torch_arguments(self, here: ResolveContext, draft: CallDraft) -> None:
        """What only a real run uses."""
        op = here.step.op
        for name, source in (
            ("timeout_ns", "timeout"),
            ("backend", "backend"),
            ("init_method", "init_method"),
            ("wait_all_ranks", "wait_all_ranks"),
        ):
            if (value := getattr(op, source, None)) is not None:
                draft.fields[name] = self._timeout(here, value) if source == "timeout" else value

    def _timeout(self, here: ResolveContext, value: FieldValue) -> int:
        """In ns; ranks that wait for different times are laid out by themselves."""
        found = self._value(here, value)
        if isinstance(found, np.ndarray):
            self._split(_rounded_ns(found))
        whole = int(_rounded_ns(found))
        if whole <= 0:
            self.walker.names.problem(
                here.step, f"timeout: expected a timeout above zero, as `10 s`, found {whole} ns"
            )
        return whole

    def _root(self, here: ResolveContext, draft: CallDraft, op: Operation) -> Vec:
        side = draft.row.root_field
        if getattr(op, f"group_{side}") is not None:
            return self._global(
                here,
                self._integer(here, getattr(op, f"group_{side}"), f"group_{side}"),
                draft,
                f"group_{side}",
            )
        given = getattr(op, str(side))
        return 0 if given is None else self._integer(here, given, str(side))

    def _splits(self, here: ResolveContext, value: SplitExpressions, what: str) -> tuple[Vec, ...]:
        if not isinstance(value, PerRank):
            return tuple(self._integer(here, item, what) for item in value)
        lists = []
        for rank in self.walker.builder.ranks:
            items = value.get(rank)
            if items is None:
                self.walker.names.problem(
                    here.step, f"{what}: rank {rank} has no entry, and there is no `else`"
                )
            lists.append([self._integer(here, item, what) for item in items])
        if len({len(items) for items in lists}) > 1:
            self._split([len(items) for items in lists])
        return tuple(
            collapse_uniform(
                np.array([_value_at(items[k], i) for i, items in enumerate(lists)], dtype=np.int64)
            )
            for k in range(len(lists[0]))
        )

    def _write_auto(self, draft: CallDraft, output: object) -> None:
        """A tensor with `shape: auto` takes the shape of what first writes it."""
        if draft.row.coalesces is not None:
            for name, buffer in zip(
                output if isinstance(output, tuple) else (output,),
                draft.fields["inputs"],
                strict=True,
            ):
                self._write_auto(
                    replace(draft, row=draft.row.coalesces, fields={"inputs": (buffer,)}), name
                )
        elif (
            not isinstance(output, NameReference)
            or self.walker.names.shapes.get(output.name, ()) is not None
            or output.name in self._auto
        ):
            return
        elif (
            shape := auto_shape(
                draft.row, draft.fields, self._group_names(draft.group)["group_size"]
            )
        ) is not None:
            self._auto[output.name] = shape

    def _batch(self, here: ResolveContext, draft: CallDraft) -> None:
        op: Any = here.step.op
        parts = []
        for part in op.ops:
            if part.ranks is not None:
                mask = self.walker._mask(part, here.indices, here.guard)
                if not mask.any():
                    continue
                if not mask.all() and not (here.guard is not None and (mask == here.guard).all()):
                    self._split(mask)
            inner = ResolveContext(
                part, here.indices, here.guard, self._group(getattr(part.op, "group", None))
            )
            parts.append(self._make(inner, type(part.op), [], CallRequests()))
        draft.parts = tuple(parts)
        draft.is_async = op.handle is not None
        broken = [part.invalid for part in parts if part.invalid is not None]
        draft.invalid += [InvalidCall(mask, *_split_code(reason)) for mask, reason in broken]
        if not parts:
            draft.invalid.append(InvalidCall(True, "DS112", _EMPTY_BATCH))
        if any(
            part.op.direction == "recv" and part.op.src is None is part.op.group_src
            for part in op.ops
        ):
            draft.invalid.append(InvalidCall(True, "DS112", _ANY_SOURCE_BATCH))

    def _local(self, here: ResolveContext, draft: CallDraft) -> None:
        op: Any = here.step.op
        fields = draft.fields
        for name, source in local_fields(draft.row):
            value = getattr(op, source)
            if value is not None and value != "":
                fields[name] = (
                    self._integer(here, value, source)
                    if source == "code"
                    else self._value(here, value)
                )
        for name, source in (("time_ns", "time"), ("flops", "flops"), ("mem_bytes", "bytes")):
            self._check_amount(here, fields.get(name, 0), source)
        if "time_ns" in fields:
            fields["time_ns"] = _rounded_ns(fields["time_ns"])
        for name in ("reads", "writes", "adds") if "reads" in field_names_of(draft.row) else ():
            if getattr(op, name):
                fields[name] = self._buffers_of(here, getattr(op, name))
        if draft.row.op == "assign":
            fields.update(
                writes=self._buffers_of(here, op.tensor),
                value=op.value,
                indices=tuple(here.indices.items()),
            )
            if fields["writes"][0].dtype != "bool" and contains_bool(op.value):
                self.walker.names.problem(
                    here.step,
                    f"value: {op.tensor} holds numbers; expected numbers, found true or false",
                )

    def _check_amount(self, here: ResolveContext, amount: object, what: str) -> None:
        """An expression's count may come out as no count."""
        if type(amount) in (int, float) and amount >= 0:  # type: ignore[operator]
            return
        found = np.asarray(amount)
        if found.dtype == np.bool_ or not bool(np.all(found >= 0)):
            self.walker.names.problem(
                here.step,
                f"{what}: expected {_AMOUNT_TEXTS[what]} of zero or more, found {np.ravel(found)[np.argmin(found)]}",
            )

    def _init_arguments(self, here: ResolveContext, op: object, draft: CallDraft) -> None:
        """init_process_group's own: texts and time-outs per rank, numbers by expression."""
        for name in ("init_method", "store", "timeout_ns"):
            given = getattr(op, name.removesuffix("_ns"))
            if isinstance(given, PerRank):
                values = [given.get(rank) for rank in self.walker.builder.ranks]
                if len(set(values)) > 1:
                    self._split([values.index(value) for value in values])
                draft.fields[name] = values[0]
            elif name == "store" and given is not None:
                draft.fields[name] = given
        for name, source in (
            ("rank_argument", "rank"),
            ("world_size_argument", "world_size"),
            ("device_id", "device_id"),
        ):
            if getattr(op, source) is not None:
                draft.fields[name] = self._integer(here, getattr(op, source), source)

    def _group_step(self, here: ResolveContext, draft: CallDraft) -> None:
        draft.group = 0
        self._torch_arguments(here, draft)
        op = draft.row.op
        if op == "init_process_group":
            self._init_arguments(here, here.step.op, draft)
            if self._ready:
                twice = "init_process_group a second time\ntorch: trying to initialize the default process group twice"
                draft.invalid.append(InvalidCall(True, "DS109", twice))
            self._ready = True
            self._gone.clear()
        elif op == "destroy_process_group":
            if not self._ready:
                draft.invalid.append(
                    InvalidCall(
                        True, "DS108", "destroy_process_group while there is no process group"
                    )
                )
            group = here.step.op.group  # type: ignore[attr-defined]
            if group not in (None, "world"):  # of one group: the others stay
                draft.group = self._group(group)
                if not self._reject_missing_group(here, draft):
                    self._gone.add(group)
            else:
                self._ready = False
        elif self._ready:
            self._new_group(here, draft)

    def _new_group(self, here: ResolveContext, draft: CallDraft) -> None:
        op: Any = here.step.op
        members = (
            list(range(self.walker.names.world_size))
            if op.ranks is None
            else list(self._splits(here, op.ranks, "ranks"))
        )
        for member in members:
            if isinstance(member, np.ndarray):
                self._split(member)
        alone = bool(op.use_local_synchronization or op.store)
        draft.fields.update(name=op.name, ranks=tuple(members), local_sync=alone, store=op.store)
        world = self.walker.names.world_size
        if (
            len(set(members)) != len(members)
            or any(not 0 <= m < world for m in members)
            or not members
        ):
            draft.invalid.append(
                InvalidCall(
                    True,
                    "DS111",
                    f"new_group with ranks {members}; the world has ranks 0 to {world - 1}, each may stand once",
                )
            )
            return
        count = -1 if alone else self._new_groups
        self._new_groups += not alone
        self._bound[op.name] = gid = self.walker.names.made_group(
            count,
            op.name,
            tuple(sorted(int(m) for m in members)),
            op,
            draft.fields.get("timeout_ns"),
        )
        self._gone.discard(op.name)
        if alone:
            draft.group = gid


def _group_key(group: Vec) -> int:
    """Equal for equal groups: `_group` keeps its vectors."""
    return id(group) if isinstance(group, np.ndarray) else group


def _rounded_ns(ns: RankValues) -> Vec:
    """Nanoseconds, rounded to the nearest."""
    return np.rint(ns).astype(np.int64) if isinstance(ns, np.ndarray) else round(ns)


def _split_code(reason: str) -> tuple[str, str]:
    """(code, sentence) of a reason that begins with its code."""
    code, _, sentence = reason.partition(" ")
    return code, sentence


def _value_at(value: Vec, i: int) -> int:
    return int(value[i]) if isinstance(value, np.ndarray) else int(value)


def _lower_wait(steps: StepLowering, here: ResolveContext, draft: CallDraft) -> None:
    """A wait has its handles alone."""


#: What lowers a step of each kind. No part of the object, which would then lead to itself.
_LOWERING_BY_KIND: dict[str, Callable[[StepLowering, ResolveContext, CallDraft], None]] = {
    "p2p": StepLowering._message,
    "collective": StepLowering._collective,
    "local": StepLowering._local,
    "batch": StepLowering._batch,
    "remote": StepLowering._remote,
    "wait": _lower_wait,
    "group": StepLowering._group_step,
}
