"""The calls of one class of ranks, stored once: call sites, buffers, channels and calls.

Key idea: ranks whose selectors and repeat counts agree share one `SharedCode`, a list of calls.
A rank is a code and a row; where ranks differ (a peer, a shape), the call holds one vector with an
entry per row instead of one call per rank. Ten thousand repeats on a thousand ranks therefore cost
little. `resolve_call` turns a call and a row into a plain `ResolvedCall`.

Nothing here knows the other codes of the program: that is `distsim.program.model.Program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from distsim.common.expressions import Expression
from distsim.common.field_parsing import PerRank
from distsim.common.records import dataclass
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS

T = TypeVar("T")
IntVector = NDArray[np.int64]
BoolVector = NDArray[np.bool_]
#: One number for all ranks of a code, or one per rank.
Vec = int | IntVector


#: The value of an expression: one for all ranks, or one per rank.
RankValues = int | float | NDArray[np.int64] | NDArray[np.float64] | NDArray[np.bool_]
#: What a numeric field may hold before it is evaluated.
FieldValue = Expression | PerRank[object] | RankValues
#: Names that expressions use, with their values.
NameBindings = Mapping[str, RankValues]
#: Vectors or plain values for `ResolvedCall`, by the name of its field.
CallFields = dict[str, Any]

#: ``CodeCall.group`` and ``CodeCall.endpoint`` of calls that have none.
NO_INDEX = -1
#: ``ChannelEndpoint.peer`` of a receive that accepts any source.
ANY_SOURCE = -1


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
    """The place of a step in its file, and the name of its operation there.

    ``via``: of a captured call, the library code that made it, as in `CallOrigin`.
    """

    file: str
    line: int
    column: int
    op: str
    via: str = ""

    def place(self, rank: int | None = None) -> SourceLocation:
        """The source location, with the rank if it matters."""
        return SourceLocation(self.file, self.line, self.column, self.op, rank)


@dataclass(frozen=True, slots=True, eq=False)
class BufferVector:
    """A `TensorBuffer` for every rank of a code: shape items and copy index may differ by rank."""

    name: str
    index: Vec
    shape: tuple[Vec, ...]
    dtype: str

    def at(self, row: int) -> TensorBuffer:
        """The buffer of one row."""
        shape = tuple(at_row(size, row) for size in self.shape)
        return TensorBuffer(self.name, at_row(self.index, row), shape, self.dtype)


class ChannelEndpoint(NamedTuple):
    """A channel end as the ranks of a code name it: ``peer`` is a global rank or `ANY_SOURCE`.

    ``group`` indexes `SharedCode.groups`.
    """

    peer: Vec
    group: int
    tag: Vec


class InvalidRows(NamedTuple):
    """The ranks of a code for which a call breaks the rules of torch.distributed, and why.

    ``rows``: a mask over the rows of the code. ``code``: the finding that reports it.
    """

    rows: BoolVector
    code: str
    message: str

    @property
    def text(self) -> str:
        """Code and message, as the error of a rank shows them."""
        return f"{self.code} {self.message}"


@dataclass(frozen=True, slots=True, eq=False)
class CodeCall:
    """One call of a code. Positions that make the same call hold the same object.

    - ``endpoint`` indexes `SharedCode.endpoints` (p2p) and ``group`` indexes `SharedCode.groups`;
      `NO_INDEX` if there is none.
    - ``signature`` numbers the properties on which both sides must agree; two calls agree if their
      numbers are equal, over the whole program (p2p: element count and dtype; collectives: the
      result of `agreement` of the operation).
    - ``waits``: distances back to the calls whose requests this call waits for (1 = the call
      before).
    - ``again``: distances back to requests that an earlier call has already waited for
      (``invalid`` reports them too).
    - ``handled``: the request is bound to a handle. Otherwise it is dropped, and no call can wait
      for it.
    - ``drops``: distances back to requests whose handle this call overwrites (as Python drops the
      old value of a rebound name).
    - ``invalid``: the ranks for which the call breaks the rules. The backend decides what they do.
    - ``fields``: further vectors or plain values for `ResolvedCall`, by the name of its field.
    """

    op: str
    site: int
    is_async: bool = False
    group: int = NO_INDEX
    endpoint: int = NO_INDEX
    nbytes: Vec = 0
    signature: Vec = -1
    waits: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    handled: bool = False
    drops: tuple[int, ...] = ()
    parts: tuple[CodeCall, ...] = ()
    invalid: InvalidRows | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        """The stream that is current at the call; "" for the default stream and for host work."""
        name = str(self.fields.get("queue") or "")
        return "" if name == "host" else name


class SplitFields(NamedTuple):
    """The fields of ``call``: those with one value for all rows, and the names of the others."""

    call: CodeCall
    fixed: CallFields
    varying: tuple[str, ...]


@dataclass(eq=False)
class SharedCode:
    """A list of calls shared by ``ranks`` (ascending; row i of every vector belongs to ranks[i]).

    ``guards[k]`` is None, or a mask over rows: the ranks that make call k at all (a selector that
    uses a loop index). ``iterations``: positions at which the training iterations start, followed
    by the end of the last iteration.
    """

    ranks: tuple[int, ...]
    calls: list[CodeCall]
    endpoints: list[ChannelEndpoint]
    groups: list[Vec]  # index -> group id of each row
    guards: list[BoolVector | None] | None = None
    iterations: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> list[int]:
        """Trace row of each call among its rank's rows, followed by their number.

        A batch has one row for itself, then one for each part.
        """
        return list(accumulate((1 + len(c.parts) for c in self.calls), initial=0))

    def distinct_calls(self, parts: bool = True) -> Iterator[CodeCall]:
        """Every call object once, in order of first use; parts follow their batch."""
        for call in self._distinct:
            yield call
            if parts:
                yield from call.parts

    @cached_property
    def _distinct(self) -> list[CodeCall]:
        return list({id(call): call for call in self.calls}.values())

    def split_fields(self, call: CodeCall) -> SplitFields:
        """Fields of a call (or part) with one value for all rows, and the names of the others."""
        split = self._split_fields.get(id(call))
        # The cache goes by id(), because comparing calls is slow. An entry keeps its call alive; a
        # call that was not kept alive elsewhere might otherwise give its id to another one.
        if split is None or split.call is not call:
            split = self._split_fields[id(call)] = _split_fields(call)
        return split

    @cached_property
    def _split_fields(self) -> dict[int, SplitFields]:
        return {}

    def call_count(self, times: IntVector | None = None) -> int:
        """Number of calls of all its ranks, where each rank counts ``times[rank]`` times."""
        if times is None:
            weights = np.ones(len(self.ranks), dtype=np.int64)
        else:
            weights = times[list(self.ranks)]
        total = int(weights.sum())
        if self.guards is None:
            return len(self.calls) * total
        return sum(total if mask is None else int(weights[mask].sum()) for mask in self.guards)

    def positions(self, row: int) -> Iterator[int]:
        """The positions of the calls that this row really makes, in order."""
        if self.guards is None:
            yield from range(len(self.calls))
            return
        for position, mask in enumerate(self.guards):
            if mask is None or mask[row]:
                yield position


def _split_fields(call: CodeCall) -> SplitFields:
    varying = tuple([name for name, value in call.fields.items() if _varies(value)])
    fixed = {
        name: _plain_value(value, 0) for name, value in call.fields.items() if name not in varying
    }
    return SplitFields(call, fixed, varying)


def resolve_call(
    code: SharedCode, groups: Sequence[RankGroup], row: int, call: CodeCall
) -> ResolvedCall:
    """The plain call of one row of a code; ``groups`` are all groups of the program."""
    rank = code.ranks[row]
    split = code.split_fields(call)
    plain: CallFields = {
        **split.fixed,
        **{name: _plain_value(call.fields[name], row) for name in split.varying},
    }
    group = groups[0] if call.group < 0 else groups[at_row(code.groups[call.group], row)]
    if call.endpoint >= 0:
        endpoint = code.endpoints[call.endpoint]
        peer = at_row(endpoint.peer, row)
        plain["peer"] = None if peer < 0 else peer
        plain["tag"] = at_row(endpoint.tag, row)
    parts = tuple(resolve_call(code, groups, row, part) for part in call.parts)
    _drop_root_only_buffers(plain, OPERATIONS[call.op], rank)
    return ResolvedCall(
        op=call.op, rank=rank, group=group, is_async=call.is_async, parts=parts, **plain
    )


def _varies(value: object) -> bool:
    """Whether a field may differ from one row to another."""
    if isinstance(value, BufferVector):
        return isinstance(value.index, np.ndarray) or _varies(value.shape)
    if isinstance(value, tuple):
        return any(map(_varies, value))
    return isinstance(value, np.ndarray)


def _plain_value(value: object, row: int) -> object:
    if isinstance(value, np.ndarray):
        return value[row].item()
    if isinstance(value, BufferVector):
        return value.at(row)
    if isinstance(value, tuple):
        return tuple(_plain_value(v, row) for v in value)
    return value


def _drop_root_only_buffers(plain: CallFields, operation: type[Operation], rank: int) -> None:
    """Away from the root, scatter has no input and gather has no output.

    In-place calls keep their buffer.
    """
    if plain.get("root") == rank or plain.get("inputs") == plain.get("outputs"):
        return
    if operation.gives == "root":
        plain["inputs"] = ()
    if operation.gets == "root":
        plain["outputs"] = ()
