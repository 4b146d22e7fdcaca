"""Tokens to experts in two stages: over the network to the rank of the same place on each machine, and from there inside the machine.

Sources: DeepEP 2.0 (deepseek-ai/DeepEP, commit dd758ca, README: RDMA between machines, NVLink inside, FP8 dispatch and BF16 combine) and
DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.2.2: a token is sent to a machine once, whatever number of its experts is there,
and 3.3.2: what is dispatched is FP8, with a scale for each 128 elements, what is combined BF16; Rajbhandari et al., DeepSpeed-MoE
(arXiv:2201.05596), section 5.3, hierarchical all-to-all. The library's own kernels move both stages at once, which `pieces` comes near to:
one piece goes round inside while the next one crosses the network.
"""

from __future__ import annotations

from math import ceil, comb
from typing import TYPE_CHECKING

from distsim.strategies.base import Context, Entry, Price, compute, wait
from distsim.strategies.layers import LayerWriter

if TYPE_CHECKING:
    from distsim.strategies.expert_parallel import ExpertParallel

#: Elements that share a float32 scale in an FP8 dispatch.
_SCALED = 128


def hit(experts: int, of_place: int, top_k: int) -> float:
    """How likely it is that one of the ``top_k`` experts of a token is among the ``of_place`` that a place has."""
    return 1 - comb(experts - of_place, top_k) / comb(experts, top_k)


class StagedWriter(LayerWriter):
    """Entries of one layer's experts. ``across``, ``inside``: rows of a piece to each machine, and to each rank of the own one."""

    def __init__(self, fields: ExpertParallel, context: Context) -> None:
        super().__init__(context.prefix(fields.name), fields.dtype)
        assert fields.between is not None
        self.f, self.axes = fields, (fields.between, fields.axis)
        self.nodes, self.local = (context.size_of(axis) for axis in self.axes)
        there, everywhere = fields.experts // self.nodes, self.nodes * self.local
        if fields.once_per_machine:
            across = fields.tokens * hit(fields.experts, there, fields.top_k)
            inside = fields.tokens * hit(fields.experts, fields.experts // everywhere, fields.top_k)
        else:
            across, inside = fields.tokens * fields.top_k / self.nodes, fields.tokens * fields.top_k / everywhere
        self.across, self.inside = ceil(across / fields.pieces), self.nodes * ceil(inside / fields.pieces)
        self.tensor("counts", fields.experts, "int64")
        self.tensor("theirs", fields.experts, "int64")
        for suffix in ("", "_grad") if fields.backward is not None else ("",):
            for word, rows in (("tokens", self.nodes * self.across), ("forwarded", self.local * self.inside)):
                for way, dtype in (("out", fields.dispatch_dtype or fields.dtype), ("back", fields.dtype)):
                    scales = 4 * fields.hidden // _SCALED if dtype.startswith("float8") else 0
                    for side in ("sent", "got"):
                        self.room(f"{word}_{way}_{side}{suffix}", [rows, fields.hidden + scales], dtype)

    def room(self, word: str, shape: list[int], dtype: str) -> None:
        name = self.tensor(word, shape, dtype)
        if self.f.pieces > 1:
            self.tensors[name]["copies"] = self.f.pieces

    def name(self, word: str, piece: int) -> str:
        return f"{self.p}_{word}" + (f"@{piece}" if piece else "")

    # --- passes ---
    def forward(self, price: Price) -> list[Entry]:
        axes = list(self.axes)
        counts: Entry = {"all_to_all_single": {"input": f"{self.p}_counts", "output": f"{self.p}_theirs", "group": axes}}
        out = self.moved("out", "", self.f.beside)
        return [counts, *out, self.work("experts", price, ""), *self.moved("back", "", None)]

    def backward(self, price: Price) -> list[Entry]:
        """The backward pass of a combine is a dispatch, that of a dispatch a combine."""
        return [
            *self.moved("out", "_grad", None),
            self.work("experts backward", price, "_grad"),
            *self.moved("back", "_grad", None),
        ]

    def work(self, name: str, price: Price, suffix: str) -> Entry:
        pieces = range(self.f.pieces)
        reads = [self.name(f"forwarded_out_got{suffix}", k) for k in pieces]
        return compute(name, price, reads=reads, writes=[self.name(f"forwarded_back_sent{suffix}", k) for k in pieces])

    def moved(self, way: str, suffix: str, beside: Price | None) -> list[Entry]:
        """All pieces by both stages; what is computed ``beside`` begins when the first stage is under way."""
        stages = [("tokens", self.axes[0]), ("forwarded", self.axes[1])]
        (first, one), (second, other) = stages if way == "out" else stages[::-1]
        pieces, begin = range(self.f.pieces), "combined" if way == "back" else "dispatched"
        started = "" if way == "back" else f"{first}_{way}_sent{suffix}"
        steps: list[Entry] = []
        if started:
            steps.append(compute("router", {"time": "0 ns"}, writes=[self.name(started, k) for k in pieces]))
        steps += [self.exchange(first, way, suffix, one, k) for k in pieces]
        steps += [] if beside is None else [compute(f"beside {begin}", beside)]
        for k in pieces:
            steps.append(wait(f"{self.p}_{first}@{k}"))
            reads, writes = [self.name(f"{first}_{way}_got{suffix}", k)], [self.name(f"{second}_{way}_sent{suffix}", k)]
            steps += [
                compute("permute", {"time": "0 ns"}, reads=reads, writes=writes),
                self.exchange(second, way, suffix, other, k),
            ]
        return [*steps, *(wait(f"{self.p}_{second}@{k}") for k in pieces)]

    def exchange(self, word: str, way: str, suffix: str, axis: str, k: int) -> Entry:
        sent, got = (self.name(f"{word}_{way}_{side}{suffix}", k) for side in ("sent", "got"))
        return {"all_to_all_single": {"input": sent, "output": got, "group": axis, "async": True, "as": f"{self.p}_{word}@{k}"}}
