"""Fits the constants of `distsim.hardware.cost.nccl_constants` to published tables: one set for
all, with shrunken offsets by transport and GPU family.

Residuals are logarithms of predicted over measured time, Huber's loss; a table weighs (tables of
its system)^-0.3; a constant is held to its prior by a ridge. Gauss-Newton with exact derivatives; a
fit takes a second.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tables import Table

from distsim.hardware.cost import nccl_curves
from distsim.hardware.cost.nccl_curves import SHARPNESS

Array = NDArray[np.float64]

#: Priors: NCCL's own latencies count once (base, hops), what it has no figure for is a guess in us;
#: shares of bandwidth. The launch is measured: nccl-tests' calls of no bytes take 3.1 to 3.2 us (8
#: H20, one process a GPU, deepseek-ai/DeepEP#303).
LATENCIES = {
    "launch": 3.15,
    "base": 1.0,
    "start, Simple": 5.9,
    "start, LL128": 3.0,
    "start, Simple between": 5.2,
    "channel": 0.15,
    "hop inside, LL": 1.5,
    "hop inside, LL128": 1.5,
    "hop inside, Simple": 1.41,
    "hop between, LL": 1.2,
    "hop between, LL128": 1.2,
    "hop between, Simple": 1.2,
    "hop, NVLS": 1.0,
    "hop between, NVLS": 1.0,
    "message": 4.4,
    "message between": 12.0,
    "issue": 4.0,
    "issue, message": 0.7,
    "peer inside": 2.7,
    "peer between": 8.2,
}
SHARES = {
    "bandwidth, Simple": 0.95,
    "bandwidth, Simplex": 0.94,
    "bandwidth, LL": 0.88,
    "bandwidth, LL128": 0.81,
    "ring, LL": 0.64,
    "ring, Simple": 0.15,
    "crowd": 0.95,
    "tree": 0.97,
    "two nodes": 0.82,
    "bandwidth, NVLS": 0.9,
    "bandwidth, NVLS gather": 0.9,
    "bandwidth, NVLS tree": 0.84,
    "bandwidth, message": 0.94,
    "bandwidth, messagex": 0.885,
    "bandwidth, message LL": 0.86,
}
ADDED = ("ring, LL", "ring, Simple")
NAMES = (*LATENCIES, *SHARES)
#: Standard deviations of the priors, in logarithms: (latencies, shares). What a channel costs to
#: start nobody says: ten times more or less may be.
GLOBAL, TRANSPORT, FAMILY = (0.7, 0.15), (2.0, 1.0), (0.25, 0.1)
#: Transports that one plugin of NCCL's reaches through libfabric (aws-ofi-nccl), by a thread of the
#: host.
PLUGINS = {"efa": "ofi", "slingshot": "ofi"}
#: NCCL's tables treat Blackwell as Hopper but for figures that `distsim.hardware.cost.nccl_tuning`
#: has.
LIKE = {"blackwell": "hopper"}
OFFSETS = tuple(("way", name) for name in ("efa", "slingshot", "pcie", "staged", "ofi")) + tuple(
    ("family", name) for name in ("volta", "hopper")
)
#: Known before any of these tables: a message over EFA takes some 15 us against 2 to 3 over
#: InfiniBand (Shalev and others, "A cloud-optimized transport protocol", IEEE Micro 2020); PCIe
#: without peer access crosses the host's memory twice.
KNOWN = {
    ("way", "efa"): {"hop between, LL": 5.0, "hop between, LL128": 4.0, "hop between, Simple": 1.8},
    ("way", "staged"): {"bandwidth, Simple": 0.45, "bandwidth, LL": 0.6},
}
HUBER, RIDGE, STEPS = 0.1, 0.1, 30


class Data(NamedTuple):
    """Tables as arrays over (row, form, constant)."""

    tables: tuple[Table, ...]
    table: NDArray[np.int64]  # of each row
    nbytes: Array
    us: Array
    latency: Array
    power: Array
    moving: Array  # us at constants of 1
    member: Array  # (offset, row)
    issue: Array  # (row, constant)


def data(tables: list[Table]) -> Data:
    rows, most = sum(len(t.us) for t in tables), 10
    latency, power, issue = (
        np.zeros((rows, most, len(LATENCIES))),
        np.zeros((rows, most, len(SHARES))),
        np.zeros((rows, len(LATENCIES))),
    )
    moving = np.full((rows, most), np.inf)
    index = {name: k for k, name in enumerate(NAMES)}
    at = 0
    for table in tables:
        part = slice(at, at := at + len(table.us))
        forms = [
            f
            for f in nccl_curves.candidate_forms(table.kind, table.at, table.nbytes)
            if not table.rings or f.algorithm == "ring"
        ]
        for p in nccl_curves.launch_terms(table.kind, table.at):
            issue[part, index[p.constant]] += p.us
        for k, form in enumerate(forms):
            for p in form.parts:
                latency[part, k, index[p.constant]] += p.us
            for name, exponent in form.powers:
                power[part, k, index[name] - len(LATENCIES)] += exponent
            moving[part, k] = table.nbytes / (1000 * form.gbs)
    of = np.repeat(np.arange(len(tables)), [len(t.us) for t in tables])
    member = np.array([[_of(t, *offset) for t in tables] for offset in OFFSETS], dtype=float)[:, of]
    joined = [np.concatenate([getattr(t, name) for t in tables]) for name in ("nbytes", "us")]
    return Data(tuple(tables), of, *joined, latency, power, moving, member, issue)


def _of(table: Table, kind: str, name: str) -> bool:
    way = table.family[2]
    return (
        name in (way, PLUGINS.get(way))
        if kind == "way"
        else name == LIKE.get(table.family[0], table.family[0])
    )


def priors() -> tuple[Array, Array]:
    """(means, standard deviations): of every constant, then of every offset's; logarithms, but for
    exponents.
    """
    means, spreads = (
        [np.array([_scale(n, {**LATENCIES, **SHARES}[n]) for n in NAMES])],
        [_spread(GLOBAL)],
    )
    spreads[0][[NAMES.index(name) for name in ADDED]] = 0.3
    spreads[0][NAMES.index("channel")] = np.log(10.0)
    spreads[0][NAMES.index("launch")] = 0.08
    for offset in OFFSETS:
        means.append(np.array([np.log(KNOWN.get(offset, {}).get(name, 1.0)) for name in NAMES]))
        spreads.append(_spread(TRANSPORT if offset[0] == "way" else FAMILY))
        if offset[0] == "family":
            spreads[-1][NAMES.index("channel")] = 1.0
            spreads[-1][[k for k, name in enumerate(NAMES) if "hop" in name]] = 0.5
        else:
            spreads[-1][[k for k, name in enumerate(NAMES) if not _of_way(offset[1], name)]] = 1e-3
    return np.concatenate(means), np.concatenate(spreads)


def _of_way(way: str, name: str) -> bool:
    """Whether a way may change a constant: the network what is between nodes, what its plugin does
    latencies alone. One table of PCIe without peer access tells of its own box."""
    if way in ("staged", "pcie"):
        return way == "pcie" and ("inside" in name or "bandwidth" in name)
    between = name != "message" and not any(
        word in name for word in ("inside", "launch", "issue", "base")
    )
    return between and (way != "ofi" or name in LATENCIES)


def _scale(name: str, value: float) -> float:
    return value if name in ADDED else float(np.log(value))


def _spread(pair: tuple[float, float]) -> Array:
    return np.array([pair[0]] * len(LATENCIES) + [pair[1]] * len(SHARES))


def predict(d: Data, x: Array) -> tuple[Array, Array]:
    """(log us of every row, its derivatives)."""
    width = len(NAMES)
    full = x[:width] + d.member.T @ x[width:].reshape(len(OFFSETS), width)
    latency = np.exp(full[:, : len(LATENCIES)])
    moving = d.moving * np.exp(-np.einsum("rkp,rp->rk", d.power, full[:, len(LATENCIES) :]))
    each = np.einsum("rkl,rl->rk", d.latency, latency) + moving
    least = each.min(axis=1, keepdims=True)
    share = (each / least) ** -SHARPNESS
    log_us = np.log(least[:, 0]) - np.log(share.sum(axis=1)) / SHARPNESS
    weight = share / share.sum(axis=1, keepdims=True) / each
    by_latency = np.einsum("rk,rkl->rl", weight, d.latency) * latency
    by_share = -np.einsum(
        "rk,rkp->rp", weight * np.where(np.isfinite(moving), moving, 0.0), d.power
    )
    log_us, own = _issued(d, latency, log_us, np.concatenate([by_latency, by_share], axis=1))
    return log_us, np.concatenate([own, *(own * m[:, None] for m in d.member)], axis=1)


def _issued(d: Data, latency: Array, log_us: Array, slope: Array) -> tuple[Array, Array]:
    """The same with the launches of a process that drives several GPUs, where they take longer than
    the GPUs.
    """
    each = d.issue * latency
    whole = each.sum(axis=1, keepdims=True)
    behind = 1 / (1 + np.exp(SHARPNESS * (np.log(whole[:, 0]) - log_us)))
    slope = behind[:, None] * slope
    slope[:, : len(LATENCIES)] += (1 - behind)[:, None] * each / whole
    return log_us - np.log(behind) / SHARPNESS, slope


def fit(
    d: Data, rows: NDArray[np.int64] | None = None, start: Array | None = None, steps: int = STEPS
) -> Array:
    """The constants that fit these rows best (all of them, if none are named)."""
    rows = np.arange(len(d.us)) if rows is None else rows
    mean, spread = priors()
    hold, weight, wanted = RIDGE / spread**2, _weights(d)[rows], np.log(d.us[rows])

    def loss(x: Array) -> tuple[float, Array, Array]:
        found, slope = predict(d, x)
        off = found[rows] - wanted
        size = np.abs(off)
        huber = np.where(size < HUBER, off**2 / 2, HUBER * (size - HUBER / 2))
        return float((weight * huber).sum() + (hold * (x - mean) ** 2).sum() / 2), off, slope[rows]

    x, damping = mean.copy() if start is None else start.copy(), 1e-3
    now, off, slope = loss(x)
    for _ in range(steps):
        w = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(off), 1e-9))
        square, gradient = (
            (slope * w[:, None]).T @ slope + np.diag(hold),
            (slope * w[:, None]).T @ off + hold * (x - mean),
        )
        step = np.clip(
            np.linalg.solve(square + damping * np.diag(np.diag(square)), -gradient), -0.5, 0.5
        )
        then, off_then, slope_then = loss(x + step)
        gained = now - then
        damping = damping / 5 if gained > 0 else damping * 5
        if gained > 0:
            x, now, off, slope = x + step, then, off_then, slope_then
        if 0 < gained < 1e-4 * now or damping > 1e4:
            break
    return x


def _weights(d: Data) -> Array:
    systems = Counter(t.system for t in d.tables)
    each = np.array([systems[t.system] ** -0.3 * 20 / len(t.us) for t in d.tables])
    return each[d.table]


def module(x: Array) -> str:
    """The constants as `distsim/hardware/cost/nccl_constants.py` has them."""
    width = len(NAMES)
    lines = ["CONSTANTS: Final[dict[str, float]] = {"]
    for name, value in zip(NAMES, x[:width], strict=True):
        lines.append(f'    "{name}": {value if name in ADDED else np.exp(value):.3f},')
    lines += ["}", f"ADDED: Final = {ADDED!r}".replace("'", '"')]
    for kind, title in (("way", "BY_TRANSPORT"), ("family", "BY_ARCHITECTURE")):
        lines.append(f"{title}: Final[dict[str, dict[str, float]]] = {{")
        for k, offset in enumerate(OFFSETS):
            if offset[0] != kind:
                continue
            if offset[1] in PLUGINS.values():
                continue
            shared = OFFSETS.index((kind, PLUGINS[offset[1]])) + 1 if offset[1] in PLUGINS else 0
            own = x[width * (k + 1) : width * (k + 2)] + (
                x[width * shared : width * (shared + 1)] if shared else 0.0
            )
            kept = {
                n: v if n in ADDED else np.exp(v)
                for n, v in zip(NAMES, own, strict=True)
                if abs(v) > 0.03
            }
            lines += [
                f'    "{offset[1]}": {{',
                *(f'        "{name}": {value:.3f},' for name, value in kept.items()),
                "    },",
            ]
        lines.append("}")
    return "\n".join(lines) + "\n"
