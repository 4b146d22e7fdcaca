"""Layouts as a table, as JSON, and as a picture of time against memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from distsim.common.units import show_bytes, show_ns
from distsim.output.text_layout import (
    display_width,
    page_width,
    table_lines,
    truncated,
    wrapped_lines,
)
from distsim.planning.ranking import LayoutPlan, RankedLayout

SCHEMA_VERSION = 1
#: Columns, from the most comfortable on.
_COLUMN_SETS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    (0, 1, 2, 3, 5, 6, 7, 8, 9),
    (0, 1, 2, 3, 6, 7, 8, 9),
    (0, 1, 2, 3, 6, 7, 8),
    (0, 1, 2, 6, 7),
    (0, 1, 2, 6),
    (0, 1, 2),
)
#: What a step goes into, as people call what bounds it.
_BOUND_NAMES = {
    "products": "FLOPs",
    "memory": "HBM",
    "launch": "host",
    "pipeline": "bubble",
    "data": "dp",
}


def layout_plan_text(plan: LayoutPlan, shown: int) -> str:
    """The best ``shown`` layouts in a table; who is tied, who is on the front; why others are left
    out.
    """
    head = _header_lines(plan)
    if not plan.ranked:
        return "\n\n".join(["\n".join(head), "\n".join(_rejected_lines(plan))])
    rows = plan.ranked[:shown]
    more = [f"  … {len(plan.ranked) - shown} more …"] if len(plan.ranked) > shown else []
    notes = [*_legend_lines(plan, any(map(_is_estimate, rows))), *_unknown_dtype_notes(plan)]
    legend = [line for text in notes for line in wrapped_lines(text, "  ", "  ")]
    return "\n\n".join(
        [
            "\n".join(part)
            for part in (head, [*_layout_table(plan, rows), *more], legend, _rejected_lines(plan))
            if part
        ]
    )


def _legend_lines(plan: LayoutPlan, rough: bool) -> list[str]:
    tied = sum(one.tied for one in plan.ranked)
    ties = (
        f"may be as fast as the first, within the band of prices: {tied - 1} layout{'s' if tied > 2 else ''}"
        if tied > 1
        else "none may be as fast as the first"
    )
    front = "no other is faster and holds less" + (
        " on as few GPUs" if len({q.gpus for q in plan.questions}) > 1 else ""
    )
    return [
        f"=: {ties}; *: {front}",
        "z: ZeRO stage; b: micro-batch; ppPxC: C stages a rank; full: all recomputed",
        "within: if all prices err alike; %: MFU, memory, bubble, exposed communication",
        "bound: what most of a rank's step goes into",
        *(
            ["~: each transfer timed alone; simulated it may take a few percent longer"]
            if rough
            else []
        ),
    ]


def _unknown_dtype_notes(plan: LayoutPlan) -> Iterator[str]:
    """Devices that are not known to compute in the step's dtype at all."""
    for name, device in {q.cluster.name: q.cluster.device for q in plan.questions}.items():
        dtype = plan.questions[0].base.dtype
        if device.peak and dtype not in device.peak:
            yield f"{name}: its device has no rate for {dtype}, and is priced as computing in float32; --set dtype=float16 asks for another"


def _header_lines(plan: LayoutPlan) -> list[str]:
    first = plan.questions[0]
    model = first.model if isinstance(first.model, str) else "the model"
    gpus = ", ".join(dict.fromkeys(str(q.gpus) for q in plan.questions))
    names = ", ".join(dict.fromkeys(q.cluster.name for q in plan.questions))
    asked = f"{model} on {gpus} GPUs of {names}, {first.global_batch} sequences of {first.tokens} tokens a step"
    return wrapped_lines(f"{asked}: {len(plan.ranked)} layouts fit, {len(plan.left)} are left out")


