"""Convert a captured run into a `Program`, which all of distsim works on.

Equal calls of a rank share one object of the program, so that a training loop stays small.
"""

from __future__ import annotations

import linecache
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final

from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.program.assemble import CodeBuilder
from distsim.program.call_builder import CallDraft, CallRequests
from distsim.program.code import BufferVector, CallSite, CodeCall, SharedCode
from distsim.program.from_calls import program_of_ranks
from distsim.program.model import Program, RankFault
from distsim.program.program_tables import ProgramTables
from distsim.script_capture.compute.kernel_counter import (
    SUBSTITUTE_DTYPES,
    ComputeInterval,
    ComputeKernel,
)
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import GroupInstance, RankCall
from distsim.script_capture.hub.state import HubEvent, RankProcess
from distsim.script_capture.launch.parent_process import CapturedRun, known_backend
from distsim.script_capture.protocol.message_types import CallOrigin
from distsim.script_capture.result.future_calls import assumed_future_calls
from distsim.script_capture.result.recorded_calls import (
    CapturedCall,
    groups_in_order,
    missing_startup_calls,
    recorded_calls_of,
)
from distsim.script_capture.result.thread_order import ThreadOrder, events_in_order

#: Events that a training loop repeats, and that their facts describe completely.
_DEVICE_WORK_OPS: Final = ("compute", "wait_stream", "synchronize")
#: Operations that run on the CUDA stream that is current, or make it wait.
_OPS_ON_STREAMS: Final = frozenset(
    name for name, op in OPERATIONS.items() if "on" in op.model_fields
)
#: Number of the world's group in a program.
_WORLD_GROUP: Final = 0
_MAX_ERROR_TEXT: Final = 200


def build_program(
    captured: CapturedRun,
    backend: str,
    name: str,
    file: str,
    order: ThreadOrder = "met",
) -> Program:
    """The program that the ranks ran, under the rules of ``backend``.

    ``order`` is that of the calls of a rank's threads
    (`distsim.script_capture.result.thread_order`).
    """
    return _CapturedProgramBuilder(captured, backend, order).build(name, file)


def world_backend(processes: Iterable[RankProcess]) -> str:
    """The backend of the world's group, as the lowest rank asked for it.

    With a backend for each device, that of the GPUs if a call used them.
    """
    processes = list(processes)
    requested = "gloo"
    for process in processes:
        world = next((group for group in process.groups.values() if group.is_world), None)
        if world is not None:
            requested = world.backend
            break
    has_backend_per_device = ":" in requested
    if has_backend_per_device and any(_uses_cuda(process) for process in processes):
        return known_backend(requested, "cuda")
    return known_backend(requested, "cpu")


def _uses_cuda(process: RankProcess) -> bool:
    return any(call.device == "cuda" for call in process.calls.values())


