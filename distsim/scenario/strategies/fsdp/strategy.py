"""The strategy `fsdp`: joins the fields (`fields`) and the calls (`calls`) of fully_shard.

It is a module of its own, so that fields and writers do not import each other.
"""

from __future__ import annotations

from distsim.scenario.strategies.base import Expansion, ExpansionContext
from distsim.scenario.strategies.fsdp.calls import FsdpWriter
from distsim.scenario.strategies.fsdp.fields import FsdpFields


class Fsdp(FsdpFields):
    """Every rank keeps a shard of each layer; layers are gathered when they are needed, gradients
    scattered as they come.
    """

    def expand(self, context: ExpansionContext) -> Expansion:
        return FsdpWriter(self, context, self.root_unit(context)).expansion()
