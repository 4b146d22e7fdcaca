"""The strategy `data_parallel`: torch.nn.DataParallel.

One process drives all devices; the first device does everything that cannot be shared. Here a rank
stands for a device of that process, so the copies between devices become collectives.

Sources, torch 2.13: `torch/nn/parallel/data_parallel.py`, `replicate.py`, `scatter_gather.py`,
`_functions.py` (Broadcast, Gather and their backward passes); `torch/nn/parallel/comm.py` for the
buffer size.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from pydantic import Field, StrictBool

from distsim.scenario.strategies.base import (
    ZERO_COST,
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    block,
    compute,
)
from distsim.scenario.strategies.ddp.buckets import assign_buckets, model_parameters
from distsim.scenario.strategies.field_types import AxesOrGroup, ComputeCostField, Shape
from distsim.scenario.strategies.layers import LayeredModelStrategy

#: comm.broadcast_coalesced and reduce_add_coalesced: bytes of one message.
_BROADCAST_BUFFER_BYTES = 10 * 2**20


class DataParallel(LayeredModelStrategy):
    """Nine moves an iteration: master copy, batch out, model out, forward, loss at one place,
    gradients in, average, update, copies.
    """

    name: ClassVar[str] = "data_parallel"
    about: ClassVar[str] = (
        "torch.nn.DataParallel. Rank 0 scatters the batch and the model, gathers outputs "
        "and gradients, and updates alone, so its links are the bottleneck."
    )

    real_run_note: ClassVar[str] = (
        "data_parallel: each rank stands for one device of the single process of "
        "torch.nn.DataParallel. A real run makes the same calls between processes."
    )

    group: AxesOrGroup | None = Field(
        default=None,
        description=("Ranks that represent the devices of nn.DataParallel [default: all ranks]."),
        examples=["dp"],
    )
    batch: Shape = Field(
        description="Shape of the whole batch, which is split along its first dimension.",
        examples=[[64, 1024]],
    )
    output: Shape = Field(
        description="Shape of the model's output for the whole batch.", examples=[[64, 10]]
    )
    loss: ComputeCostField | None = Field(
        default=None,
        description="Cost of the loss, which the first device computes.",
        examples=["1 ms"],
    )
    optimizer: ComputeCostField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )
    refresh: StrictBool = Field(
        default=True,
        description=(
            "Copy the parameters to all devices after the last optimizer step too. PyTorch "
            "leaves this to the next forward pass."
        ),
        examples=[False],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.refuse_groups(group=self.group)
        if unknown:
            return unknown
        n = context.size_of(self.group)
        return [
            (
                (field,),
                (
                    f"the first dimension of {field}, {shape[0]}, is not divisible by {n} ranks; "
                    "all ranks need equal parts"
                ),
            )
            for field, shape in (("batch", self.batch), ("output", self.output))
            if shape[0] % n
        ]

    def expand(self, context: ExpansionContext) -> Expansion:
        return DataParallelWriter(self, context).expansion()


class _SplitTensor(NamedTuple):
    """Names of a tensor on rank 0 (``whole``) and of each rank's ``part`` of it."""

    whole: str
    part: str


class DataParallelWriter(EntryWriter):
    """Writes one model's entries; group rank 0 holds the master copy."""

    def __init__(self, fields: DataParallel, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.group)
        self.fields = fields
        self.context = context
        self.group_size = context.size_of(fields.group)
        messages = assign_buckets(
            model_parameters(fields.model), fields.itemsize, [_BROADCAST_BUFFER_BYTES]
        )
        self.weights = [self.tensor(f"weights_{k}", m.numel) for k, m in enumerate(messages)]
        self.grads = [self.tensor(f"grads_{k}", m.numel) for k, m in enumerate(messages)]

    def split_tensor(self, whole: str, part: str, shape: tuple[int, ...]) -> _SplitTensor:
        """Declare a tensor that is split along its first dimension."""
        part_shape = (shape[0] // self.group_size, *shape[1:])
        return _SplitTensor(
            self.tensor(whole, (self.group_size, *part_shape)), self.tensor(part, part_shape)
        )

    def on_first_device(self, entries: list[Entry]) -> Entry:
        """Entries of the device that holds the master copy: group rank 0."""
        return block(entries, self.context.first_rank_selector(self.fields.group))

    def expansion(self) -> Expansion:
        fields = self.fields
        batch = self.split_tensor("batch", "part", fields.batch)
        output = self.split_tensor("outputs", "output", fields.output)
        output_grad = self.split_tensor("output_grads", "output_grad", fields.output)
        loss = compute(
            "loss", fields.loss or ZERO_COST, reads=[output.whole], writes=[output_grad.whole]
        )
        steps = [
            *self.load_batch(batch),
            *self.broadcast_weights(),
            *self.forward(batch.part, output.part),
            self.call("gather", input=output.part, output=output.whole, group_dst=0),
            self.on_first_device([loss]),
            self.call("scatter", input=output_grad.whole, output=output_grad.part, group_src=0),
            *self.backward(output_grad.part),
            *self.update(),
        ]
        if fields.refresh:
            last = self.context.iterations - 1
            steps.append(block(self.broadcast_weights(), f"iteration == {last}"))
        return Expansion(steps, self.tensors)

    def load_batch(self, batch: _SplitTensor) -> list[Entry]:
        """The master copy, once, and a batch that is scattered in every iteration."""
        master_copy = compute("master copy", ZERO_COST, writes=self.weights)
        return [
            block([self.on_first_device([master_copy])], "iteration == 0"),
            self.on_first_device([compute("next batch", ZERO_COST, writes=[batch.whole])]),
            self.call("scatter", input=batch.whole, output=batch.part, group_src=0),
        ]

    def broadcast_weights(self) -> list[Entry]:
        return [self.call("broadcast", tensor=name, group_src=0) for name in self.weights]

    def forward(self, batch: str, output: str) -> list[Entry]:
        layers = [
            compute(f"forward {layer.name}", layer.forward, reads=[batch, *self.weights])
            for layer in self.fields.model
        ]
        return [*layers, compute("output", ZERO_COST, writes=[output])]

    def backward(self, output_grad: str) -> list[Entry]:
        """Layers from the last; the first to compute overwrites the gradients, the others add."""
        steps = []
        for k, layer in enumerate(reversed(self.fields.model)):
            gradients = {"writes": self.grads} if k == 0 else {"adds": self.grads}
            steps.append(
                compute(f"backward {layer.name}", layer.backward, reads=[output_grad], **gradients)
            )
        return steps

    def update(self) -> list[Entry]:
        """The gradients are summed on group rank 0, which averages them and updates alone."""
        sums = [self.call("reduce", tensor=name, op="sum", group_dst=0) for name in self.grads]
        averages: list[Entry] = [
            {"assign": {"tensor": name, "value": f"{name} * {1 / self.group_size!r}"}}
            for name in self.grads
        ]
        optimizer = compute(
            "optimizer",
            self.fields.optimizer or ZERO_COST,
            reads=self.grads,
            writes=self.weights,
        )
        return [*sums, self.on_first_device(averages), self.on_first_device([optimizer])]
