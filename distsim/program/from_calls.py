"""Programs in which each rank has a code of its own, because nothing is known to be shared.

`program_of_ranks` assembles such a program from finished codes; recordings and captured runs use
it. `build_program` makes the codes too, from plain lists of calls: for tests and cases of other
tools. Scenario files are lowered by `distsim.program.lower` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from distsim.backends import DEFAULT_BACKEND
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.assemble import CodeBuilder
from distsim.program.call_builder import (
    NO_REQUESTS,
    CallDraft,
    CallRequests,
    InvalidCall,
    OpenHandles,
)
from distsim.program.code import (
    ANY_SOURCE,
    BufferVector,
    CallSite,
    CodeCall,
    SharedCode,
)
from distsim.program.model import LinkFault, Program, RankFault
from distsim.program.program_tables import ProgramTables
from distsim.program.symbol_table import LOCAL_CREATION

PlainCall = Mapping[str, Any]


#: Number of the new_group call on its rank (`LOCAL_CREATION` if only the members call it), members.
_MadeGroupKey = tuple[int, tuple[int, ...]]

#: Arguments of local calls that have the names of their fields in `ResolvedCall`.
_LOCAL_ARGUMENTS = (
    "name",
    "time_ns",
    "flops",
    "mem_bytes",
    "work",
    "code",
    "message",
    "queue",
    "stream",
)


class ProgramOptions(TypedDict, total=False):
    """Optional properties of a built program; see `Program`."""

    is_partial: bool
    faults: tuple[RankFault, ...]
    link_faults: tuple[LinkFault, ...]
    seed: int
    jitter: float
    mesh: Mapping[str, int]


def program_of_ranks(
    tables: ProgramTables,
    codes: list[SharedCode],
    *,
    name: str,
    file: str,
    nodes: int,
    backend: str,
    options: Mapping[str, object] | None = None,
    **more: Unpack[ProgramOptions],
) -> Program:
    """Assemble a program from one code per rank, in the order of the ranks.

    ``tables`` are those with which the codes were built. The program declares no tensors.
    """
    world_size = tables.world_size
    return Program(
        name=name,
        file=file,
        world_size=world_size,
        nodes=nodes,
        local_size=-(-world_size // nodes),  # rounded up
        backend=backend,
        options=dict(options or {}),
        sites=tables.sites,
        groups=tables.groups,
        tensors={},
        codes=codes,
        code_of=list(range(world_size)),
        row_of=[0] * world_size,
        findings=tables.findings(),
        **more,
    )


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
    """Build a program in which each rank has a code of its own.

    A call is a mapping with ``op`` and its arguments:

    - messages: ``peer tag numel dtype group handle tensor`` (``peer: None`` receives from any
      source);
    - collectives: ``numel dtype group root reduce_op async handle in_splits out_splits``, where
      ``numel`` is one rank's part for all_gather, gather, scatter and reduce_scatter, and the whole
      input for all others. For a coalesced launch ``numels`` and ``tensors`` are lists with one
      entry for each part;
    - wait: ``handles`` (``"all"`` for all);
    - batch: ``ops handle``;
    - compute: ``time_ns name``;
    - new_group: ``name ranks timeout_ns use_local_synchronization``.

    The place of a call is the file ``rank N``, line = index + 1.
    """
    tables = ProgramTables(world_size, backend)
    groups_by_name = {"world": 0}
    for group, ranks in (groups or {}).items():
        groups_by_name[group] = tables.group(group, ranks)
    made_groups: dict[_MadeGroupKey, int] = {}
    codes = [
        _PlainCallsBuilder(tables, groups_by_name, made_groups, rank).build(programs.get(rank, ()))
        for rank in range(world_size)
    ]
    return program_of_ranks(
        tables,
        codes,
        name=name,
        file=name,
        nodes=nodes,
        backend=backend,
        options=options,
        **more,
    )


class _PlainCallsBuilder:
    """Builds the code of one rank.

    ``groups_by_name`` are the declared groups; ``made_groups`` are shared by all ranks, so that
    matching new_group calls get the same group.
    """

    def __init__(
        self,
        tables: ProgramTables,
        groups_by_name: Mapping[str, int],
        made_groups: dict[_MadeGroupKey, int],
        rank: int,
    ) -> None:
        self.tables = tables
        self.groups_by_name = dict(groups_by_name)
        self.made_groups = made_groups
        self.rank = rank
        self.builder = CodeBuilder(tables, [rank])
        self.handles = OpenHandles()
        self.new_group_count = 0

    def build(self, calls: Sequence[PlainCall]) -> SharedCode:
        for line, plain in enumerate(calls, 1):
            self._add(plain, line)
        return self.builder.finish()

    def _add(self, plain: PlainCall, line: int) -> None:
        op = "batch_isend_irecv" if plain["op"] == "batch" else plain["op"]
        draft = self._draft(op, plain, line)
        position = len(self.builder.calls)
        requests = NO_REQUESTS
        if draft.row.kind == "wait":
            requests = self._wait(draft, plain, position)
        elif draft.row.kind == "batch":
            draft.parts = tuple(self._part(part, line) for part in plain["ops"])
            draft.is_async = plain.get("handle") is not None
        elif draft.row.kind == "p2p":
            self._message(draft, plain)
        elif draft.row.kind == "collective":
            self._collective(draft, plain)
        elif draft.row.op == "new_group":
            self._new_group(draft, plain)
        else:
            self._local(draft, plain)
        if draft.row.kind != "local" and plain.get("queue"):
            draft.fields = {**draft.fields, "queue": plain["queue"]}
        if draft.is_async:
            name = plain.get("handle")
            requests = self.handles.bind(None if name is None else (name, None), position)
        self.builder.append(self.builder.make(draft, requests))

    def _draft(self, op: str, plain: PlainCall, line: int) -> CallDraft:
        site = self.tables.site(CallSite(f"rank {self.rank}", line, 1, op))
        return CallDraft(OPERATIONS[op], site, self.groups_by_name[plain.get("group") or "world"])

    def _wait(self, draft: CallDraft, plain: PlainCall, position: int) -> CallRequests:
        names = plain["handles"] if "handles" in plain else [plain["handle"]]
        handles = None if names == "all" else [(name, None) for name in names]
        return self.handles.wait(handles, position, draft.invalid)

    def _part(self, plain: PlainCall, line: int) -> CodeCall:
        draft = self._draft(plain["op"], plain, line)
        self._message(draft, plain)
        return self.builder.make(draft)

    def _message(self, draft: CallDraft, plain: PlainCall) -> None:
        peer = plain.get("peer")
        if peer is None:
            peer = ANY_SOURCE
        elif peer < 0:
            last_rank = self.tables.world_size - 1
            reason = (
                f"{draft.row.op} names rank {peer}, but the world has ranks 0 to {last_rank}\n"
                "name a rank of the world"
            )
            draft.invalid.append(InvalidCall(True, "DS101", reason))
            peer -= 1  # because -1 would mean any source
        draft.peer = peer
        draft.tag = plain.get("tag", 0)
        draft.is_async = draft.row.nonblocking
        buffer = self._buffer(plain, plain.get("numel", 1))
        draft.fields = {"inputs": (buffer,), "outputs": (buffer,)}
        if plain.get("assume_from") is not None:
            draft.fields["assume_src"] = plain["assume_from"]

    def _local(self, draft: CallDraft, plain: PlainCall) -> None:
        draft.fields = {name: plain[name] for name in _LOCAL_ARGUMENTS if name in plain}
        if plain.get("buf"):
            access = "writes" if plain.get("writes") else "reads"
            draft.fields[access] = (self._buffer(plain, plain.get("numel", 1)),)

    def _collective(self, draft: CallDraft, plain: PlainCall) -> None:
        row = draft.row
        assert isinstance(draft.group, int)
        size = self.tables.groups[draft.group].size
        if row.coalesces is not None:
            part_row = row.coalesces
            pairs = [self._buffers(part_row, part, size) for part in _coalesced_parts(plain)]
            draft.fields["inputs"] = tuple(read for read, _ in pairs)
            draft.fields["outputs"] = tuple(written for _, written in pairs)
        elif row.gives != "none":
            read, written = self._buffers(row, plain, size)
            draft.fields.update(inputs=(read,), outputs=(written,))
        if row.root_field is not None:
            draft.fields["root"] = plain.get("root", 0)
        if row.reduces:
            draft.fields["reduce_op"] = plain.get("reduce_op") or "sum"
        for argument, field in (("in_splits", "input_splits"), ("out_splits", "output_splits")):
            if plain.get(argument) is not None:
                draft.fields[field] = tuple(plain[argument])
        draft.is_async = bool(plain.get("async"))

    def _buffers(
        self, row: type[Operation], plain: PlainCall, group_size: int
    ) -> tuple[BufferVector, BufferVector]:
        """Input and output of a collective; for an in-place one, the same buffer twice."""
        one, parts = _buffer_shapes(row, plain, group_size)
        read = self._buffer(plain, *(parts if row.input_parts == "n" else one))
        if "tensor" in row.model_fields:
            return read, read
        if plain.get("out_splits") is not None:
            return read, self._buffer(plain, sum(plain["out_splits"]))
        return read, self._buffer(plain, *(parts if row.output_parts == "n" else one))

    def _new_group(self, draft: CallDraft, plain: PlainCall) -> None:
        name, members = plain["name"], tuple(sorted(plain["ranks"]))
        only_members = bool(plain.get("use_local_synchronization"))
        if only_members:
            key = (LOCAL_CREATION, members)
        else:
            key = (self.new_group_count, members)
            self.new_group_count += 1
        if key not in self.made_groups:
            timeout_ns = plain.get("timeout_ns")
            self.made_groups[key] = self.tables.group(name, members, timeout_ns=timeout_ns)
        group = self.groups_by_name[name] = self.made_groups[key]
        draft.group = group if only_members else 0
        draft.fields = {
            "name": name,
            "ranks": tuple(plain["ranks"]),
            "local_sync": only_members,
            "timeout_ns": plain.get("timeout_ns"),
        }

    def _buffer(self, plain: PlainCall, *shape: int) -> BufferVector:
        name = plain.get("tensor", plain.get("buf")) or ""
        return BufferVector(name, 0, shape, plain.get("dtype") or "float32")


def _buffer_shapes(
    row: type[Operation], plain: PlainCall, group_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one rank's buffer, and of one that holds a part for every rank."""
    numel = plain.get("numel", 1)
    if not row.pairwise:
        # torch takes either one flat tensor or a list.
        parts = (group_size * numel,) if row.flat else (group_size, numel)
        return (numel,), parts
    # For all_to_all, numel is the whole buffer: flat if it has splits or does not divide evenly.
    is_flat = "in_splits" in plain or row.flat or numel % group_size != 0
    return (numel,), ((numel,) if is_flat else (group_size, numel // group_size))


def _coalesced_parts(plain: PlainCall) -> list[PlainCall]:
    """The parts of a coalesced launch, each as a call of its own."""
    numels = plain.get("numels") or [plain.get("numel", 1)]
    names = plain.get("tensors") or [""] * len(numels)
    return [
        {**plain, "numel": numel, "tensor": name} for numel, name in zip(numels, names, strict=True)
    ]


def plain_calls(program: Program, rank: int) -> list[ResolvedCall]:
    """The plain calls of a rank, in order."""
    return [call for _, call in program.calls_of(rank)]
