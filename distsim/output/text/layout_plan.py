"""The layouts of `distsim plan` as a table, as JSON, and as a picture of time against memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from distsim.common.units import show_bytes, show_ns
from distsim.hardware.cost.memory_fit import MemoryFit
from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    Section,
    Table,
    TableLayout,
    paragraphs,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.planning.evaluate_layouts import MAX_RISKY_LAYOUTS
from distsim.planning.frameworks import ANY_FRAMEWORK, FRAMEWORKS, SCHEDULE_NAMES
from distsim.planning.layout_result import SLOW_REASON
from distsim.planning.layouts import ParallelLayout
from distsim.planning.ranking import LayoutPlan, RankedLayout

SCHEMA_VERSION = 1
#: From wide to narrow.
_LAYOUTS = (
    TableLayout(
        (
            *("place", "layout", "step", "range", "tok/s", "MFU", "memory", "bubble"),
            *("exposed comm", "limited by"),
        )
    ),
    TableLayout(
        (
            "place",
            "layout",
            "step",
            "range",
            "MFU",
            "memory",
            "bubble",
            "exposed comm",
            "limited by",
        )
    ),
    TableLayout(
        ("place", "layout", "step", "range", "memory", "bubble", "exposed comm", "limited by"),
        headings={"memory": "mem\n%"},
    ),
    TableLayout(("place", "layout", "step", "range", "memory", "bubble", "exposed comm")),
    TableLayout(("place", "layout", "step", "memory", "bubble")),
    TableLayout(("place", "layout", "step", "memory")),
    TableLayout(("place", "layout", "step")),
)
_HIDDEN_NOTE = "columns not shown: {columns} (set COLUMNS={width} or use -o F.csv)"
#: The usual names of what limits a step.
_LIMIT_NAMES = {
    "products": "FLOPs",
    "memory": "HBM",
    "launch": "host",
    "pipeline": "bubble",
    "data": "DP comm",
    "tp": "TP comm",
    "cp": "CP comm",
    "ep": "EP comm",
}


class _TimeUnit(NamedTuple):
    """The unit of all times of a table."""

    name: str
    ns: float


def layout_plan_text(plan: LayoutPlan, shown: int) -> str:
    """The whole report as text."""
    return write_text(layout_plan_report(plan, shown))


def layout_plan_report(plan: LayoutPlan, shown: int) -> Report:
    """The best ``shown`` layouts in a table, a legend, and why other layouts were rejected."""
    sections = [Section([Paragraph(_header_text(plan)), Paragraph(_search_text(plan))])]
    if plan.ranked:
        rows = plan.certain[:shown]
        hidden = len(plan.certain) - len(rows)
        if rows:
            table = _layout_table(plan, rows)._replace(hidden_note=_HIDDEN_NOTE)
            if hidden > 0:
                table = table._replace(rows=[*table.rows, _omitted_row(table, hidden)])
            sections.append(Section([table]))
        risky = _risky_rows(plan)
        if risky:
            table = _layout_table(plan, risky, first_place=len(plan.certain) + 1)
            sections.append(Section([table], _risky_title(plan)))
        notes = [*_legend_texts(plan, [*rows, *risky]), *_unknown_dtype_notes(plan)]
        sections.append(Section(paragraphs(notes, "  ")))
    return Report([*sections, _rejected_section(plan)])


def _header_text(plan: LayoutPlan) -> str:
    first = plan.requests[0]
    model = first.model if isinstance(first.model, str) else "the model"
    gpus = ", ".join(dict.fromkeys(str(request.gpus) for request in plan.requests))
    clusters = ", ".join(dict.fromkeys(request.cluster.name for request in plan.requests))
    sequences = "sequence" if first.global_batch == 1 else "sequences"
    return (
        f"{model} on {gpus} GPUs of {clusters}, "
        f"{first.global_batch} {sequences} of {first.tokens} tokens per step: "
        f"{len(plan.certain)} layouts fit, {len(plan.risky)} may run out of memory, "
        f"{len(plan.rejected)} were rejected"
    )


def _search_text(plan: LayoutPlan) -> str:
    """The axes, schedules and precisions that were tried, and for which framework."""
    tried = [ranked.outcome.layout for ranked in plan.ranked]
    tried += [rejected.layout for rejected in plan.rejected]
    parts = []
    for axis in ("tp", "pp", "cp", "ep"):
        sizes = {int(getattr(layout, axis)) for layout in tried}
        if max(sizes) > 1:
            low, high = min(sizes), max(sizes)
            parts.append(f"{axis.upper()} {low}" + (f"–{high}" if high > low else ""))
    if any(layout.pp > 1 for layout in tried):
        names = {layout.schedule for layout in tried if layout.pp > 1}
        parts += [name for key, name in SCHEDULE_NAMES.items() if key in names]
    precisions = {layout.precision for layout in tried}
    dtype = plan.requests[0].base.dtype
    parts += [dtype] if "bf16" in precisions else []
    parts += ["FP8 matrix products"] if "fp8" in precisions else []
    framework = plan.requests[0].framework
    scope = (ANY_FRAMEWORK if framework is None else FRAMEWORKS[framework]).title
    return f"search space for {scope}: {', '.join(parts)}"


# --- the table ---


def _risky_rows(plan: LayoutPlan) -> Sequence[RankedLayout]:
    """The fastest layouts that may run out of memory, if they may be as fast as the best one."""
    if not plan.certain:
        return plan.risky[:MAX_RISKY_LAYOUTS]
    best_ns = plan.certain[0].outcome.step_ns
    fast = [ranked for ranked in plan.risky if ranked.tied or ranked.outcome.step_ns < best_ns]
    return fast[:MAX_RISKY_LAYOUTS]


def _risky_title(plan: LayoutPlan) -> str:
    if plan.certain:
        return "May be faster than layout 1, but may run out of memory"
    return "No layout fits for certain; these may run out of memory"


def _layout_table(plan: LayoutPlan, rows: Sequence[RankedLayout], first_place: int = 1) -> Table:
    unit = _TimeUnit("s", 1e9) if rows[0].outcome.step_ns >= 10**9 else _TimeUnit("ms", 1e6)
    columns = [
        Column("place", ""),
        text_column("layout"),
        Column("step", f"step\n{unit.name}"),
        Column("range", f"range\n{unit.name}"),
        Column("tok/s", "tok/s\nper GPU"),
        Column("MFU", "MFU\n%"),
        Column("memory", "memory\n%"),
        Column("bubble", "bubble\n%"),
        Column("exposed comm", "exposed\ncomm, %"),
        text_column("limited by", "limited\nby"),
    ]
    cells = [
        _layout_cells(place, _layout_name(plan, ranked), ranked, unit)
        for place, ranked in enumerate(rows, first_place)
    ]
    return Table(columns, cells, _LAYOUTS, indent="")


def _omitted_row(table: Table, count: int) -> dict[str, str]:
    """The row that stands for the layouts that are not shown."""
    empty = {column.key: "" for column in table.columns}
    return {**empty, "place": "…", "layout": f"{count} more"}


def _layout_name(plan: LayoutPlan, ranked: RankedLayout) -> str:
    """The name of a layout, with GPUs and cluster if the plan compares several of them."""
    outcome = ranked.outcome
    parts = [outcome.layout.label()]
    if len({request.gpus for request in plan.requests}) > 1:
        parts.insert(0, f"{outcome.layout.gpus}:")
    if len({request.cluster.name for request in plan.requests}) > 1:
        parts.append(f"({outcome.cluster})")
    return " ".join(part for part in parts if part)


def _layout_cells(place: int, name: str, ranked: RankedLayout, unit: _TimeUnit) -> dict[str, str]:
    outcome = ranked.outcome
    tie_mark = "=" if ranked.tied and place > 1 else " "
    front_mark = "*" if ranked.front else " "
    estimate_mark = "~" if _is_estimate(ranked) else ""
    low, high = (_bound_of_range(ns, unit) for ns in outcome.band_ns)
    return {
        "place": f"{place}{tie_mark}{front_mark}",
        "layout": name,
        "step": f"{estimate_mark}{outcome.step_ns / unit.ns:.4g}",
        "range": f"{low}–{high}",
        "tok/s": f"{outcome.tokens_s_gpu:.0f}",
        "MFU": f"{100 * outcome.mfu:.0f}",
        "memory": _memory_range_text(outcome.fit),
        "bubble": f"{100 * outcome.bubble:.0f}",
        "exposed comm": f"{100 * outcome.exposed:.0f}",
        "limited by": _LIMIT_NAMES.get(outcome.bound, outcome.bound),
    }


def _memory_range_text(fit: MemoryFit) -> str:
    """The range in percent of the device's memory."""
    low, high = (100 * nbytes / fit.capacity_nbytes for nbytes in (fit.low_nbytes, fit.high_nbytes))
    return f"{low:.0f}–{high:.0f}"


