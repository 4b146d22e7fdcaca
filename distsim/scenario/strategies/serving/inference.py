"""The strategy `inference`: prefill of a prompt, then decoding one token at a time.

The mesh has pipeline, data, tensor and expert parallel ranks. The sampled tokens go from the last
stage to the first.

Sources: vLLM, `vllm/model_executor/layers/` (VocabParallelEmbedding and RowParallelLinear: an
all_reduce each over the tensor axis; logits_processor.py: logits gathered to the first rank of the
axis), `vllm/distributed/parallel_state.py` (send_tensor_dict: hidden states and residual from stage
to stage), `vllm/v1/worker/dp_utils.py` (_run_ar: an all_reduce of 4 int32 per rank before each
step, whose largest count all pad to), `vllm/v1/engine/core.py` (DPEngineCoreProc: a rank without
requests runs a dummy batch; every 32 steps, by `sync_every` here, an all_reduce finds out
whether any rank has requests left), `vllm/distributed/device_communicators/all2all.py` (all_gather
of tokens before the experts, reduce_scatter after them).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

from pydantic import Field, StrictBool

from distsim.scenario.strategies.base import (
    ZERO_COST,
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
        "LLM inference with prefill and decode, tensor and pipeline parallelism, and "
        "expert parallelism over data-parallel ranks with dummy batches, as in vLLM."
    )

    tensor: AxisOrGroup | None = Field(
        default=None, description="Mesh axis of tensor parallelism.", examples=["tp"]
    )
    pipeline: AxisOrGroup | None = Field(
        default=None, description="Mesh axis of the pipeline.", examples=["pp"]
    )
    data: AxisOrGroup | None = Field(
        default=None,
        description="Mesh axis of data-parallel attention, over which experts are spread.",
        examples=["dp"],
    )
    layers: PositiveInt = Field(
        description="Number of layers. Must be divisible by the number of stages.", examples=[32]
    )
    hidden: PositiveInt = Field(description="Hidden size of the model.", examples=[4096])
    vocabulary: PositiveInt = Field(
        description="Vocabulary size. Must be divisible by the number of tensor ranks.",
        examples=[128256],
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    prompt: NonNegativeInt = Field(
        default=0,
        description="Prompt tokens of a rank's batch. 0: no prefill.",
        examples=[2048],
    )
    batch: PositiveInt = Field(
        default=1,
        description="Sequences of a rank's batch. Each gets one token per step.",
        examples=[64],
    )
    steps: IntByRank = Field(
        default={"else": 1},
        description="Number of decoding steps; by coordinate of the data axis if it differs.",
        examples=[{0: 8, "else": 4}],
    )
    experts: StrictBool = Field(
        default=False,
        description=(
            "The feed-forward layers are experts: gather tokens before them and scatter "
            "results after them."
        ),
        examples=[True],
    )
    dummy_batches: StrictBool = Field(
        default=True,
        description="Run dummy batches on ranks without requests while other ranks have some.",
        examples=[False],
    )
    sync_every: NonNegativeInt = Field(
        default=32,
        description=("Steps between two checks whether any rank has requests left. 0: no checks."),
        examples=[32],
    )
    prefill: ComputeCostField = Field(
        default={"time": "0 ns"},
        description="Cost of one layer for the prompt on a rank.",
        examples=["2 ms"],
    )
    decode: ComputeCostField = Field(
        description="Cost of one layer for one decoding step on a rank.", examples=["100 us"]
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        axes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        refusals = context.refuse_groups(**axes)
        for field, axis in axes.items():
            if axis and axis not in context.mesh:
                refusals.append(((field,), f"the mesh has no axis {axis}"))
        return refusals or list(self._refuse_sizes(context))

    def _refuse_sizes(self, context: ExpansionContext) -> Iterator[Refusal]:
        tensor_ranks = self.ranks(context, self.tensor)
        stages = self.ranks(context, self.pipeline)
        copies = self.ranks(context, self.data)
        if self.vocabulary % tensor_ranks:
            text = (
                f"vocabulary {self.vocabulary} is not divisible by the {tensor_ranks} ranks "
                f"of {self.tensor}"
            )
            yield ("vocabulary",), text
        if self.layers % stages:
            text = (
                f"{self.layers} layers are not divisible by the {stages} stages of {self.pipeline}"
            )
            yield ("layers",), text
        if self.experts and self.data is None:
            yield ("experts",), "experts are spread over the data axis: set `data` to it"
        unknown = next((k for k in self.steps if isinstance(k, int) and k >= copies), None)
        if unknown is not None:
            yield ("steps",), f"the data axis has no coordinate {unknown}"

    def ranks(self, context: ExpansionContext, axis: str | None) -> int:
        return 1 if axis is None else context.size_of(axis)

    def expand(self, context: ExpansionContext) -> Expansion:
        return InferenceWriter(self, context).expansion()


class InferenceWriter(EntryWriter):
    """Entries of all steps; the tensor axis is the writer's group."""

    def __init__(self, fields: Inference, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.tensor)
        self.fields = fields
        self.tensor_ranks = fields.ranks(context, fields.tensor)
        self.stages = fields.ranks(context, fields.pipeline)
        self.copies = fields.ranks(context, fields.data)
        default_steps = fields.steps.get("else", 0)
        #: Steps of decoding for each coordinate of the data axis.
        self.steps_of_copy = [fields.steps.get(k, default_steps) for k in range(self.copies)]

    def expansion(self) -> Expansion:
        """Prefill, then spans of steps in which the same ranks have requests."""
        fields = self.fields
        steps = self.step("prefill", fields.prompt, fields.prefill) if fields.prompt else []
        decode = self.step("decode", fields.batch, fields.decode)
        last = max(self.steps_of_copy)
        syncs: list[int] = []
        if self.copies > 1 and fields.sync_every:
            syncs = list(range(fields.sync_every, last + 1, fields.sync_every))
        bounds = sorted({0, *self.steps_of_copy, *syncs})
        for start, end in pairwise(bounds):
            body = repeat_entries(end - start, decode) if decode else []
            busy = [k for k in range(self.copies) if self.steps_of_copy[k] > start]
            if not fields.dummy_batches and len(busy) < self.copies:
                condition = " or ".join(f"{fields.data} == {k}" for k in busy)
                steps.append(block(body, condition))
            else:
                steps += body
            if end in syncs:
                steps.append(self.sync_unfinished())
        return Expansion(steps, self.tensors)

    def sync_unfinished(self) -> Entry:
        """Does any rank have requests left?"""
        unfinished = self.tensor("unfinished", 1, "int32")
        return step("all_reduce", tensor=unfinished, op="max", group=self.fields.data)

    def sync_batch_sizes(self) -> Entry:
        """All ranks of the data axis pad to the largest batch among them."""
        sizes = self.tensor("batches", [4, self.copies], "int32")
        return step("all_reduce", tensor=sizes, op="sum", group=self.fields.data)

    # --- a pass of all stages ---
    def step(self, word: str, tokens: int, cost: ComputeCost) -> list[Entry]:
        """One pass of all stages, from tokens to tokens."""
        fields = self.fields
        hidden = self.tensor(f"{word}_hidden", [tokens, fields.hidden])
        sampled = self.tensor(f"{word}_sampled", fields.batch, "int64")
        start = [self.sync_batch_sizes()] if self.copies > 1 else []
        layers_per_stage = fields.layers // self.stages
        layers = repeat_entries(layers_per_stage, self.layer(word, tokens, cost, hidden))
        embedding = [
            compute(f"{word}: embedding", ZERO_COST, writes=[hidden]),
            *self.sum_over_tensor_axis(hidden),
        ]
        head = [*self.logits(word), compute("sample", ZERO_COST, writes=[sampled])]
        if self.stages == 1:
            return [*start, *embedding, *layers, *head]

        axis = str(fields.pipeline)
        residual = self.tensor(f"{word}_residual", [tokens, fields.hidden])
        last = self.stages - 1
        receives = [
            step("recv", tensor=name, group=axis, group_src=f"{axis} - 1")
            for name in (hidden, residual)
        ]
        sends = [
            step("send", tensor=name, group=axis, group_dst=f"{axis} + 1")
            for name in (hidden, residual)
        ]
        return [
            *start,
            block(embedding, f"{axis} == 0"),
            block(receives, f"{axis} > 0"),
            *layers,
            block(sends, f"{axis} < {last}"),
            block(head, f"{axis} == {last}"),
            step("broadcast", tensor=sampled, group=axis, group_src=last),
        ]

    def layer(self, word: str, tokens: int, cost: ComputeCost, hidden: str) -> list[Entry]:
        """Attention and feed-forward part, each with half of the cost, and their sums."""
        fields = self.fields
        attention_cost, mlp_cost = equal_cost_shares(cost, 2)
        attention = compute(f"{word}: attention", attention_cost, writes=[hidden])
        if not fields.experts:
            mlp = compute(f"{word}: mlp", mlp_cost, writes=[hidden])
            return [
                attention,
                *self.sum_over_tensor_axis(hidden),
                mlp,
                *self.sum_over_tensor_axis(hidden),
            ]
        all_tokens = self.tensor(f"{word}_tokens", [self.copies * tokens, fields.hidden])
        results = self.tensor(f"{word}_results", [self.copies * tokens, fields.hidden])
        return [
            attention,
            *self.sum_over_tensor_axis(hidden),
            step("all_gather_into_tensor", input=hidden, output=all_tokens, group=fields.data),
            compute(f"{word}: experts", mlp_cost, reads=[all_tokens], writes=[results]),
            step(
                "reduce_scatter_tensor", input=results, output=hidden, op="sum", group=fields.data
            ),
            *self.sum_over_tensor_axis(hidden),
        ]

    def sum_over_tensor_axis(self, tensor: str) -> list[Entry]:
        if self.tensor_ranks == 1:
            return []
        return [self.call("all_reduce", tensor=tensor, op="sum")]

    def logits(self, word: str) -> list[Entry]:
        """Each rank's part of the vocabulary, gathered to the first rank."""
        fields = self.fields
        shape = [fields.batch, fields.vocabulary // self.tensor_ranks]
        part = self.tensor(f"{word}_logits", shape)
        product = compute(f"{word}: logits", ZERO_COST, writes=[part])
        if self.tensor_ranks == 1:
            return [product]
        whole = self.tensor(f"{word}_all_logits", [self.tensor_ranks, *shape])
        return [product, self.call("gather", input=part, output=whole, group_dst=0)]