def _layout_table(plan: LayoutPlan, rows: Sequence[RankedLayout]) -> list[str]:
    clusters, gpus = (
        len(set(names)) > 1
        for names in zip(*((q.cluster.name, q.gpus) for q in plan.questions), strict=True)
    )
    unit, scale = ("s", 1e9) if rows[0].outcome.step_ns >= 10**9 else ("ms", 1e6)
    head = ("", "layout", f"step, {unit}", "within", "tok/s", "MFU", "mem", "bub", "exp", "bound")
    lines = [
        _layout_row(
            k,
            one,
            scale,
            (
                f"{one.outcome.layout.gpus}:" if gpus else "",
                f"({one.outcome.cluster})" if clusters else "",
            ),
        )
        for k, one in enumerate(rows, 1)
    ]
    for shown in _COLUMN_SETS:
        left = [k for k, i in enumerate(shown) if i in (1, 9)]
        found = table_lines(
            [head[i] for i in shown], [[line[i] for i in shown] for line in lines], left, indent=""
        )
        if max(map(display_width, found)) <= page_width():
            return found
    return [truncated(line, page_width()) for line in found]


def _layout_row(
    place: int, one: RankedLayout, scale: float, where: tuple[str, str]
) -> tuple[str, ...]:
    found = one.outcome
    mark = ("=" if one.tied and place > 1 else " ") + ("*" if one.front else " ")
    name = " ".join(word for word in (where[0], found.layout.label(), where[1]) if word)
    low, high = (
        f"{ns / scale:.3g}" if ns < 1000 * scale else f"{ns / scale:.0f}" for ns in found.band_ns
    )
    percent = (found.mfu, found.memory, found.bubble, found.exposed)
    return (
        f"{place}{mark}",
        name,
        f"{'~' * _is_estimate(one)}{found.step_ns / scale:.4g}",
        f"{low}-{high}",
        f"{found.tokens_s_gpu:.0f}",
        *(f"{100 * share:.0f}" for share in percent),
        _BOUND_NAMES.get(found.bound, found.bound),
    )


def _is_estimate(one: RankedLayout) -> bool:
    return one.outcome.timed != "exact"


def _rejected_lines(plan: LayoutPlan) -> list[str]:
    """Why layouts are left out: reasons without their numbers, the most frequent first."""
    if not plan.left:
        return []
    reasons = Counter(rejection_kind(one.reason) for one in plan.left)
    rows = [
        (str(count), reason)
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    ]
    nearest = min(
        (one.reason for one in plan.left if one.reason.startswith("it does not fit")),
        key=_first_number,
        default="",
    )
    near = (
        [f"  the nearest that does not fit holds {_first_number(nearest)} % of the device's memory"]
        if nearest and not plan.ranked
        else []
    )
    return [
        "Left out",
        *(
            line
            for count, reason in rows
            for line in wrapped_lines(f"{count:>5}  {reason}", "  ", " " * 9)
        ),
        *near,
    ]


def _first_number(reason: str) -> int:
    return next((int(word) for word in reason.split() if word.isdigit()), 0)


def rejection_kind(reason: str) -> str:
    """A reason without what differs from layout to layout."""
    if reason.startswith("it does not fit"):
        return "do not fit the device's memory"
    if reason.startswith("it hangs"):
        return "hang"
    if reason.startswith("the global batch"):
        return "replicas and micro-batches do not divide the global batch"
    return " ".join(
        "N" if word.rstrip(",;").isdigit() else word for word in reason.partition(";")[0].split()
    )


def layout_plan_json(plan: LayoutPlan) -> dict[str, object]:
    """What `distsim plan --format json` prints: every layout. Times are ns, sizes bytes, shares of
    1.
    """
    first = plan.questions[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": first.model if isinstance(first.model, str) else dict(first.model),
        "global_batch": first.global_batch,
        "sequence": first.tokens,
        "gpus": list(dict.fromkeys(q.gpus for q in plan.questions)),
        "clusters": list(dict.fromkeys(q.cluster.name for q in plan.questions)),
        "layouts": [_layout_json(one) for one in plan.ranked],
        "left_out": [{"layout": one.layout._asdict(), "reason": one.reason} for one in plan.left],
    }