def _bound_of_range(ns: int, unit: _TimeUnit) -> str:
    """Three significant digits; all digits from 1000 on, where `g` would write 1e+03."""
    return f"{ns / unit.ns:.3g}" if ns < 1000 * unit.ns else f"{ns / unit.ns:.0f}"


def _is_estimate(ranked: RankedLayout) -> bool:
    return ranked.outcome.timed != "exact"


# --- the legend ---


def _legend_texts(plan: LayoutPlan, rows: Sequence[RankedLayout]) -> list[str]:
    """The meaning of every mark that occurs in the table, and of its columns."""
    texts = []
    # The first layout is tied with itself.
    others_tied = sum(ranked.tied for ranked in plan.ranked) - 1
    if others_tied > 0:
        count = f"{others_tied} layout{'s' if others_tied > 1 else ''}"
        texts.append(f"=: may be faster than layout 1, because costs are uncertain ({count})")
    if any(ranked.front for ranked in rows):
        front = "no layout is both faster and smaller in memory"
        if len({request.gpus for request in plan.requests}) > 1:
            front += " on as few GPUs"
        texts.append(f"*: Pareto-optimal ({front})")
    texts += [
        _abbreviations_text([ranked.outcome.layout for ranked in rows]),
        *_precision_texts(plan, rows),
        "range: likely step times, given the prediction errors measured on this hardware",
        "memory: peak in % of device memory; 90 % of measured peaks are in the range",
        f"memory includes {_reserve_text(rows)} for the CUDA context and NCCL",
    ]
    if any(_is_estimate(ranked) for ranked in rows):
        texts.append("~: estimate without contention; a simulated step may take a few % longer")
    return texts


