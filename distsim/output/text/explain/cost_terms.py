"""The terms of a predicted cost: the algorithm and protocol that NCCL chooses, and the times of the
other ones.
"""

from __future__ import annotations

from math import exp

from distsim.common.units import show_bytes, show_ns
from distsim.hardware.cost.explain import CostExplanation, ExplainedForm
from distsim.hardware.cost.nccl_constants import ADDITIVE_CONSTANTS
from distsim.hardware.cost.nccl_context import SEND_RECV_OPERATIONS
from distsim.output.text_layout import table_lines, wrapped_lines


def cost_explanation_text(op: str, cluster: str, found: CostExplanation) -> str:
    """The terms of the cheapest form, a table of all forms, the links, and the range."""
    at = found.at
    nodes = (
        f"{at.nodes} nodes with {at.per_node} rank{'s' * (at.per_node > 1)} each"
        if at.nodes > 1
        else f"{at.nodes} node"
    )
    head = (
        f"{op} of {show_bytes(found.nbytes)} on {at.n} ranks ({nodes}), "
        f"cluster {cluster}: {show_ns(found.ns)}"
    )
    if found.busbw:
        head += f", busbw {found.busbw:.3g} GB/s"
    best = found.candidates[0]
    candidates = table_lines(
        ("algorithm", "protocol", "latency", "bandwidth", "time"),
        [_candidate_row(candidate) for candidate in found.candidates],
        left=(0, 1),
    )
    sections = [
        wrapped_lines(head),
        [_chosen_text(found), *_term_lines(best)],
        ["All algorithms and protocols", *candidates],
    ]
    if found.ways:
        sections.append(_link_lines(found))
    sections.append(wrapped_lines(_closing_text(found)))
    return "\n\n".join("\n".join(lines) for lines in sections)


def _form_name(candidate: ExplainedForm) -> str:
    return f"{candidate.algorithm}, {candidate.protocol}"


def _chosen_text(found: CostExplanation) -> str:
    return f"Chosen: {_form_name(found.candidates[0])}, the fastest of {len(found.candidates)}"


def _duration_text(us: float) -> str:
    return show_ns(round(1000 * us))


def _factor_text(name: str, value: float, power: float) -> str:
    """A constant to its power; for an additive constant, the base and the constant as exponent."""
    if name in ADDITIVE_CONSTANTS:
        return f"{exp(power):.3g}^{value:.3g}" if power else "1"
    return f"{value:.3g}" if abs(power - 1) < 1e-9 else f"{value:.3g}^{power:.2g}"


def _term_lines(candidate: ExplainedForm) -> list[str]:
    rows = [
        (t.what, f"{t.amount:.4g} × {t.value:.3g}", f"({t.constant})", _duration_text(t.us))
        for t in candidate.terms
    ]
    reached = " × ".join(_factor_text(*share) for share in candidate.shares)
    rows.append(
        ("transfer", f"at {candidate.gbs:.4g} GB/s", "", _duration_text(candidate.moving_us))
    )
    lines = table_lines(("term", "amount", "constant", "time"), rows, left=(0, 1, 2))
    names = ", ".join(name for name, _, _ in candidate.shares)
    return [
        *lines,
        *wrapped_lines(
            f"algorithm bandwidth: {candidate.counted_gbs:.4g} GB/s in NCCL's tuning model "
            f"× {reached} ({names})",
            indent="  ",
        ),
    ]


def _link_lines(found: CostExplanation) -> list[str]:
    """The levels of links that the bytes must cross."""
    rows = [
        (way.name, show_bytes(way.nbytes), f"{way.gbs:.4g} GB/s", show_ns(way.ns))
        for way in found.ways
    ]
    return [
        "Links, the slowest first",
        *table_lines(("link", "bytes", "bandwidth", "minimum time"), rows),
    ]


def _candidate_row(candidate: ExplainedForm) -> tuple[str, str, str, str, str]:
    latency_us = sum(t.us for t in candidate.terms)
    return (
        candidate.algorithm,
        candidate.protocol,
        _duration_text(latency_us),
        f"{candidate.gbs:.4g} GB/s",
        _duration_text(candidate.us),
    )


def _closing_text(found: CostExplanation) -> str:
    # Without an NVSwitch, a smaller group has fewer of the links, and may therefore be slower.
    is_mesh = found.at.intra == "nvlink" and not found.at.switch
    smaller = "for fewer bytes"
    if found.kind not in SEND_RECV_OPERATIONS and not is_mesh:
        smaller += " or for a part of the group"
    parts = [
        "Near sizes where another algorithm becomes the fastest, the cost is smoothed, so it is "
        "slightly below the fastest row. "
        f"The cost is never lower than {smaller}."
    ]
    if found.at.driven > 1:
        parts.append(
            f"One process launches on {found.at.driven} GPUs in turn, "
            f"which takes {_duration_text(found.issue_us)}; no call is shorter."
        )
    if found.measured:
        parts.append("The cluster has measured times, which correct the cost.")
    parts.append(f"Lower bound for any algorithm on these links: {show_ns(found.bound_ns)}.")
    kind = (
        "from published measurements of similar systems"
        if found.band.known
        else "no published measurements of such systems"
    )
    low, high = (show_ns(round(found.ns * factor)) for factor in (found.band.low, found.band.high))
    parts.append(f"90 % of measured times lie between {low} and {high} ({kind}).")
    return " ".join(parts)
