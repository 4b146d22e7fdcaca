"""Each rank's calls as items: what must agree for two calls to be one step, and the numbers that
may differ.

A *form* is a nested tuple: an operation, its fields, and what kind of value stands in each. The
values themselves lie flat beside it, in the order in which a walk over the form meets their
places.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from distsim.operations.core.operation_base import Operation
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, SharedCode
from distsim.trace.model import Trace
from distsim.trace_replay.compact.group_names import GroupNames
from distsim.trace_replay.rebuild import RebuiltProgram

#: A duration of which nothing is known: the run ended before.
UNKNOWN_TIME: Final = -1
#: ("text", words) stands for itself; ("int",), ("time",), ("peer", side), ("ints", n) and ("shape",
#: dtype, n) take values.
FieldSpec = tuple[object, ...]


class CallForm(NamedTuple):
    """``fields``: names and specs, in the order in which they are written. ``source``: where the
    script has the call.
    """

    op: str
    fields: tuple[tuple[str, FieldSpec], ...]
    source: str = ""


class CallItem(NamedTuple):
    """``times``: nanoseconds of pause before the call, then of every duration in it; `UNKNOWN_TIME`
    where it never came to that.
    """

    form: CallForm
    ints: tuple[int, ...]
    times: tuple[int, ...]


@dataclass
class _FormValues:
    ints: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    done: bool = True


class _RequestNames:
    """Names of one rank's requests: the lowest number that no open request has."""

    def __init__(self) -> None:
        self.slot: dict[int, int] = {}  # position of an open request -> its number

    def take(self, position: int, call: CodeCall) -> str:
        taken = [
            self.slot.pop(position - back) for back in call.drops if position - back in self.slot
        ]
        used = set(self.slot.values())
        self.slot[position] = (
            taken[0] if taken else next(k for k in range(len(used) + 1) if k not in used)
        )
        return f"h{self.slot[position]}"

    def spend(self, position: int, call: CodeCall) -> list[str]:
        return [
            f"h{self.slot.pop(position - back)}"
            for back in call.waits
            if position - back in self.slot
        ]


