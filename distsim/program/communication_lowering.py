"""Lowering of messages, one-sided accesses and collectives: peers, roots, splits and buffers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distsim.operations.core.field_types import (
    NameReference,
    PerRank,
    ScalarExpression,
    SplitExpressions,
)
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.program.call_builder import CallDraft, InvalidCall
from distsim.program.call_checks import peer_preposition
from distsim.program.code import ANY_SOURCE, FieldValue, RankValues, Vec, collapse_uniform
from distsim.program.inferred_arguments import auto_shape, transposed_splits
from distsim.program.resolver import NameResolver, ResolveContext
from distsim.program.step_traits import field_names_of

#: In place of a peer -1 that the file writes, because `ANY_SOURCE` is -1 too.
_INVALID_PEER = -2


class CommunicationLowering(NameResolver):
    """Fills drafts of calls that communicate."""

    # --- messages and one-sided accesses ---
    def _message(self, context: ResolveContext, draft: CallDraft) -> None:
        op = context.op
        if not self._reject_missing_group(context, draft):
            if draft.row.direction == "send":
                draft.peer = self._peer(context, draft, "dst")
            else:
                draft.peer = self._peer(context, draft, "src")
        if draft.row.signals:
            draft.tag = FIRST_SIGNAL_TAG + self._integer(context, op.channel, "channel")
            return
        draft.tag = self._integer(context, op.tag, "tag")
        buffer = self._buffer(context, op.tensor)
        draft.fields.update(inputs=(buffer,), outputs=(buffer,))
        if "assume_src" in field_names_of(draft.row) and op.assume_src is not None:
            draft.fields["assume_src"] = self._integer(context, op.assume_src, "assume_src")

    def _remote(self, context: ResolveContext, draft: CallDraft) -> None:
        """A put or a get: the names of both tensors mean this rank's declarations."""
        op = context.op
        if not self._reject_missing_group(context, draft):
            side = "dst" if draft.row.gives == "all" else "src"
            draft.peer = self._peer(context, draft, side)
        read = self._buffer(context, op.tensor)
        written = read if op.into is None else self._buffer(context, op.into)
        draft.fields.update(inputs=(read,), outputs=(written,))

    def _peer(self, context: ResolveContext, draft: CallDraft, side: str) -> Vec:
        """The global rank in ``dst`` or ``group_dst`` (``src`` or ``group_src``)."""
        peer: ScalarExpression = getattr(context.op, side)
        if peer is not None:
            return self._without_any_source(draft, self._integer(context, peer, side))
        group_peer: ScalarExpression = getattr(context.op, f"group_{side}")
        if group_peer is None:
            return ANY_SOURCE
        group_rank = self._integer(context, group_peer, f"group_{side}")
        return self._global(context, group_rank, draft, f"group_{side}")

    def _without_any_source(self, draft: CallDraft, peer: Vec) -> Vec:
        """-1 means any source only inside distsim; a file that computes it names no rank."""
        is_minus_one = np.equal(peer, ANY_SOURCE)
        if not np.any(is_minus_one):
            return peer
        last_rank = self.state.names.world_size - 1
        reason = (
            f"{draft.row.op} {peer_preposition(draft)} rank -1, "
            f"but the world has ranks 0 to {last_rank}"
        )
        rows = np.broadcast_to(is_minus_one, len(self.state.ranks))
        draft.invalid.append(InvalidCall(rows, "DS101", reason))
        if isinstance(peer, np.ndarray):
            return collapse_uniform(np.where(is_minus_one, _INVALID_PEER, peer))
        return _INVALID_PEER

    # --- collectives ---
    def _collective(self, context: ResolveContext, draft: CallDraft) -> None:
        op = context.op
        self._reject_missing_group(context, draft)
        if draft.row.root_field is not None:
            draft.fields["root"] = self._root(context, draft, draft.row.root_field)
        if draft.row.reduces:
            draft.fields["reduce_op"] = op.reduce_op
        for name in ("input_splits", "output_splits"):
            splits = getattr(op, name, None)
            if splits is not None:
                draft.fields[name] = self._splits(context, splits, name)
        if "input_splits" in draft.fields and op.output_splits is None:
            self._infer_output_splits(context, draft)
        self._torch_arguments(context, draft)
        if hasattr(op, "tensor"):
            draft.fields["inputs"] = self._buffers_of(context, op.tensor)
            draft.fields["outputs"] = draft.fields["inputs"]
        elif draft.row.gives != "none":
            draft.fields["inputs"] = self._buffers_of(context, op.input)
            self._infer_auto_shapes(draft, op.output)
            draft.fields["outputs"] = self._buffers_of(context, op.output)

    def _root(self, context: ResolveContext, draft: CallDraft, side: str) -> Vec:
        group_root = getattr(context.op, f"group_{side}")
        if group_root is not None:
            group_rank = self._integer(context, group_root, f"group_{side}")
            return self._global(context, group_rank, draft, f"group_{side}")
        root = getattr(context.op, side)
        return 0 if root is None else self._integer(context, root, side)

    def _torch_arguments(self, context: ResolveContext, draft: CallDraft) -> None:
        """Arguments that only a real run and the timeouts use."""
        op = context.op
        timeout = getattr(op, "timeout", None)
        if timeout is not None:
            draft.fields["timeout_ns"] = self._timeout_ns(context, timeout)
        for name in ("backend", "init_method", "wait_all_ranks"):
            value = getattr(op, name, None)
            if value is not None:
                draft.fields[name] = value

    def _timeout_ns(self, context: ResolveContext, value: FieldValue) -> int:
        """A timeout in ns; a class whose ranks have different timeouts is split."""
        found = self._value(context, value)
        if isinstance(found, np.ndarray):
            self._split(rounded_ns(found))
        timeout_ns = int(rounded_ns(found))
        if timeout_ns <= 0:
            self.state.names.problem(
                context.step,
                f"timeout: expected a timeout above zero, such as `10 s`, found {timeout_ns} ns",
            )
        return timeout_ns

    # --- splits ---
    def _splits(
        self, context: ResolveContext, value: SplitExpressions, field: str
    ) -> tuple[Vec, ...]:
        if not isinstance(value, PerRank):
            return tuple(self._integer(context, item, field) for item in value)
        lists = []
        for rank in self.state.builder.ranks:
            items = value.get(rank)
            if items is None:
                self.state.names.problem(
                    context.step, f"{field}: rank {rank} has no entry, and there is no `else`"
                )
            lists.append([self._integer(context, item, field) for item in items])
        self._split_by_length([len(items) for items in lists])
        columns = []
        for position in range(len(lists[0])):
            # Each rank's own list, evaluated over all ranks: take its own entry.
            column = [_value_at(items[position], row) for row, items in enumerate(lists)]
            columns.append(collapse_uniform(np.array(column, dtype=np.int64)))
        return tuple(columns)

    def _infer_output_splits(self, context: ResolveContext, draft: CallDraft) -> None:
        ranks = self.state.builder.ranks
        groups = np.broadcast_to(np.asarray(draft.group), len(ranks)).tolist()
        lists = transposed_splits(
            self.state.names,
            ranks,
            groups,
            context.op.input_splits,
            context.indices,
            context.step,
        )
        self._split_by_length([len(items or ()) for items in lists])
        complete = [items for items in lists if items is not None]
        if lists[0] is not None:
            draft.fields["output_splits"] = tuple(
                collapse_uniform(np.array(column, dtype=np.int64))
                for column in zip(*complete, strict=True)
            )

    def _split_by_length(self, lengths: list[int]) -> None:
        """All ranks of a class have the same number of splits."""
        if len(set(lengths)) > 1:
            self._split(lengths)

    # --- shape: auto ---
    def _infer_auto_shapes(self, draft: CallDraft, output: object) -> None:
        """A tensor with `shape: auto` takes the shape of the first call that writes it."""
        part_row = draft.row.coalesces
        if part_row is None:
            self._infer_auto_shape(draft, output)
            return
        outputs = output if isinstance(output, tuple) else (output,)
        for part_output, part_input in zip(outputs, draft.fields["inputs"], strict=True):
            part = replace(draft, row=part_row, fields={"inputs": (part_input,)})
            self._infer_auto_shapes(part, part_output)

    def _infer_auto_shape(self, draft: CallDraft, output: object) -> None:
        if not isinstance(output, NameReference) or output.name in self._auto_shapes:
            return
        if self.state.names.shapes.get(output.name, ()) is not None:
            return  # declared with its shape
        group_size = self._bindings_of_group(draft.group)["group_size"]
        shape = auto_shape(draft.row, draft.fields, group_size)
        if shape is not None:
            self._auto_shapes[output.name] = shape


def rounded_ns(ns: RankValues) -> Vec:
    """Nanoseconds, rounded to the nearest integer."""
    return np.rint(ns).astype(np.int64) if isinstance(ns, np.ndarray) else round(ns)


def _value_at(value: Vec, row: int) -> int:
    return int(value[row]) if isinstance(value, np.ndarray) else int(value)
