"""How a run is wanted, and what its launcher has in hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distsim.program.records import Program
from distsim.real.device import Devices
from distsim.real.place import Started
from distsim.simulation import Simulation


@dataclass(frozen=True)
class Wish:
    """How a run is wanted. ``launcher``: None takes fork, or spawn for GPUs. ``init``: env, tcp, file, or a URL of torch's.

    ``device``: auto (GPUs for nccl, else the CPU), cpu or cuda.
    """

    backend: str | None = None
    launcher: str | None = None
    init: str = "env"
    timeout_ns: int = 10_000_000_000
    repeat: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    force: bool = False
    device: str = "auto"


@dataclass
class Session:
    """What one launcher has in hand."""

    simulation: Simulation
    wish: Wish
    backend: str
    launcher: str
    ranks: tuple[int, ...]
    address: str
    port: int
    number: int = 0
    hosts: int = 1
    started: Started | None = None
    notes: list[str] = field(default_factory=list)
    store: Any = None
    directory: str = ""
    devices: Devices = field(default_factory=Devices)
    program: Program | None = None  # in place of the simulation's: the same calls with other buffers


__all__ = ["Session", "Wish"]
