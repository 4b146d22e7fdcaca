"""Predicted durations of communication and computation; see `distsim.hardware.cost.model`."""

from distsim.hardware.cost.link_loads import CHEAPEST, PricedOperation, ScheduleLoad
from distsim.hardware.cost.model import CostModel, LinkClass, SlowLink

__all__ = ["CHEAPEST", "CostModel", "LinkClass", "ScheduleLoad", "PricedOperation", "SlowLink"]
