"""torch.nn.DataParallel: one process drives all devices, and the first of them does what cannot be
shared.

Source: torch 2.13, `torch/nn/parallel/data_parallel.py`, `replicate.py`, `scatter_gather.py`,
`_functions.py` (Broadcast, Gather and their backward passes); `torch/nn/parallel/comm.py` for the
buffer size. Here a rank stands for a device of the one process.
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
    block,
    compute,
)
from distsim.scenario.strategies.ddp.buckets import assign_buckets, model_parameters
from distsim.scenario.strategies.field_types import AxesOrGroup, ComputeCostField, Shape
from distsim.scenario.strategies.layers import LayeredModelStrategy

#: comm.broadcast_coalesced and reduce_add_coalesced: bytes of one message.
_BROADCAST_BUFFER_BYTES = 10 * 2**20
_ZERO_COST = {"time": "0 ns"}


class DataParallel(LayeredModelStrategy):
    """Nine moves an iteration: master copy, batch out, model out, forward, loss at one place,
    gradients in, average, update, copies.
    """

    name: ClassVar[str] = "data_parallel"
    about: ClassVar[str] = (
        "nn.DataParallel: rank 0 sends out batch and model, gathers outputs and gradients, and updates alone: "
        "its links are the bottleneck."
    )

    for_real: ClassVar[str] = (
        "data_parallel: a rank stands for a device of the one process of torch.nn.DataParallel; "
        "for real the same calls are run among processes."
    )

    group: AxesOrGroup | None = None
    #: The whole batch, first axis first: it is cut along it.
    batch: Shape
    #: What the model makes of the whole batch.
    output: Shape
    loss: ComputeCostField | None = None
    optimizer: ComputeCostField | None = None
    #: The copies are renewed after the last update too; PyTorch leaves that to the next forward
    #: pass.
    refresh: StrictBool = True

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.refused(group=self.group)
        if unknown:
            return unknown
        n = context.size_of(self.group)
        return [
            (
                (key,),
                f"the first axis of {key}, {size[0]}, does not divide among {n} ranks; each gets an equal part",
            )
            for key, size in (("batch", self.batch), ("output", self.output))
            if size[0] % n
        ]

    def expand(self, context: ExpansionContext) -> Expansion:
        return DataParallelWriter(self, context).expansion()


class DataParallelWriter(EntryWriter):
    def __init__(self, fields: DataParallel, context: ExpansionContext) -> None:
        super().__init__(context.prefix(fields.name), fields.dtype, fields.group)
        self.f, self.context, self.n = fields, context, context.size_of(fields.group)
        parts = assign_buckets(
            model_parameters(fields.model), fields.itemsize, [_BROADCAST_BUFFER_BYTES]
        )
        self.weights = [self.tensor(f"weights_{k}", part.numel) for k, part in enumerate(parts)]
        self.grads = [self.tensor(f"grads_{k}", part.numel) for k, part in enumerate(parts)]

    def parted(self, word: str, whole: str, shape: tuple[int, ...]) -> tuple[str, str]:
        """A tensor on rank 0, one part after the other, and each rank's part."""
        part = (shape[0] // self.n, *shape[1:])
        return self.tensor(whole, (self.n, *part)), self.tensor(word, part)

    def at_root(self, entries: list[Entry]) -> Entry:
        """Entries of the device that holds the master copy: group rank 0."""
        return block(entries, self.context.first_of(self.f.group))

    def expansion(self) -> Expansion:
        f = self.f
        batch, part = self.parted("part", "batch", f.batch)
        outputs, output = self.parted("output", "outputs", f.output)
        grads_out, grad_out = self.parted("output_grad", "output_grads", f.output)
        last = self.context.iterations - 1
        steps = [
            block(
                [self.at_root([compute("master copy", _ZERO_COST, writes=self.weights)])],
                "iteration == 0",
            ),
            self.at_root([compute("next batch", _ZERO_COST, writes=[batch])]),
            self.call("scatter", input=batch, output=part, group_src=0),
            *self.copy(),
            *[
                compute(f"forward {layer.name}", layer.forward, reads=[part, *self.weights])
                for layer in f.model
            ],
            compute("output", _ZERO_COST, writes=[output]),
            self.call("gather", input=output, output=outputs, group_dst=0),
            self.at_root(
                [compute("loss", f.loss or _ZERO_COST, reads=[outputs], writes=[grads_out])]
            ),
            self.call("scatter", input=grads_out, output=grad_out, group_src=0),
            *self.backward(grad_out),
            *[self.call("reduce", tensor=name, op="sum", group_dst=0) for name in self.grads],
            self.at_root(
                [
                    {"assign": {"tensor": name, "value": f"{name} * {1 / self.n!r}"}}
                    for name in self.grads
                ]
            ),
            self.at_root(
                [
                    compute(
                        "optimizer",
                        f.optimizer or _ZERO_COST,
                        reads=self.grads,
                        writes=self.weights,
                    )
                ]
            ),
        ]
        return Expansion(
            steps + ([block(self.copy(), f"iteration == {last}")] if f.refresh else []),
            self.tensors,
        )

    def backward(self, grad_out: str) -> list[Entry]:
        """Layers from the last; the first to compute starts the gradients, the others add to
        them.
        """
        found = []
        for k, layer in enumerate(reversed(self.f.model)):
            fields = {"writes": self.grads} if k == 0 else {"adds": self.grads}
            found.append(
                compute(f"backward {layer.name}", layer.backward, reads=[grad_out], **fields)
            )
        return found

    def copy(self) -> list[Entry]:
        return [self.call("broadcast", tensor=name, group_src=0) for name in self.weights]
