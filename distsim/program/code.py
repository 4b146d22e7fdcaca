"""A scenario lowered to calls: what rules, engine, check, values and views read.

A `Program` holds *codes*: a list of calls shared by all ranks whose selectors and repeat counts
agree. A rank is a code and a row of the code's vectors, so ten thousand repeats on a thousand ranks
cost little. Whoever wants plain calls asks `Program.call(rank, position)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from distsim.common.expressions import Expression
from distsim.common.field_parsing import PerRank
from distsim.common.records import dataclass
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS

if TYPE_CHECKING:
    from distsim.program.features import Feature
    from distsim.scenario.startup.records import StartupResult

T = TypeVar("T")
IntVector = NDArray[np.int64]
BoolVector = NDArray[np.bool_]
#: One number for all ranks of a code, or one per rank.
Vec = int | IntVector


#: What an expression comes to: one value for all ranks, or one per rank.
RankValues = int | float | NDArray[np.int64] | NDArray[np.float64] | NDArray[np.bool_]
#: What a field may say in place of that.
FieldValue = Expression | PerRank[object] | RankValues
#: Names of expressions and what they stand for.
NameBindings = Mapping[str, RankValues]
#: Vectors or plain values for `ResolvedCall`, by the name of Call's field.
CallFields = dict[str, Any]


@overload
def at_row(value: Vec, row: int) -> int: ...
@overload
def at_row(value: T, row: int) -> T: ...
def at_row(value: object, row: int) -> object:
    """The entry of a Vec for one row of its code."""
    return value[row].item() if isinstance(value, np.ndarray) else value


@overload
def collapse_uniform(vector: IntVector) -> Vec: ...
@overload
def collapse_uniform(vector: T) -> T: ...
def collapse_uniform(vector: object) -> object:
    """A vector whose entries are all equal becomes that entry."""
    if isinstance(vector, np.ndarray) and len(vector) and (vector == vector[0]).all():
        return vector[0].item()
    return vector


class CallSite(NamedTuple):
    """Where a step is written and what it is called there."""

    file: str
    line: int
    column: int
    op: str

    def place(self, rank: int | None = None) -> SourceLocation:
        return SourceLocation(self.file, self.line, self.column, self.op, rank)


@dataclass(frozen=True, slots=True, eq=False)
class BufferVector:
    """A `TensorBuffer` for every rank of a code: shape items and copy index may differ by rank."""

    name: str
    index: Vec
    shape: tuple[Vec, ...]
    dtype: str

    def at(self, row: int) -> TensorBuffer:
        return TensorBuffer(
            self.name,
            at_row(self.index, row),
            tuple(at_row(n, row) for n in self.shape),
            self.dtype,
        )


class ChannelEndpoint(NamedTuple):
    """A channel end as the ranks of a code name it: ``peer`` is global, -1 means any source.

    ``group`` indexes `SharedCode.groups`.
    """

    peer: Vec
    group: int
    tag: Vec


@dataclass(frozen=True, slots=True, eq=False)
class CodeCall:
    """One call of a code. The same object stands at every position where the same call is made.

    ``port`` numbers `SharedCode.ports` (p2p), ``group`` numbers `SharedCode.groups`; -1 where
    there is none. ``signature`` numbers what both sides must agree on: equal numbers agree, over
    the whole program (p2p: element count and dtype; collectives: what `agreement` of the row
    returns). Vec. ``waits`` are distances back to the calls whose requests this call waits for
    (1 = the call before). ``again``: distances back to requests that were waited for before
    (``invalid`` says so too). ``handled``: the request is bound to a handle (else dropped:
    nobody can wait for it). ``drops`` are distances back to requests whose handle this call
    overwrites (as Python drops a rebound name). ``invalid``: None, or (mask over rows, reason);
    such a rank raises here. ``fields`` are further vectors or plain values for `ResolvedCall`,
    by the name of Call's field.
    """

    op: str
    site: int
    is_async: bool = False
    group: int = -1
    port: int = -1
    nbytes: Vec = 0
    signature: Vec = -1
    waits: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    handled: bool = False
    drops: tuple[int, ...] = ()
    parts: tuple[CodeCall, ...] = ()
    invalid: tuple[BoolVector, str] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        """The stream that is current at the call, "" the default one; what the host computes counts
        as that one's.
        """
        name = str(self.fields.get("queue") or "")
        return "" if name == "host" else name


@dataclass(eq=False)
class SharedCode:
    """A list of calls shared by ``ranks`` (ascending; row i of every vector belongs to ranks[i]).

    ``guards[k]`` is None, or a mask over rows: which ranks make call k at all (a selector that uses
    a loop index). ``iterations``: positions at which the training iterations start; their end is
    the last entry.
    """

    ranks: tuple[int, ...]
    calls: list[CodeCall]
    ports: list[ChannelEndpoint]
    groups: list[Vec]  # index -> group id of each row
    guards: list[BoolVector | None] | None = None
    iterations: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> list[int]:
        """Trace row of each call within a rank's rows, and their number at the end: a batch has a
        row, then one per part.
        """
        return list(accumulate((1 + len(c.parts) for c in self.calls), initial=0))

    def distinct_calls(self, parts: bool = True) -> Iterator[CodeCall]:
        """Every call object once, in order of first use; with ``parts``, those of a batch after
        it.
        """
        for call in self._distinct:
            yield call
            if parts:
                yield from call.parts

    @cached_property
    def _distinct(self) -> list[CodeCall]:
        return list({id(call): call for call in self.calls}.values())

    def plain_fields(self, call: CodeCall) -> tuple[CallFields, tuple[str, ...]]:
        """The fields of a call, or of a part, that are the same in every row, and the names of the
        others.
        """
        found = self._plain_fields.get(id(call))
        if found is None or found[0] is not call:
            varying = tuple([name for name, value in call.fields.items() if _varies(value)])
            fixed = {
                name: _plain_value(value, 0)
                for name, value in call.fields.items()
                if name not in varying
            }
            found = self._plain_fields[id(call)] = call, fixed, varying
        return found[1:]

    @cached_property
    def _plain_fields(self) -> dict[int, tuple[CodeCall, CallFields, tuple[str, ...]]]:
        return {}

    def call_count(self, times: IntVector | None = None) -> int:
        """How many calls its ranks make, each rank counted ``times[rank]`` times."""
        count = (
            np.ones(len(self.ranks), dtype=np.int64) if times is None else times[list(self.ranks)]
        )
        if self.guards is None:
            return len(self.calls) * int(count.sum())
        return sum(int(count.sum() if mask is None else count[mask].sum()) for mask in self.guards)

    def positions(self, row: int) -> Iterator[int]:
        """The positions of the calls that this row really makes, in order."""
        if self.guards is None:
            yield from range(len(self.calls))
            return
        for k, mask in enumerate(self.guards):
            if mask is None or mask[row]:
                yield k


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A declared tensor. ``value`` is None (unknown numbers) or the file's value, kept as parsed.

    Use `distsim.values` for its numbers.
    """

    name: str
    dtype: str
    copies: Vec
    shape: tuple[Vec, ...] | None  # over all ranks of the world; None: ``auto``
    value: Any = None


