"""Which operation, dtype and reduce op each back end takes, and in which words it refuses the rest. For torch 2.9 to 2.13.

One table for the profiles (`Profile.refuse`) and for `distsim explain backends`. Sources: gloo was run, every collective with every
dtype and reduce op, on torch 2.13; nccl was read in ``ProcessGroupNCCL.cpp`` and ``torch/csrc/cuda/nccl.cpp``, mpi in
``ProcessGroupMPI.cpp``; the columns for GPU tensors are those of torch's own table (docs, torch.distributed, "Backends").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from distsim.ops.checks import mixed_parts, shared_part
from distsim.ops.records import DTYPE_BYTES, REDUCE_OPS, Buffer, Call
from distsim.ops.table import OPS

Device = Literal["cpu", "gpu"]
#: ``built``: only where the library underneath was built for it.
Level = Literal["yes", "no", "built"]

#: Collectives between one tensor and another n times as large: a back end may look at their shapes, not only at the elements.
SHAPED = tuple(f"{op}{launch}" for op in ("all_gather_into_tensor", "reduce_scatter_tensor") for launch in ("", "_coalesced"))
MESSAGES = ("send", "recv", "isend", "irecv")
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
INTEGERS = frozenset({"int64", "int32", "int8", "uint8"})
COMPLEX = frozenset({"complex64", "complex128"})
BITWISE = ("band", "bor", "bxor")
#: torch's C++ names of dtypes, as its messages print them.
SCALAR_TYPES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2", "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Support:
    """What one back end takes.

    ``cpu``, ``gpu``: whether tensors there are taken at all; ``not_on_gpu``: the operations that are not, although others are.
    ``lacks``: operation -> the text of its refusal. ``any_source``: the text for a receive without a source, None where it is taken.
    ``messages``, ``moved``: the dtypes of messages and of collectives. ``gaps``: operation -> dtypes of ``moved`` that it does not take.
    ``reduced``: reduce op -> dtypes. ``dtype_text``: the refusal of a dtype, by operation (``""``: any other), ``{type}`` is torch's
    name. ``reduce_text``: the refusal of a reduce op, by reduce op (``""``: any other). ``shape_text``: operation -> the refusal of a
    larger tensor that is not the smaller one with its first axis n times as long; ``{one}`` and ``{got}`` are shapes as torch prints
    them, ``{sizes}`` two lengths. ``alike``: coalesced launches whose parts must have one dtype, or be refused.
    """

    backend: str
    cpu: Level
    gpu: Level
    messages: frozenset[str]
    moved: frozenset[str]
    reduced: Mapping[str, frozenset[str]]
    dtype_text: Mapping[str, str]
    reduce_text: Mapping[str, str]
    not_on_gpu: frozenset[str] = frozenset()
    lacks: Mapping[str, str] = field(default_factory=dict)
    gaps: Mapping[str, frozenset[str]] = field(default_factory=dict)
    any_source: str | None = None
    shape_text: Mapping[str, str] = field(default_factory=dict)
    alike: tuple[str, ...] = ()

    def on(self, op: str, device: Device) -> Level:
        """Does the operation take tensors there?"""
        if op in self.lacks or (device == "gpu" and op in self.not_on_gpu):
            return "no"
        return self.cpu if device == "cpu" else self.gpu

    def takes(self, op: str, dtype: str, reduce_op: str | None = None) -> bool:
        """Does the operation take this dtype, and reduce it so?"""
        return self.refusal(op, dtype, reduce_op) is None

    def refusal(self, op: str, dtype: str, reduce_op: str | None = None) -> str | None:
        """The text of the error that the call raises; None when it is taken. An empty dtype is a call without tensors."""
        if op in self.lacks:
            return self.lacks[op]
        if not dtype:
            return None
        if dtype not in (self.messages if op in MESSAGES else self.moved) or dtype in self.gaps.get(op, ()):
            return self.dtype_text.get(op, self.dtype_text[""]).format(type=SCALAR_TYPES[dtype])
        if reduce_op is None or dtype in self.reduced.get(reduce_op, ()):
            return None
        if dtype in COMPLEX and reduce_op not in ("sum", "avg"):
            return complex_text(op, reduce_op)
        return self.reduce_text.get(reduce_op, self.reduce_text[""]).format(op=reduce_op.upper(), type=SCALAR_TYPES[dtype])

    def refuse(self, call: Call) -> str | None:
        """`Profile.refuse`: the text of the error that a resolved call raises, else None."""
        if self.any_source is not None and call.op in ("recv", "irecv") and call.peer is None:
            return self.any_source
        buffers = call.inputs or call.outputs
        reason = self.refusal(call.op, buffers[0].dtype if buffers else "", call.reduce_op)
        return reason or (_shape_refusal(call, self.shape_text[call.op]) if call.op in self.shape_text else None)

    def overlooks(self, call: Call, code: str) -> bool:
        """Does the back end take a coalesced launch that the contract forbids, as it does not look for what is wrong with it? A tensor
        in two parts nobody looks for; parts of several dtypes only some."""
        if code != "DS110" or OPS[call.op].coalesces is None:
            return False
        mixed = mixed_parts((*call.inputs, *call.outputs))
        return call.op not in self.alike if mixed else shared_part(call.inputs, call.outputs) is not None


def _shape_refusal(call: Call, text: str) -> str | None:
    """Of the first part whose larger tensor does not begin with n times the smaller one's first axis. One of too few elements is
    invalid under every back end, which is no business of this table."""
    row, n = OPS[call.op], call.group.size
    for part in row.separate(call):
        small, large = (part.inputs[0], part.outputs[0]) if row.output_parts == "n" else (part.outputs[0], part.inputs[0])
        if large.numel == n * small.numel and (not small.shape or large.shape != (n * small.shape[0], *small.shape[1:])):
            rows = -(-large.shape[0] // n) if large.shape else 1
            first = small.shape[0] if small.shape else 0
            sizes = f"{first * n} vs. {large.shape[0] if large.shape else 0}"
            return text.format(one=_torch_shape(small), got=_torch_shape(large, rows), sizes=sizes)
    return None


def _torch_shape(buffer: Buffer, rows: int | None = None) -> str:
    shape = buffer.shape if rows is None else (rows, *buffer.shape[1:])
    return f"({', '.join(map(str, shape))})"


def complex_text(op: str, reduce_op: str) -> str:
    """Complex tensors travel as pairs of real numbers, which only sum and avg allow. all_reduce is refused in Python, the others in
    C++, where the reduce op is printed as the control character of its number; it is left out here."""
    if op in ("all_reduce", "all_reduce_coalesced"):
        return f"all_reduce does not support RedOpType.{reduce_op.upper()} on complex tensors"
    return f"{'reduce' if op == 'reduce' else 'all_reduce'} does not supporton complex tensors"


def _reduced(
    numbers: frozenset[str], means: frozenset[str], bits: frozenset[str], complex_: frozenset[str]
) -> dict[str, frozenset[str]]:
    """By reduce op: ``numbers`` have sum, product, min and max; ``means`` avg; ``bits`` the bitwise ones; ``complex_`` sum, and avg."""
    plain = {"sum": numbers | complex_, "product": numbers, "min": numbers, "max": numbers}
    return {**plain, "avg": means | (complex_ if means else frozenset()), **dict.fromkeys(BITWISE, bits)}


#: Run on torch 2.13, each cell. A mean of integers is refused only after the sum was taken. A coalesced all_reduce or all_gather lays
#: its parts end to end in one operation in the host's memory; of several dtypes the one refuses them, the other mixes up their bytes.
GLOO_SUPPORT = Support(
    "gloo",
    cpu="yes",
    gpu="yes",
    not_on_gpu=frozenset({*MESSAGES, "barrier", "monitored_barrier", "all_reduce_coalesced", "all_gather_into_tensor_coalesced"}),
    messages=frozenset(DTYPE_BYTES),
    moved=FLOATS | INTEGERS | COMPLEX | {"bool"},
    gaps={"gather": COMPLEX},
    reduced=_reduced(FLOATS | INTEGERS | {"bool"}, FLOATS, INTEGERS | {"bool"}, COMPLEX),
    dtype_text={"": "Invalid scalar type"},
    reduce_text={"": "Cannot use ReduceOp.{op} with non-integral dtype",
                 "avg": "result type Float can't be cast to the desired output type {type}"},
    shape_text={
        "all_gather_into_tensor": "ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected {one}, got {got})",
        "all_gather_into_tensor_coalesced":
            "ProcessGroupGloo::allgather_coalesced: invalid size of output tensor at index 0 (expected length {one}, got {got})",
        "reduce_scatter_tensor": "Check failed: outputShape[0] * worldSize == inputShape[0] ({sizes})",
        "reduce_scatter_tensor_coalesced": "Check failed: outputShape[0] * worldSize == inputShape[0] ({sizes})",
    },
    alike=("all_reduce_coalesced",),
)  # fmt: skip

_ONLY_GLOO = "monitored_barrier is only implemented for GLOO backend."
_NCCL_DTYPE = "Input tensor data type is not supported for NCCL process group: {type}"
_NCCL_MOVES = "Unconvertible NCCL type {type}"
#: Read. bool travels as uint8, so its sum is a maximum. float8 is reduced with NCCL >= 2.24 on compute capability >= 9.0.
NCCL_SUPPORT = Support(
    "nccl",
    cpu="no",
    gpu="yes",
    lacks={"monitored_barrier": _ONLY_GLOO},
    any_source="ProcessGroupNCCL does not support recvAnysource",
    messages=frozenset(DTYPE_BYTES) - {"int16"},
    moved=frozenset(DTYPE_BYTES) - {"int16"},
    reduced=_reduced(FLOATS | FLOAT8 | INTEGERS | {"bool"}, FLOATS | FLOAT8 | INTEGERS, frozenset(), COMPLEX),
    dtype_text={
        "": _NCCL_DTYPE,
        **dict.fromkeys((*MESSAGES, "gather", "scatter", "all_to_all", "all_to_all_single"), _NCCL_MOVES),
    },
    reduce_text={"": "Cannot use ReduceOp.{op} with NCCL", "avg": "Cannot use ReduceOp.AVG with boolean inputs"},
    alike=("all_reduce_coalesced",),
)

_MPI_NUMBERS = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8"})
_NOT_AS_REAL = ("reduce", "gather", "reduce_scatter", "reduce_scatter_tensor")
#: Read. What is not in its tables fails as a lookup. torch hands it complex tensors as real ones, but not in all operations.
MPI_SUPPORT = Support(
    "mpi",
    cpu="yes",
    gpu="built",
    lacks={
        "monitored_barrier": _ONLY_GLOO,
        "all_reduce_coalesced": "allreduce_coalesced is currently not supported with MPI",
        "all_gather_into_tensor_coalesced": "Backend mpi does not support allgather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced": "Backend mpi does not support reduce_scatter_tensor_coalesced",
    },
    messages=_MPI_NUMBERS | COMPLEX,
    moved=_MPI_NUMBERS | COMPLEX,
    gaps=dict.fromkeys(_NOT_AS_REAL, COMPLEX),
    reduced=_reduced(_MPI_NUMBERS, frozenset(), frozenset(), COMPLEX),
    dtype_text={"": "map::at"},
    reduce_text={"": "map::at"},
)

#: By name, in the order of `distsim.profiles.PROFILES`.
SUPPORT: dict[str, Support] = {one.backend: one for one in (GLOO_SUPPORT, NCCL_SUPPORT, MPI_SUPPORT)}


def reductions(dtype: str) -> dict[str, str]:
    """Reduce op -> the first letters of the back ends whose all_reduce takes this dtype, ``-`` for each that does not (``gn-``)."""
    return {op: "".join(s.backend[0] if s.takes("all_reduce", dtype, op) else "-" for s in SUPPORT.values()) for op in REDUCE_OPS}
