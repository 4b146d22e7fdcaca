"""Decides, before anything starts, what one launcher runs: ranks, devices and start method.

A launcher is in one of two situations. Either distsim starts the ranks of this machine itself, or
torchrun, srun or mpirun started this process as one rank (`ExternalRank`), and it runs only that
rank. Wrong combinations of options are refused here.
"""

from __future__ import annotations

import os

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.real.launch.external_launchers import ExternalRank
from distsim.real.launch.session import LaunchSession, RealRunOptions
from distsim.real.launch.start_methods import START_METHODS
from distsim.real.shared import device_selection
from distsim.real.shared.device_selection import RankDevices, choose_devices
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import Simulation


def launch_session(
    simulation: Simulation,
    options: RealRunOptions,
    backend: str,
    external_rank: ExternalRank | None,
) -> LaunchSession:
    """The session of this launcher. Raises UsageError or EnvironmentFault if it cannot run."""
    devices = rank_devices(simulation, options, backend, external_rank)
    # Checked in both situations, although an external rank ignores the start method.
    launcher = start_method(simulation.scenario, options, devices)
    if external_rank is not None:
        return _session_of_external_rank(simulation, options, backend, external_rank, devices)
    return _session_of_machine(simulation, options, backend, launcher, devices)


def _session_of_external_rank(
    simulation: Simulation,
    options: RealRunOptions,
    backend: str,
    external_rank: ExternalRank,
    devices: RankDevices,
) -> LaunchSession:
    """Each rank has its own launcher process, so the world is as many "machines"."""
    world_size = simulation.program.world_size
    if external_rank.world_size != world_size:
        raise EnvironmentFault(
            f"{external_rank.launcher} started {external_rank.world_size} ranks, "
            f"the scenario has {world_size}",
            f"start {world_size} ranks",
        )
    return LaunchSession(
        simulation,
        options,
        backend,
        launcher=_default_start_method(devices),
        ranks=(external_rank.rank,),
        address=external_rank.master_addr,
        port=external_rank.master_port,
        number=external_rank.rank,
        hosts=world_size,
        external_rank=external_rank,
        devices=devices,
    )


def _session_of_machine(
    simulation: Simulation,
    options: RealRunOptions,
    backend: str,
    launcher: str,
    devices: RankDevices,
) -> LaunchSession:
    """The world is cut into equal parts of consecutive ranks, one for each machine."""
    launch = simulation.scenario.launch
    world_size = simulation.program.world_size
    nodes, node_rank = options.nnodes, options.node_rank
    has_equal_parts = nodes >= 1 and world_size % nodes == 0
    if not has_equal_parts or not 0 <= node_rank < nodes:
        raise UsageError(
            f"{world_size} ranks cannot be split over --nnodes {nodes} with "
            f"--node-rank {node_rank}",
            "give --nnodes that divides the world size, and --node-rank from 0",
        )
    if launcher == "elastic" and nodes > 1:
        raise UsageError(
            "--launcher elastic supports one node only",
            "for several nodes, start torchrun on each: see `distsim run FILE`",
        )
    local_size = world_size // nodes
    first_rank = node_rank * local_size
    port = options.master_port if options.master_port is not None else launch.master_port
    return LaunchSession(
        simulation,
        options,
        backend,
        launcher,
        ranks=tuple(range(first_rank, first_rank + local_size)),
        address=options.master_addr or launch.master_addr,
        port=port,
        number=node_rank,
        hosts=nodes,
        devices=devices,
    )


def rank_devices(
    simulation: Simulation,
    options: RealRunOptions,
    backend: str,
    external_rank: ExternalRank | None,
) -> RankDevices:
    """The devices of the ranks on this machine.

    For a task that another launcher started, the other tasks on its machine count too.
    """
    program = simulation.program
    visible_in_file = simulation.scenario.launch.visible_devices
    gpus = device_selection.visible_gpus()
    if visible_in_file is not None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        gpus = min(gpus, len(visible_in_file))
    if external_rank is not None:
        return choose_devices(
            options.device, backend, gpus, program.local_size, external_rank.launcher
        )
    local_size = program.world_size // max(options.nnodes, 1)
    return choose_devices(options.device, backend, gpus, local_size)


def start_method(scenario: Scenario, options: RealRunOptions, devices: RankDevices) -> str:
    """The start method that the options or the scenario ask for, else the default one."""
    name = options.launcher or None
    if name is None and "start" in scenario.launch.model_fields_set:
        name = scenario.launch.start
    if name is None:
        return _default_start_method(devices)
    if name not in START_METHODS:
        raise UsageError(f"unknown launcher {name}", f"one of {', '.join(START_METHODS)}")
    if name == "fork" and _default_start_method(devices) != "fork":
        raise UsageError(
            (
                "--launcher fork cannot be used with CUDA here: a forked process cannot use a CUDA "
                "context that its parent has created"
            ),
            "use --launcher spawn or forkserver",
        )
    return name


def _default_start_method(devices: RankDevices) -> str:
    """fork, which loads torch only once, wherever a forked rank can use its device."""
    if devices.kind != "cuda" or device_selection.cuda_survives_fork():
        return "fork"
    return "spawn"
