"""One-sided operations of symmetric memory: a rank reads or writes the memory of another rank, and
signals order these accesses.

torch.distributed._symmetric_memory of torch 2.13. A signal pad has a cell for each channel and
sender. `put_signal` waits until the cell is empty and fills it, `wait_signal` waits until it is
full and empties it (`CUDASymmetricMemoryOps.cu`: compare-and-swap 0 → 1, 1 → 0). A signal is
therefore a message without data, of which one may be sent before its receive, on every backend that
supports signals. `put` and `get` (`torch.ops.symm_mem.nvshmem_put`, `nvshmem_get`, `nccl_put`,
`nccl_get`) involve no call of the other rank. All four are kernels on the current stream.
"""

from __future__ import annotations

from pydantic import Field

from distsim.operations.core import colours
from distsim.operations.core.field_types import (
    ExpressionField,
    GroupField,
    StreamField,
    TensorField,
    expression_field,
)
from distsim.operations.core.operation_base import (
    BackendBinding,
    OperationHelp,
    PairOperation,
    WithDestination,
    WithSource,
)
from distsim.operations.core.resolved_call import (
    ResolvedCall,
    caller_not_in_group,
    first_reason,
    invalid_peer,
)

#: The tag of a signal on channel 0: tags of messages end below, so that the two never meet.
FIRST_SIGNAL_TAG = 1 << 32
#: Bytes of a cell of the signal pad (uint32).
SIGNAL_BYTES = 4

_CPU_ERROR = "SymmetricMemory does not support device type cpu"
_GPU_ONLY_BINDINGS = {
    "gloo": BackendBinding(refused=_CPU_ERROR),
    "nccl": BackendBinding(),
    "mpi": BackendBinding(refused=_CPU_ERROR),
}


def is_signal(tag: int) -> bool:
    """Is it the tag of a signal?"""
    return tag >= FIRST_SIGNAL_TAG


def tag_text(tag: int) -> str:
    """The text that distinguishes messages between two ranks: `tag 3`, of a signal `channel 0`;
    empty for tag 0.
    """
    return f"channel {tag - FIRST_SIGNAL_TAG}" if is_signal(tag) else f"tag {tag}" if tag else ""


class _OneSidedOperation(PairOperation):
    """What the four have in common."""

    bindings = _GPU_ONLY_BINDINGS

    group: GroupField = Field(
        default=None,
        description=(
            "Group of both ranks: `world`, an axis of the mesh, a list of axes, or a name from "
            "`groups` or new_group [default: `world`]."
        ),
        examples=["dp"],
    )
    #: The stream that is current at the call.
    on: StreamField = Field(
        default="",
        description=(
            "CUDA stream that is current at the call; `current` is the default stream. Only nccl "
            "uses it."
        ),
        examples=["comm"],
    )

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        return first_reason((caller_not_in_group(call), invalid_peer(call, call.peer)))


