"""What NCCL's operations cost on GPUs: the least over algorithms and protocols, as a curve over sizes that never falls.

A form's time is ``sum of its latencies × constants + bytes / (bandwidth × constants)`` (`distsim.cost.tuning`,
`distsim.cost.messages`,
`distsim.cost.constants`); the least of them is rounded off where two of them meet: ``(sum t^-8)^(-1/8)``. On a curve it is at
least what
fewer bytes and a group inside this one take, and what no link can be beaten to. Between four sizes an octave it is interpolated
in the
logarithms of both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, exp, log
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.cost import messages, tuning
from distsim.cost.constants import ADDED, BEFOREHAND, BY_ARCHITECTURE, BY_TRANSPORT, CONSTANTS
from distsim.cost.setting import PAIRWISE, Kind, Setting
from distsim.cost.tuning import Array, Form, Part

#: How sharp the least of the forms is.
SHARPNESS: Final = 8.0
#: Sizes of a curve: four an octave, 1 byte to 16 TiB.
GRID: Final[Array] = np.exp2(np.arange(0, 44 * 4 + 1) / 4.0)
#: ns that rounding may bring forth, so that one size costs the same alone and among many.
_SPECK: Final = 1e-4
_LOG_GRID: Final[list[float]] = np.log(GRID).tolist()


def forms(kind: Kind, at: Setting, nbytes: Array) -> tuple[Form, ...]:
    """Every form that may run an operation, with what its launch costs."""
    found = tuple(messages.forms(kind, at, nbytes)) if kind in PAIRWISE else tuning.forms(kind, at, nbytes)
    return tuple(form._replace(parts=(Part("launch", 1.0, "launch"), *form.parts)) for form in found)


def issue(kind: Kind, at: Setting) -> tuple[Part, ...]:
    """What a process' thread takes to launch a call on each of its GPUs, one after the other. Calls follow each other as fast as that
    at the most, however fast the GPUs are; where it is shorter than their work it hides behind it."""
    each = Part("issue", float(at.driven), f"launches of one process, on {at.driven} GPUs")
    if kind not in PAIRWISE or at.driven == 1:
        return (each,)
    peers = 1 if kind == "send" else at.driven - 1
    return (each, Part("issue, message", float(at.driven * peers), f"messages of {at.driven} GPUs, put down one by one"))


@lru_cache(maxsize=256)
def constants(architecture: str, way: str) -> Mapping[str, float]:
    """The constants of an architecture's GPUs over a way (the link inside one node, else the network's transport)."""
    found = dict(CONSTANTS)
    for offsets in (BY_ARCHITECTURE.get(architecture, {}), {**BY_TRANSPORT, **BEFOREHAND}.get(way, {})):
        for name, offset in offsets.items():
            found[name] = found[name] + offset if name in ADDED else found[name] * offset
    return found


def constants_at(at: Setting) -> Mapping[str, float]:
    """The constants that hold in a setting."""
    return constants(at.architecture, at.link if at.nodes == 1 else at.transport)


def issue_us(kind: Kind, at: Setting) -> float:
    """us between two calls of a process at the least, for its launches."""
    known = constants_at(at)
    return sum(known[part.constant] * float(part.us) for part in issue(kind, at))


class Told(NamedTuple):
    """A form's time at some sizes, in us: each latency with its words, and the moving of the bytes."""

    form: Form
    latencies: tuple[tuple[Part, Array], ...]
    gbs: Array  # algorithm bandwidth that is reached
    moving: Array

    @property
    def total(self) -> Array:
        return self.moving + sum((us for _, us in self.latencies), np.zeros_like(self.moving))


def told(form: Form, known: Mapping[str, float], nbytes: Array) -> Told:
    """A form's time, term by term."""
    reached = 1.0
    for name, power in form.powers:
        reached *= exp(known[name] * power) if name in ADDED else known[name] ** power
    gbs = form.gbs * reached
    latencies = tuple((part, known[part.constant] * part.us * np.ones_like(nbytes)) for part in form.parts)
    return Told(form, latencies, gbs, nbytes / (1000.0 * gbs))


