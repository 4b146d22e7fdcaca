"""The strategy `deepspeed`: joins the fields (`fields`) and the calls of each ZeRO stage.

It is a module of its own, so that fields and writers do not import each other.
"""

from __future__ import annotations

from distsim.scenario.strategies.base import Entry, Expansion, ExpansionContext, block
from distsim.scenario.strategies.deepspeed.calls import ZeroStage12Writer
from distsim.scenario.strategies.deepspeed.fields import DeepSpeedFields
from distsim.scenario.strategies.deepspeed.stage3_calls import ZeroStage3Writer


class DeepSpeed(DeepSpeedFields):
    """Layers are the modules that hold parameters, in the order of the forward pass, inside a root
    that holds none.
    """

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = ZeroStage3Writer if self.stage == 3 else ZeroStage12Writer
        common = writer(self, context).expansion()
        if not self.skips_layer:
            return common
        others = " and ".join(f"rank != {rank}" for rank in self.skips_layer)
        steps: list[Entry] = [block(common.steps, others)]
        tensors = dict(common.tensors)
        groups = dict(common.groups)
        for rank, layer in self.skips_layer.items():
            own = writer(self, context, layer).expansion()
            steps.append(block(own.steps, f"rank == {rank}"))
            tensors |= own.tensors
            groups |= own.groups
        return common._replace(steps=steps, tensors=tensors, groups=groups)
