"""The strategy `kv_transfer`: keys and values from ranks of prefill to ranks of decode.

If prefill and decode split heads differently, each pair of ranks exchanges the heads that both
have.

Sources: vLLM, `vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py`
(save_kv_layer: a layer's keys and values are sent when it is computed; P2pNcclEngine: one NCCL
communicator for each pair of ranks, sends waited for before the request ends); Zhong et al.,
DistServe (arXiv 2401.09670); Patel et al., Splitwise (arXiv 2311.18677), section 4.2: layer by
layer, during the next layer's computation.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from pydantic import Field, StrictBool

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
from distsim.scenario.strategies.layers import repeat_entries
from distsim.scenario.strategies.rank_lists import (
    RankList,
    refuse_overlapping_ranks,
    refuse_ranks_outside_world,
)


class KvTransfer(Strategy):
    """Prefill on some ranks, decode on others: keys and values travel as layers are done."""

    name: ClassVar[str] = "kv_transfer"
    about: ClassVar[str] = (
        "Disaggregated prefill and decode (KV cache transfer). Prefill ranks send the keys "
        "and values of each layer while the next layer computes."
    )

    prefill: RankList = Field(description="Ranks that run prefill.", examples=[[0, 1]])
    decode: RankList = Field(description="Ranks that decode.", examples=[[2, 3]])
    layers: PositiveInt = Field(description="Number of layers.", examples=[32])
    tokens: PositiveInt = Field(description="Tokens of a prompt.", examples=[2048])
    kv_heads: PositiveInt = Field(
        description="Number of key and value heads on a prefill rank.", examples=[8]
    )
    head_dim: PositiveInt = Field(description="Size of a head.", examples=[128])
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    requests: PositiveInt = Field(
        default=1,
        description="Number of prompts, which are processed one after the other.",
        examples=[4],
    )
    forward: ComputeCostField = Field(
        description="Cost of one layer for a prompt.", examples=["2 ms"]
    )
    decode_forward: ComputeCostField = Field(
        default={"time": "0 ns"},
        description="Cost of one layer for one decoding step.",
        examples=["100 us"],
    )
    steps: NonNegativeInt = Field(
        default=1, description="Number of decoding steps per request.", examples=[8]
    )
    at_once: StrictBool = Field(
        default=False,
        description=(
            "Send the keys and values of all layers at the end of prefill. false: send each "
            "layer's when they are ready."
        ),
        examples=[True],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = refuse_ranks_outside_world(context, "prefill", self.prefill)
        refusals += refuse_ranks_outside_world(context, "decode", self.decode)
        refusals += refuse_overlapping_ranks(("prefill", self.prefill), ("decode", self.decode))
        prefill = len(self.prefill)
        decode = len(self.decode)
        if max(prefill, decode) % min(prefill, decode):
            text = (
                f"{decode} decode ranks and {prefill} prefill ranks: one number must divide "
                "the other, so that heads are split evenly"
            )
            refusals.append((("decode",), text))
        elif decode > prefill and self.kv_heads % (decode // prefill):
            text = (
                f"{self.kv_heads} heads of a prefill rank are not divisible by its "
                f"{decode // prefill} decode ranks"
            )
            refusals.append((("kv_heads",), text))
        return refusals

    def expand(self, context: ExpansionContext) -> Expansion:
        return KvTransferWriter(self, context).expansion()


class _RankPair(NamedTuple):
    """A rank of prefill and a rank of decode that have heads in common."""

    prefill: int
    decode: int


class KvTransferWriter(EntryWriter):
    """Entries of all requests.

    A pair of ranks exchanges the heads that both have. A message's copy is numbered by request, and
    by layer unless all layers are sent at once.
    """

    def __init__(self, fields: KvTransfer, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype)
        self.fields = fields
        prefill_ranks = len(fields.prefill)
        decode_ranks = len(fields.decode)
        count = max(prefill_ranks, decode_ranks)
        self.pairs = [
            _RankPair(
                fields.prefill[k * prefill_ranks // count], fields.decode[k * decode_ranks // count]
            )
            for k in range(count)
        ]
        heads = fields.kv_heads // (count // prefill_ranks)
        shape = [2, fields.tokens, heads, fields.head_dim]
        copies = fields.requests * fields.layers
        if fields.at_once:
            shape = [fields.layers, *shape]
            copies = fields.requests
        self.number = {pair: k for k, pair in enumerate(self.pairs)}
        self.messages = {pair: self.tensor(f"keys_{k}", shape) for pair, k in self.number.items()}
        for name in self.messages.values():
            self.tensors[name]["copies"] = copies

    def expansion(self) -> Expansion:
        steps: list[Entry] = []
        for request in range(self.fields.requests):
            steps += self.prefill(request)
            steps += self.decode(request)
        return Expansion(steps, self.tensors)

    def copies_of(self, request: int) -> list[int]:
        """The copies of a request's messages."""
        if self.fields.at_once:
            return [request]
        first = request * self.fields.layers
        return list(range(first, first + self.fields.layers))

    def prefill(self, request: int) -> list[Entry]:
        """Layers, each followed by its keys and values; the sender waits at the end."""
        fields = self.fields
        copies = self.copies_of(request)
        steps: list[Entry] = []
        for layer in range(fields.layers):
            sends = not fields.at_once or layer == fields.layers - 1
            copy = copies[0] if fields.at_once else copies[layer]
            for rank in fields.prefill:
                own_pairs = [pair for pair in self.pairs if sends and pair.prefill == rank]
                written = [f"{self.messages[pair]}@{copy}" for pair in own_pairs]
                steps.append(
                    compute(f"prefill, layer {layer}", fields.forward, [rank], writes=written)
                )
                steps += [self.send(pair, copy) for pair in own_pairs]
        waits = [self.wait_send(pair, copy) for copy in copies for pair in self.pairs]
        return steps + waits

    def decode(self, request: int) -> list[Entry]:
        """All keys and values arrive before the first step."""
        fields = self.fields
        copies = self.copies_of(request)
        steps = [self.receive(pair, copy) for copy in copies for pair in self.pairs]
        steps += [self.wait_receive(pair, copy) for copy in copies for pair in self.pairs]
        if not fields.steps:
            return steps
        for rank in fields.decode:
            own_pairs = [pair for pair in self.pairs if pair.decode == rank]
            reads = [f"{self.messages[pair]}@{copy}" for copy in copies for pair in own_pairs]
            layer = compute("decode", fields.decode_forward, reads=reads)
            steps.append(block(repeat_entries(fields.steps * fields.layers, [layer]), [rank]))
        return steps

    # --- messages ---
    def send(self, pair: _RankPair, copy: int) -> Entry:
        return step(
            "isend",
            [pair.prefill],
            tensor=f"{self.messages[pair]}@{copy}",
            as_=self.handle("sent", pair, copy),
            dst=pair.decode,
        )

    def receive(self, pair: _RankPair, copy: int) -> Entry:
        return step(
            "irecv",
            [pair.decode],
            tensor=f"{self.messages[pair]}@{copy}",
            as_=self.handle("came", pair, copy),
            src=pair.prefill,
        )

    def wait_send(self, pair: _RankPair, copy: int) -> Entry:
        return block([wait(self.handle("sent", pair, copy))], [pair.prefill])

    def wait_receive(self, pair: _RankPair, copy: int) -> Entry:
        return block([wait(self.handle("came", pair, copy))], [pair.decode])

    def handle(self, word: str, pair: _RankPair, copy: int) -> str:
        return f"{self.prefix}_{word}_{self.number[pair]}@{copy}"