def _precision_texts(plan: LayoutPlan, rows: Sequence[RankedLayout]) -> list[str]:
    """What FP8 means, and the best layout without it if the table has none."""
    if all(ranked.outcome.layout.precision != "fp8" for ranked in rows):
        return []
    dtype = plan.requests[0].base.dtype
    text = f"FP8: matrix products in 8 bits; --restrict precision=bf16 keeps all in {dtype}"
    places = [k for k, r in enumerate(plan.certain, 1) if r.outcome.layout.precision != "fp8"]
    if places:
        first = plan.certain[places[0] - 1].outcome
        text += f" (fastest: {first.layout.label()}, {show_ns(first.step_ns)}, number {places[0]})"
    return [text]


def _reserve_text(rows: Sequence[RankedLayout]) -> str:
    reserves = sorted({ranked.outcome.fit.reserve_nbytes for ranked in rows})
    if len(reserves) == 1:
        return show_bytes(reserves[0])
    return f"{show_bytes(reserves[0])} to {show_bytes(reserves[-1])}"


def _abbreviations_text(layouts: Sequence[ParallelLayout]) -> str:
    """The parts of the names of layouts that are not standard terms."""
    texts = ["b2: micro-batch of 2"]
    if any(layout.chunks > 1 for layout in layouts):
        texts.append("PP2x4: 2 pipeline ranks with 4 stages each")
    return "; ".join(texts)


def _unknown_dtype_notes(plan: LayoutPlan) -> Iterator[str]:
    """A note for each device without a rate for the dtype of the step."""
    dtype = plan.requests[0].base.dtype
    devices = {request.cluster.name: request.cluster.device for request in plan.requests}
    for name, device in devices.items():
        if device.peak and dtype not in device.peak:
            yield (
                f"{name}: its device has no peak rate for {dtype}, so costs are those of float32; "
                "use --set dtype=float16 for another dtype"
            )


# --- rejected layouts ---


