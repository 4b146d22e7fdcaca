"""How a real run is requested, and the state of the launcher that carries it out.

The result of a run is `distsim.real.results.real_run.RealRun`; it is separate because outputs load
it without the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distsim.real.shared.device_selection import RankDevices

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from distsim.program.model import Program
    from distsim.real.launch.external_launchers import ExternalRank
    from distsim.simulation.simulate_scenario import Simulation


@dataclass(frozen=True)
class RealRunOptions:
    """The request for a real run.

    ``launcher``: None means fork, or spawn if a forked rank cannot use its GPU. ``init``: env, tcp,
    file, or a URL of torch's. ``device``: auto (GPUs for nccl, else the CPU), cpu or cuda.
    ``trace``: the file of the recording; a partial recording is written next to it during the run.
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
    trace: str | None = None


@dataclass
class LaunchSession:
    """The state of one launcher.

    ``number`` of ``hosts`` launchers; number 0 decides and reports. ``ranks``: those it runs.
    ``external_rank``: the rank that this process is if another launcher started it.
    ``program``: replaces the simulated program; it has the same calls with other buffers.
    """

    simulation: Simulation
    options: RealRunOptions
    backend: str
    launcher: str
    ranks: tuple[int, ...]
    address: str
    port: int
    number: int = 0
    hosts: int = 1
    external_rank: ExternalRank | None = None
    notes: list[str] = field(default_factory=list)
    store: TCPStore | None = None
    directory: str = ""
    devices: RankDevices = field(default_factory=RankDevices)
    program: Program | None = None
