"""Keys and values from the ranks that read prompts to those that decode.

Sources: vLLM, `vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py`
(save_kv_layer: a layer's keys and values are sent when it is computed; P2pNcclEngine: one NCCL
communicator for each pair of ranks, sends waited for before the request ends); Zhong et al.,
DistServe (arXiv 2401.09670); Patel et al., Splitwise (arXiv 2311.18677), section 4.2: layer by
layer, beside the next layer's compute. Where prefill and decode cut heads differently, each pair of
ranks exchanges the heads that both have.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import StrictBool

from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    block,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.field_types import (
    ComputeCostField,
    Dtype,
    NonNegativeInt,
    PositiveInt,
)
from distsim.scenario.strategies.rank_lists import (
    RankList,
    refuse_overlapping_ranks,
    refuse_ranks_outside_world,
)


class KvTransfer(Strategy):
    """Prefill on some ranks, decode on others: keys and values travel as layers are done."""

    name: ClassVar[str] = "kv_transfer"
    about: ClassVar[str] = (
        "Prefill and decode on ranks of their own: keys and values of each layer are sent while the next one computes."
    )

    prefill: RankList
    decode: RankList
    layers: PositiveInt
    #: Tokens of the prompt, heads of keys on a rank of prefill, and the size of each.
    tokens: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    dtype: Dtype = "bfloat16"
    #: Requests, one after the other.
    requests: PositiveInt = 1
    #: What a layer takes: of a prompt, and of one step of decoding.
    forward: ComputeCostField
    decode_forward: ComputeCostField = {"time": "0 ns"}
    #: Steps of decoding for each request.
    steps: NonNegativeInt = 1
    #: All layers' keys and values at the end of prefill, in one message each; else as layers are
    #: done.
    at_once: StrictBool = False

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = refuse_ranks_outside_world(
            context, "prefill", self.prefill
        ) + refuse_ranks_outside_world(context, "decode", self.decode)
        found += refuse_overlapping_ranks(("prefill", self.prefill), ("decode", self.decode))
        many, few = len(self.prefill), len(self.decode)
        if max(many, few) % min(many, few):
            found.append(
                (
                    ("decode",),
                    f"{few} ranks of decode and {many} of prefill: heads are split evenly where one divides the other",
                )
            )
        elif few > many and self.kv_heads % (few // many):
            found.append(
                (
                    ("kv_heads",),
                    f"{self.kv_heads} heads of a rank of prefill do not divide among {few // many} of decode",
                )
            )
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        return KvTransferWriter(self, context).expansion()


class KvTransferWriter(EntryWriter):
    """Entries of all requests. A pair shares the heads that both have."""

    def __init__(self, fields: KvTransfer, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype)
        self.f = fields
        many, few = len(fields.prefill), len(fields.decode)
        wide = max(many, few)
        self.pairs = [
            (fields.prefill[k * many // wide], fields.decode[k * few // wide]) for k in range(wide)
        ]
        self.heads = fields.kv_heads // (wide // many)
        self.each = {pair: k for k, pair in enumerate(self.pairs)}

    def expansion(self) -> Expansion:
        f = self.f
        shape = (
            [2, f.tokens, self.heads, f.head_dim]
            if not f.at_once
            else [f.layers, 2, f.tokens, self.heads, f.head_dim]
        )
        self.messages = {pair: self.tensor(f"keys_{k}", shape) for pair, k in self.each.items()}
        for name in self.messages.values():
            self.tensors[name]["copies"] = f.requests * (1 if f.at_once else f.layers)
        return Expansion(
            [e for r in range(f.requests) for e in (*self.prefilled(r), *self.decoded(r))],
            self.tensors,
        )

    def numbers(self, request: int) -> list[int]:
        """The copies that a request's messages are."""
        return (
            [request]
            if self.f.at_once
            else [request * self.f.layers + k for k in range(self.f.layers)]
        )

    def prefilled(self, request: int) -> list[Entry]:
        """Layers, each followed by its keys and values; the sender waits at the end."""
        found: list[Entry] = []
        numbers = self.numbers(request)
        for layer in range(self.f.layers):
            last = not self.f.at_once or layer == self.f.layers - 1
            k = numbers[0] if self.f.at_once else numbers[layer]
            for rank in self.f.prefill:
                mine = [pair for pair in self.pairs if pair[0] == rank]
                written = [f"{self.messages[pair]}@{k}" for pair in mine] if last else []
                found.append(
                    compute(f"prefill, layer {layer}", self.f.forward, [rank], writes=written)
                )
                found += [self.message("isend", pair, k, "dst", 1) for pair in mine if last]
        return found + [
            block([wait(f"{self.prefix}_sent_{self.each[pair]}@{k}")], [pair[0]])
            for k in numbers
            for pair in self.pairs
        ]

    def decoded(self, request: int) -> list[Entry]:
        """All keys and values come before the first step."""
        f, numbers = self.f, self.numbers(request)
        found = [self.message("irecv", pair, k, "src", 0) for k in numbers for pair in self.pairs]
        found += [
            block([wait(f"{self.prefix}_came_{self.each[pair]}@{k}")], [pair[1]])
            for k in numbers
            for pair in self.pairs
        ]
        for rank in f.decode:
            reads = [
                f"{self.messages[pair]}@{k}"
                for k in numbers
                for pair in self.pairs
                if pair[1] == rank
            ]
            steps = [compute("decode", f.decode_forward, reads=reads)]
            if f.steps:
                found.append(
                    block([{"repeat": {"times": f.steps * f.layers, "steps": steps}}], [rank])
                )
        return found

    def message(self, row: str, pair: tuple[int, int], k: int, word: str, other: int) -> Entry:
        handle = f"{self.prefix}_{'sent' if row == 'isend' else 'came'}_{self.each[pair]}@{k}"
        return step(
            row,
            [pair[1 - other]],
            tensor=f"{self.messages[pair]}@{k}",
            as_=handle,
            **{word: pair[other]},
        )
