"""The costs of calls and their terms (as in `distsim explain`), with the costs of alternative
algorithms. Calls with equal costs share one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.analysis.timeline import CollectiveTimes
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.explain import ExplainedForm, explain_cost
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATIONS
from distsim.output.page.data_encoding import Numbers
from distsim.trace.model import Trace

#: The largest number of different costs; of more, those of the first calls are kept.
MAX_PRICES = 400
#: For groups up to this size, the costs of all algorithms of the operation are listed.
_MAX_RANKS_FOR_ALTERNATIVES = 64


class CallCosts:
    """``prices``: the different costs; ``price``: the index of each row's cost, -1 if it has none.

    The names are those of the page's data format.
    """

    def __init__(self, cost: CostModel, trace: Trace, roots: Numbers) -> None:
        self._cost = cost
        self._index: dict[tuple[object, ...], int] = {}
        #: By the arguments of a call, which are cheap to compare; `_index` goes by the placement
        #: of its ranks.
        self._known: dict[tuple[object, ...], int] = {}
        self._groups: list[tuple[int, ...]] = [
            tuple(ranks) for _, ranks in trace.header.get("groups", ())
        ]
        self.prices: list[dict[str, object]] = []
        names = [OPERATIONS.get(op) for op in trace.tables["op"]]
        columns = [trace[n].tolist() for n in ("op", "rank", "group", "peer", "nbytes", "match")]
        self.price: list[int] = []
        for op, rank, group, peer, nbytes, match, root in zip(
            *columns, roots.tolist(), strict=True
        ):
            operation = names[op] if op >= 0 else None
            number = -1
            if match >= 0:
                number = self._row(operation, rank, group, peer, nbytes, root)
            self.price.append(number)

    def _row(
        self, row: type[Operation] | None, rank: int, group: int, peer: int, nbytes: int, root: int
    ) -> int:
        if row is None or row.signals or row.kind not in ("p2p", "collective"):
            return -1
        said = (row.op, nbytes, (rank, peer) if row.kind == "p2p" else (group, root))
        if said not in self._known:
            self._known[said] = self._number(row, rank, group, peer, nbytes, root)
        return self._known[said]

    def _number(
        self, row: type[Operation], rank: int, group: int, peer: int, nbytes: int, root: int
    ) -> int:
        ends = self._ends(row, rank, group, peer)
        if ends is None:
            return -1
        kind = self._cost.link_class(*ends) if row.kind == "p2p" else id(self._cost.placement(ends))
        key = (
            row.op if row.kind == "collective" else "message",
            kind,
            nbytes,
            ends.index(root) if root in ends else -1,
        )
        if key not in self._index:
            if len(self.prices) >= MAX_PRICES:
                return -1
            self._index[key] = len(self.prices)
            self.prices.append(
                _cost_data(self._cost, row, ends, nbytes, root if root in ends else None)
            )
        return self._index[key]

    def _ends(
        self, row: type[Operation], rank: int, group: int, peer: int
    ) -> tuple[int, ...] | None:
        if row.kind == "collective":
            return (
                self._groups[group]
                if 0 <= group < len(self._groups) and self._groups[group]
                else None
            )
        return None if peer < 0 else (rank, peer) if row.direction == "send" else (peer, rank)


def _cost_data(
    cost: CostModel, row: type[Operation], ends: tuple[int, ...], nbytes: int, root: int | None
) -> dict[str, object]:
    found = explain_cost(cost, row, ends, nbytes)
    head = {
        "op": row.op,
        "n": len(ends),
        "nbytes": nbytes,
        "nodes": len({cost.node(r) for r in ends}),
    }
    if found is not None:
        best = found.candidates[0]
        return {
            **head,
            "ns": found.ns,
            "form": f"{best.algorithm}, {best.protocol}",
            "terms": _nccl_terms(best),
            "bound_ns": found.bound_ns,
            "others": [
                [f"{c.algorithm}, {c.protocol}", round(1000 * c.us)] for c in found.candidates[1:]
            ],
            "band": [round(found.ns * found.band.low), round(found.ns * found.band.high)],
        }
    if row.kind == "p2p":
        return {**head, **_message_cost(cost, ends, nbytes)}
    return {**head, **_collective_cost(cost, row, ends, nbytes, root)}


def _nccl_terms(best: ExplainedForm) -> list[list[object]]:
    """[name, amount and constant, ns] of each term."""
    terms: list[list[object]] = [
        [t.what, f"{t.amount:.4g} × {t.value:.3g} ({t.constant})", round(1000 * t.us)]
        for t in best.terms
    ]
    return [*terms, ["transfer", f"at {best.gbs:.4g} GB/s", round(1000 * best.moving_us)]]


def _message_cost(cost: CostModel, ends: tuple[int, ...], nbytes: int) -> dict[str, object]:
    src, dst = ends
    ns, link = cost.p2p_ns(src, dst, nbytes), cost.link_class(src, dst)
    latency = cost.p2p_latency_ns(src, dst)
    where = {"self": "within the device", "intra": "within a node", "inter": "between nodes"}[link]
    terms: list[list[object]] = [
        ["call overhead", "per communication call", cost.call_overhead_ns],
        ["latency", f"one hop {where}", latency - cost.call_overhead_ns],
        ["transfer", f"at {cost.bytes_per_ns(src, dst):.4g} GB/s", max(ns - latency, 0)],
    ]
    return {"ns": ns, "form": f"a message {where}", "terms": terms, "others": []}


def _collective_cost(
    cost: CostModel, row: type[Operation], ends: tuple[int, ...], nbytes: int, root: int | None
) -> dict[str, object]:
    """A cost by a schedule: the time of an empty buffer is overhead and latency, the rest is
    transfer.
    """
    ns, empty = (cost.collective_ns(row, ends, size, root) for size in (nbytes, 0))
    overhead = min(cost.call_overhead_ns, empty)
    moving = f"at {nbytes / (ns - empty):.4g} GB/s of buffer size" if ns > empty else "no data"
    terms: list[list[object]] = [
        ["call overhead", "per communication call", overhead],
        ["latency", f"of all rounds among {len(ends)} ranks", max(empty - overhead, 0)],
        ["transfer", moving, max(ns - empty, 0)],
    ]
    index = 0 if root is None else ends.index(root)
    others: list[list[object]] = []
    if 1 < len(ends) <= _MAX_RANKS_FOR_ALTERNATIVES:
        others = [
            [name, cost.flat_ns(row, ends, nbytes, index, algorithm)]
            for name, algorithm in row.algorithms.items()
        ]
    first = (
        next(iter(row.algorithms), "schedule")
        if cost.cluster.collectives == "flat"
        else "cheapest algorithm"
    )
    return {"ns": ns, "form": first, "terms": terms, "others": others}


# --- bandwidth over size ---

#: The largest number of curves, the sizes of each (1 KiB to 1 GiB), and the largest group with a
#: curve.
MAX_CURVES, _CURVE_SIZES, _MAX_CURVE_RANKS = 6, [1 << k for k in range(10, 31)], 4096


def bandwidth_curves(
    cost: CostModel, trace: Trace, measured: Sequence[CollectiveTimes]
) -> list[dict[str, object]]:
    """Predicted algbw and busbw (GB/s) by size for the collectives of a run, those that took the
    most time first, with the points of the run.

    ``measured``: `CollectiveTimes` of the run. Bandwidths are defined as in nccl-tests.
    """
    groups = {name: tuple(ranks) for name, ranks in trace.header.get("groups", ())}
    chosen: dict[tuple[object, ...], list[CollectiveTimes]] = {}
    for one in measured:
        row, ranks = OPERATIONS[one.op], groups.get(one.group, ())
        if 1 < len(ranks) <= _MAX_CURVE_RANKS and one.nbytes and row.busbw_factor(len(ranks)):
            chosen.setdefault((one.op, cost.placement(ranks)), []).append(one)
    largest = sorted(chosen.values(), key=lambda some: -sum(c.calls * c.duration_ns for c in some))[
        :MAX_CURVES
    ]
    return [_bandwidth_curve(cost, groups[some[0].group], some) for some in largest]


def _bandwidth_curve(
    cost: CostModel, ranks: tuple[int, ...], some: Sequence[CollectiveTimes]
) -> dict[str, object]:
    row = OPERATIONS[some[0].op]
    factor = row.busbw_factor(len(ranks))
    algbw = [
        size / max(cost.collective_ns(row, ranks, size, ranks[0] if row.root_field else None), 1)
        for size in _CURVE_SIZES
    ]
    points: Mapping[tuple[int, float], CollectiveTimes] = {
        (c.nbytes, round(c.algbw, 6)): c for c in some
    }
    bands = [
        found.band
        for size in _CURVE_SIZES
        if (found := explain_cost(cost, row, ranks, size)) is not None
    ]
    return {
        "op": row.op,
        "n": len(ranks),
        "nodes": len({cost.node(r) for r in ranks}),
        "group": some[0].group,
        "factor": factor,
        "sizes": _CURVE_SIZES,
        "algbw": [float(f"{x:.5g}") for x in algbw],
        "points": [[c.nbytes, float(f"{c.algbw:.5g}")] for c in points.values()],
        "band": [[b.low for b in bands], [b.high for b in bands]] if bands else None,
    }
