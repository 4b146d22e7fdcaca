"""How long things take: see `distsim.cost.model`."""

from distsim.cost.loads import CHEAPEST, Load, Row
from distsim.cost.model import CostModel, LinkClass, SlowLink

__all__ = ["CHEAPEST", "CostModel", "LinkClass", "Load", "Row", "SlowLink"]