@dataclass(frozen=True, slots=True)
class RankFault:
    """A fault laid over the program, resolved for one rank (``kind`` as in the file)."""

    rank: int
    kind: str  # kill raise exit slow late absent
    position: int | None = None  # before this call of the rank
    at_ns: int | None = None
    factor: float = 1.0
    code: int = 1
    delay_ns: int = 0


@dataclass(frozen=True, slots=True)
class LinkFault:
    """A slower link: ``link`` is a link class of the cluster (``nic``, ``nvlink``, …)."""

    link: str
    nodes: tuple[int, ...]
    factor: float


@dataclass(eq=False)
class Program:
    """A whole program. ``findings`` holds what lowering saw: invalid calls, selectors that select
    nobody.
    """

    name: str
    file: str
    world_size: int
    nodes: int
    local_size: int  # ranks per node
    backend: str
    options: Mapping[str, Any]
    sites: list[CallSite]
    groups: list[RankGroup]  # groups[i].id == i; groups[0] is the world
    tensors: Mapping[str, TensorSpec]
    codes: list[SharedCode]
    code_of: list[int]  # rank -> index into codes
    row_of: list[int]  # rank -> row of its code
    findings: tuple[Finding, ...] = ()
    faults: tuple[RankFault, ...] = ()
    link_faults: tuple[LinkFault, ...] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    jitter: float = 0.0
    #: Every name an expression may use, over all ranks of the world: rank, node, axes, vars, …
    names: Mapping[str, Any] = field(default_factory=dict)
    #: What becomes of init_process_group, where the file says anything of it that is worth a look;
    #: None: all ranks meet.
    startup: StartupResult | None = None
    #: Of a program that is cut down to some of its ranks, by rank the one that stands for it; None:
    #: all ranks are there. Its codes hold those ranks alone, its groups all of their members. See
    #: `distsim.semantics.classes.representatives`.
    representative_of: IntVector | None = None
    #: Lowered from a file: ranks hold the groups that it names and no others. What was recorded may
    #: have been made otherwise, under names that are known.
    from_file: bool = False

    @cached_property
    def features(self) -> frozenset[Feature]:
        """What it uses."""
        from distsim.program.features import features_of

        return features_of(self)

    @cached_property
    def present(self) -> Sequence[int]:
        """The ranks whose calls are there."""
        return (
            range(self.world_size)
            if self.representative_of is None
            else sorted(set(self.representative_of.tolist()))
        )

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group whose calls are there."""
        if self.representative_of is None:
            return self.groups[group].ranks
        found = self._present_members.get(group)
        if found is None:
            ranks = np.array(self.groups[group].ranks, dtype=np.int64)
            found = self._present_members[group] = tuple(
                ranks[self.representative_of[ranks] == ranks].tolist()
            )
        return found

    @cached_property
    def _present_members(self) -> dict[int, tuple[int, ...]]:
        return {}

    def alike(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks that these stand for, themselves included, ascending."""
        if self.representative_of is None:
            return tuple(sorted(ranks))
        return tuple(np.flatnonzero(np.isin(self.representative_of, list(ranks))).tolist())

    @cached_property
    def delays(self) -> dict[int, int]:
        """By rank how many ns later it starts, of those that do: the sum of what the faults say."""
        found: dict[int, int] = {}
        for fault in self.faults:
            if fault.kind == "late":
                found[fault.rank] = found.get(fault.rank, 0) + fault.delay_ns
        return found

    def names_of(self, rank: int) -> dict[str, object]:
        """The names of expressions with their values on one rank."""
        return {name: at_row(value, rank) for name, value in self.names.items()}

    def code(self, rank: int) -> SharedCode:
        return self.codes[self.code_of[rank]]

    def code_call(self, rank: int, position: int) -> CodeCall:
        return self.codes[self.code_of[rank]].calls[position]

    def node(self, rank: int) -> int:
        return rank // self.local_size

    def place(self, rank: int, position: int) -> SourceLocation:
        return self.sites[self.code_call(rank, position).site].place(rank)

    def call(self, rank: int, position: int) -> ResolvedCall:
        """The plain resolved call of a rank at a position of its code."""
        return self.resolve(rank, self.code_call(rank, position))

    def resolve(self, rank: int, call: CodeCall) -> ResolvedCall:
        return resolve_call(self.code(rank), self.groups, self.row_of[rank], call)

    def calls_of(self, rank: int) -> Iterator[tuple[int, ResolvedCall]]:
        """(position, call) of every call that the rank makes, in order."""
        for k in self.code(rank).positions(self.row_of[rank]):
            yield k, self.call(rank, k)

    @cached_property
    def call_count(self) -> int:
        """Calls of all ranks together, of those too that others stand for."""
        times = (
            None
            if self.representative_of is None
            else np.bincount(self.representative_of, minlength=self.world_size)
        )
        return sum(c.call_count(times) for c in self.codes)

    def rows(self) -> list[int]:
        """How many rows each rank has in a trace; none where another stands for it."""
        of = self.representative_of
        return [
            self.code(r).offsets[-1] if of is None or of[r] == r else 0
            for r in range(self.world_size)
        ]

    @cached_property
    def present_calls(self) -> int:
        """Calls of the ranks that are there."""
        return sum(c.call_count() for c in self.codes)