# --- data ---
class _RemoteAccessOperation(_OneSidedOperation):
    """``inputs`` is what is read, ``outputs`` what is written; `put` writes and `get` reads on the
    other rank.
    """

    kind = "remote"
    nccl_tests = "sendrecv_perf"

    tensor: TensorField = Field(
        description="Tensor to read: a name, a copy `name@index`, or an inline `{shape, dtype}`.",
        examples=["x"],
    )
    into: TensorField | None = Field(
        default=None,
        description=(
            "Tensor to write: on the other rank for a put, on this rank for a get [default: the "
            "tensor with the same name]."
        ),
        examples=["y@rank"],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        return (call.rank,) if call.peer is None else (call.rank, call.peer)

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        return first_reason((super().faults(call), _buffer_mismatch(call)))

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        return call.input_nbytes


def _buffer_mismatch(call: ResolvedCall) -> str | None:
    read, written = call.inputs[0], call.outputs[0]
    if (read.numel, read.dtype) == (written.numel, written.dtype):
        return None
    return (
        f"{call.op} reads {read.numel} {read.dtype} elements of {read.label}, but "
        f"{written.label} has {written.numel} {written.dtype} elements"
    )


_ORDERING_NOTE = (
    "The access is not ordered with accesses of the other rank; use a signal, a collective or a "
    "message for that. distsim assumes that the calls of one rank complete in order, even on "
    "several streams. It does not check that a put and its signal are on the same stream or on "
    "synchronised streams."
)


class PutOperation(WithDestination, _RemoteAccessOperation):
    """Write into the symmetric memory of another rank."""

    op = "put"
    gives = "all"
    colour = colours.SEND
    words = OperationHelp(
        signature="torch.ops.symm_mem.nvshmem_put(tensor, peer)",
        before=(
            "The tensor is in symmetric memory: every rank of the group has one of the same size."
        ),
        after="The other rank's tensor contains the content of this rank's tensor.",
        waits="Waits for no rank: the other rank does not take part.",
        example="- put: {tensor: x, dst: 1}\n  ranks: 0",
        notes=(
            _ORDERING_NOTE,
            (
                "torch supports this call only on GPUs, as a kernel on the current stream (NVSHMEM "
                "and NCCL 2.29)."
            ),
        ),
        torch="if rank == 0:\n    torch.ops.symm_mem.nvshmem_put(x, 1)",
    )


class GetOperation(WithSource, _RemoteAccessOperation):
    """Read from the symmetric memory of another rank."""

    op = "get"
    gets = "all"
    colour = colours.RECV
    words = OperationHelp(
        signature="torch.ops.symm_mem.nvshmem_get(tensor, peer)",
        before=(
            "The tensor is in symmetric memory: every rank of the group has one of the same size."
        ),
        after="This rank's tensor contains the content of the other rank's tensor.",
        waits="Waits for no rank: the other rank does not take part.",
        example="- get: {tensor: x, src: 0}\n  ranks: 1",
        notes=(
            _ORDERING_NOTE,
            (
                "torch supports this call only on GPUs, as a kernel on the current stream (NVSHMEM "
                "and NCCL 2.29)."
            ),
        ),
        torch="if rank == 1:\n    torch.ops.symm_mem.nvshmem_get(x, 0)",
    )


# --- signals ---
class _SignalOperation(_OneSidedOperation):
    kind = "p2p"
    signals = True

    channel: ExpressionField = Field(
        default_factory=lambda: expression_field(0),
        json_schema_extra={"default": 0},
        description="Cell of the signal pad, 0 or more. Signals on one channel match in order.",
        examples=[1],
    )

    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Who signals, who waits."""
        if call.peer is None:
            return (call.rank,)
        return (call.rank, call.peer) if cls.direction == "send" else (call.peer, call.rank)

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        negative = (
            f"a channel must not be negative, found {call.tag - FIRST_SIGNAL_TAG}"
            if call.tag < FIRST_SIGNAL_TAG
            else None
        )
        return first_reason((super().faults(call), negative))

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """A cell of the pad: 4 bytes."""
        return SIGNAL_BYTES


_SIGNAL_PAD_NOTE = (
    "Each sender has its own cell on each channel. distsim does not limit the number of channels; "
    "in torch, get_signal_pad_size() limits the cells of all ranks of the group."
)


class PutSignalOperation(WithDestination, _SignalOperation):
    """Signal another rank on a channel."""

    op = "put_signal"
    direction = "send"
    colour = colours.SEND
    words = OperationHelp(
        signature="_SymmetricMemory.put_signal(dst_rank, channel=0, timeout_ms=0)",
        before="The other rank has one cell for each sender and channel. This cell is empty.",
        after=(
            "The cell is full. The other rank can read the data that this rank's stream put before."
        ),
        waits=(
            "Waits until the other rank has taken the previous signal, if that is still in the "
            "cell."
        ),
        example="- put_signal: {dst: 1}\n  ranks: 0\n- wait_signal: {src: 0}\n  ranks: 1",
        notes=(_SIGNAL_PAD_NOTE, "The first signal never waits. The stream blocks, not the host."),
        torch="hdl = symm_mem.rendezvous(x, group)\nif rank == 0:\n    hdl.put_signal(1)",
    )


class WaitSignalOperation(WithSource, _SignalOperation):
    """Wait for the signal of another rank on a channel."""

    op = "wait_signal"
    direction = "recv"
    colour = colours.WAIT
    words = OperationHelp(
        signature="_SymmetricMemory.wait_signal(src_rank, channel=0, timeout_ms=0)",
        before="The cell may be empty or full.",
        after=(
            "The cell is empty again. This rank can read the data that the sender put before its "
            "signal."
        ),
        waits="Waits until the other rank has signalled on this channel.",
        example="- put_signal: {dst: 1}\n  ranks: 0\n- wait_signal: {src: 0}\n  ranks: 1",
        notes=(
            _SIGNAL_PAD_NOTE,
            (
                "If the signal never arrives, the stream spins forever; NCCL's watchdog does not "
                "detect this."
            ),
        ),
        torch="hdl = symm_mem.rendezvous(x, group)\nif rank == 1:\n    hdl.wait_signal(0)",
    )


__all__ = [
    "SIGNAL_BYTES",
    "FIRST_SIGNAL_TAG",
    "GetOperation",
    "PutOperation",
    "PutSignalOperation",
    "WaitSignalOperation",
    "is_signal",
    "tag_text",
]
