"""A real run: how it is wanted, what its launcher has in hand, what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.real.results.posted_calls import DivergingReceive
from distsim.real.results.value_check import BufferCheck
from distsim.real.shared.device_selection import RankDevices
from distsim.trace.model import Trace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from distsim.program.model import Program
    from distsim.real.launch.external_launchers import ExternalRank
    from distsim.simulation.simulate_scenario import Simulation


@dataclass(frozen=True)
class RealRunOptions:
    """How a run is wanted. ``launcher``: None takes fork, or spawn where a forked rank can't use
    its GPU. ``init``: env, tcp, file, or a URL of torch's. ``device``: auto (GPUs for nccl, else
    the CPU), cpu or cuda. ``trace``: the file of the recording, beside which it is written as it
    goes.
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
    """What one launcher has in hand."""

    simulation: Simulation
    wish: RealRunOptions
    backend: str
    launcher: str
    ranks: tuple[int, ...]
    address: str
    port: int
    number: int = 0
    hosts: int = 1
    started: ExternalRank | None = None
    notes: list[str] = field(default_factory=list)
    store: TCPStore | None = None
    directory: str = ""
    devices: RankDevices = field(default_factory=RankDevices)
    program: Program | None = (
        None  # in place of the simulation's: the same calls with other buffers
    )


@dataclass(frozen=True)
class RealRun:
    """A run on torch.distributed beside its simulation.

    ``makespans_ns``: one per repetition that counted, the warm-up left out. ``findings``,
    ``culprits``: of the real standstill. ``differences``: where simulated and real ends differ, in
    words; empty where they agree. ``stacks``: Python stack by rank of those that were stuck;
    ``outputs``: what a failed rank printed last. ``overhead_ns``: what recording a call cost.
    ``reason``: done, standstill, start, interrupted. ``outcome`` is empty where the run was ended
    from outside while it got on. ``agreement``: where there are no differences and the ends are not
    alike, how the two go together. ``ended_by``: the signal that interrupted it. ``taken``:
    receives from any source that took another rank's message than in the simulation.
    """

    simulation: Simulation
    backend: str
    launcher: str
    outcome: str
    reason: str
    final_state: FinalState
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]
    differences: tuple[str, ...]
    trace: Trace
    makespans_ns: tuple[int, ...]
    values: tuple[BufferCheck, ...]
    stacks: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    overhead_ns: int = 0
    clock_error_ns: int = 0
    timeout_ns: int = 0
    notes: tuple[str, ...] = ()
    agreement: str = ""
    ended_by: str = ""
    taken: tuple[DivergingReceive, ...] = ()

    @property
    def agrees(self) -> bool:
        """The run ended as the simulation said."""
        return not self.differences

    def held(self, state: str) -> list[BufferCheck]:
        """The buffers that are equal, close, that differ, or are unknown."""
        return [one for one in self.values if one.state == state]
