"""A scenario on torch.distributed, from the first look at the machine to the record of the run."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.operations.core.collective_results import numpy_dtype
from distsim.program.model import Program
from distsim.real.launch.coordinator import LaunchCoordinator, StoreCoordinator
from distsim.real.launch.external_launchers import ExternalRank, real_run_notes
from distsim.real.launch.monitor import MonitorResult, RankMonitor
from distsim.real.launch.start_methods import START_METHODS, ElasticLauncher, ProcessLauncher
from distsim.real.launch.startup_faults import inject_startup_faults
from distsim.real.results import collect
from distsim.real.results.partial_trace import write_partial_trace
from distsim.real.results.real_run import LaunchSession, RealRun, RealRunOptions
from distsim.real.shared import device_selection, rendezvous
from distsim.real.shared.device_selection import (
    RankDevices,
    check_device_support,
    choose_backend,
    choose_devices,
    require_torch,
)
from distsim.real.shared.job import FOLDER_PREFIX, LOOPBACK, WorkerJob
from distsim.real.worker.compute_load import ComputeTimes, simulated_compute_times
from distsim.real.worker.rank_tensors import check_memory
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import Simulation, simulate

#: So long may ranks that load be seen to do nothing, and launchers of other machines be waited for.
#: Loading itself may take longer.
_STARTUP_LIMIT_NS = 60_000_000_000


class RealRunRefused(UsageError):
    """The simulation says that the run would not complete. ``simulation`` has the diagnosis."""

    exit_code = 1

    def __init__(self, simulation: Simulation) -> None:
        words = {"wrong-data": "ends with wrong data", "undefined": "has no defined outcome"}
        outcome = (
            f"{words.get(simulation.outcome, simulation.outcome)} under {simulation.run.profile}"
        )
        said = "is invalid" if _is_invalid(simulation) else outcome
        super().__init__(
            f"not run: the simulation says that it {said}", "--force runs it all the same"
        )
        self.simulation = simulation


def _is_invalid(simulation: Simulation) -> bool:
    return simulation.verdict is not None and simulation.verdict.verdict == "invalid"


def run_scenario(
    scenario: Scenario, wish: RealRunOptions, started: ExternalRank | None = None
) -> tuple[RealRun | None, int]:
    """Run a scenario for real: (the record, None on all launchers but the first; the exit status).

    ``started``: what `place.found` says of this process. Raises Refused, EnvironmentFault,
    UsageError, ScenarioErrors.
    """
    chosen = chosen_backend(wish, scenario.backend, scenario.world.size, started)
    return run_simulation(simulate(scenario, backend=chosen), wish, started)


def chosen_backend(
    wish: RealRunOptions, written: str, ranks: int, started: ExternalRank | None = None
) -> str:
    """The back end that a run uses: the wish's, else the ``written`` one. Raises EnvironmentFault
    where it can't run here.
    """
    require_torch()
    return choose_backend(wish.backend, written, 1 if started else ranks // max(wish.nnodes, 1))


def run_simulation(
    simulation: Simulation,
    wish: RealRunOptions,
    started: ExternalRank | None = None,
    program: Program | None = None,
) -> tuple[RealRun | None, int]:
    """Run for real what was simulated under the back end that is to be used; see `run_scenario`.

    ``program``: in place of the simulated one, the same calls with other buffers.
    """
    if not wish.force and (simulation.outcome != "completes" or _is_invalid(simulation)):
        raise RealRunRefused(simulation)
    chosen = simulation.program.backend
    session = _session(simulation, wish, chosen, started)
    session.program = program
    check_device_support(simulation.program, chosen, session.devices)
    session.notes += real_run_notes(simulation.scenario)
    if session.devices.apart:
        session.notes.append(
            "ranks share a GPU: NCCL takes each for a machine of its own (NCCL_HOSTID) and uses sockets"
        )
    if session.devices.kind == "cpu":
        check_memory(program or simulation.program, session.ranks)
    _remove_stale_folders()
    try:
        session.directory = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
    except OSError as fault:
        raise EnvironmentFault(
            f"can't write into {tempfile.gettempdir()}: {fault.strerror}",
            "set TMPDIR to another folder",
        ) from None
    try:
        with inject_startup_faults(
            simulation.scenario, simulation.program.startup, session.address
        ):
            return _run(session)
    finally:
        shutil.rmtree(session.directory, ignore_errors=True)


def _session(
    simulation: Simulation, wish: RealRunOptions, chosen: str, started: ExternalRank | None
) -> LaunchSession:
    program, given = simulation.program, simulation.scenario.launch
    address = wish.master_addr or given.master_addr
    port = wish.master_port if wish.master_port is not None else given.master_port
    size = program.world_size
    devices = _rank_devices(simulation, wish, chosen, started)
    launcher = _start_method(simulation.scenario, wish, devices)
    if started is not None:
        if started.world_size != size:
            raise EnvironmentFault(
                f"{started.launcher} started {started.world_size} ranks, the scenario has {size}",
                f"start {size} ranks",
            )
        one = (started.rank,)
        return LaunchSession(
            simulation,
            wish,
            chosen,
            _default_start_method(devices),
            one,
            started.master_addr,
            started.master_port,
            started.rank,
            size,
            started,
            devices=devices,
        )
    if wish.nnodes < 1 or size % wish.nnodes or not 0 <= wish.node_rank < wish.nnodes:
        raise UsageError(
            f"{size} ranks can't be cut into --nnodes {wish.nnodes}, machine {wish.node_rank} of them",
            "give --nnodes that divides the world, and --node-rank from 0 on",
        )
    if launcher == "elastic" and wish.nnodes > 1:
        raise UsageError(
            "--launcher elastic is for one machine",
            "for several, start torchrun on each: see `distsim run FILE`",
        )
    here = size // wish.nnodes
    first = wish.node_rank * here
    return LaunchSession(
        simulation,
        wish,
        chosen,
        launcher,
        tuple(range(first, first + here)),
        address,
        port,
        wish.node_rank,
        wish.nnodes,
        devices=devices,
    )


def _rank_devices(
    simulation: Simulation, wish: RealRunOptions, chosen: str, started: ExternalRank | None
) -> RankDevices:
    """What the ranks of this machine work on; a task that another launcher started counts those
    beside it too.
    """
    visible, program = simulation.scenario.launch.visible_devices, simulation.program
    hidden = visible is not None and "CUDA_VISIBLE_DEVICES" not in os.environ
    count = (
        min(device_selection.visible_gpus(), len(visible))
        if visible is not None and hidden
        else device_selection.visible_gpus()
    )
    here = program.local_size if started else program.world_size // max(wish.nnodes, 1)
    return choose_devices(wish.device, chosen, count, here, started.launcher if started else None)


def _start_method(scenario: Scenario, wish: RealRunOptions, devices: RankDevices) -> str:
    name = wish.launcher or (
        scenario.launch.start if "start" in scenario.launch.model_fields_set else None
    )
    if name is None:
        return _default_start_method(devices)
    if name not in START_METHODS:
        raise UsageError(f"there is no launcher {name}", f"one of {', '.join(START_METHODS)}")
    if name == "fork" and _default_start_method(devices) != "fork":
        raise UsageError(
            "--launcher fork can't be used with CUDA here: a forked process can't use a CUDA context that its parent has made",
            "use --launcher spawn or forkserver",
        )
    return name


def _default_start_method(devices: RankDevices) -> str:
    """fork, which loads torch once, wherever a forked rank can use its device."""
    return "fork" if devices.kind != "cuda" or device_selection.cuda_survives_fork() else "spawn"


# --- the run itself ---


def _run(session: LaunchSession) -> tuple[RealRun | None, int]:
    door = _listening_socket(session)
    job = _job(session)
    absent = {f.rank for f in job.program.faults if f.kind == "absent"}
    present = [rank for rank in session.ranks if rank not in absent]
    launcher = (
        ElasticLauncher(job) if session.launcher == "elastic" else ProcessLauncher(session.launcher)
    )
    watch = RankMonitor(
        job,
        session.ranks,
        launcher,
        LaunchCoordinator(),
        session.wish.timeout_ns,
        max(session.wish.timeout_ns, _STARTUP_LIMIT_NS),
    )
    clean = False
    with watch.signals():
        try:
            _preload_torch(session)
            launcher.start(job, present)  # before the store: a process with threads should not fork
            watch.coordinator = coordinator = _coordinator(session, door, lambda: watch.ended_by)
            before = coordinator.offset("start")
            with write_partial_trace(session, job, watch.starts):
                watched = watch.run()
            clean = watched.reason == "done"
            after = coordinator.offset("end")
            left = collect.local_records(session, job, watched, (before, after))
            return _report(session, job, watched, coordinator, coordinator.gather(left))
        finally:
            watch.finish(clean)
            session.store = None


def _listening_socket(session: LaunchSession) -> socket.socket | None:
    """The store's port, taken before anything starts; None where somebody else serves the store."""
    startup = session.simulation.program.startup
    failing = startup is not None and startup.failed
    if not failing:
        rendezvous.check_host(session.address, "--master-addr")
    if failing and session.hosts > 1:
        raise UsageError(
            "a start-up that fails is run for real by one launcher",
            "leave out --nnodes, and other launchers",
        )
    if failing and startup is not None and not startup.entrances[0].agent:
        return None  # a rank serves the store, or none does
    if (
        session.number
        or (session.started and session.started.agent_store)
        or session.launcher == "elastic"
    ):
        return None
    alone = session.hosts == 1
    door, port = rendezvous.listen(
        session.address,
        session.port,
        allow_other_port=alone and not failing and session.wish.master_port is None,
    )
    if port != session.port:
        session.notes.append(f"port {session.port} is taken; {port} was used")
        session.port = port
    return door


