"""Training strategies: entries of a program that expand into plain operations. The door is here; no strategy is built in yet."""

from __future__ import annotations

#: Name of the entry -> the class of its fields. An entry whose key is here is expanded when the scenario is read.
STRATEGIES: dict[str, type] = {}