def _layout_json(one: RankedLayout) -> dict[str, object]:
    found = one.outcome
    return {
        "layout": {**found.layout._asdict(), "dp": found.layout.dp},
        "label": found.layout.label(),
        "cluster": found.cluster,
        "step_ns": found.step_ns,
        "band_ns": list(found.band_ns),
        "tokens_s_gpu": round(found.tokens_s_gpu, 3),
        "mfu": round(found.mfu, 6),
        "held_nbytes": found.held_nbytes,
        "memory": round(found.memory, 6),
        "bubble": round(found.bubble, 6),
        "exposed": round(found.exposed, 6),
        "bound": found.bound,
        "shares": {k: round(v, 6) for k, v in found.shares.items()},
        "tied": one.tied,
        "front": one.front,
        "timed": found.timed,
    }


# --- the picture ---
_WIDTH, _HEIGHT, _LEFT_MARGIN, _BOTTOM_MARGIN = 720, 400, 70, 50


def layout_plan_svg(plan: LayoutPlan) -> str:
    """Step time over memory, a dot for each layout with its band as a title; the front joined, ties
    filled.
    """
    if not plan.ranked:
        return _svg_document(['<text x="20" y="40">no layout fits</text>'])
    found = [one.outcome for one in plan.ranked]
    least, most = found[0].step_ns, min(found[-1].step_ns, 6 * found[0].step_ns)
    shown = [one for one in plan.ranked if one.outcome.step_ns <= most]

    def at(one: RankedLayout) -> tuple[float, float]:
        x = _LEFT_MARGIN + one.outcome.memory * (_WIDTH - _LEFT_MARGIN - 20)
        share = (one.outcome.step_ns - least) / max(most - least, 1)
        return round(x, 1), round(20 + (1 - share) * (_HEIGHT - _BOTTOM_MARGIN - 30), 1)

    front = sorted((at(one) for one in shown if one.front), key=lambda p: p[0])
    line = '<polyline class="front" points="' + " ".join(f"{x},{y}" for x, y in front) + '"/>'
    dots = [_layout_dot(one, *at(one)) for one in reversed(shown)]
    best = at(shown[0])
    label = f'<text class="best" x="{best[0] - 8}" y="{best[1] + 16}" text-anchor="end">{escape(found[0].layout.label())}</text>'
    room = plan.questions[0].cluster.device.memory_nbytes
    axes = [
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">memory of the fullest rank, % of {show_bytes(room)}</text>',
        f'<text x="14" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {_HEIGHT / 2})">step time</text>',
        *(
            f'<text x="{_LEFT_MARGIN + k * (_WIDTH - _LEFT_MARGIN - 20) / 4}" y="{_HEIGHT - 30}" text-anchor="middle">{25 * k}</text>'
            for k in range(5)
        ),
        f'<text x="{_LEFT_MARGIN - 6}" y="{_HEIGHT - _BOTTOM_MARGIN}" text-anchor="end">{show_ns(least)}</text>',
        f'<text x="{_LEFT_MARGIN - 6}" y="28" text-anchor="end">{show_ns(most)}</text>',
    ]
    return _svg_document([*axes, line, *dots, label])


def _layout_dot(one: RankedLayout, x: float, y: float) -> str:
    low, high = one.outcome.band_ns
    told = f"{one.outcome.layout.label()}: {show_ns(one.outcome.step_ns)} ({show_ns(low)} to {show_ns(high)})"
    kind = "tied" if one.tied else "front" if one.front else "other"
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"><title>{escape(told)}</title></circle>'


def _svg_document(parts: Sequence[str]) -> str:
    style = (
        "text{font:12px sans-serif;fill:#333}.best{font-weight:bold}circle{fill:#b8c4d0}circle.front{fill:#4878a8}"
        "circle.tied{fill:#d07020}polyline{fill:none;stroke:#4878a8;stroke-width:1.5}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    frame = f'<rect x="{_LEFT_MARGIN}" y="14" width="{_WIDTH - _LEFT_MARGIN - 20}" height="{_HEIGHT - _BOTTOM_MARGIN - 14}" fill="none" stroke="#bbb"/>'
    back = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join([head, f"<style>{style}</style>", back, frame, *parts, "</svg>", ""])


__all__ = ["layout_plan_json", "layout_plan_svg", "layout_plan_text", "rejection_kind"]