def _preload_torch(session: LaunchSession) -> None:
    """What forked ranks would otherwise each import for themselves."""
    if session.launcher == "fork":
        import torch.distributed  # noqa: F401

        import distsim.real.worker.runner  # noqa: F401

        numpy_dtype("bfloat16")


def _coordinator(
    session: LaunchSession, door: socket.socket | None, ended: Callable[[], str]
) -> LaunchCoordinator:
    wait_s = max(session.wish.timeout_ns, _STARTUP_LIMIT_NS) / 1e9
    store = session.store = (
        rendezvous.serve_store(door, session.address, session.port)
        if door is not None
        else rendezvous.connect_store(session.address, session.port, wait_s, ended)
        if session.hosts > 1
        else None
    )
    if store is None or session.hosts == 1:
        return LaunchCoordinator()
    coordinator = StoreCoordinator(store, session.number, session.hosts, wait_s)
    coordinator.meet(ended)
    return coordinator


def _job(session: LaunchSession) -> WorkerJob:
    simulation, wish = session.simulation, session.wish
    program = session.program or simulation.program
    init = _init_method(session, simulation.scenario.options.init_method)
    per = max(program.world_size // session.hosts if session.hosts > 1 else program.local_size, 1)
    local = (
        (session.started.local_rank,)
        if session.started
        else tuple(rank % per for rank in session.ranks)
    )
    return WorkerJob(
        program,
        session.backend,
        session.directory,
        session.address,
        session.port,
        init,
        True,
        group_timeout_ns=wish.timeout_ns * 6 + 60_000_000_000,
        repeats=wish.repeat + (wish.repeat > 1),
        busy=len(session.ranks) * (session.hosts if session.address in LOOPBACK else 1)
        <= device_selection.usable_cores(),
        threads=simulation.scenario.launch.omp_threads,
        local_ranks=local,
        first_rank=session.ranks[0],
        devices=session.devices,
        visible=tuple(simulation.scenario.launch.visible_devices or ()),
        prices=_compute_times(session),
    )


def _compute_times(session: LaunchSession) -> ComputeTimes:
    found = simulated_compute_times(session.simulation, session.ranks, session.devices.kind)
    if found:
        session.notes.append(
            "compute takes the time of the scenario's cluster: this machine is too slow for its flops"
        )
    return found


def _init_method(session: LaunchSession, written: str | None) -> str:
    wanted = session.wish.init
    if wanted == "env":
        found = written or "env://"
    elif wanted == "tcp":
        found = f"tcp://{session.address}:{session.port}"
    elif wanted == "file":
        if session.hosts > 1:
            raise UsageError(
                "--init file needs a file that all machines share",
                "give it: --init file:///shared/folder/name",
            )
        found = Path(session.directory, "rendezvous").as_uri()
    elif wanted.startswith(("env://", "tcp://", "file://")):
        found = wanted
    else:
        raise UsageError(
            f"there is no --init {wanted}", "env, tcp, file, or a URL such as file:///tmp/name"
        )
    rendezvous.check_rendezvous_file(found)
    startup = session.simulation.program.startup
    if found.startswith("tcp://") and not (startup is not None and startup.failed):
        rendezvous.check_host(urlsplit(found).hostname or "", f"--init {found}")
    return found


def _report(
    session: LaunchSession,
    job: WorkerJob,
    watched: MonitorResult,
    coordinator: LaunchCoordinator,
    records: Sequence[Mapping[str, bytes]],
) -> tuple[RealRun | None, int]:
    if not coordinator.first:
        return None, coordinator.agree_on(0)
    session.notes += [f"the launcher of machine {number} is gone" for number in coordinator.gone]
    try:
        collect.check_environment_faults(session, job, watched)
        run = collect.build_real_run(session, job, watched, records)
    except EnvironmentFault:
        coordinator.agree_on(4)
        raise
    return run, coordinator.agree_on(4 if coordinator.gone else _exit_status(run))


def _exit_status(run: RealRun) -> int:
    """0 completes, 1 the scenario fails, 4 it was ended from outside."""
    if run.reason == "interrupted":
        return 4
    return 0 if run.outcome == "completes" else 1


def _remove_stale_folders() -> None:
    """Remove what launchers that were killed have left in the temporary folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        pid = path.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not _process_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _process_exists(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


__all__ = [
    "RealRun",
    "RealRunRefused",
    "RealRunOptions",
    "chosen_backend",
    "run_scenario",
    "run_simulation",
]
