"""Cost of NCCL's operations on GPUs: the minimum over algorithms and protocols, as a curve.

A form's time is ``sum of its latencies × constants + bytes / (bandwidth × constants)``
(`distsim.hardware.cost.nccl_tuning`, `distsim.hardware.cost.nccl_messages`,
`distsim.hardware.cost.nccl_constants`). The minimum of the forms is smoothed where two of them
cross: ``(sum t^-8)^(-1/8)``.

A curve never falls with the size. Each cost is at least the cost of fewer bytes, the cost in a
subgroup, and the lower bound that the links' data sheets set. The grid has four sizes per octave;
between them the cost is interpolated in the logarithms of size and time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, exp, log
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.hardware.cost import nccl_messages, nccl_tuning
from distsim.hardware.cost.nccl_constants import (
    ADDITIVE_CONSTANTS,
    ASSUMED_BY_TRANSPORT,
    BY_ARCHITECTURE,
    BY_TRANSPORT,
    CONSTANTS,
)
from distsim.hardware.cost.nccl_context import SEND_RECV_OPERATIONS, NcclContext, NcclOperation
from distsim.hardware.cost.nccl_tuning import Array, LatencyTerm, NcclForm

#: Exponent of the smooth minimum over the forms; a larger one is closer to the true minimum.
SHARPNESS: Final = 8.0
#: Sizes of a curve: four an octave, 1 byte to 16 TiB.
SIZE_GRID: Final[Array] = np.exp2(np.arange(0, 44 * 4 + 1) / 4.0)
#: Tolerance in ns for rounding errors, so that `cost_ns` and `cost_ns_by_size` agree exactly.
_ROUNDING_TOLERANCE_NS: Final = 1e-4
_LOG_SIZE_GRID: Final[list[float]] = np.log(SIZE_GRID).tolist()


def candidate_forms(kind: NcclOperation, at: NcclContext, nbytes: Array) -> tuple[NcclForm, ...]:
    """Every form that may run an operation, including the cost of its launch."""
    found = (
        tuple(nccl_messages.message_forms(kind, at, nbytes))
        if kind in SEND_RECV_OPERATIONS
        else nccl_tuning.collective_forms(kind, at, nbytes)
    )
    return tuple(
        form._replace(parts=(LatencyTerm("launch", 1.0, "launch"), *form.parts)) for form in found
    )


def launch_terms(kind: NcclOperation, at: NcclContext) -> tuple[LatencyTerm, ...]:
    """The time that a process's thread takes to launch a call on each of its GPUs in turn.

    Consecutive calls cannot follow each other faster than this, however fast the GPUs are. If the
    launches take less time than the GPUs' work, they are hidden behind it.
    """
    each = LatencyTerm("issue", float(at.driven), f"launches of one process, on {at.driven} GPUs")
    if kind not in SEND_RECV_OPERATIONS or at.driven == 1:
        return (each,)
    peers = 1 if kind == "send" else at.driven - 1
    return (
        each,
        LatencyTerm(
            "issue, message",
            float(at.driven * peers),
            f"messages of {at.driven} GPUs, launched one by one",
        ),
    )


@lru_cache(maxsize=256)
def scaled_constants(architecture: str, way: str) -> Mapping[str, float]:
    """The constants for an architecture and a link.

    ``way`` is the link inside the node for a group on one node, otherwise the network's transport.
    """
    found = dict(CONSTANTS)
    for offsets in (
        BY_ARCHITECTURE.get(architecture, {}),
        {**BY_TRANSPORT, **ASSUMED_BY_TRANSPORT}.get(way, {}),
    ):
        for name, offset in offsets.items():
            found[name] = (
                found[name] + offset if name in ADDITIVE_CONSTANTS else found[name] * offset
            )
    return found


def constants_in_context(at: NcclContext) -> Mapping[str, float]:
    """The constants that apply to a group."""
    return scaled_constants(at.architecture, at.link if at.nodes == 1 else at.transport)


def launch_us(kind: NcclOperation, at: NcclContext) -> float:
    """Minimum time in us between two calls of a process, due to its launches."""
    known = constants_in_context(at)
    return sum(known[part.constant] * float(part.us) for part in launch_terms(kind, at))


class FormTime(NamedTuple):
    """A form's time at some sizes, in us.

    ``latencies`` has each latency term with its time; ``moving`` is the time to move the bytes.
    """

    form: NcclForm
    latencies: tuple[tuple[LatencyTerm, Array], ...]
    gbs: Array  # algorithm bandwidth that is reached
    moving: Array

    @property
    def total(self) -> Array:
        """The sum of all parts."""
        return self.moving + sum((us for _, us in self.latencies), np.zeros_like(self.moving))


def form_time(form: NcclForm, known: Mapping[str, float], nbytes: Array) -> FormTime:
    """A form's time, by term."""
    reached = 1.0
    for name, power in form.powers:
        reached *= exp(known[name] * power) if name in ADDITIVE_CONSTANTS else known[name] ** power
    gbs = form.gbs * reached
    latencies = tuple(
        (part, known[part.constant] * part.us * np.ones_like(nbytes)) for part in form.parts
    )
    return FormTime(form, latencies, gbs, nbytes / (1000.0 * gbs))


