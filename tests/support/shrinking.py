"""Makes a scenario small that shows something: what `distsim shrink` does, for any question."""

from __future__ import annotations

from distsim.repair.shrink import shrink

__all__ = ["shrink"]
