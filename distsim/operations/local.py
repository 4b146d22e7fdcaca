"""What a rank does by itself: compute, assign, synchronize, sleep, wait, exit, fail."""

from collections.abc import Sequence
from types import ModuleType

from pydantic import Field, StrictInt, field_validator, model_validator

from distsim.operations.core import colours
from distsim.operations.core.field_types import (
    ByteCountField,
    DtypeField,
    DurationField,
    ExpressionField,
    FlopsField,
    ReferenceListField,
    StreamField,
    TensorField,
    ValueField,
    WaitField,
    expression_field,
    parse_stream,
)
from distsim.operations.core.kernel_work import WorkField
from distsim.operations.core.operation_base import Operation, OperationHelp
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork


class LocalOperation(Operation):
    """Involves no other rank and sends nothing."""

    kind = "local"


class ComputeOperation(LocalOperation):
    """Work of one rank, given as a time or as FLOP and bytes."""

    op = "compute"
    first_field = "time"
    colour = colours.LOCAL
    words = OperationHelp(
        signature=(
            "compute(time | flops and bytes, kernels, dtype | work, name, reads, writes, adds, on)"
        ),
        before="The tensors in `reads` and `adds` contain the input of the work.",
        after=(
            "The tensors in `writes` have new content, and those in `adds` have grown; their "
            "values are unknown."
        ),
        waits=(
            "Waits for no rank. On nccl, the host only launches the work; it runs in the order of "
            "its stream."
        ),
        example="- compute: {name: forward, time: 3 ms, reads: [x], writes: [y]}",
        notes=(
            (
                "Give the time, or let the cost model derive it from `flops` and `bytes`. Each "
                "kernel also costs a kernel launch."
            ),
            (
                "`on: host` keeps the host busy. Any other name is a separate stream, which waits "
                "for other streams only through wait_stream."
            ),
        ),
        torch="y = forward(x)",
    )

    time: DurationField = Field(default=None, description="Duration.", examples=["3 ms"])
    flops: FlopsField = Field(
        default=None,
        description="Floating-point operations; the cost model derives the time from the device.",
        examples=["2 TFLOP"],
    )
    bytes: ByteCountField = Field(
        default=None,
        description=(
            "Bytes that the kernels read and write in device memory; the cost model derives the "
            "time."
        ),
        examples=["4 B * width"],
    )
    kernels: StrictInt | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Number of kernels; each one costs a kernel launch of the device [default: 1].",
        examples=[7],
    )
    work: WorkField = Field(
        default=(),
        description=(
            "Kernels as a list of {flops, bytes, kernels, dtype}; their times are added. `capture` "
            "writes it."
        ),
        examples=[[{"flops": "2 GFLOP", "bytes": "4 MB", "dtype": "bfloat16"}, {"bytes": "8 MB"}]],
    )
    name: str = Field(default="", description="Name in reports and pictures.", examples=["forward"])
    reads: ReferenceListField = Field(
        default=(),
        description=(
            "Tensors that the work reads. A transfer into them at the same time is a race."
        ),
        examples=[["x"]],
    )
    writes: ReferenceListField = Field(
        default=(), description="Tensors that the work overwrites.", examples=[["y"]]
    )
    adds: ReferenceListField = Field(
        default=(),
        description="Tensors that the work adds to, as a backward pass does to gradients.",
        examples=[["grad"]],
    )
    on: str = Field(
        default="",
        description=(
            "CUDA stream of the kernels; `host` keeps the host busy, `current` is the default "
            "stream."
        ),
        examples=["side"],
    )
    dtype: DtypeField | None = Field(
        default=None,
        description="Data type of the floating-point operations; the device's rate depends on it.",
        examples=["bfloat16"],
    )

    @field_validator("on")
    @classmethod
    def _default_stream(cls, value: str) -> str:
        return "" if value == "current" else value

    @model_validator(mode="after")
    def _one_price(self) -> "ComputeOperation":
        by_device = self.flops is not None or self.bytes is not None
        given = (self.time is not None, by_device, bool(self.work))
        if sum(given) != 1:
            raise ValueError("expected either `time`, or `flops` and `bytes`, or `work`")
        if self.work and self.dtype is not None:
            raise ValueError("`dtype` belongs into the entries of `work`")
        if self.kernels is not None and not by_device:
            raise ValueError(
                "`kernels` is only valid with `flops` and `bytes`: `time` includes the kernel "
                "launches"
            )
        return self


class AssignOperation(LocalOperation):
    """New values for a tensor, which takes no time."""

    op = "assign"
    colour = colours.LOCAL
    words = OperationHelp(
        signature="assign(tensor, value)",
        before="The tensors in the expression have the same shape.",
        after="The tensor contains the new values.",
        waits="Waits for no rank and takes no time.",
        example="- assign: {tensor: y, value: 2 * x + rank}",
        notes=(
            (
                "A number fills the tensor, a list gives its elements, and an expression may use "
                "rank and index."
            ),
        ),
        torch="y.copy_(2 * x + rank)",
    )

    tensor: TensorField = Field(
        description="Tensor to set: a name, a copy `name@index`, or an inline `{shape, dtype}`.",
        examples=["x"],
    )
    value: ValueField = Field(
        description="New content: a number, an expression over tensors, rank and index, or a list.",
        examples=["2 * x + rank"],
    )


