"""A captured run as a `Program`, which all of distsim takes."""

from __future__ import annotations

import linecache
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from distsim.hardware.cluster import Cluster
from distsim.hardware.cost import CostModel
from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.program.assemble import CodeBuilder
from distsim.program.call_builder import CallDraft, CallRequests
from distsim.program.code import BufferVector, CallSite, CodeCall, SharedCode
from distsim.program.model import Program, RankFault
from distsim.program.program_tables import ProgramTables
from distsim.script_capture.compute.kernel_counter import (
    ComputeInterval,
    ComputeKernel,
    duration_with_model_ns,
)
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import GroupInstance, RankCall
from distsim.script_capture.hub.state import HubEvent, Place, RankProcess
from distsim.script_capture.launch.parent_process import CapturedRun, known_backend
from distsim.script_capture.result.future_calls import assumed_future_calls
from distsim.script_capture.result.recorded_calls import (
    CapturedCall,
    groups_in_order,
    missing_startup_calls,
    recorded_calls_of,
)
from distsim.script_capture.result.thread_order import ThreadOrder, events_in_order

#: Dtypes that distsim has no name for, as one of the same width.
_SUBSTITUTE_DTYPES = {
    "uint16": "int16",
    "uint32": "int32",
    "uint64": "int64",
    "float8_e4m3fnuz": "float8_e4m3fn",
    "float8_e5m2fnuz": "float8_e5m2",
    "float8_e8m0fnu": "uint8",
    "complex32": "float32",
}


def build_program(
    captured: CapturedRun,
    backend: str,
    name: str,
    file: str,
    cluster: Cluster | None = None,
    threads: ThreadOrder = "met",
) -> Program:
    """The program that the ranks ran, under the rules of ``backend``. ``cluster``: whose devices
    compute what was counted.

    ``threads``: how the calls of a rank's threads follow each other, see
    `distsim.script_capture.result.thread_order`.
    """
    return _CapturedProgramBuilder(captured, backend, cluster, threads).build(name, file)


def world_backend(members: Iterable[RankProcess]) -> str:
    """The back end of the world's group, as its lowest rank asked for it; of one for each device,
    that of the GPUs if they are used.
    """
    there = list(members)
    asked = next(
        (t.backend for m in there for t in m.group_instances.values() if t.is_world), "gloo"
    )
    devices = {c.on for m in there for c in m.calls.values()} if ":" in asked else set()
    return known_backend(asked, "cuda" if "cuda" in devices else "cpu")


