"""Compute what a collective returns to a member from the payloads of all members.

Moves only rearrange payloads. Reductions add in the order of group ranks; a result in shared memory
overwrites the input of the first member, so no further memory is needed.

Which members must have arrived is decided in `distsim.script_capture.hub.matching`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.script_capture.protocol.wire import PayloadLocation, SharedMemoryRegions

if TYPE_CHECKING:
    from torch import Tensor

#: The bytes themselves, or where they are in shared memory.
Payload = bytes | PayloadLocation

#: Dtypes of torch that distsim's operations do not have.
_EXTRA_DTYPE_BYTES: Final = {"uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4}
#: What numpy reduces with the same result as torch, at a fraction of the cost of a call.
_NUMPY_DTYPES: Final = frozenset({"float32", "float64", "int32", "int64"})
_NUMPY_REDUCTIONS: Final[Mapping[str, np.ufunc]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class CallContribution:
    """What one rank brings to a call: payloads, shapes of its buffers, dtype, further arguments."""

    __slots__ = ("dtype", "extra", "input_shapes", "output_shapes", "payloads")

    def __init__(self, payloads: Sequence[Payload], facts: Sequence[Any]) -> None:
        """``facts``: shapes of inputs and of outputs, dtype, and a dict of further arguments."""
        self.payloads = payloads
        self.input_shapes, self.output_shapes, self.dtype, self.extra = facts

    def element_size(self) -> int:
        """The bytes of one element."""
        return DTYPE_BYTES.get(self.dtype) or _EXTRA_DTYPE_BYTES.get(self.dtype, 1)


def payload_slice(payload: Payload, start: int, count: int) -> Payload:
    """``count`` bytes of a payload."""
    if isinstance(payload, bytes):
        return payload[start : start + count]
    region, offset = payload[0], payload[1]
    return [region, offset + start, count]


def payload_size(payload: Payload) -> int:
    """The number of its bytes."""
    return len(payload) if isinstance(payload, bytes) else payload[2]


class CollectiveExecutor:
    """Computes results, one method for each operation.

    Each method takes the contributions by group rank (None where the result does not depend on a
    member that has not arrived), the group rank whose outputs are wanted, and the root's. It
    returns for each output the payloads that it consists of.
    """

    def __init__(self, regions: SharedMemoryRegions) -> None:
        self.regions = regions

    def outputs(
        self, op: str, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        """The outputs of one member; none for an operation without data, such as barrier."""
        name = op.removesuffix("_coalesced")
        compute = getattr(self, f"_{name}", None)
        if compute is None:
            return []
        found: list[list[Payload]] = compute(contributions, group_rank, root)
        return found

    # --- moves ---
    def _broadcast(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        return [] if group_rank == root else [[contributions[root].payloads[0]]]

    def _scatter(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        return [[contributions[root].payloads[group_rank]]]

    def _gather(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        if group_rank != root:
            return []
        return [[member.payloads[0]] for member in contributions]

    def _all_gather(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        return [[member.payloads[0]] for member in contributions]

    def _all_gather_into_tensor(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        tensors = range(len(contributions[group_rank].payloads))
        return [[member.payloads[k] for member in contributions] for k in tensors]

    def _all_to_all(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        return [[member.payloads[group_rank]] for member in contributions]

    def _all_to_all_single(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        size = len(contributions)
        return [[_all_to_all_share(member, group_rank, size) for member in contributions]]

    # --- reductions ---
    def _all_reduce(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        tensors = range(len(contributions[0].payloads))
        inputs = ([member.payloads[k] for member in contributions] for k in tensors)
        return [[self._reduced(payloads, contributions[0])] for payloads in inputs]

    def _reduce(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        return self._all_reduce(contributions, group_rank, root) if group_rank == root else []

    def _reduce_scatter(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        payloads = [member.payloads[group_rank] for member in contributions]
        return [[self._reduced(payloads, contributions[0])]]

    def _reduce_scatter_tensor(
        self, contributions: Sequence[CallContribution], group_rank: int, root: int
    ) -> list[list[Payload]]:
        first = contributions[0]
        found: list[list[Payload]] = []
        for k, payload in enumerate(first.payloads):
            share = payload_size(payload) // len(contributions)
            start = group_rank * share
            slices = [payload_slice(member.payloads[k], start, share) for member in contributions]
            found.append([self._reduced(slices, first)])
        return found

    def _reduced(self, payloads: Sequence[Payload], first: CallContribution) -> Payload:
        """Reduce payloads; ``first`` is the contribution that ``payloads[0]`` belongs to."""
        op = str(first.extra.get("reduce_op") or "sum")
        inline = [payload for payload in payloads if isinstance(payload, bytes)]
        is_simple = first.dtype in _NUMPY_DTYPES and op in _NUMPY_REDUCTIONS
        if is_simple and len(inline) == len(payloads):
            return _reduced_by_numpy(inline, first.dtype, op)
        if not isinstance(payloads[0], bytes):
            self._reduce_with_torch(payloads[0], payloads[1:], first, op)
            return payloads[0]
        total = bytearray(payloads[0])
        self._reduce_with_torch(total, payloads[1:], first, op)
        return bytes(total)

    def _reduce_with_torch(
        self,
        total: bytearray | PayloadLocation,
        others: Sequence[Payload],
        first: CallContribution,
        op: str,
    ) -> None:
        """Reduce in place, into the memory of ``total``."""
        tensor = self._tensor(total, first)
        if tensor.numel():
            reduce_into(tensor, [self._tensor(other, first) for other in others], op)

    def _tensor(self, payload: Payload | bytearray, contribution: CallContribution) -> Tensor:
        """A tensor over the memory of a payload; over a copy for bytes, which are read-only."""
        import torch

        dtype = getattr(torch, contribution.dtype)
        if isinstance(payload, list):
            region, offset, nbytes = payload
            count = nbytes // contribution.element_size()
            return torch.frombuffer(
                self.regions.maps[region], dtype=dtype, count=count, offset=offset
            )
        if not payload:
            return torch.empty(0)  # frombuffer refuses an empty buffer
        writable = bytearray(payload) if isinstance(payload, bytes) else payload
        return torch.frombuffer(writable, dtype=dtype)


def _reduced_by_numpy(payloads: Sequence[bytes], dtype: str, op: str) -> bytes:
    """Reduce payloads in order. Like torch, overflow and NaN cause no warning."""
    reduce = _NUMPY_REDUCTIONS[op]
    total = np.frombuffer(payloads[0], dtype).copy()
    with np.errstate(all="ignore"):
        for payload in payloads[1:]:
            reduce(total, np.frombuffer(payload, dtype), out=total)
    return total.tobytes()


def _all_to_all_share(contribution: CallContribution, receiver: int, size: int) -> Payload:
    """The part of a member's input to all_to_all_single that goes to group rank ``receiver``."""
    shape = contribution.input_shapes[0]
    payload = contribution.payloads[0]
    splits = contribution.extra.get("input_splits") or []
    if not splits:
        share = payload_size(payload) // size
        return payload_slice(payload, receiver * share, share)
    row_bytes = prod(shape[1:]) * contribution.element_size()
    start = sum(splits[:receiver]) * row_bytes
    return payload_slice(payload, start, splits[receiver] * row_bytes)


@cache
def _torch_reductions() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """In-place functions by reduce op; ``avg`` is divided afterwards."""
    import torch

    return {
        "sum": torch.Tensor.add_,
        "avg": torch.Tensor.add_,
        "product": torch.Tensor.mul_,
        "band": torch.Tensor.bitwise_and_,
        "bor": torch.Tensor.bitwise_or_,
        "bxor": torch.Tensor.bitwise_xor_,
        "min": lambda a, b: torch.minimum(a, b, out=a),
        "max": lambda a, b: torch.maximum(a, b, out=a),
    }


def reduce_into(total: Tensor, others: Sequence[Tensor], op: str) -> None:
    """Reduce tensors into ``total``, in order. Floats of 8 bits are reduced as float32."""
    reduce = _torch_reductions()[op]
    is_float8 = total.dtype.is_floating_point and total.element_size() == 1
    work = total.float() if is_float8 else total
    for other in others:
        reduce(work, other.float() if is_float8 else other)
    if op == "avg":
        _divide(work, len(others) + 1)
    if is_float8:
        total.copy_(work)


def _divide(tensor: Tensor, count: int) -> None:
    """Divide in place; integers round towards zero."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(count)
    else:
        tensor.div_(count, rounding_mode="trunc")