class SynchronizeOperation(LocalOperation):
    """The host waits for its device (torch.cuda.synchronize), or for one stream of it."""

    op = "synchronize"
    first_field = "stream"
    colour = colours.WAIT
    words = OperationHelp(
        signature="torch.cuda.synchronize(), torch.cuda.Stream.synchronize()",
        before="The host may be ahead of the device.",
        after="All work that this rank launched on its device is done.",
        waits="The host waits for its own device. On gloo and mpi there is nothing to wait for.",
        example="- synchronize",
        notes=(
            (
                "If an nccl collective hangs, the host blocks here and not at the call of the "
                "collective."
            ),
        ),
        torch="torch.cuda.synchronize()",
    )

    stream: str = Field(
        default="",
        description="Stream that the host waits for [default: all streams of the device].",
        examples=["comm"],
    )

    @field_validator("stream")
    @classmethod
    def _known_stream(cls, value: str) -> str:
        # The default stream keeps its name, because an empty name means the whole device.
        return parse_stream(value) or "current"


class WaitStreamOperation(LocalOperation):
    """One CUDA stream waits for another (torch.cuda.Stream.wait_stream)."""

    op = "wait_stream"
    first_field = "stream"
    colour = colours.WAIT
    words = OperationHelp(
        signature="torch.cuda.Stream.wait_stream(stream)",
        before="Both streams contain the work launched on them so far.",
        after=(
            "Work launched on the stream `on` after this call starts when the other stream has "
            "finished its present work."
        ),
        waits=(
            "The stream `on` waits, not the host. gloo and mpi have no streams, so nothing waits."
        ),
        example="- wait_stream: reduce",
        notes=("Both `on` and `stream` default to the current stream, whose name is `current`.",),
        torch="torch.cuda.current_stream().wait_stream(reduce)",
    )

    stream: StreamField = Field(default="", description="Stream to wait for.", examples=["comm"])
    on: StreamField = Field(
        default="",
        description="Stream that waits [default: the current stream].",
        examples=["current"],
    )

    @model_validator(mode="after")
    def _two_streams(self) -> "WaitStreamOperation":
        if self.stream == self.on:
            raise ValueError(
                "expected two different streams: `on` waits for `stream`; both default to `current`"
            )
        return self


class SleepOperation(LocalOperation):
    """The host is idle for a time."""

    op = "sleep"
    first_field = "time"
    colour = colours.LOCAL
    words = OperationHelp(
        signature="time.sleep(seconds)",
        before="The host is free.",
        after="The host has been idle for this time; its device may have continued.",
        waits="Waits only for the clock.",
        example="- sleep: 3 ms",
        notes=("The delay shows which ranks wait for this one.",),
        torch="time.sleep(0.003)",
    )

    time: DurationField = Field(description="Duration.", examples=["3 ms"])


class ExitOperation(LocalOperation):
    """The process exits with a status."""

    op = "exit"
    first_field = "code"
    colour = colours.END
    words = OperationHelp(
        signature="sys.exit(code)",
        before="The rank runs.",
        after=(
            "The process has exited (code 0: successfully). The rank takes part in no further call."
        ),
        waits="Waits for no rank. Ranks that need this rank hang or get a connection error.",
        example="- exit: 0\n  ranks: 1",
        notes=(
            "torchrun does not treat exit code 0 as a failure, so its report blames another rank.",
        ),
        torch=("if rank == 1:\n    sys.exit(0)"),
    )

    code: ExpressionField = Field(
        default_factory=lambda: expression_field(0),
        json_schema_extra={"default": 0},
        description="Exit status; 0 means success.",
        examples=[0],
    )


class FailOperation(LocalOperation):
    """The rank raises an exception."""

    op = "fail"
    first_field = "message"
    colour = colours.END
    words = OperationHelp(
        signature="raise RuntimeError(message)",
        before="The rank runs.",
        after="The rank has raised an exception and exits with status 1.",
        waits="Waits for no rank. Ranks that need this rank hang or get a connection error.",
        example="- fail: out of memory\n  ranks: 1",
        torch=('if rank == 1:\n    raise RuntimeError("out of memory")'),
    )

    message: str = Field(
        default="", description="Text of the exception.", examples=["out of memory"]
    )


class WaitOperation(Operation):
    """Wait for requests (Work.wait)."""

    op = "wait"
    kind = "wait"
    torch_name = "wait"
    first_field = "handles"
    colour = colours.WAIT
    words = OperationHelp(
        signature="Work.wait(timeout=None)",
        before="The requests have been started.",
        after=(
            "The requests are complete, and their buffers may be reused. Their handles are no "
            "longer valid."
        ),
        waits=(
            "The host waits until the requests complete. On nccl only the current stream waits; "
            "the host continues."
        ),
        example="- isend: {tensor: x, dst: 1, as: h}\n  ranks: 0\n- wait: h\n  ranks: 0",
        notes=(
            "`wait: all` waits for every open handle.",
            "On gloo, a second wait for the same message hangs.",
        ),
        torch=("if rank == 0:\n    h = dist.isend(x, dst=1)\n    h.wait()"),
    )

    handles: WaitField = Field(
        description="Request to wait for, a list of requests, or `all` (every open request).",
        examples=["h"],
    )
    #: Which stream waits, where there are streams (nccl).
    on: StreamField = Field(
        default="",
        description=(
            "CUDA stream that is current at the call; `current` is the default stream. Only nccl "
            "uses it."
        ),
        examples=["comm"],
    )

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
        for work in works:
            work.wait()
        return None
