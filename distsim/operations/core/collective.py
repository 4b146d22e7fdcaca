"""Base classes of collectives: their common fields, their members, and helpers of their torch
calls.
"""

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import ClassVar

from pydantic import Field, StrictBool, model_validator

from distsim.operations.core.field_types import (
    ExpressionField,
    GroupField,
    HandleField,
    ReduceOpField,
    StreamField,
    TensorField,
)
from distsim.operations.core.operation_base import GroupRanks, InputPart, Operation, RankScope
from distsim.operations.core.resolved_call import (
    ResolvedCall,
    TensorBuffer,
    caller_not_in_group,
    differing_dtypes,
    first_reason,
    root_not_in_group,
)
from distsim.operations.core.torch_protocols import TensorLookup, TorchTensor


class CollectiveOperation(Operation):
    """All ranks of the group make the call. The k-th call of one rank matches the k-th call of
    every other rank.
    """

    kind = "collective"
    gives: ClassVar[RankScope] = "all"
    gets: ClassVar[RankScope] = "all"

    group: GroupField = Field(
        default=None,
        description=(
            "Group that makes the call: `world`, an axis of the mesh, a list of axes, or a name "
            "from `groups` or new_group [default: `world`]."
        ),
        examples=["dp"],
    )
    is_async: StrictBool = Field(
        default=False,
        alias="async",
        description="Start the collective without waiting for it; `as` names the request.",
        examples=[True],
    )
    handle: HandleField = Field(
        default=None,
        alias="as",
        description="Name of the request, for a later `wait`; `name@index` inside a repeat.",
        examples=["h"],
    )
    #: The stream that is current at the call (`torch.cuda.stream`). It only matters on backends
    #: with streams (nccl).
    on: StreamField = Field(
        default="",
        description=(
            "CUDA stream that is current at the call; `current` is the default stream. Only nccl "
            "uses it."
        ),
        examples=["comm"],
    )

    @model_validator(mode="after")
    def _handle_needs_async(self) -> "CollectiveOperation":
        if self.handle is not None and not self.is_async:
            raise ValueError(
                f"`as` needs `async: true` in {self.op}: without it there is no request to wait for"
            )
        return self

    @classmethod
    def share(cls, call: ResolvedCall) -> TensorBuffer | None:
        """The buffer whose element count all ranks agree on."""
        buffers = call.inputs or call.outputs
        return buffers[0] if buffers else None

    @classmethod
    def numel(cls, call: ResolvedCall) -> Hashable:
        """The element count that all ranks agree on, a tuple of them where the parts are uneven."""
        share = cls.share(call)
        return None if share is None else share.numel

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that take part (`Operation.parties`)."""
        return call.group.ranks

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """What all parties must have in common (`Operation.agreement`)."""
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
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why no backend accepts this call, or None (`Operation.faults`)."""
        root = root_not_in_group(call, cls.root_field) if cls.root_field else None
        return first_reason(
            (
                caller_not_in_group(call),
                root,
                differing_dtypes((*call.inputs, *call.outputs)),
                cls.misfits(call),
            )
        )

    @classmethod
    def misfits(cls, call: ResolvedCall) -> str | None:
        """Why the buffers of one rank don't fit each other."""
        return None

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them (`Operation.nbytes`)."""
        share = cls.share(call)
        return share.nbytes if share else 0


class InPlaceCollective(CollectiveOperation):
    """The buffer is both input and output."""

    tensor: TensorField = Field(
        description=(
            "Tensor that the collective reads and overwrites: a name, a copy `name@index`, or an "
            "inline `{shape, dtype}`."
        ),
        examples=["x"],
    )


class ReducingCollective(CollectiveOperation):
    """Contributions are combined by ``op`` (torch's argument; ``reduce_op`` in records)."""

    reduces = True

    reduce_op: ReduceOpField = Field(
        default="sum",
        alias="op",
        description=(
            "Reduction: sum, avg, min, max or another name of ReduceOp; `ReduceOp.SUM` is also "
            "accepted."
        ),
        examples=["avg"],
    )


class FromRootCollective(CollectiveOperation):
    """``src`` gives; torch takes a global rank or, as ``group_src``, a group rank."""

    root_field = "src"
    gives = "root"

    src: ExpressionField = Field(
        default=None,
        description="Global rank that provides the data.",
        examples=[0],
    )
    group_src: ExpressionField = Field(
        default=None,
        description="Group rank that provides the data.",
        examples=[0],
    )

    @model_validator(mode="after")
    def _one_root(self) -> "FromRootCollective":
        require_one_root(self, self.src, self.group_src)
        return self

    @classmethod
    def takes_from(cls, n: int, root: int, me: int) -> GroupRanks:
        """Group ranks whose data end in the output of ``me``."""
        return frozenset() if me == root else frozenset((root,))

    @classmethod
    def gives_to(cls, n: int, root: int, me: int) -> GroupRanks:
        """Group ranks whose output contains data of ``me``."""
        return None if me == root else frozenset()


class ToRootCollective(CollectiveOperation):
    """``dst`` gets; torch takes a global rank or, as ``group_dst``, a group rank."""

    root_field = "dst"
    gets = "root"

    dst: ExpressionField = Field(
        default=None,
        description="Global rank that gets the result.",
        examples=["(rank + 1) % world_size"],
    )
    group_dst: ExpressionField = Field(
        default=None,
        description="Group rank that gets the result.",
        examples=["group_rank + 1"],
    )

    @model_validator(mode="after")
    def _one_root(self) -> "ToRootCollective":
        require_one_root(self, self.dst, self.group_dst)
        return self

    @classmethod
    def takes_from(cls, n: int, root: int, me: int) -> GroupRanks:
        """Group ranks whose data end in the output of ``me``."""
        return None if me == root else frozenset()

    @classmethod
    def gives_to(cls, n: int, root: int, me: int) -> GroupRanks:
        """Group ranks whose output contains data of ``me``."""
        return frozenset() if me == root else frozenset((root,))


def require_one_root(row: Operation, by_rank: object, by_group_rank: object) -> None:
    """Raise ValueError unless one of the two is given (or none, where torch has a default)."""
    op, word = row.op, row.root_field
    if by_rank is not None and by_group_rank is not None:
        raise ValueError(
            f"expected `{word}` (a global rank) or `group_{word}` (a group rank) in {op}, "
            "found both"
        )
    if by_rank is None and by_group_rank is None and not row.root_optional:
        raise ValueError(
            f"expected `{word}` (a global rank) or `group_{word}` (a group rank) in {op}"
        )


def part_of_every_rank(n: int, part: int = 0) -> tuple[InputPart, ...]:
    """Part ``part`` of every rank's input."""
    return tuple(InputPart(r, part) for r in range(n))


def torch_reduce_op(dist: ModuleType, call: ResolvedCall) -> object:
    """torch's ReduceOp."""
    return getattr(dist.ReduceOp, (call.reduce_op or "sum").upper())


def torch_tensor_list(
    tensors: TensorLookup,
    buffers: Sequence[TensorBuffer],
    n: int,
    splits: Sequence[int] | None = None,
) -> list[TorchTensor]:
    """torch's list argument: the listed tensors, or the rows of the one tensor (views: torch writes
    into it).
    """
    if splits is not None:
        return list(tensors[buffers[0]].split(list(splits)))
    if len(buffers) == 1 and buffers[0].shape and buffers[0].shape[0] == n:
        return list(tensors[buffers[0]].unbind(0))
    return [tensors[b] for b in buffers]
