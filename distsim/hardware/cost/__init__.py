"""Predicted durations of communication and computation; see `distsim.hardware.cost.model`."""

from distsim.hardware.cost.link_loads import CHEAPEST, CostedOperation, ScheduleLoad
from distsim.hardware.cost.model import CostModel, LinkClass, SlowLink

__all__ = ["CHEAPEST", "CostModel", "LinkClass", "ScheduleLoad", "CostedOperation", "SlowLink"]
