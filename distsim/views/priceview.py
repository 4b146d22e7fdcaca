"""Where a price comes from, in 80 columns: the form that NCCL runs, its terms, and what the others would take."""

from __future__ import annotations

from math import exp

from distsim.cost.constants import ADDED
from distsim.cost.setting import PAIRWISE
from distsim.cost.told import Candidate, Told
from distsim.units import show_bytes, show_ns
from distsim.views.tables import folded, table


def price_text(op: str, cluster: str, found: Told) -> str:
    """Algorithm, protocol, floor, steps and bandwidth of a price, the other forms, and the band."""
    at, best = found.at, found.candidates[0]
    per_node = f" of {at.per_node}" if at.nodes > 1 else ""
    where = f"{at.nodes} node{'s' if at.nodes > 1 else ''}{per_node}"
    head = f"{op} of {show_bytes(found.nbytes)} among {at.n} ranks on {where}, cluster {cluster}: {show_ns(found.ns)}"
    sections = [
        folded(head + (f", busbw {found.busbw:.3g} GB/s" if found.busbw else "")),
        [f"{_name(best)}, the least of {len(found.candidates)}", *_terms(best)],
        [
            "Others",
            *table(("algorithm", "protocol", "floor", "bandwidth", "time"), [_row(c) for c in found.candidates], left=(0, 1)),
        ],
        *([_ways(found)] if found.ways else []),
        folded(_end(found)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _name(candidate: Candidate) -> str:
    return f"{candidate.algorithm}, {candidate.protocol}"


def _us(us: float) -> str:
    return show_ns(round(1000 * us))


def _share(name: str, value: float, power: float) -> str:
    """A constant to its power; of the two that are exponents, what they are exponents of."""
    if name in ADDED:
        return f"{exp(power):.3g}^{value:.3g}" if power else "1"
    return f"{value:.3g}" if abs(power - 1) < 1e-9 else f"{value:.3g}^{power:.2g}"


def _terms(candidate: Candidate) -> list[str]:
    rows = [(t.what, f"{t.amount:.4g} × {t.value:.3g}", f"({t.constant})", _us(t.us)) for t in candidate.terms]
    reached = " × ".join(_share(*share) for share in candidate.shares)
    rows.append(("moving", f"at {candidate.gbs:.4g} GB/s", "", _us(candidate.moving_us)))
    lines = table(("term", "how much", "constant", "time"), rows, left=(0, 1, 2))
    names = ", ".join(name for name, _, _ in candidate.shares)
    return [
        *lines,
        *folded(f"algorithm bandwidth: {candidate.counted_gbs:.4g} GB/s counted by NCCL × {reached} ({names})", indent="  "),
    ]


def _ways(found: Told) -> list[str]:
    """The levels of links that the bytes must pass."""
    rows = [(way.name, show_bytes(way.nbytes), f"{way.gbs:.4g} GB/s", show_ns(way.ns)) for way in found.ways]
    return ["What must pass, the narrowest first", *table(("link", "bytes", "bandwidth", "at least"), rows)]


def _row(candidate: Candidate) -> tuple[str, str, str, str, str]:
    floor = sum(t.us for t in candidate.terms)
    return candidate.algorithm, candidate.protocol, _us(floor), f"{candidate.gbs:.4g} GB/s", _us(candidate.us)


def _end(found: Told) -> str:
    rounded = "Where forms meet, the price is rounded off below the least of them"
    meshed = found.at.intra == "nvlink" and not found.at.switch  # a smaller group has fewer of its links
    fewer = "with fewer bytes" if found.kind in PAIRWISE or meshed else "with fewer bytes or in a group inside this one"
    parts = [f"{rounded}; it is never less than {fewer}."]
    if found.at.driven > 1:
        parts.append(
            f"One process launches on {found.at.driven} GPUs in turn, which takes {_us(found.issue_us)}: no call is shorter."
        )
    if found.measured:
        parts.append("The cluster has measured times, which correct the price.")
    parts.append(f"No schedule can beat {show_ns(found.bound_ns)} on these links.")
    kind = "systems like this" if found.band.known else "systems of a kind that no published table is of"
    low, high = (show_ns(round(found.ns * factor)) for factor in (found.band.low, found.band.high))
    parts.append(f"Nine of ten measured times lie between {low} and {high} ({kind}).")
    return " ".join(parts)