class CallItemizer:
    """One rank's calls to items; pauses become part of the call that follows."""

    def __init__(self, rebuilt: RebuiltProgram, trace: Trace, families: GroupNames) -> None:
        self.program, self.families = rebuilt.program, families
        self.reached: list[list[tuple[bool, bool]]] = [[] for _ in range(self.program.world_size)]
        for row in range(len(trace)):
            if trace["part"][row] < 0:
                begun, done = (
                    bool(trace["posted_ns"][row] >= 0),
                    bool(trace["finished_ns"][row] >= 0),
                )
                self.reached[trace["rank"][row]].append((begun, done))

    def items(self, rank: int) -> list[CallItem]:
        code, handles = self.program.code(rank), _RequestNames()
        found: list[CallItem] = []
        pause = number = 0
        for position, call in enumerate(code.calls):
            if self._is_pause(call):
                pause += int(call.fields["time_ns"])
                continue
            (begun, done), number = self.reached[rank][number], number + 1
            values = _FormValues(times=[pause if begun else UNKNOWN_TIME], done=done)
            form = self._form(rank, code, position, call, handles, values)
            if form is not None:
                found.append(CallItem(form, tuple(values.ints), tuple(values.times)))
                pause = 0
        return found

    def _is_pause(self, call: CodeCall) -> bool:
        """What a replay put between two calls: a sleep that stands nowhere."""
        site = self.program.sites[call.site]
        return call.op == "sleep" and not site.file and not site.line

    def _form(
        self,
        rank: int,
        code: SharedCode,
        position: int,
        call: CodeCall,
        handles: _RequestNames,
        values: _FormValues,
    ) -> CallForm | None:
        row = OPERATIONS[call.op]
        fields: list[tuple[str, FieldSpec]] = []
        if row.kind == "wait":
            names = handles.spend(position, call)
            if not names:
                return None
            fields.append(("handles", ("text", names[0] if len(names) == 1 else tuple(names))))
        elif row.kind == "batch":
            parts = tuple(
                self._message(code, part, OPERATIONS[part.op], values) for part in call.parts
            )
            fields.append(("ops", ("parts", parts)))
        elif row.kind in ("p2p", "remote"):
            fields += self._message(code, call, row, values).fields
        elif row.kind == "collective":
            fields += self._collective(code, call, row, values)
        elif row.kind == "group":
            fields += self._group_step(rank, call, values)
        else:
            fields += _local_fields(call, values)
        if row.kind in ("collective", "batch", "p2p") and call.is_async:
            fields += [("async", ("text", True))] if row.kind == "collective" else []
            if call.handled:
                fields.append(("as", ("text", handles.take(position, call))))
        if (queue := str(call.fields.get("queue") or "")) and row.kind != "local":
            fields.append(("on", ("text", queue)))
        return CallForm(call.op, tuple(fields), self._source(call))

    def _source(self, call: CodeCall) -> str:
        site = self.program.sites[call.site]
        return f"{os.path.basename(site.file)}:{site.line}" if site.file and site.line else ""

    # --- kinds of calls ---
    def _message(
        self, code: SharedCode, call: CodeCall, row: type[Operation], values: _FormValues
    ) -> CallForm:
        port, group = code.ports[call.port], _single_value(code.groups[call.group])
        peer, side = (
            _single_value(port.peer),
            "dst"
            if row.direction == "send" or (row.kind, row.gives) == ("remote", "all")
            else "src",
        )
        fields: list[tuple[str, FieldSpec]] = (
            [] if row.signals else [("tensor", _tensor(call.fields["inputs"][0], values))]
        )
        if row.kind == "remote" and call.fields["outputs"] != call.fields["inputs"]:
            fields.append(("into", _tensor(call.fields["outputs"][0], values)))
        fields += self._group(group)
        if peer >= 0:
            inside = peer in self.program.groups[group].ranks
            values.ints.append(peer)
            fields.append((side, ("peer", side, self.families.family_of[group] if inside else -1)))
        if tag := _single_value(port.tag) - (FIRST_SIGNAL_TAG if row.signals else 0):
            values.ints.append(tag)
            fields.append(("channel" if row.signals else "tag", ("int",)))
        if (sender := call.fields.get("assume_src")) is not None:
            values.ints.append(int(sender))
            fields.append(("assume_src", ("int",)))
        return CallForm(call.op, tuple(fields))

    def _collective(
        self, code: SharedCode, call: CodeCall, row: type[Operation], values: _FormValues
    ) -> list[tuple[str, FieldSpec]]:
        found: list[tuple[str, FieldSpec]] = []
        group = _single_value(code.groups[call.group])
        if "tensor" in row.model_fields:
            found.append(("tensor", _tensors(call.fields["inputs"], values)))
        elif row.gives != "none":
            found += [
                (side, _tensors(call.fields[f"{side}s"], values)) for side in ("input", "output")
            ]
        found += self._group(group)
        if row.root_field is not None:
            values.ints.append(int(call.fields["root"]))
            inside = call.fields["root"] in self.program.groups[group].ranks
            found.append(
                (
                    row.root_field,
                    ("peer", row.root_field, self.families.family_of[group] if inside else -1),
                )
            )
        if row.reduces and call.fields.get("reduce_op", "sum") != "sum":
            found.append(("op", ("text", call.fields["reduce_op"])))
        for name in ("input_splits", "output_splits"):
            if (splits := call.fields.get(name)) is not None:
                values.ints += splits
                found.append((name, ("ints", len(splits))))
        return found + _torch_arguments(call)

    def _group(self, group: int) -> list[tuple[str, FieldSpec]]:
        name = self.families.name(group)
        return [] if name is None else [("group", ("text", name))]

    def _group_step(
        self, rank: int, call: CodeCall, values: _FormValues
    ) -> list[tuple[str, FieldSpec]]:
        if call.op != "new_group":
            return _torch_arguments(call)
        ranks = tuple(call.fields.get("ranks") or ())
        values.ints += ranks
        found: list[tuple[str, FieldSpec]] = [
            (
                "name",
                (
                    "text",
                    self.families.name_in_step(
                        rank, ranks, str(call.fields.get("name") or "group")
                    ),
                ),
            ),
            ("ranks", ("ints", len(ranks))),
        ]
        if call.fields.get("store"):
            found.append(("store", ("text", call.fields["store"])))
        elif call.fields.get("local_sync"):
            found.append(("use_local_synchronization", ("text", True)))
        return found + _torch_arguments(call)


def _torch_arguments(call: CodeCall) -> list[tuple[str, FieldSpec]]:
    found: list[tuple[str, FieldSpec]] = [
        (name, ("text", call.fields[name]))
        for name in ("backend", "init_method", "wait_all_ranks")
        if call.fields.get(name)
    ]
    if call.fields.get("timeout_ns") is not None:
        found.append(("timeout", ("text", int(call.fields["timeout_ns"]), "ns")))
    return found


def _local_fields(call: CodeCall, values: _FormValues) -> list[tuple[str, FieldSpec]]:
    given, found = call.fields, list[tuple[str, FieldSpec]]()
    if call.op == "assign":
        values.ints.append(1)
        return [("tensor", ("shape", "float32", 1)), ("value", ("text", 0))]
    if call.op in ("compute", "sleep"):
        values.times.append(int(given.get("time_ns") or 0) if values.done else UNKNOWN_TIME)
        found.append(("time", ("time",)))
    if call.op == "exit":
        found.append(("code", ("text", int(given.get("code") or 0))))
    if call.op == "fail":
        found.append(("message", ("text", str(given.get("message") or ""))))
    found += (
        [("name", ("text", given["name"]))] if call.op == "compute" and given.get("name") else []
    )
    found += [("stream", ("text", given["stream"]))] if given.get("stream") else []
    found += [("on", ("text", given["queue"]))] if given.get("queue") else []
    return found


def _tensors(buffers: tuple[BufferVector, ...], values: _FormValues) -> FieldSpec:
    if len(buffers) == 1:
        return _tensor(buffers[0], values)
    return ("list", tuple(_tensor(buffer, values) for buffer in buffers))


def _tensor(buffer: BufferVector, values: _FormValues) -> FieldSpec:
    values.ints += [_single_value(n) for n in buffer.shape]
    return ("shape", buffer.dtype, len(buffer.shape))


def _single_value(value: object) -> int:
    """A number of a code of one rank."""
    return int(value.flat[0]) if hasattr(value, "flat") else int(value)  # type: ignore[call-overload]