class _CapturedProgramBuilder:
    """Builds the program; what ranks share (sites, groups, findings) is in ``tables``.

    ``group_numbers`` has the numbers of groups by instance (its id) and backend.
    """

    def __init__(self, captured: CapturedRun, backend: str, order: ThreadOrder) -> None:
        self.captured = captured
        self.backend = backend
        self.order: ThreadOrder = order
        self.size = captured.world
        self.tables = ProgramTables(self.size, backend)
        self.processes = self._processes()
        self.group_numbers = self._number_groups()

    def _processes(self) -> list[RankProcess]:
        """For each rank its process; one that was started as it; or one that did nothing."""
        started = {p.planned: p for p in self.captured.others if p.planned >= 0}
        joined = self.captured.evaluated_ranks
        return [
            joined.get(rank) or started.get(rank) or RankProcess(0, rank)
            for rank in range(self.size)
        ]

    def _number_groups(self) -> dict[tuple[int, str], int]:
        """Add the groups to the tables.

        A group with a backend for each device becomes one group for each backend that is used.
        """
        world_ranks = tuple(range(self.size))
        main_backend = world_backend(self.processes)
        used = self._used_backends()
        numbers: dict[tuple[int, str], int] = {}
        for group in groups_in_order(self.processes):
            backends = used.get(id(group))
            if not backends:
                backends = {main_backend if group.is_world else known_backend(group.backend)}
            for backend in sorted(backends):
                is_world = group.is_world and group.ranks == world_ranks
                if is_world and backend == main_backend:
                    numbers[id(group), backend] = _WORLD_GROUP
                    continue
                number = numbers[id(group), backend] = len(self.tables.groups)
                own_backend = backend if backend != main_backend else None
                self.tables.groups.append(
                    RankGroup(number, group.title, group.ranks, own_backend, group.timeout_ns)
                )
        return numbers

    def _used_backends(self) -> dict[int, set[str]]:
        """The backends that calls of each group use, by the group's id."""
        used: dict[int, set[str]] = {}
        for process in self.processes:
            for call in process.calls.values():
                backend = known_backend(call.group.backend, call.device)
                used.setdefault(id(call.group), set()).add(backend)
        return used

    def group_number(self, group: GroupInstance | None, device: str = "") -> int:
        """The number of a group; that of the world for None."""
        if group is None:
            return _WORLD_GROUP
        key = (id(group), known_backend(group.backend, device))
        return self.group_numbers.get(key, _WORLD_GROUP)

    def build(self, name: str, file: str) -> Program:
        """The program, with a code of its own for each rank."""
        codes = []
        faults = []
        future = assumed_future_calls(self.processes)
        events = events_in_order(self.processes, self.order)
        for rank, process in enumerate(self.processes):
            recorded = recorded_calls_of(process, events[rank])
            missing = missing_startup_calls(process, self.processes)
            calls = [*recorded, *missing, *future.get(rank, ())]
            code = _CapturedRankBuilder(self, rank).build(calls)
            codes.append(code)
            if process.ended is not None and process.ended.how == "killed":
                position = len(code.calls) - len(missing)
                faults.append(RankFault(rank, "kill", position=position))
        return program_of_ranks(
            self.tables,
            codes,
            name=name,
            file=file,
            nodes=self.captured.capture_options.nodes,
            backend=self.backend,
            options=self._options(),
            faults=tuple(faults),
            is_partial=self.captured.ended != "ended",
        )

    def _options(self) -> dict[str, object]:
        """``init: eager`` if every rank passed ``device_id`` to init_process_group."""
        startups = []
        for process in self.processes:
            startups += [e.facts for e in process.events if e.kind == "init_process_group"]
        is_eager = bool(startups) and all(facts["eager"] for facts in startups)
        return {"init": "eager"} if is_eager and self.backend == "nccl" else {}


