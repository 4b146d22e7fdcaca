"""Messages between two ranks: send, recv, isend, irecv, and the batch of them."""

from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import ClassVar

from pydantic import Field, model_validator

from distsim.operations.core import colours
from distsim.operations.core.backend_bindings import NCCL_DTYPE_ERROR
from distsim.operations.core.field_types import (
    ExpressionField,
    GroupField,
    HandleField,
    StreamField,
    TensorField,
    expression_field,
)
from distsim.operations.core.operation_base import (
    BackendBinding,
    Operation,
    OperationHelp,
    PairOperation,
    WithDestination,
)
from distsim.operations.core.resolved_call import (
    ResolvedCall,
    caller_not_in_group,
    first_reason,
    invalid_peer,
)
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork


class MessageOperation(PairOperation):
    """What the four have in common."""

    kind = "p2p"
    nccl_tests = "sendrecv_perf"
    bindings = {
        "gloo": BackendBinding(gpu=False),
        "nccl": BackendBinding(dtype_text=NCCL_DTYPE_ERROR),
        "mpi": BackendBinding(),
    }

    tensor: TensorField = Field(
        description=(
            "Tensor to send or to receive into: a name, a copy `name@index`, or an inline "
            "`{shape, dtype}`."
        ),
        examples=["x"],
    )
    group: GroupField = Field(
        default=None,
        description=(
            "Group of both ranks: `world`, an axis of the mesh, a list of axes, or a name from "
            "`groups` or new_group [default: `world`]."
        ),
        examples=["dp"],
    )
    tag: ExpressionField = Field(
        default_factory=lambda: expression_field(0),
        json_schema_extra={"default": 0},
        description=(
            "Tag that distinguishes messages between two ranks, from 0 to 2**31 - 1; nccl ignores "
            "it."
        ),
        examples=[7],
    )
    #: The stream that is current at the call; of a batch, the batch's own counts.
    on: StreamField = Field(
        default="",
        description=(
            "CUDA stream that is current at the call; `current` is the default stream. Only nccl "
            "uses it."
        ),
        examples=["comm"],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Sender, receiver; a receive from any source knows only itself."""
        if call.peer is None:
            return (call.rank,)
        return (call.rank, call.peer) if cls.direction == "send" else (call.peer, call.rank)

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """What all parties must have in common (`Operation.agreement`)."""
        buffer = (call.inputs or call.outputs)[0]
        return {"numel": buffer.numel, "dtype": buffer.dtype}

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why no backend accepts this call, or None (`Operation.faults`)."""
        return first_reason(
            (
                caller_not_in_group(call),
                invalid_peer(call, call.peer),
                invalid_peer(call, call.assume_src),
                _negative_tag(call.tag),
            )
        )

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them (`Operation.nbytes`)."""
        return (call.inputs or call.outputs)[0].nbytes

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Call torch's function (`Operation.torch_call`)."""
        buffer = (call.inputs or call.outputs)[0]
        return getattr(dist, cls.op)(tensors[buffer], call.peer, group=group, tag=call.tag)


def _negative_tag(tag: int) -> str | None:
    return f"a tag must not be negative, found {tag}" if tag < 0 else None


class _SendingOperation(WithDestination, MessageOperation):
    direction = "send"
    gives = "all"


class _ReceivingOperation(MessageOperation):
    direction = "recv"
    gets = "all"

    src: ExpressionField = Field(
        default=None,
        description="Global rank of the sender [default: any rank].",
        examples=[0],
    )
    group_src: ExpressionField = Field(
        default=None,
        description="Group rank of the sender.",
        examples=[0],
    )
    assume_src: ExpressionField = Field(
        default=None,
        description=(
            "For a receive from any source: the sender that the program expects. A message from "
            "another sender is then a race (DS401)."
        ),
        examples=[1],
    )

    @model_validator(mode="after")
    def _at_most_one_peer(self) -> "_ReceivingOperation":
        if self.src is not None and self.group_src is not None:
            raise ValueError(
                f"expected `src` (a global rank) or `group_src` (a group rank) in {self.op}, "
                "found both"
            )
        if self.assume_src is not None and not (self.src is None and self.group_src is None):
            raise ValueError(
                "`assume_src` is only valid for a receive from any source, without `src` and "
                "`group_src`"
            )
        return self


_NCCL_TAGS_NOTE = (
    "nccl ignores tags: it matches the messages from one rank to another in the order of the calls."
)


class SendOperation(_SendingOperation):
    """A blocking send."""

    op = "send"
    torch_name = "send"
    colour = colours.SEND
    words = OperationHelp(
        signature="send(tensor, dst=None, group=None, tag=0, group_dst=None)",
        before="This rank has the tensor.",
        after="The receiver has a copy of the tensor; this rank's tensor is unchanged.",
        waits=(
            "Waits until the receiver calls recv. Some backends buffer small messages and return "
            "earlier."
        ),
        example="- send: {tensor: x, dst: 1}\n  ranks: 0",
        notes=(
            (
                "gloo always waits for the receive. mpi and nccl buffer small messages; do not "
                "rely on that."
            ),
            _NCCL_TAGS_NOTE,
        ),
        torch=("if rank == 0:\n    dist.send(x, dst=1)"),
    )


class RecvOperation(_ReceivingOperation):
    """A blocking receive, from one rank or from any rank."""

    op = "recv"
    torch_name = "recv"
    first_field = "tensor"
    colour = colours.RECV
    words = OperationHelp(
        signature="recv(tensor, src=None, group=None, tag=0, group_src=None)",
        before="The tensor has the element count and the dtype of the message.",
        after="The tensor contains the message.",
        waits=(
            "Waits until the message of the sender has arrived. Without src, a message from any "
            "rank of the group matches."
        ),
        example="- recv: {tensor: x, src: 0}\n  ranks: 1",
        notes=(
            "nccl does not support receives from any source.",
            "gloo does not detect a message that is too short.",
            _NCCL_TAGS_NOTE,
        ),
        torch=("if rank == 1:\n    dist.recv(x, src=0)"),
    )


class IsendOperation(_SendingOperation):
    """A send that returns a request."""

    op = "isend"
    torch_name = "isend"
    nonblocking = True
    colour = colours.SEND
    words = OperationHelp(
        signature="isend(tensor, dst=None, group=None, tag=0, group_dst=None) -> Work",
        before="This rank has the tensor.",
        after="After `wait`: the message has been taken, and the tensor may be overwritten.",
        waits=(
            "Does not wait: it only starts the message. The `wait` on its handle waits for the "
            "receiver."
        ),
        example="- isend: {tensor: x, dst: 1, as: h}\n  ranks: 0",
        notes=(
            "gloo cancels an isend if its Work is dropped before the receive is posted.",
            _NCCL_TAGS_NOTE,
        ),
        torch=("if rank == 0:\n    h = dist.isend(x, dst=1)"),
    )
    handle: HandleField = Field(
        default=None,
        alias="as",
        description="Name of the request, for a later `wait`; `name@index` inside a repeat.",
        examples=["h"],
    )


class IrecvOperation(_ReceivingOperation):
    """A receive that returns a request."""

    op = "irecv"
    torch_name = "irecv"
    first_field = "tensor"
    nonblocking = True
    colour = colours.RECV
    words = OperationHelp(
        signature="irecv(tensor, src=None, group=None, tag=0, group_src=None) -> Work",
        before="The tensor has the element count and the dtype of the message.",
        after=(
            "After `wait`: the tensor contains the message. Before that, it must be neither read "
            "nor written."
        ),
        waits=(
            "Does not wait: it only starts the receive. The `wait` on its handle waits for the "
            "message."
        ),
        example="- irecv: {tensor: x, src: 0, as: h}\n  ranks: 1",
        notes=(
            "gloo cancels an irecv if its Work is dropped before the message arrives.",
            _NCCL_TAGS_NOTE,
        ),
        torch=("if rank == 1:\n    h = dist.irecv(x, src=0)"),
    )
    handle: HandleField = Field(
        default=None,
        alias="as",
        description="Name of the request, for a later `wait`; `name@index` inside a repeat.",
        examples=["h"],
    )


_BATCHABLE_OPERATIONS: dict[str, type[Operation]] = {
    "isend": IsendOperation,
    "irecv": IrecvOperation,
}


class BatchIsendIrecvOperation(Operation):
    """``ops`` are isend and irecv steps; the loader turns them into `Step`s."""

    op = "batch_isend_irecv"
    kind: ClassVar = "batch"
    torch_name = "batch_isend_irecv"
    nonblocking = True
    colour = colours.SEND
    words = OperationHelp(
        signature=(
            "batch_isend_irecv([P2POp(isend | irecv, tensor, peer, group, tag), …]) -> list[Work]"
        ),
        before="Each isend has its tensor, and each irecv has space for its message.",
        after="After `wait`: all messages of the batch have been transferred.",
        waits="Does not wait if it has a handle. Without a handle, it waits for all its messages.",
        example=(
            "- batch_isend_irecv:\n"
            "    ops:\n"
            "      - isend: {tensor: x, dst: (rank + 1) % world_size}\n"
            "      - irecv: {tensor: y, src: (rank - 1) % world_size}"
        ),
        notes=(
            "nccl runs a batch as one unit: its messages complete together.",
            (
                "If a batch is the first call on a group, nccl requires that all ranks of the "
                "group call it."
            ),
            (
                "All messages of a batch use the same group. A batch cannot contain a receive "
                "from any source."
            ),
        ),
        torch=(
            "sent = dist.P2POp(dist.isend, x, (rank + 1) % world_size)\n"
            "received = dist.P2POp(dist.irecv, y, (rank - 1) % world_size)\n"
            "for work in dist.batch_isend_irecv([sent, received]):\n"
            "    work.wait()"
        ),
    )

    ops: tuple[object, ...] = Field(
        description="The isend and irecv steps of the batch, in list order.",
        examples=[[{"isend": {"tensor": "x", "dst": 1}}]],
    )
    handle: HandleField = Field(
        default=None,
        alias="as",
        description="Name of the request, for a later `wait`; `name@index` inside a repeat.",
        examples=["h"],
    )
    on: StreamField = Field(
        default="",
        description=(
            "CUDA stream that is current at the call; `current` is the default stream. Only nccl "
            "uses it."
        ),
        examples=["comm"],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that take part (`Operation.parties`)."""
        return tuple(sorted({call.rank} | {p.peer for p in call.parts if p.peer is not None}))

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why no backend accepts this call, or None (`Operation.faults`)."""
        if not call.parts:
            return "the batch contains no messages (torch raises IndexError)"
        if any(part.group.id != call.parts[0].group.id for part in call.parts):
            return "all messages of a batch must use the same group"
        return first_reason(_BATCHABLE_OPERATIONS[part.op].faults(part) for part in call.parts)

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them (`Operation.nbytes`)."""
        return sum((p.inputs or p.outputs)[0].nbytes for p in call.parts)

    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Returns a list of Works: one per message, or one for all (nccl)."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(
                    getattr(dist, p.op), tensors[(p.inputs or p.outputs)[0]], p.peer, group, p.tag
                )
                for p in call.parts
            ]
        )
