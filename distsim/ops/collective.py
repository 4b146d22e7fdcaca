"""What all collectives share: their common fields, who takes part, and the helpers of their torch calls."""

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import ClassVar

from pydantic import Field, StrictBool, model_validator

from distsim.ops.base import Op, Peers, Share, Source
from distsim.ops.fields import Expr, GroupField, HandleField, ReduceOpField, StreamField, TensorField
from distsim.ops.records import Buffer, Call, first, foreign_root, stranger, unlike_dtypes
from distsim.ops.torch_types import Memory, Tensor


class Collective(Op):
    """All ranks of the group make the call, the k-th of one rank with the k-th of every other."""

    kind = "collective"
    gives: ClassVar[Share] = "all"
    gets: ClassVar[Share] = "all"

    group: GroupField = None
    is_async: StrictBool = Field(default=False, alias="async")
    handle: HandleField = Field(default=None, alias="as")
    #: The stream that is current at the call (`torch.cuda.stream`); means something where there are streams (nccl).
    on: StreamField = ""

    @model_validator(mode="after")
    def _handle_needs_async(self) -> "Collective":
        if self.handle is not None and not self.is_async:
            raise ValueError(f"expected `async: true` beside `as`: {self.op} without it has no request to wait for")
        return self

    @classmethod
    def share(cls, call: Call) -> Buffer | None:
        """The buffer whose element count all ranks agree on."""
        buffers = call.inputs or call.outputs
        return buffers[0] if buffers else None

    @classmethod
    def numel(cls, call: Call) -> Hashable:
        """The element count that all ranks agree on, a tuple of them where the parts are uneven."""
        share = cls.share(call)
        return None if share is None else share.numel

    @classmethod
    def parties(cls, call: Call) -> tuple[int, ...]:
        return call.group.ranks

    @classmethod
    def agreement(cls, call: Call) -> dict[str, Hashable]:
        share = cls.share(call)
        agreed: dict[str, Hashable] = {"op": cls.op}
        if share is not None:
            agreed |= {"numel": cls.numel(call), "dtype": share.dtype}
        if cls.reduces:
            agreed["reduce_op"] = call.reduce_op
        if cls.root_field:
            agreed["root"] = call.root
        return agreed

    @classmethod
    def faults(cls, call: Call) -> str | None:
        root = foreign_root(call, cls.root_field) if cls.root_field else None
        return first((stranger(call), root, unlike_dtypes((*call.inputs, *call.outputs)), cls.misfits(call)))

    @classmethod
    def misfits(cls, call: Call) -> str | None:
        """Why the buffers of one rank don't fit each other."""
        return None

    @classmethod
    def nbytes(cls, call: Call) -> int:
        share = cls.share(call)
        return share.nbytes if share else 0


class InPlace(Collective):
    """The buffer is both input and output."""

    tensor: TensorField


class Reducing(Collective):
    """Contributions are combined by ``op`` (torch's argument; ``reduce_op`` in records)."""

    reduces = True

    reduce_op: ReduceOpField = Field(default="sum", alias="op")


class FromRoot(Collective):
    """``src`` gives; torch takes a global rank or, as ``group_src``, a group rank."""

    root_field = "src"
    gives = "root"

    src: Expr = None
    group_src: Expr = None

    @model_validator(mode="after")
    def _one_root(self) -> "FromRoot":
        one_root(self, self.src, self.group_src)
        return self

    @classmethod
    def takes_from(cls, n: int, root: int, me: int) -> Peers:
        return frozenset() if me == root else frozenset((root,))

    @classmethod
    def gives_to(cls, n: int, root: int, me: int) -> Peers:
        return None if me == root else frozenset()


class ToRoot(Collective):
    """``dst`` gets; torch takes a global rank or, as ``group_dst``, a group rank."""

    root_field = "dst"
    gets = "root"

    dst: Expr = None
    group_dst: Expr = None

    @model_validator(mode="after")
    def _one_root(self) -> "ToRoot":
        one_root(self, self.dst, self.group_dst)
        return self

    @classmethod
    def takes_from(cls, n: int, root: int, me: int) -> Peers:
        return None if me == root else frozenset()

    @classmethod
    def gives_to(cls, n: int, root: int, me: int) -> Peers:
        return frozenset() if me == root else frozenset((root,))


def one_root(row: Op, by_rank: object, by_group_rank: object) -> None:
    """Raise ValueError unless one of the two is given (or none, where torch has a default)."""
    op, word = row.op, row.root_field
    if by_rank is not None and by_group_rank is not None:
        raise ValueError(f"expected `{word}` (a global rank) or `group_{word}` (a group rank) in {op}, found both")
    if by_rank is None and by_group_rank is None and not row.root_optional:
        raise ValueError(f"expected `{word}` (a global rank) or `group_{word}` (a group rank) in {op}")


def everyone(n: int, part: int = 0) -> tuple[Source, ...]:
    """Part ``part`` of every rank's input."""
    return tuple(Source(r, part) for r in range(n))


def op_of(dist: ModuleType, call: Call) -> object:
    """torch's ReduceOp."""
    return getattr(dist.ReduceOp, (call.reduce_op or "sum").upper())


def torch_list(tensors: Memory, buffers: Sequence[Buffer], n: int, splits: Sequence[int] | None = None) -> list[Tensor]:
    """torch's list argument: the listed tensors, or the rows of the one tensor (views: torch writes into it)."""
    if splits is not None:
        return list(tensors[buffers[0]].split(list(splits)))
    if len(buffers) == 1 and buffers[0].shape and buffers[0].shape[0] == n:
        return list(tensors[buffers[0]].unbind(0))
    return [tensors[b] for b in buffers]