def _rejected_section(plan: LayoutPlan) -> Section:
    """Why layouts were rejected: reasons without their numbers, the most frequent first."""
    counts = Counter(rejection_kind(rejected.reason) for rejected in plan.rejected)
    by_frequency = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    reasons = [f"{count:>5}  {kind}" for kind, count in by_frequency]
    return Section(
        [*paragraphs(reasons, "  ", " " * 9), Paragraph(_nearest_text(plan), "  ")],
        "Rejected layouts",
    )


def _nearest_text(plan: LayoutPlan) -> str:
    """What would help, if no layout fits; else empty."""
    if plan.ranked:
        return ""
    reasons = [rejected.reason for rejected in plan.rejected]
    if all(reason.startswith(_INDIVISIBLE_BATCH) for reason in reasons):
        gpus = plan.requests[0].gpus
        return f"help: set --global-batch to a multiple of {gpus}, the number of GPUs"
    percentages = [_first_number(r) for r in reasons if r.startswith(_OUT_OF_MEMORY)]
    if not percentages:
        return ""
    return f"the smallest layout needs {min(percentages)} % of the device's memory"


_OUT_OF_MEMORY = "it does not fit"
_INDIVISIBLE_BATCH = "the global batch"


def _first_number(reason: str) -> int:
    return next((int(word) for word in reason.split() if word.isdigit()), 0)


def rejection_kind(reason: str) -> str:
    """A reason without the numbers that differ from layout to layout."""
    if reason.startswith(_OUT_OF_MEMORY):
        return "they do not fit in the device's memory"
    if reason.startswith(SLOW_REASON):
        return "they are much slower than the fastest layouts"
    if reason.startswith("it hangs"):
        return "hang"
    if reason.startswith("the number of micro-batches"):
        return (
            "the number of micro-batches is not a multiple of the number of pipeline ranks "
            "(required by the interleaved schedule)"
        )
    if reason.startswith(_INDIVISIBLE_BATCH):
        return "the global batch is not divisible by replicas x micro-batch"
    # The remedy is for a scenario file; a plan has rejected the layout already.
    words = reason.partition(";")[0].partition(": set ")[0].split()
    return " ".join("N" if word.rstrip(",;").isdigit() else word for word in words)


# --- JSON ---


def layout_plan_json(plan: LayoutPlan) -> dict[str, object]:
    """The output of `distsim plan --format json`: every layout.

    Times are ns, sizes are bytes, shares are between 0 and 1.
    """
    first = plan.requests[0]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": first.model if isinstance(first.model, str) else dict(first.model),
        "global_batch": first.global_batch,
        "sequence": first.tokens,
        "gpus": list(dict.fromkeys(request.gpus for request in plan.requests)),
        "clusters": list(dict.fromkeys(request.cluster.name for request in plan.requests)),
        "layouts": [_layout_json(ranked) for ranked in plan.ranked],
        "excluded": [
            {"layout": rejected.layout._asdict(), "reason": rejected.reason}
            for rejected in plan.rejected
        ],
    }


def _layout_json(ranked: RankedLayout) -> dict[str, object]:
    outcome = ranked.outcome
    return {
        "layout": {**outcome.layout._asdict(), "dp": outcome.layout.dp},
        "label": outcome.layout.label(),
        "cluster": outcome.cluster,
        "step_ns": outcome.step_ns,
        "band_ns": list(outcome.band_ns),
        "tokens_s_gpu": round(outcome.tokens_s_gpu, 3),
        "mfu": round(outcome.mfu, 6),
        "held_nbytes": outcome.held_nbytes,
        "memory": round(outcome.memory, 6),
        "memory_low_nbytes": outcome.fit.low_nbytes,
        "memory_high_nbytes": outcome.fit.high_nbytes,
        "memory_reserve_nbytes": outcome.fit.reserve_nbytes,
        "may_run_out": outcome.fit.may_run_out,
        "bubble": round(outcome.bubble, 6),
        "exposed": round(outcome.exposed, 6),
        "bound": outcome.bound,
        "shares": {k: round(v, 6) for k, v in outcome.shares.items()},
        "tied": ranked.tied,
        "pareto": ranked.front,
        "timed": outcome.timed,
    }