def resolve_call(
    code: SharedCode, groups: Sequence[RankGroup], row: int, call: CodeCall
) -> ResolvedCall:
    """The plain call of one row of a code."""
    fixed, varying = code.plain_fields(call)
    plain: CallFields = {
        **fixed,
        **{name: _plain_value(call.fields[name], row) for name in varying},
    }
    group = groups[at_row(code.groups[call.group], row)] if call.group >= 0 else groups[0]
    if call.port >= 0:
        port = code.ports[call.port]
        peer = at_row(port.peer, row)
        plain["peer"], plain["tag"] = (None if peer < 0 else peer), at_row(port.tag, row)
    parts = tuple(resolve_call(code, groups, row, part) for part in call.parts)
    _drop_root_only_buffers(plain, OPERATIONS[call.op], code.ranks[row])
    return ResolvedCall(
        op=call.op, rank=code.ranks[row], group=group, is_async=call.is_async, parts=parts, **plain
    )


def _varies(value: object) -> bool:
    """Whether a field may differ from one row to another."""
    if isinstance(value, BufferVector):
        return isinstance(value.index, np.ndarray) or _varies(value.shape)
    return any(map(_varies, value)) if isinstance(value, tuple) else isinstance(value, np.ndarray)


def _plain_value(value: object, row: int) -> object:
    if isinstance(value, np.ndarray):
        return value[row].item()
    if isinstance(value, BufferVector):
        return value.at(row)
    if isinstance(value, tuple):
        return tuple(_plain_value(v, row) for v in value)
    return value


def _drop_root_only_buffers(plain: CallFields, row: type[Operation], rank: int) -> None:
    """Away from the root, scatter has no input and gather no output; in-place calls keep their
    buffer.
    """
    if plain.get("root") == rank or plain.get("inputs") == plain.get("outputs"):
        return
    if row.gives == "root":
        plain["inputs"] = ()
    if row.gets == "root":
        plain["outputs"] = ()
