"""What a back end takes, and in which words it refuses the rest. For torch 2.9 to 2.13.

What holds for one operation stands in its row (`Op.bindings`), what holds for all in the back end's file. Both are read here, for the
profiles (`Profile.refuse`) and for `distsim explain backends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from distsim.ops.base import Binding
from distsim.ops.checks import mixed_parts, shared_part
from distsim.ops.records import Buffer, Call
from distsim.ops.table import OPS
from distsim.records import dataclass

Device = Literal["cpu", "gpu"]
#: ``built``: only where the library underneath was built for it.
Level = Literal["yes", "no", "built"]

#: Operations at whose shapes a back end may look, not only at the elements.
SHAPED = tuple(op for op, row in OPS.items() if any(binding.shape_text for binding in row.bindings.values()))
#: Operations that are a back end's business.
MEETING = tuple(op for op, row in OPS.items() if row.kind in ("p2p", "collective", "remote"))
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

    ``cpu``, ``gpu``: whether tensors there are taken at all. ``messages``, ``moved``: the dtypes of messages and of collectives.
    ``reduced``: reduce op -> dtypes. ``dtype_text``: the refusal of a dtype, ``{type}`` is torch's name. ``reduce_text``: the refusal
    of a reduce op, by reduce op (``""``: any other). ``any_source``: the text for a receive without a source, None where it is taken.
    ``bindings``: operations that the back end takes although their rows do not name it.
    """

    backend: str
    cpu: Level
    gpu: Level
    messages: frozenset[str]
    moved: frozenset[str]
    reduced: Mapping[str, frozenset[str]]
    dtype_text: str
    reduce_text: Mapping[str, str]
    any_source: str | None = None
    bindings: Mapping[str, Binding] = field(default_factory=dict)

    def binding(self, op: str) -> Binding | None:
        """What the back end makes of an operation; None where it has never heard of it."""
        return OPS[op].bindings.get(self.backend) or self.bindings.get(op)

    def on(self, op: str, device: Device) -> Level:
        """Does the operation take tensors there?"""
        binding = self.binding(op)
        if binding is None or binding.refused or (device == "gpu" and not binding.gpu):
            return "no"
        return self.cpu if device == "cpu" else self.gpu

    def takes(self, op: str, dtype: str, reduce_op: str | None = None) -> bool:
        """Does the operation take this dtype, and reduce it so?"""
        return self.refusal(op, dtype, reduce_op) is None

    def refusal(self, op: str, dtype: str, reduce_op: str | None = None) -> str | None:
        """The text of the error that the call raises; None when it is taken. An empty dtype is a call without tensors."""
        row, binding = OPS[op], self.binding(op)
        if op not in MEETING:
            return None
        if binding is None or binding.refused:
            return self._lacks(op, binding)
        if not dtype:
            return None
        if dtype not in (self.messages if row.kind in ("p2p", "remote") else self.moved) or dtype in binding.gaps:
            return (binding.dtype_text or self.dtype_text).format(type=SCALAR_TYPES[dtype])
        if reduce_op is None or dtype in self.reduced.get(reduce_op, ()):
            return None
        if dtype in COMPLEX and reduce_op not in ("sum", "avg"):
            return complex_text(op, reduce_op)
        return self.reduce_text.get(reduce_op, self.reduce_text[""]).format(op=reduce_op.upper(), type=SCALAR_TYPES[dtype])

    def _lacks(self, op: str, binding: Binding | None) -> str:
        """torch's default of an operation that a back end does not have, or words of its own."""
        return (binding.refused if binding else None) or f"Backend {self.backend} does not support {op}"

    def texts(self) -> tuple[str, ...]:
        """Every text of a refusal once, as a template."""
        bindings = {op: self.binding(op) for op in MEETING}
        bound = [b for b in bindings.values() if b is not None]
        texts = (
            self.any_source,
            self.dtype_text,
            *(b.dtype_text for b in bound),
            *self.reduce_text.values(),
            *(self._lacks(op, b) for op, b in bindings.items() if b is None or b.refused),
            *(b.shape_text for b in bound),
        )
        return tuple(dict.fromkeys(text for text in texts if text))

    def refuse(self, call: Call) -> str | None:
        """`Profile.refuse`: the text of the error that a resolved call raises, else None."""
        if self.any_source is not None and OPS[call.op].direction == "recv" and call.peer is None:
            return self.any_source
        buffers = call.inputs or call.outputs
        reason = self.refusal(call.op, buffers[0].dtype if buffers else "", call.reduce_op)
        binding = self.binding(call.op)
        return reason or (_shape_refusal(call, binding.shape_text) if binding and binding.shape_text else None)

    def overlooks(self, call: Call, code: str) -> bool:
        """Does the back end take a coalesced launch that the contract forbids, as it does not look for what is wrong with it? A tensor
        in two parts nobody looks for; parts of several dtypes only some."""
        binding = self.binding(call.op)
        if code != "DS110" or OPS[call.op].coalesces is None or binding is None:
            return False
        mixed = mixed_parts((*call.inputs, *call.outputs))
        return not binding.one_dtype if mixed else shared_part(call.inputs, call.outputs) is not None


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
    if OPS[op].single() == "all_reduce":
        return f"all_reduce does not support RedOpType.{reduce_op.upper()} on complex tensors"
    return f"{'reduce' if op == 'reduce' else 'all_reduce'} does not supporton complex tensors"


def reduced_by(
    numbers: frozenset[str], means: frozenset[str], bits: frozenset[str], complex_: frozenset[str]
) -> dict[str, frozenset[str]]:
    """By reduce op: ``numbers`` have sum, product, min and max; ``means`` avg; ``bits`` the bitwise ones; ``complex_`` sum, and avg."""
    plain = {"sum": numbers | complex_, "product": numbers, "min": numbers, "max": numbers}
    return {**plain, "avg": means | (complex_ if means else frozenset()), **dict.fromkeys(BITWISE, bits)}