class _CapturedProgramBuilder:
    def __init__(
        self, captured: CapturedRun, backend: str, cluster: Cluster | None, threads: ThreadOrder
    ) -> None:
        self.captured, self.backend, self.threads = captured, backend, threads
        self.model = CostModel(cluster, 1, 1) if cluster is not None else None
        self.size = captured.world
        self.shelf = ProgramTables(self.size, backend)
        started = {m.planned: m for m in captured.others if m.planned >= 0}
        self.members = [
            captured.evaluated_ranks.get(r) or started.get(r) or RankProcess(0, r)
            for r in range(self.size)
        ]
        self.group_number_by_instance = self._groups()

    def _groups(self) -> dict[tuple[int, str], int]:
        """By team and back end: the number of its group. A group with a back end for each device is
        one group for each that is used.
        """
        world, main = tuple(range(self.size)), world_backend(self.members)
        used: dict[int, set[str]] = {}
        for call in (c for m in self.members for c in m.calls.values()):
            used.setdefault(id(call.team), set()).add(known_backend(call.team.backend, call.on))
        numbers: dict[tuple[int, str], int] = {}
        for team in groups_in_order(self.members):
            for backend in sorted(
                used.get(id(team)) or {main if team.is_world else known_backend(team.backend)}
            ):
                if team.ranks == world and team.is_world and backend == main:
                    numbers[id(team), backend] = 0
                    continue
                numbers[id(team), backend] = number = len(self.shelf.groups)
                own = backend if backend != main else None
                self.shelf.groups.append(
                    RankGroup(number, team.title, team.ranks, own, team.timeout_ns)
                )
        return numbers

    def number_of(self, team: GroupInstance | None, on: str = "") -> int:
        """The group of a call; the world where there is none."""
        return (
            self.group_number_by_instance.get((id(team), known_backend(team.backend, on)), 0)
            if team is not None
            else 0
        )

    def build(self, name: str, file: str) -> Program:
        codes, faults = [], []
        later, events = (
            assumed_future_calls(self.members),
            events_in_order(self.members, self.threads),
        )
        for rank, member in enumerate(self.members):
            steps, never = (
                recorded_calls_of(member, events[rank]),
                missing_startup_calls(member, self.members),
            )
            codes.append(
                _CapturedRankBuilder(self, rank).code([*steps, *never, *later.get(rank, ())])
            )
            if member.ended is not None and member.ended.how == "killed":
                faults.append(RankFault(rank, "kill", position=len(codes[-1].calls) - len(never)))
        nodes = self.captured.capture_options.nodes
        return Program(
            name=name,
            file=file,
            world_size=self.size,
            nodes=nodes,
            local_size=-(-self.size // nodes),
            backend=self.backend,
            options=self._options(),
            sites=self.shelf.sites,
            groups=self.shelf.groups,
            tensors={},
            codes=codes,
            code_of=list(range(self.size)),
            row_of=[0] * self.size,
            findings=self.shelf.findings(),
            faults=tuple(faults),
        )

    def _options(self) -> dict[str, object]:
        """``init: eager`` where each rank gave init_process_group its device (torch:
        ``device_id``).
        """
        begun = [e.facts for m in self.members for e in m.events if e.kind == "init_process_group"]
        return (
            {"init": "eager"}
            if self.backend == "nccl" and begun and all(facts["eager"] for facts in begun)
            else {}
        )

    def price(self, kernels: Sequence[Sequence[Any]]) -> int:
        """Nanoseconds of what a rank counted; 0 where nobody said on which device."""
        stretch = ComputeInterval(
            tuple((ComputeKernel(*kernel), count) for *kernel, count in kernels)
        )
        return duration_with_model_ns(stretch, self.model) if self.model is not None else 0


class _CapturedRankBuilder:
    """Builds one rank's code."""

    def __init__(self, owner: _CapturedProgramBuilder, rank: int) -> None:
        self.owner, self.rank = owner, rank
        self.builder = CodeBuilder(owner.shelf, [rank])
        self.at: dict[int, int] = {}  # number of a posted call -> position
        self.known: dict[Hashable, CodeCall] = {}
        self.names: dict[
            int, str
        ] = {}  # of what a call was given and the script changed before it waited

    def code(self, steps: Sequence[CapturedCall]) -> SharedCode:
        self.names = _changed_buffer_names(steps)
        for step in steps:
            if step.op == "stranger" and step.event is not None:
                if not step.place[
                    3
                ]:  # a library that calls for everybody knows that the others' calls do nothing
                    self._report_stranger(step, str(step.event.facts["op"]))
                continue
            here = len(self.builder.calls)
            back = [here - self.at[n] for n in step.waits if n in self.at]
            if step.op == "wait" and not back:
                continue
            drops = [here - self.at[n] for n in step.drops if n in self.at]
            for call in step.calls:
                self.at[call.number] = here
            requests = CallRequests(
                waits=tuple(dict.fromkeys(back)),
                drops=tuple(drops),
                handled=step.is_async and step.handled,
            )
            self.builder.append(self._made(step, requests))
        return self.builder.finish()

    def _report_stranger(self, step: CapturedCall, op: str) -> None:
        known = op if op in OPERATIONS else "barrier"
        words = f"{op} on a group that the caller is not in: torch warns and does nothing"
        self.owner.shelf.report("DS104", self._site(step.place, known), words, [self.rank])

    def _made(self, step: CapturedCall, requests: CallRequests) -> CodeCall:
        """The call; equal calls are one object."""
        if step.failure is not None and step.failure.refused:
            self.owner.shelf.report(
                step.failure.refused,
                self._site(step.place, step.op),
                step.failure.text,
                [self.rank],
            )
        key = (
            (
                step.op,
                step.place,
                step.is_async,
                requests,
                tuple((_call_key(c), self.names.get(c.number)) for c in step.calls),
            )
            if step.event is None
            else id(step)
        )
        if key not in self.known or step.failure is not None:
            self.known[key] = self.builder.make(self._draft(step), requests)
        return self.known[key]

    def _site(self, place: Place, op: str) -> int:
        file, line = place[0], place[1]
        text = linecache.getline(file, line) if line else ""
        return self.owner.shelf.site(
            CallSite(file, line, len(text) - len(text.lstrip()) + 1 if line else 0, op)
        )

    def _draft(self, step: CapturedCall) -> CallDraft:
        if step.op == "changed" and step.event is not None:
            return self._change(step, step.event)
        row, site = OPERATIONS[step.op], self._site(step.place, step.op)
        draft = CallDraft(row, site, self._group(step), is_async=step.is_async)
        if row.kind == "batch":
            draft.parts = tuple(self.builder.make(self._message(c, c.op, step)) for c in step.calls)
        elif row.kind == "p2p":
            return self._message(step.calls[0], step.op, step)
        elif row.kind == "collective":
            draft.fields = _collective_fields(
                step.calls[0], self.names.get(step.calls[0].number, "")
            )
        elif step.op == "new_group" and step.event is not None:
            facts = step.event.facts
            team = step.event.team
            draft.fields = {
                "name": team.title if team is not None else _group_name(self.owner, facts),
                "ranks": tuple(facts["ranks"]),
                "timeout_ns": facts["timeout_ns"],
                "local_sync": facts["local_sync"],
            }
        elif step.op == "init_process_group" and step.event is not None:
            draft.fields = {
                "timeout_ns": step.event.facts["timeout_ns"],
                "backend": self.owner.backend,
            }
        elif step.op == "compute" and step.event is not None:
            draft.fields = {
                "time_ns": self.owner.price(step.event.facts["kernels"]),
                "name": "compute",
            }
        elif step.failure is not None:
            draft.fields = (
                {"code": step.failure.code}
                if step.op == "exit"
                else {"message": step.failure.text[:200]}
            )
        return draft

    def _change(self, step: CapturedCall, event: HubEvent) -> CallDraft:
        """What the script wrote, as a computation that takes no time."""
        buffer = BufferVector(self.names[event.facts["call"]], 0, (), "uint8")
        fields = {"time_ns": 0, "name": "compute", "writes": (buffer,)}
        return CallDraft(OPERATIONS["compute"], self._site(step.place, "compute"), 0, fields=fields)

    def _group(self, step: CapturedCall) -> int:
        if step.op == "new_group":
            return 0
        if step.calls:
            return self.owner.number_of(step.calls[0].team, step.calls[0].on)
        return self.owner.number_of(step.event.team if step.event is not None else None)

    def _message(self, call: RankCall, op: str, step: CapturedCall) -> CallDraft:
        draft = CallDraft(
            OPERATIONS[op], self._site(step.place, op), self.owner.number_of(call.team, call.on)
        )
        draft.peer, draft.tag, draft.is_async = call.peer, call.tag, OPERATIONS[op].nonblocking
        buffer = _buffers(
            call.side.ins or call.side.outs, call.side.dtype, self.names.get(call.number, "")
        )[:1]
        draft.fields = {"inputs": buffer, "outputs": buffer}
        return draft


def _group_name(owner: _CapturedProgramBuilder, facts: Mapping[str, Any]) -> str:
    """Of a group that this rank is no member of: the name that its members know."""
    ranks = tuple(facts["ranks"])
    return next(
        (g.name for g in owner.shelf.groups[1:] if g.ranks == ranks), f"ranks {list(ranks)}"
    )


def _call_key(call: RankCall) -> Hashable:
    side = call.side
    return (
        call.op,
        id(call.team),
        call.peer,
        call.tag,
        str(side.ins),
        str(side.outs),
        side.dtype,
        str(side.extra),
    )


def _changed_buffer_names(steps: Sequence[CapturedCall]) -> dict[int, str]:
    """By call: what the script changed of it. While several are open, each has a name of its
    own.
    """
    changed = {
        s.event.facts["call"]: str(s.event.facts["name"])
        for s in steps
        if s.op == "changed" and s.event is not None
    }
    found: dict[int, str] = {}
    if changed:
        held: dict[int, str] = {}
        for step in steps:
            for number in step.waits:
                held.pop(number, None)
            for call in step.calls:
                if call.number in changed:
                    name = changed[call.number] or f"the tensor of {call.op}"
                    while name in held.values():
                        name += "'"
                    found[call.number] = held[call.number] = name
    return found


def _buffers(
    shapes: Sequence[Sequence[int]], dtype: str, name: str = ""
) -> tuple[BufferVector, ...]:
    known = dtype if dtype in DTYPE_BYTES else _SUBSTITUTE_DTYPES.get(dtype, "uint8")
    return tuple(BufferVector(name, 0, tuple(shape), known) for shape in shapes)


def _collective_fields(call: RankCall, name: str = "") -> dict[str, object]:
    """The fields of a collective, by its row. ``name``: of its buffers, where that matters."""
    row, side = OPERATIONS[call.op], call.side
    fields: dict[str, object] = {
        k: side.extra[k] for k in ("timeout_ns", "wait_all_ranks", "reduce_op") if k in side.extra
    }
    if row.root_field is not None:
        fields["root"] = call.peer
    if row.gives == "none":
        return fields
    if call.op == "all_to_all_single":
        return fields | _all_to_all_fields(side)
    fields["inputs"], fields["outputs"] = (
        _buffers(side.ins, side.dtype, name),
        _buffers(side.outs, side.dtype, name),
    )
    return fields


def _all_to_all_fields(side: CallContribution) -> dict[str, object]:
    """Splits count rows in torch, elements here."""
    fields: dict[str, object] = {}
    for name, shape in (("input", side.ins[0]), ("output", side.outs[0])):
        splits = side.extra.get(f"{name}_splits")
        if splits:
            fields[f"{name}_splits"] = tuple(k * prod(shape[1:]) for k in splits)
        fields[f"{name}s"] = _buffers([[prod(shape)]], side.dtype)
    return fields