def raw_us(kind: Kind, at: Setting, nbytes: Array) -> Array:
    """The rounded least of the forms, before anything is made of it."""
    known = constants_at(at)
    issued = issue_us(kind, at)
    every = np.stack([told(form, known, nbytes).total for form in forms(kind, at, nbytes)])
    least = every.min(axis=0)
    least = least * ((every / least) ** -SHARPNESS).sum(axis=0) ** (-1.0 / SHARPNESS)
    return np.asarray((least**SHARPNESS + issued**SHARPNESS) ** (1.0 / SHARPNESS))


def bound_us(kind: Kind, at: Setting, nbytes: Array | float) -> Array:
    """No schedule is faster: what must cross a rank's link, and a node's cards, by their data sheets.

    Where the switch inside reduces (NVLS), a rank gives and takes the buffer once; likewise a node where the network reduces. Of an
    exchange what the node with the fewest ranks sends, which has the fewest cards.
    """
    share, apart = (at.n - 1) / at.n, (at.nodes - 1) / at.nodes
    whole = {"broadcast": 1.0, "reduce": 1.0, "send": 1.0}
    if at.nodes == 1:
        asked = {"all_reduce": 1.0 if reduces(at) else 2 * share, **whole}.get(kind, share)
        return np.asarray(asked * nbytes / (1000.0 * at.sheet_intra))
    fewest = max(at.n - (at.nodes - 1) * at.per_node, 1)
    exchanged = fewest * (at.n - fewest) / at.n
    asked = {"all_reduce": 1.0 if at.reducing else 2 * apart, "all_to_all": exchanged, **whole}.get(kind, apart)
    return np.asarray(asked * nbytes / (1000.0 * at.sheet_inter))


def reduces(at: Setting) -> bool:
    """Whether the switch inside reduces (NVLS)."""
    return at.switch and at.link == "nvlink" and at.architecture in ("hopper", "blackwell") and at.per_node > 2


def bound_ns(kind: Kind, at: Setting, nbytes: int) -> int:
    """`bound_us` in ns, rounded down."""
    return int(1000.0 * bound_us(kind, at, nbytes))


class PriceCurve:
    """us by bytes, on `GRID`."""

    def __init__(self, us: Array) -> None:
        self.us = us
        self._log: NDArray[np.float64] = np.log(us)
        self._list: list[float] = self._log.tolist()

    def at(self, nbytes: int) -> float:
        """us for so many bytes."""
        x = log(max(nbytes, 1))
        i = bisect_right(_LOG_GRID, x)
        if i >= len(_LOG_GRID):
            return float(self.us[-1]) * nbytes / float(GRID[-1])
        share = (x - _LOG_GRID[i - 1]) / (_LOG_GRID[i] - _LOG_GRID[i - 1])
        return exp(self._list[i - 1] + share * (self._list[i] - self._list[i - 1]))

    def many(self, nbytes: Sequence[int] | NDArray[np.int64]) -> Array:
        """us for many sizes at once."""
        sizes = np.maximum(np.asarray(nbytes, dtype=np.float64), 1.0)
        x = np.log(sizes)
        return np.where(x < _LOG_GRID[-1], np.exp(np.interp(x, _LOG_GRID, self._log)), self.us[-1] * sizes / GRID[-1])


@lru_cache(maxsize=4096)
def curve(kind: Kind, at: Setting) -> PriceCurve:
    """The prices of an operation in a setting."""
    us = np.maximum(raw_us(kind, at, GRID), bound_us(kind, at, GRID))
    alone = kind in PAIRWISE or tuning.all_pairs(kind, at)  # the fewer the peers, the fewer channels or links a buffer has
    inside = None if alone else at.smaller
    if inside is not None:
        us = np.maximum(us, curve(kind, inside).us)
    return PriceCurve(np.maximum.accumulate(us))


def ns(kind: Kind, at: Setting, nbytes: int) -> int:
    """The price in ns, rounded up."""
    return ceil(1000.0 * curve(kind, at).at(nbytes) - _SPECK)


def many_ns(kind: Kind, at: Setting, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ns` of many sizes at once."""
    return np.ceil(1000.0 * curve(kind, at).many(nbytes) - _SPECK).astype(np.int64)
