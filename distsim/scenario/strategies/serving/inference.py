"""Inference: a prompt is read, then tokens are made one at a time, on a mesh of pipeline, data,
tensor and expert parallel ranks.

Sources: vLLM, `vllm/model_executor/layers/` (VocabParallelEmbedding and RowParallelLinear: an
all_reduce each over the tensor axis; logits_processor.py: logits gathered to the first rank of the
axis), `vllm/distributed/parallel_state.py` (send_tensor_dict: hidden states and residual from stage
to stage), `vllm/v1/worker/dp_utils.py` (_run_ar: an all_reduce of 4 int32 per rank before each
step, whose largest count all pad to), `vllm/v1/engine/core.py` (DPEngineCoreProc: a rank without
requests runs a dummy batch; every 32 steps, by `sync_every` here, an all_reduce tells whether
anybody has requests left), `vllm/distributed/device_communicators/all2all.py` (all_gather of tokens
before the experts, reduce_scatter after them). The sampled tokens go from the last stage to the
first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from pydantic import StrictBool

from distsim.scenario.strategies.base import (
    ComputeCost,
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    block,
    compute,
    step,
)
from distsim.scenario.strategies.field_types import (
    AxisOrGroup,
    ComputeCostField,
    Dtype,
    IntByRank,
    NonNegativeInt,
    PositiveInt,
)
from distsim.scenario.strategies.layers import equal_cost_shares, repeat_entries


class Inference(Strategy):
    """Prefill and decode of a batch on each data parallel rank."""

    name: ClassVar[str] = "inference"
    about: ClassVar[str] = (
        "Prefill and decode: activations summed over tensor ranks, handed from stage to stage; tokens to experts and back; dummy batches."
    )

    tensor: AxisOrGroup | None = None
    pipeline: AxisOrGroup | None = None
    data: AxisOrGroup | None = None
    layers: PositiveInt
    hidden: PositiveInt
    vocabulary: PositiveInt
    dtype: Dtype = "bfloat16"
    #: Tokens of the prompts of a rank's batch; 0: no prefill. And its sequences, a token each in
    #: every step.
    prompt: NonNegativeInt = 0
    batch: PositiveInt = 1
    #: Steps of decoding, by coordinate of the data axis where they differ.
    steps: IntByRank = {"else": 1}
    #: Feed-forward parts are experts, spread over the data and tensor axes.
    experts: StrictBool = False
    #: A rank of the data axis that has no request left steps with a dummy batch.
    dummy_batches: StrictBool = True
    #: Steps between two looks whether anybody has requests left; 0: none.
    sync_every: NonNegativeInt = 32
    #: What a layer takes on a rank: of the prompt, and of a step.
    prefill: ComputeCostField = {"time": "0 ns"}
    decode: ComputeCostField

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(tensor=self.tensor, pipeline=self.pipeline, data=self.data)
        axes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        found += [
            ((field,), f"{axis} is no axis of the mesh")
            for field, axis in axes.items()
            if axis and axis not in context.mesh
        ]
        if found:
            return found
        n, stages = self.ranks(context, self.tensor), self.ranks(context, self.pipeline)
        if self.vocabulary % n:
            found.append(
                (
                    ("vocabulary",),
                    f"vocabulary {self.vocabulary} does not divide among the {n} ranks of {self.tensor}",
                )
            )
        if self.layers % stages:
            found.append(
                (
                    ("layers",),
                    f"{self.layers} layers do not divide among the {stages} stages of {self.pipeline}",
                )
            )
        if self.experts and self.data is None:
            found.append(
                (("experts",), "experts are spread over the data axis: name it with `data`")
            )
        strange = [
            k for k in self.steps if isinstance(k, int) and k >= self.ranks(context, self.data)
        ]
        return found + [(("steps",), f"the data axis has no coordinate {k}") for k in strange[:1]]

    def ranks(self, context: ExpansionContext, axis: str | None) -> int:
        return 1 if axis is None else context.size_of(axis)

    def expand(self, context: ExpansionContext) -> Expansion:
        return InferenceWriter(self, context).expansion()


class InferenceWriter(EntryWriter):
    """Entries of all steps."""

    def __init__(self, fields: Inference, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.tensor)
        self.f = fields
        self.n, self.stages, self.copies = (
            fields.ranks(context, a) for a in (fields.tensor, fields.pipeline, fields.data)
        )
        self.counted = [
            fields.steps.get(k, fields.steps.get("else", 0)) for k in range(self.copies)
        ]

    def expansion(self) -> Expansion:
        f = self.f
        found = self.step("prefill", f.prompt, f.prefill) if f.prompt else []
        most = max(self.counted)
        spans = sorted({0, *self.counted})
        decoded = self.step("decode", f.batch, f.decode)
        every = f.sync_every if self.copies > 1 else 0
        asked = list(range(every, most + 1, every)) if every else []
        for k in asked:
            spans = sorted({*spans, k})
        for start, end in pairwise(spans):
            some = [d for d in range(self.copies) if self.counted[d] > start]
            body = repeat_entries(end - start, decoded) if decoded else []
            alone = not f.dummy_batches and len(some) < self.copies
            found += [block(body, " or ".join(f"{f.data} == {d}" for d in some))] if alone else body
            found += [self.unfinished()] if end in asked else []
        return Expansion(found, self.tensors)

    def unfinished(self) -> Entry:
        """Has anybody requests left?"""
        return step(
            "all_reduce", tensor=self.tensor("unfinished", 1, "int32"), op="max", group=self.f.data
        )

    def step(self, word: str, tokens: int, price: ComputeCost) -> list[Entry]:
        """One pass of all stages, from tokens to tokens."""
        f = self.f
        hidden = self.tensor(f"{word}_hidden", [tokens, f.hidden])
        sampled = self.tensor(f"{word}_sampled", f.batch, "int64")
        found: list[Entry] = [self.agreed()] if self.copies > 1 else []
        per_stage = f.layers // self.stages
        layers = repeat_entries(per_stage, self.layer(word, tokens, price, hidden))
        first = [
            compute(f"{word}: embedding", {"time": "0 ns"}, writes=[hidden]),
            *self.summed(hidden),
        ]
        last = [*self.logits(word), compute("sample", {"time": "0 ns"}, writes=[sampled])]
        if self.stages == 1:
            return [*found, *first, *layers, *last]
        axis, residual = str(f.pipeline), self.tensor(f"{word}_residual", [tokens, f.hidden])
        both = hidden, residual
        end = self.stages - 1
        return [
            *found,
            block(first, f"{axis} == 0"),
            block(
                [step("recv", tensor=name, group=axis, group_src=f"{axis} - 1") for name in both],
                f"{axis} > 0",
            ),
            *layers,
            block(
                [step("send", tensor=name, group=axis, group_dst=f"{axis} + 1") for name in both],
                f"{axis} < {end}",
            ),
            block(last, f"{axis} == {end}"),
            step("broadcast", tensor=sampled, group=axis, group_src=end),
        ]

    def agreed(self) -> Entry:
        """All ranks of the data axis pad to the largest batch among them."""
        return step(
            "all_reduce",
            tensor=self.tensor("batches", [4, self.copies], "int32"),
            op="sum",
            group=self.f.data,
        )

    def layer(self, word: str, tokens: int, price: ComputeCost, hidden: str) -> list[Entry]:
        f = self.f
        halves = [
            compute(f"{word}: {part}", half, writes=[hidden])
            for part, half in zip(("attention", "mlp"), _half_costs(price), strict=True)
        ]
        if not f.experts:
            return [halves[0], *self.summed(hidden), halves[1], *self.summed(hidden)]
        every = self.tensor(f"{word}_tokens", [self.copies * tokens, f.hidden])
        out = self.tensor(f"{word}_results", [self.copies * tokens, f.hidden])
        experts = compute(f"{word}: experts", _half_costs(price)[1], reads=[every], writes=[out])
        return [
            halves[0],
            *self.summed(hidden),
            step("all_gather_into_tensor", input=hidden, output=every, group=f.data),
            experts,
            step("reduce_scatter_tensor", input=out, output=hidden, op="sum", group=f.data),
            *self.summed(hidden),
        ]

    def summed(self, tensor: str) -> list[Entry]:
        return [self.call("all_reduce", tensor=tensor, op="sum")] if self.n > 1 else []

    def logits(self, word: str) -> list[Entry]:
        """Each rank's part of the vocabulary, to the first one."""
        f = self.f
        part = self.tensor(f"{word}_logits", [f.batch, f.vocabulary // self.n])
        found = [compute(f"{word}: logits", {"time": "0 ns"}, writes=[part])]
        if self.n == 1:
            return found
        whole = self.tensor(f"{word}_all_logits", [self.n, f.batch, f.vocabulary // self.n])
        return [*found, self.call("gather", input=part, output=whole, group_dst=0)]


def _half_costs(price: ComputeCost) -> list[ComputeCost]:
    return equal_cost_shares(price, 2)