# --- the picture ---
_WIDTH = 720
_HEIGHT = 400
_LEFT_MARGIN = 70
_BOTTOM_MARGIN = 50
_RIGHT_MARGIN = 20
#: Layouts that are slower than the best by more than this factor are not drawn.
_MAX_SLOWDOWN = 6
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.best{font-weight:bold}"
    "circle{fill:#b8c4d0}circle.front{fill:#4878a8}"
    "circle.tied{fill:#d07020}polyline{fill:none;stroke:#4878a8;stroke-width:1.5}"
)


def layout_plan_svg(plan: LayoutPlan) -> str:
    """Step time over memory: a dot for each layout, with its range as a tooltip.

    A line joins the Pareto front; layouts that may be as fast as the best have another colour.
    """
    if not plan.ranked:
        return _svg_document(['<text x="20" y="40">no layout fits</text>'])
    best = plan.ranked[0].outcome
    least_ns = best.step_ns
    most_ns = min(plan.ranked[-1].outcome.step_ns, _MAX_SLOWDOWN * best.step_ns)
    shown = [ranked for ranked in plan.ranked if ranked.outcome.step_ns <= most_ns]

    def position(ranked: RankedLayout) -> tuple[float, float]:
        x = _LEFT_MARGIN + ranked.outcome.memory * (_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN)
        share = (ranked.outcome.step_ns - least_ns) / max(most_ns - least_ns, 1)
        return round(x, 1), round(20 + (1 - share) * (_HEIGHT - _BOTTOM_MARGIN - 30), 1)

    front = sorted((position(ranked) for ranked in shown if ranked.front), key=lambda p: p[0])
    line = '<polyline class="front" points="' + " ".join(f"{x},{y}" for x, y in front) + '"/>'
    # The best layouts are drawn last, above the others.
    dots = [_layout_dot(ranked, *position(ranked)) for ranked in reversed(shown)]
    x, y = position(shown[0])
    label = (
        f'<text class="best" x="{x - 8}" y="{y + 16}" text-anchor="end">'
        f"{escape(best.layout.label())}</text>"
    )
    axes = _axis_elements(plan.requests[0].cluster.device.memory_nbytes, least_ns, most_ns)
    return _svg_document([*axes, line, *dots, label])


def _axis_elements(capacity: int, least_ns: int, most_ns: int) -> list[str]:
    """The titles and the labels of both axes."""
    elements = [
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"peak memory of the fullest rank, % of {show_bytes(capacity)}</text>",
        f'<text x="14" y="{_HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {_HEIGHT / 2})">step time</text>',
    ]
    for k in range(5):
        x = _LEFT_MARGIN + k * (_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN) / 4
        elements.append(f'<text x="{x}" y="{_HEIGHT - 30}" text-anchor="middle">{25 * k}</text>')
    elements += [
        f'<text x="{_LEFT_MARGIN - 6}" y="{_HEIGHT - _BOTTOM_MARGIN}" text-anchor="end">'
        f"{show_ns(least_ns)}</text>",
        f'<text x="{_LEFT_MARGIN - 6}" y="28" text-anchor="end">{show_ns(most_ns)}</text>',
    ]
    return elements


def _layout_dot(ranked: RankedLayout, x: float, y: float) -> str:
    outcome = ranked.outcome
    low, high = map(show_ns, outcome.band_ns)
    tooltip = f"{outcome.layout.label()}: {show_ns(outcome.step_ns)} ({low} to {high})"
    kind = "other"
    if ranked.tied:
        kind = "tied"
    elif ranked.front:
        kind = "front"
    return (
        f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"><title>{escape(tooltip)}</title></circle>'
    )


def _svg_document(elements: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    )
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    frame = (
        f'<rect x="{_LEFT_MARGIN}" y="14" width="{_WIDTH - _LEFT_MARGIN - _RIGHT_MARGIN}" '
        f'height="{_HEIGHT - _BOTTOM_MARGIN - 14}" fill="none" stroke="#bbb"/>'
    )
    style = f"<style>{_STYLE}</style>"
    return "\n".join([head, style, background, frame, *elements, "</svg>", ""])


__all__ = ["layout_plan_json", "layout_plan_svg", "layout_plan_text", "rejection_kind"]
