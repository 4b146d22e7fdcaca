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
)
from distsim.operations.core.operation_base import Operation, OperationHelp
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork


class LocalOperation(Operation):
    """Meets nobody and sends nothing."""

    kind = "local"


class ComputeOperation(LocalOperation):
    op = "compute"
    first_field = "time"
    colour = colours.LOCAL
    words = OperationHelp(
        signature="compute(time | flops and bytes, kernels, name, reads, writes, adds, on, dtype)",
        before="The tensors under reads (and adds) hold what it needs.",
        after=(
            "The tensors under writes hold something new, those under adds hold more than "
            "before; their numbers are unknown."
        ),
        waits="Nobody. Under nccl it is only launched, and runs when its stream comes to it.",
        example="- compute: {name: forward, time: 3 ms, reads: [x], writes: [y]}",
        notes=(
            (
                "Time is given, or priced from flops and bytes by the cluster's device; each of "
                "its kernels takes the device's launch."
            ),
            (
                "on: host keeps the host busy; another word names a stream of its own, which "
                "waits for others by wait_stream alone."
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
    name: str = Field(default="", description="Name in reports and pictures.", examples=["forward"])
    reads: ReferenceListField = Field(
        default=(),
        description="Tensors that the work reads. It must not overlap a transfer into them.",
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
        if (self.time is not None) == by_device:
            raise ValueError(
                "expected either `time`, or `flops` and `bytes` that the cluster's device prices"
            )
        if self.kernels is not None and not by_device:
            raise ValueError(
                "kernels: what a kernel's start takes is in the `time`; it is for `flops` "
                "and `bytes`"
            )
        return self


class AssignOperation(LocalOperation):
    op = "assign"
    colour = colours.LOCAL
    words = OperationHelp(
        signature="assign(tensor, value)",
        before="The tensors that the value names have the same shape.",
        after="The tensor holds the value's numbers.",
        waits="Nobody; it takes no time.",
        example="- assign: {tensor: y, value: 2 * x + rank}",
        notes=(
            (
                "A number fills the tensor, a list gives its elements, an expression may use "
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
    op = "synchronize"
    colour = colours.WAIT
    words = OperationHelp(
        signature="torch.cuda.synchronize()",
        before="The host may have run ahead of the device.",
        after="All that this rank launched on its device is done.",
        waits="The host waits for its own device. Under gloo and mpi there is nothing to wait for.",
        example="- synchronize",
        notes=("A hung nccl collective shows on the host at such a point, not at its call.",),
        torch="torch.cuda.synchronize()",
    )


class WaitStreamOperation(LocalOperation):
    op = "wait_stream"
    first_field = "stream"
    colour = colours.WAIT
    words = OperationHelp(
        signature="torch.cuda.Stream.wait_stream(stream)",
        before="Both streams hold what was launched on them so far.",
        after=(
            "What is launched on the stream `on` from here on starts when the other has finished "
            "what it holds now."
        ),
        waits=(
            "The stream `on`, not the host. Under gloo and mpi there are no streams, and nothing "
            "waits."
        ),
        example="- wait_stream: reduce",
        notes=("Left out, `on` and `stream` are the current stream; `current` names it.",),
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
                "expected two streams: one that waits (`on`) and one that is waited for "
                "(`stream`); `current` is the default"
            )
        return self


class SleepOperation(LocalOperation):
    op = "sleep"
    first_field = "time"
    colour = colours.LOCAL
    words = OperationHelp(
        signature="time.sleep(seconds)",
        before="The host is free.",
        after="The host has done nothing for the time; its device may have worked on.",
        waits="Nobody but the clock.",
        example="- sleep: 3 ms",
        notes=("It makes a rank late, to see who waits for it.",),
        torch="time.sleep(0.003)",
    )

    time: DurationField = Field(description="Duration.", examples=["3 ms"])


class ExitOperation(LocalOperation):
    op = "exit"
    first_field = "code"
    colour = colours.END
    words = OperationHelp(
        signature="sys.exit(code)",
        before="The rank runs.",
        after="The rank has left, cleanly if the code is 0; it answers nothing any more.",
        waits="Nobody; others who need this rank wait for ever or see the connection close.",
        example="- exit: 0\n  ranks: 1",
        notes=(
            (
                "Under torchrun a rank that leaves with 0 is no failure, so the report blames "
                "somebody else."
            ),
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
    op = "fail"
    first_field = "message"
    colour = colours.END
    words = OperationHelp(
        signature="raise RuntimeError(message)",
        before="The rank runs.",
        after="The rank has raised an exception and ends with status 1.",
        waits="Nobody; others who need this rank wait for ever or see the connection close.",
        example="- fail: out of memory\n  ranks: 1",
        torch=('if rank == 1:\n    raise RuntimeError("out of memory")'),
    )

    message: str = Field(
        default="", description="Text of the exception.", examples=["out of memory"]
    )


class WaitOperation(Operation):
    op = "wait"
    kind = "wait"
    torch_name = "wait"
    first_field = "handles"
    colour = colours.WAIT
    words = OperationHelp(
        signature="Work.wait(timeout=None)",
        before="The requests behind the handles have been started.",
        after="They are done, their buffers may be used again, and the handles are spent.",
        waits=(
            "The host until the requests are done. Under nccl the current stream alone: the host "
            "goes on."
        ),
        example="- isend: {tensor: x, dst: 1, as: h}\n  ranks: 0\n- wait: h\n  ranks: 0",
        notes=(
            "`wait: all` waits for every open handle.",
            "Waiting twice for one message hangs on gloo.",
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
        for work in works:
            work.wait()
        return None
