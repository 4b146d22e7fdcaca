"""What a collective moves: the payloads of its members in, those of one member's outputs out.

Reductions add in the order of group ranks, in the memory of the first.
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

#: Bytes themselves, or where they lie.
Payload = bytes | PayloadLocation


class CallContribution:
    """What one member brought: its payloads, the shapes of its buffers, its dtype."""

    __slots__ = ("dtype", "extra", "ins", "outs", "payloads")

    def __init__(self, payloads: Sequence[Payload], facts: Sequence[Any]) -> None:
        self.payloads = payloads
        self.ins, self.outs, self.dtype, self.extra = facts

    def width(self) -> int:
        return max(1, DTYPE_BYTES.get(self.dtype, _EXTRA_DTYPE_BYTES.get(self.dtype, 1)))


_EXTRA_DTYPE_BYTES = {"uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4}


def payload_slice(payload: Payload, start: int, count: int) -> Payload:
    """A stretch of a payload, in bytes."""
    if isinstance(payload, bytes):
        return payload[start : start + count]
    return [payload[0], payload[1] + start, count]


def payload_size(payload: Payload) -> int:
    return len(payload) if isinstance(payload, bytes) else payload[2]


class CollectiveExecutor:
    """Works out results, with torch for what is added."""

    def __init__(self, regions: SharedMemoryRegions) -> None:
        self.regions = regions

    def outputs(
        self, op: str, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        """The outputs of group rank ``me``; ``sides`` in group order, None for members that nobody
        needs to have come.
        """
        name = op.removesuffix("_coalesced")
        made = getattr(self, f"_{name}", None)
        return made(sides, me, root) if made is not None else []

    # --- what is only moved ---
    def _broadcast(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [] if me == root else [[sides[root].payloads[0]]]

    def _scatter(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [[sides[root].payloads[me]]]

    def _gather(self, sides: Sequence[CallContribution], me: int, root: int) -> list[list[Payload]]:
        return [[side.payloads[0]] for side in sides] if me == root else []

    def _all_gather(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [[side.payloads[0]] for side in sides]

    def _all_gather_into_tensor(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [[side.payloads[k] for side in sides] for k in range(len(sides[me].payloads))]

    def _all_to_all(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [[side.payloads[me]] for side in sides]

    def _all_to_all_single(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [[_all_to_all_share(side, me, len(sides)) for side in sides]]

    # --- what is added ---
    def _all_reduce(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [
            [self._reduced([s.payloads[k] for s in sides], sides[0])]
            for k in range(len(sides[0].payloads))
        ]

    def _reduce(self, sides: Sequence[CallContribution], me: int, root: int) -> list[list[Payload]]:
        return self._all_reduce(sides, me, root) if me == root else []

    def _reduce_scatter(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        return [[self._reduced([s.payloads[me] for s in sides], sides[0])]]

    def _reduce_scatter_tensor(
        self, sides: Sequence[CallContribution], me: int, root: int
    ) -> list[list[Payload]]:
        n, found = len(sides), []
        for k in range(len(sides[0].payloads)):
            each = payload_size(sides[0].payloads[k]) // n
            found.append(
                [
                    self._reduced(
                        [payload_slice(s.payloads[k], me * each, each) for s in sides], sides[0]
                    )
                ]
            )
        return found

    def _reduced(self, payloads: Sequence[Payload], side: CallContribution) -> Payload:
        first, op = payloads[0], str(side.extra.get("reduce_op") or "sum")
        if (
            side.dtype in _NUMPY_DTYPES
            and op in _NUMPY_REDUCTIONS
            and all(isinstance(p, bytes) for p in payloads)
        ):
            return _reduced_by_numpy(payloads, side.dtype, op)  # type: ignore[arg-type]
        held = bytearray(first) if isinstance(first, bytes) else None
        total = self._tensor(held if held is not None else first, side)
        if total.numel():
            reduce_into(total, [self._tensor(p, side) for p in payloads[1:]], op)
        return bytes(held) if held is not None else first

    def _tensor(self, payload: Payload | bytearray, side: CallContribution) -> Tensor:
        import torch

        dtype = getattr(torch, side.dtype)
        if isinstance(payload, list):
            return torch.frombuffer(
                self.regions.maps[payload[0]],
                dtype=dtype,
                count=payload[2] // side.width(),
                offset=payload[1],
            )
        return (
            torch.frombuffer(
                bytearray(payload) if isinstance(payload, bytes) else payload, dtype=dtype
            )
            if payload
            else torch.empty(0)
        )


#: What numpy adds as torch does, at a fraction of the cost of a call.
_NUMPY_DTYPES: Final = frozenset({"float32", "float64", "int32", "int64"})
_NUMPY_REDUCTIONS: Final[Mapping[str, np.ufunc]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _reduced_by_numpy(payloads: Sequence[bytes], dtype: str, op: str) -> bytes:
    way, total = _NUMPY_REDUCTIONS[op], np.frombuffer(payloads[0], dtype).copy()
    with np.errstate(all="ignore"):
        for payload in payloads[1:]:
            way(total, np.frombuffer(payload, dtype), out=total)
    return total.tobytes()


def _all_to_all_share(side: CallContribution, me: int, n: int) -> Payload:
    """What a member of an all_to_all_single has for another."""
    shape, payload = side.ins[0], side.payloads[0]
    splits = side.extra.get("input_splits") or []
    if not splits:
        each = payload_size(payload) // n
        return payload_slice(payload, me * each, each)
    row = prod(shape[1:]) * side.width()
    return payload_slice(payload, sum(splits[:me]) * row, splits[me] * row)


@cache
def _torch_reductions() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
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
    """Reduce tensors into the first, in order."""
    way = _torch_reductions()[op]
    narrow = total.dtype.is_floating_point and total.element_size() == 1
    work = total.float() if narrow else total
    for other in others:
        way(work, other.float() if narrow else other)
    if op == "avg":
        count = len(others) + 1
        if work.is_floating_point() or work.is_complex():
            work.div_(count)
        else:
            work.div_(count, rounding_mode="trunc")
    if narrow:
        total.copy_(work)