class _CapturedRankBuilder:
    """Builds the code of one rank.

    ``positions`` has for each posted call its position in the code. ``changed_buffers`` has names
    of buffers that the script changes while a request uses them; all other buffers have no name.
    """

    def __init__(self, owner: _CapturedProgramBuilder, rank: int) -> None:
        self.owner = owner
        self.rank = rank
        self.builder = CodeBuilder(owner.tables, [rank])
        self.positions: dict[int, int] = {}
        self.changed_buffers: dict[int, str] = {}
        self._known: dict[Hashable, CodeCall] = {}

    def build(self, calls: Sequence[CapturedCall]) -> SharedCode:
        """The code of all calls of the rank, in order."""
        self.changed_buffers = _changed_buffer_names(calls)
        for call in calls:
            if call.op == "non_member" and call.event is not None:
                # A library that calls on all ranks knows that the call does nothing on some.
                if not call.place.via:
                    self._report_non_member(call, str(call.event.facts["op"]))
                continue
            self._append(call)
        return self.builder.finish()

    def _append(self, call: CapturedCall) -> None:
        """Append a call. Waits and drops refer to earlier calls by the distance to them.

        A wait for calls that are not part of the program is omitted.
        """
        position = len(self.builder.calls)
        waits = [position - self.positions[n] for n in call.waits if n in self.positions]
        if call.op == "wait" and not waits:
            return
        drops = [position - self.positions[n] for n in call.drops if n in self.positions]
        for posted in call.calls:
            self.positions[posted.number] = position
        requests = CallRequests(
            waits=tuple(dict.fromkeys(waits)),
            drops=tuple(drops),
            handled=call.is_async and call.handled,
        )
        self.builder.append(self._code_call(call, requests))

    def _report_non_member(self, call: CapturedCall, op: str) -> None:
        site_op = op if op in OPERATIONS else "barrier"
        text = f"{op} on a group that the caller is not in: torch warns and does nothing"
        self.owner.tables.report("DS104", self._site(call.place, site_op), text, [self.rank])

    def _code_call(self, call: CapturedCall, requests: CallRequests) -> CodeCall:
        """The call of the program; equal calls are one object."""
        failure = call.failure
        if failure is not None and failure.refused:
            site = self._site(call.place, call.op)
            self.owner.tables.report(failure.refused, site, failure.text, [self.rank])
        key: Hashable = id(call)
        if call.event is None:
            posted = tuple(
                (_call_key(posted), self.changed_buffers.get(posted.number))
                for posted in call.calls
            )
            key = (call.op, call.place, call.is_async, requests, posted, call.stream)
        elif call.op in _DEVICE_WORK_OPS:
            key = (call.op, call.place, requests, call.stream, _facts_key(call.event.facts))
        if key not in self._known or failure is not None:
            self._known[key] = self.builder.make(self._draft(call), requests)
        return self._known[key]

    def _site(self, place: CallOrigin, op: str) -> int:
        """The number of a call site. Its column is that of the first character of the line."""
        column = 0
        if place.line:
            text = linecache.getline(place.file, place.line)
            column = len(text) - len(text.lstrip()) + 1
        return self.owner.tables.site(CallSite(place.file, place.line, column, op, place.via))

    # --- drafts ---
    def _draft(self, call: CapturedCall) -> CallDraft:
        """The call with the fields of its operation, and the stream that was current."""
        draft = self._draft_without_stream(call)
        if call.stream and call.op in _OPS_ON_STREAMS:
            draft.fields = {**draft.fields, "queue": call.stream}
        return draft

    def _draft_without_stream(self, call: CapturedCall) -> CallDraft:
        if call.op == "changed" and call.event is not None:
            return self._change_draft(call, call.event)
        operation = OPERATIONS[call.op]
        if operation.kind == "p2p":
            return self._message_draft(call.calls[0], call.op, call)
        site = self._site(call.place, call.op)
        draft = CallDraft(operation, site, self._group_of(call), is_async=call.is_async)
        if operation.kind == "batch":
            messages = [self._message_draft(posted, posted.op, call) for posted in call.calls]
            draft.parts = tuple(self.builder.make(message) for message in messages)
        elif operation.kind == "collective":
            posted = call.calls[0]
            buffer_name = self.changed_buffers.get(posted.number, "")
            draft.fields = _collective_fields(posted, buffer_name)
        elif call.event is not None:
            draft.fields = self._event_fields(call.op, call.event)
        elif call.failure is not None:
            if call.op == "exit":
                draft.fields = {"code": call.failure.code}
            else:
                draft.fields = {"message": call.failure.text[:_MAX_ERROR_TEXT]}
        return draft

    def _event_fields(self, op: str, event: HubEvent) -> dict[str, object]:
        """The fields of a call that is an event of its own; none for destroy_process_group."""
        facts = event.facts
        if op == "new_group":
            title = _group_name(self.owner, facts) if event.group is None else event.group.title
            return {
                "name": title,
                "ranks": tuple(facts["ranks"]),
                "timeout_ns": facts["timeout_ns"],
                "local_sync": facts["local_sync"],
            }
        if op == "init_process_group":
            return {"timeout_ns": facts["timeout_ns"], "backend": self.owner.backend}
        if op == "compute":
            counted = tuple((ComputeKernel(*row), count) for *row, count in facts["kernels"])
            return {"work": ComputeInterval(counted).work(), "name": "compute"}
        if op in ("wait_stream", "synchronize"):
            return dict(facts)
        return {}

    def _change_draft(self, call: CapturedCall, event: HubEvent) -> CallDraft:
        """What the script wrote, as a computation that takes no time."""
        name = self.changed_buffers[event.facts["call"]]
        buffer = BufferVector(name, 0, (), "uint8")
        fields = {"time_ns": 0, "name": "compute", "writes": (buffer,)}
        site = self._site(call.place, "compute")
        return CallDraft(OPERATIONS["compute"], site, 0, fields=fields)

    def _group_of(self, call: CapturedCall) -> int:
        """The number of a call's group; creating a group is a call on the world."""
        if call.op == "new_group":
            return _WORLD_GROUP
        if call.calls:
            posted = call.calls[0]
            return self.owner.group_number(posted.group, posted.device)
        return self.owner.group_number(call.event.group if call.event is not None else None)

    def _message_draft(self, posted: RankCall, op: str, call: CapturedCall) -> CallDraft:
        """A message, alone or in a batch. It has one buffer, which is input or output."""
        operation = OPERATIONS[op]
        group = self.owner.group_number(posted.group, posted.device)
        draft = CallDraft(operation, self._site(call.place, op), group)
        draft.peer = posted.peer
        draft.tag = posted.tag
        draft.is_async = operation.nonblocking
        contribution = posted.contribution
        shapes = contribution.input_shapes or contribution.output_shapes
        name = self.changed_buffers.get(posted.number, "")
        buffers = _buffers(shapes, contribution.dtype, name)[:1]
        draft.fields = {"inputs": buffers, "outputs": buffers}
        return draft


