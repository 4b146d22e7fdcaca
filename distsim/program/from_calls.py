"""A program from plain lists of calls, one list per rank: for replayed traces, other tools' cases
and tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from distsim.backends import DEFAULT_BACKEND
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.assemble import CodeBuilder, ProgramTables
from distsim.program.call_builder import CallDraft, CallRequests, InvalidCall, OpenHandles
from distsim.program.code import (
    BufferVector,
    CallSite,
    CodeCall,
    LinkFault,
    Program,
    RankFault,
    SharedCode,
    TensorSpec,
)

PlainCall = Mapping[str, Any]


class ProgramOptions(TypedDict, total=False):
    """What a built program may have besides; see `Program`."""

    faults: tuple[RankFault, ...]
    link_faults: tuple[LinkFault, ...]
    seed: int
    jitter: float
    mesh: Mapping[str, int]


def build_program(
    world_size: int,
    programs: Mapping[int, Sequence[PlainCall]],
    *,
    groups: Mapping[str, Sequence[int]] | None = None,
    nodes: int = 1,
    backend: str = DEFAULT_BACKEND,
    options: Mapping[str, object] | None = None,
    name: str = "built",
    **more: Unpack[ProgramOptions],
) -> Program:
    """Each rank becomes a code of its own.

    A call is a mapping with ``op`` and its arguments: ``peer tag numel dtype group handle tensor``
    for messages (``peer: None`` receives from any source), ``numel dtype group root reduce_op async
    handle in_splits out_splits`` for collectives, where ``numel`` is one rank's share for
    all_gather, gather, scatter and reduce_scatter and the whole input otherwise (of a coalesced
    launch ``numels`` and ``tensors`` are lists, one entry for each part), ``handles`` for wait
    (``"all"`` for all), ``ops handle`` for a batch, ``time_ns name`` for compute, ``name ranks
    timeout_ns use_local_synchronization`` for new_group. Its place is the file ``rank N``, line =
    index + 1.
    """
    shelf = ProgramTables(world_size, backend)
    named = {"world": 0}
    for group, ranks in (groups or {}).items():
        named[group] = shelf.group(group, ranks)
    made: dict[tuple[int, tuple[int, ...]], int] = {}
    codes = [
        _PlainCallsBuilder(shelf, named, made, rank).build(programs.get(rank, ()))
        for rank in range(world_size)
    ]
    tensors: dict[str, TensorSpec] = {}
    return Program(
        name=name,
        file=name,
        world_size=world_size,
        nodes=nodes,
        local_size=-(-world_size // nodes),
        backend=backend,
        options=dict(options or {}),
        sites=shelf.sites,
        groups=shelf.groups,
        tensors=tensors,
        codes=codes,
        code_of=list(range(world_size)),
        row_of=[0] * world_size,
        findings=shelf.findings(),
        **more,
    )


class _PlainCallsBuilder:
    """Builds the code of one rank."""

    def __init__(
        self,
        shelf: ProgramTables,
        named: Mapping[str, int],
        made: dict[tuple[int, tuple[int, ...]], int],
        rank: int,
    ) -> None:
        self.shelf, self.named, self.made, self.rank = shelf, dict(named), made, rank
        self.builder = CodeBuilder(shelf, [rank])
        self.handles = OpenHandles()
        self.made_count = 0

    def build(self, calls: Sequence[PlainCall]) -> SharedCode:
        for line, plain in enumerate(calls, 1):
            self.add(plain, line)
        return self.builder.finish()

    def add(self, plain: PlainCall, line: int) -> None:
        op = "batch_isend_irecv" if plain["op"] == "batch" else plain["op"]
        site = self.shelf.site(CallSite(f"rank {self.rank}", line, 1, op))
        row, here = OPERATIONS[op], len(self.builder.calls)
        draft = CallDraft(row, site, self.named[plain.get("group") or "world"])
        requests = CallRequests()
        if row.kind == "wait":
            names = plain["handles"] if "handles" in plain else [plain["handle"]]
            waits = self.handles.wait(
                None if names == "all" else [(n, None) for n in names], here, draft.invalid
            )
            requests = CallRequests(waits=waits, again=self.handles.again)
        elif row.kind == "batch":
            draft.parts = tuple(self.part(p, line) for p in plain["ops"])
            draft.is_async = plain.get("handle") is not None
        elif row.kind == "p2p":
            self.message(draft, plain)
        elif row.kind == "collective":
            self.collective(draft, plain)
        elif row.op == "new_group":
            self.new_group(draft, plain)
        else:
            names = ("name", "time_ns", "flops", "mem_bytes", "code", "message", "queue", "stream")
            draft.fields = {k: plain[k] for k in names if k in plain}
            if plain.get("buf"):
                draft.fields["writes" if plain.get("writes") else "reads"] = (
                    self.buffer(plain, plain.get("numel", 1)),
                )
        if row.kind != "local" and plain.get("queue"):
            draft.fields = {**draft.fields, "queue": plain["queue"]}
        if draft.is_async:
            name = plain.get("handle")
            handled, drops = self.handles.bind(None if name is None else (name, None), here)
            requests = CallRequests(handled=handled, drops=drops)
        self.builder.append(self.builder.make(draft, requests))

    def part(self, plain: PlainCall, line: int) -> CodeCall:
        draft = CallDraft(
            OPERATIONS[plain["op"]],
            self.shelf.site(CallSite(f"rank {self.rank}", line, 1, plain["op"])),
            self.named[plain.get("group") or "world"],
        )
        self.message(draft, plain)
        return self.builder.make(draft)

    def message(self, draft: CallDraft, plain: PlainCall) -> None:
        peer = plain.get("peer")
        if peer is not None and peer < 0:
            draft.invalid.append(
                InvalidCall(
                    True,
                    "DS101",
                    f"{draft.row.op} names rank {peer}, but the world has ranks 0 to {self.shelf.world_size - 1}\nname a rank of the world",
                )
            )
            peer -= 1  # -1 would mean any source
        draft.peer, draft.tag, draft.is_async = (
            -1 if peer is None else peer,
            plain.get("tag", 0),
            draft.row.nonblocking,
        )
        buffer = self.buffer(plain, plain.get("numel", 1))
        draft.fields = {"inputs": (buffer,), "outputs": (buffer,)}
        if plain.get("assume_from") is not None:
            draft.fields["assume_src"] = plain["assume_from"]

    def collective(self, draft: CallDraft, plain: PlainCall) -> None:
        row, n = draft.row, self.shelf.groups[draft.group].size
        if row.coalesces is not None:
            sides = [self.sides(row.coalesces, part, n) for part in _coalesced_parts(plain)]
            draft.fields.update(
                inputs=tuple(inside for inside, _ in sides),
                outputs=tuple(outside for _, outside in sides),
            )
        elif row.gives != "none":
            inside, outside = self.sides(row, plain, n)
            draft.fields.update(inputs=(inside,), outputs=(outside,))
        if row.root_field is not None:
            draft.fields["root"] = plain.get("root", 0)
        if row.reduces:
            draft.fields["reduce_op"] = plain.get("reduce_op") or "sum"
        for here, there in (("in_splits", "input_splits"), ("out_splits", "output_splits")):
            if plain.get(here) is not None:
                draft.fields[there] = tuple(plain[here])
        draft.is_async = bool(plain.get("async"))

    def sides(
        self, row: type[Operation], plain: PlainCall, n: int
    ) -> tuple[BufferVector, BufferVector]:
        """Input and output of a collective; in place, the one buffer."""
        numel = plain.get("numel", 1)
        split = "in_splits" in plain or (row.pairwise and row.flat) or numel % n != 0
        whole = (numel,) if split else (n, numel // n)
        all_parts = (n * numel,) if row.flat else (n, numel)  # torch: one flat tensor, or a list
        one, parts = (
            (numel,),
            (whole if row.pairwise else all_parts),
        )  # pairwise: numel is the whole buffer
        inside = self.buffer(plain, *(parts if row.input_parts == "n" else one))
        outside = self.buffer(plain, *(parts if row.output_parts == "n" else one))
        if plain.get("out_splits") is not None:
            outside = self.buffer(plain, sum(plain["out_splits"]))
        return inside, inside if "tensor" in row.model_fields else outside

    def new_group(self, draft: CallDraft, plain: PlainCall) -> None:
        ranks, local = tuple(sorted(plain["ranks"])), bool(plain.get("use_local_synchronization"))
        key = (-1 if local else self.made_count, ranks)
        self.made_count += not local
        if key not in self.made:
            self.made[key] = self.shelf.group(
                plain["name"], ranks, timeout_ns=plain.get("timeout_ns")
            )
        self.named[plain["name"]] = self.made[key]
        draft.group = self.made[key] if local else 0
        draft.fields = {
            "name": plain["name"],
            "ranks": tuple(plain["ranks"]),
            "local_sync": local,
            "timeout_ns": plain.get("timeout_ns"),
        }

    def buffer(self, plain: PlainCall, *shape: int) -> BufferVector:
        return BufferVector(
            plain.get("tensor", plain.get("buf")) or "", 0, shape, plain.get("dtype") or "float32"
        )


def _coalesced_parts(plain: PlainCall) -> list[PlainCall]:
    """The parts of a coalesced launch, each as the call that it would be alone."""
    numels = plain.get("numels") or [plain.get("numel", 1)]
    names = plain.get("tensors") or [""] * len(numels)
    return [
        {**plain, "numel": numel, "tensor": name} for numel, name in zip(numels, names, strict=True)
    ]


def plain_calls(program: Program, rank: int) -> list[ResolvedCall]:
    """The plain calls of a rank, in order."""
    return [call for _, call in program.calls_of(rank)]