def unbounded_us(kind: NcclOperation, at: NcclContext, nbytes: Array) -> Array:
    """The smoothed minimum of the forms, before any lower bound is applied."""
    known = constants_in_context(at)
    issued = launch_us(kind, at)
    every = np.stack(
        [form_time(form, known, nbytes).total for form in candidate_forms(kind, at, nbytes)]
    )
    least = every.min(axis=0)
    least = least * ((every / least) ** -SHARPNESS).sum(axis=0) ** (-1.0 / SHARPNESS)
    return np.asarray((least**SHARPNESS + issued**SHARPNESS) ** (1.0 / SHARPNESS))


def lower_bound_us(kind: NcclOperation, at: NcclContext, nbytes: Array | float) -> Array:
    """Lower bound for every schedule: bytes that must cross a rank's link and a node's cards.

    Bandwidths are those of the data sheets. If the switch inside the node reduces (NVLS), a rank
    sends and receives the buffer once; the same holds for a node if the network reduces. For an
    exchange, the bound is what the node with the fewest ranks sends, because it has the fewest
    cards.
    """
    share, apart = (at.n - 1) / at.n, (at.nodes - 1) / at.nodes
    whole = {"broadcast": 1.0, "reduce": 1.0, "send": 1.0}
    if at.nodes == 1:
        asked = {"all_reduce": 1.0 if switch_reduces(at) else 2 * share, **whole}.get(kind, share)
        return np.asarray(asked * nbytes / (1000.0 * at.sheet_intra))
    fewest = max(at.n - (at.nodes - 1) * at.per_node, 1)
    exchanged = fewest * (at.n - fewest) / at.n
    asked = {"all_reduce": 1.0 if at.reducing else 2 * apart, "all_to_all": exchanged, **whole}.get(
        kind, apart
    )
    return np.asarray(asked * nbytes / (1000.0 * at.sheet_inter))


def switch_reduces(at: NcclContext) -> bool:
    """Whether the switch inside a node reduces (NVLS)."""
    has_nvls = at.architecture in nccl_tuning.NVLS_EFFICIENCY and at.link == "nvlink"
    return has_nvls and at.switch and at.per_node > 2


def lower_bound_ns(kind: NcclOperation, at: NcclContext, nbytes: int) -> int:
    """`lower_bound_us` in ns, rounded down."""
    return int(1000.0 * lower_bound_us(kind, at, nbytes))


class CostCurve:
    """Time in us by bytes, on `SIZE_GRID`."""

    def __init__(self, us: Array) -> None:
        self.us = us
        self._log: NDArray[np.float64] = np.log(us)
        self._list: list[float] = self._log.tolist()

    def at(self, nbytes: int) -> float:
        """Time in us for ``nbytes`` bytes."""
        x = log(max(nbytes, 1))
        i = bisect_right(_LOG_SIZE_GRID, x)
        if i >= len(_LOG_SIZE_GRID):
            return float(self.us[-1]) * nbytes / float(SIZE_GRID[-1])
        share = (x - _LOG_SIZE_GRID[i - 1]) / (_LOG_SIZE_GRID[i] - _LOG_SIZE_GRID[i - 1])
        return exp(self._list[i - 1] + share * (self._list[i] - self._list[i - 1]))

    def many(self, nbytes: Sequence[int] | NDArray[np.int64]) -> Array:
        """us for many sizes at once."""
        sizes = np.maximum(np.asarray(nbytes, dtype=np.float64), 1.0)
        x = np.log(sizes)
        return np.where(
            x < _LOG_SIZE_GRID[-1],
            np.exp(np.interp(x, _LOG_SIZE_GRID, self._log)),
            self.us[-1] * sizes / SIZE_GRID[-1],
        )


@lru_cache(maxsize=4096)
def cost_curve(kind: NcclOperation, at: NcclContext) -> CostCurve:
    """The cost curve of an operation in a group."""
    us = np.maximum(unbounded_us(kind, at, SIZE_GRID), lower_bound_us(kind, at, SIZE_GRID))
    # In an exchange, fewer peers mean fewer channels or links for a buffer, so a subgroup may be
    # slower than the group: its cost is no lower bound.
    is_exchange = kind in SEND_RECV_OPERATIONS or nccl_tuning.runs_all_pairs(kind, at)
    subgroup = None if is_exchange else at.smaller
    if subgroup is not None:
        us = np.maximum(us, cost_curve(kind, subgroup).us)
    return CostCurve(np.maximum.accumulate(us))


def cost_ns(kind: NcclOperation, at: NcclContext, nbytes: int) -> int:
    """Cost in ns, rounded up."""
    return ceil(1000.0 * cost_curve(kind, at).at(nbytes) - _ROUNDING_TOLERANCE_NS)


def cost_ns_by_size(
    kind: NcclOperation, at: NcclContext, nbytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`cost_ns` for many sizes at once."""
    return np.ceil(1000.0 * cost_curve(kind, at).many(nbytes) - _ROUNDING_TOLERANCE_NS).astype(
        np.int64
    )