def _group_name(owner: _CapturedProgramBuilder, facts: Mapping[str, Any]) -> str:
    """The name of a group that this rank is not a member of, as its members know it."""
    ranks = tuple(facts["ranks"])
    for group in owner.tables.groups[1:]:
        if group.ranks == ranks:
            return group.name
    return f"ranks {list(ranks)}"


def _facts_key(facts: Mapping[str, Any]) -> Hashable:
    """Equal for equal facts of an event."""
    kernels = facts.get("kernels", ())
    return facts.get("stream"), tuple([tuple(kernel) for kernel in kernels])


def _call_key(call: RankCall) -> Hashable:
    """Equal for calls that are equal in a program."""
    contribution = call.contribution
    return (
        call.op,
        id(call.group),
        call.peer,
        call.tag,
        str(contribution.input_shapes),
        str(contribution.output_shapes),
        contribution.dtype,
        str(contribution.extra),
    )


def _changed_buffer_names(calls: Sequence[CapturedCall]) -> dict[int, str]:
    """By number of a posted call: the name of its buffer, if the script changes it meanwhile.

    A name is that in the script. Requests that are open at the same time have different names.
    """
    changed: dict[int, str] = {}
    for call in calls:
        if call.op == "changed" and call.event is not None:
            changed[call.event.facts["call"]] = str(call.event.facts["name"])
    if not changed:
        return {}
    names: dict[int, str] = {}
    open_names: dict[int, str] = {}
    for call in calls:
        for number in call.waits:
            open_names.pop(number, None)
        for posted in call.calls:
            if posted.number in changed:
                name = changed[posted.number] or f"the tensor of {posted.op}"
                while name in open_names.values():
                    name += "'"
                names[posted.number] = open_names[posted.number] = name
    return names


def _buffers(
    shapes: Sequence[Sequence[int]], dtype: str, name: str = ""
) -> tuple[BufferVector, ...]:
    """Buffers of these shapes. An unknown dtype becomes one of the same width."""
    if dtype not in DTYPE_BYTES:
        dtype = SUBSTITUTE_DTYPES.get(dtype, "uint8")
    return tuple(BufferVector(name, 0, tuple(shape), dtype) for shape in shapes)


def _collective_fields(call: RankCall, name: str = "") -> dict[str, object]:
    """The fields of a collective. ``name`` is that of its buffers, if it matters."""
    operation = OPERATIONS[call.op]
    contribution = call.contribution
    fields: dict[str, object] = {}
    for key in ("timeout_ns", "wait_all_ranks", "reduce_op"):
        if key in contribution.extra:
            fields[key] = contribution.extra[key]
    if operation.root_field is not None:
        fields["root"] = call.peer
    if operation.gives == "none":
        return fields
    if call.op == "all_to_all_single":
        return fields | _all_to_all_fields(contribution)
    fields["inputs"] = _buffers(contribution.input_shapes, contribution.dtype, name)
    fields["outputs"] = _buffers(contribution.output_shapes, contribution.dtype, name)
    return fields


def _all_to_all_fields(contribution: CallContribution) -> dict[str, object]:
    """The fields of all_to_all_single, whose splits count rows in torch and elements here."""
    fields: dict[str, object] = {}
    shapes = {"input": contribution.input_shapes[0], "output": contribution.output_shapes[0]}
    for name, shape in shapes.items():
        splits = contribution.extra.get(f"{name}_splits")
        if splits:
            row = prod(shape[1:])
            fields[f"{name}_splits"] = tuple(rows * row for rows in splits)
        fields[f"{name}s"] = _buffers([[prod(shape)]], contribution.dtype)
    return fields
