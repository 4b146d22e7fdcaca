"""Turns the calls of each rank into items, which separate the form of a call from its numbers.

Two calls can be one step of a scenario if their forms are equal; the numbers may differ, by rank or
by repetition. A *form* is a nested tuple: an operation, its fields, and the kind of each value. The
values themselves are stored in flat lists, in the order in which a walk over the form visits them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from distsim.operations.core.operation_base import Operation
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, SharedCode
from distsim.simulation.trace_replay.compact.group_names import GroupNames
from distsim.simulation.trace_replay.rebuild import RebuiltProgram
from distsim.trace.model import Trace

#: In place of a duration that is unknown, because the run ended before.
UNKNOWN_TIME: Final = -1
#: The kind of a value. ("text", value) contains the value; ("int",), ("time",), ("peer", side,
#: family), ("ints", n), ("shape", dtype, n) and ("work", kernels, dtype) take values from the item.
FieldSpec = tuple[object, ...]


class CallForm(NamedTuple):
    """The form of a call.

    ``fields``: names and kinds, in the order in which they are written. ``source``: the line of the
    script.
    """

    op: str
    fields: tuple[tuple[str, FieldSpec], ...]
    source: str = ""


class CallItem(NamedTuple):
    """A call. ``times``: ns of the pause before it, then of every duration in it."""

    form: CallForm
    ints: tuple[int, ...]
    times: tuple[int, ...]


@dataclass
class _FormValues:
    ints: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    done: bool = True


class _RequestNames:
    """Names for the requests of one rank: each takes the lowest number that no open request has."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # by the position of an open request

    def open(self, position: int, call: CodeCall) -> str:
        """Name the request of a call; it takes over the name of a request that it replaces."""
        replaced = self._close(position, call.drops)
        used = set(self.numbers.values())
        if replaced:
            number = replaced[0]
        else:
            number = next(k for k in range(len(used) + 1) if k not in used)
        self.numbers[position] = number
        return f"h{number}"

    def wait(self, position: int, call: CodeCall) -> list[str]:
        """The names of the requests for which a call waits."""
        return [f"h{number}" for number in self._close(position, call.waits)]

    def _close(self, position: int, distances: Iterable[int]) -> list[int]:
        requests = [position - distance for distance in distances]
        return [self.numbers.pop(request) for request in requests if request in self.numbers]


class CallItemizer:
    """Turns calls into items; a pause becomes part of the call that follows."""

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
        """The calls of a rank, in order."""
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
        """A pause that the replay has inserted: a sleep without a place in a script."""
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
            names = handles.wait(position, call)
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
            if call.op == "new_group" and self.families.is_axis(call):
                return None
            fields += self._group_step(rank, call, values)
        else:
            fields += _local_fields(call, values)
        if row.kind in ("collective", "batch", "p2p") and call.is_async:
            fields += [("async", ("text", True))] if row.kind == "collective" else []
            if call.handled:
                fields.append(("as", ("text", handles.open(position, call))))
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
        endpoint, group = code.endpoints[call.endpoint], _single_value(code.groups[call.group])
        peer, side = (
            _single_value(endpoint.peer),
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
        if tag := _single_value(endpoint.tag) - (FIRST_SIGNAL_TAG if row.signals else 0):
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
    if given.get("work"):
        found.append(("work", _kernel_work(given["work"], values)))
    elif call.op in ("compute", "sleep"):
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


def _kernel_work(work: tuple[tuple[Any, ...], ...], values: _FormValues) -> FieldSpec:
    """The entries of a compute; FLOP and bytes, which may differ by rank, are values."""
    entries = []
    for flops, nbytes, kernels, dtype in work:
        values.ints += [int(flops), int(nbytes)]
        entries.append(("work", int(kernels), str(dtype)))
    return ("list", tuple(entries))


def _tensors(buffers: tuple[BufferVector, ...], values: _FormValues) -> FieldSpec:
    if len(buffers) == 1:
        return _tensor(buffers[0], values)
    return ("list", tuple(_tensor(buffer, values) for buffer in buffers))


def _tensor(buffer: BufferVector, values: _FormValues) -> FieldSpec:
    values.ints += [_single_value(n) for n in buffer.shape]
    return ("shape", buffer.dtype, len(buffer.shape))


def _single_value(value: object) -> int:
    """A number in the code of a single rank, where vectors have one element."""
    return int(value.flat[0]) if hasattr(value, "flat") else int(value)  # type: ignore[call-overload]
