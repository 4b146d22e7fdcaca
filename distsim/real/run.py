"""Runs a scenario on torch.distributed, from the choice of the backend to the record of the run.

A run has three stages: `launch_session` decides what this launcher runs, `_run` starts the ranks
and watches them, and `results` turns the files that they left into a `RealRun`. On several machines
each has a launcher; the first one decides when the run ends and reports it.

Invariant: whatever happens, no rank process is left when `_run` returns, and the run's folder is
removed.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.operations.core.collective_results import numpy_dtype
from distsim.program.model import Program
from distsim.real.launch.coordinator import LaunchCoordinator, StoreCoordinator
from distsim.real.launch.external_launchers import ExternalRank, real_run_notes
from distsim.real.launch.monitor import MonitorResult, RankMonitor
from distsim.real.launch.session import LaunchSession, RealRunOptions
from distsim.real.launch.session_setup import launch_session
from distsim.real.launch.start_methods import ElasticLauncher, ProcessLauncher
from distsim.real.launch.startup_faults import inject_startup_faults
from distsim.real.results import collect
from distsim.real.results.partial_trace import write_partial_trace
from distsim.real.results.real_run import RealRun
from distsim.real.shared import device_selection, rendezvous
from distsim.real.shared.device_selection import (
    check_device_support,
    choose_backend,
    require_torch,
)
from distsim.real.shared.job import FOLDER_PREFIX, LOOPBACK, ComputeTimes, WorkerJob
from distsim.real.worker.compute_load import simulated_compute_times
from distsim.real.worker.rank_tensors import check_memory
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import Simulation, simulate

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

#: How long ranks that are loading may make no progress, and how long to wait for the launchers of
#: other machines. Loading itself may take longer.
_STARTUP_LIMIT_NS = 60_000_000_000

#: Exit statuses of `distsim run`.
_EXIT_COMPLETED = 0
_EXIT_SCENARIO_FAILED = 1
_EXIT_ENVIRONMENT_FAILED = 4

_OUTCOME_TEXTS = {"wrong-data": "ends with wrong data", "undefined": "has no defined outcome"}


class RealRunRefused(UsageError):
    """The simulation predicts that the run will not complete; ``simulation`` has the diagnosis."""

    exit_code = _EXIT_SCENARIO_FAILED

    def __init__(self, simulation: Simulation) -> None:
        if _is_invalid(simulation):
            reason = "is invalid"
        else:
            outcome = _OUTCOME_TEXTS.get(simulation.outcome, simulation.outcome)
            reason = f"{outcome} under {simulation.run.profile}"
        super().__init__(f"not run: in the simulation it {reason}", "to run it anyway, add --force")
        self.simulation = simulation


def _is_invalid(simulation: Simulation) -> bool:
    return simulation.verdict is not None and simulation.verdict.verdict == "invalid"


class LauncherResult(NamedTuple):
    """The record of a run, None on all launchers but the first, and the exit status of all."""

    run: RealRun | None
    status: int


def run_scenario(
    scenario: Scenario, options: RealRunOptions, external_rank: ExternalRank | None = None
) -> LauncherResult:
    """Run a scenario for real.

    ``external_rank``: the rank that this process
    is if another launcher started it. Raises RealRunRefused, EnvironmentFault, UsageError and
    ScenarioErrors.
    """
    backend = chosen_backend(options, scenario.backend, scenario.world.size, external_rank)
    return run_simulation(simulate(scenario, backend=backend), options, external_rank)


def chosen_backend(
    options: RealRunOptions,
    scenario_backend: str,
    ranks: int,
    external_rank: ExternalRank | None = None,
) -> str:
    """The backend of the run: that of the options, else the scenario's.

    Raises EnvironmentFault if it cannot run here.
    """
    require_torch()
    local_ranks = 1 if external_rank else ranks // max(options.nnodes, 1)
    return choose_backend(options.backend, scenario_backend, local_ranks)


def run_simulation(
    simulation: Simulation,
    options: RealRunOptions,
    external_rank: ExternalRank | None = None,
    program: Program | None = None,
) -> LauncherResult:
    """Run for real what was simulated with the backend that is to be used; see `run_scenario`.

    ``program`` replaces the simulated program; it must have the same calls with other buffers.
    """
    expected_to_fail = simulation.outcome != "completes" or _is_invalid(simulation)
    if expected_to_fail and not options.force:
        raise RealRunRefused(simulation)
    backend = simulation.program.backend
    session = launch_session(simulation, options, backend, external_rank)
    session.program = program
    check_device_support(simulation.program, backend, session.devices)
    session.notes += real_run_notes(simulation.scenario)
    if session.devices.separate_hosts:
        session.notes.append(
            "ranks share a GPU: NCCL treats each rank as a separate node (NCCL_HOSTID) and uses "
            "sockets"
        )
    if session.devices.kind == "cpu":
        check_memory(program or simulation.program, session.ranks)
    _remove_stale_folders()
    session.directory = _run_folder()
    startup = simulation.program.startup
    try:
        with inject_startup_faults(simulation.scenario, startup, session.address):
            return _run(session)
    finally:
        shutil.rmtree(session.directory, ignore_errors=True)


# --- the folder of a run ---


def _run_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
    except OSError as fault:
        raise EnvironmentFault(
            f"cannot write into {tempfile.gettempdir()}: {fault.strerror}",
            "set TMPDIR to another folder",
        ) from None


def _remove_stale_folders() -> None:
    """Remove the folders of launchers that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        pid = path.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not _process_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _process_exists(pid: int) -> bool:
    with suppress(PermissionError):  # the process exists, and belongs to another user
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


# --- the run itself ---


def _run(session: LaunchSession) -> LauncherResult:
    listening = _listening_socket(session)
    job = _job(session)
    absent = {fault.rank for fault in job.program.faults if fault.kind == "absent"}
    present = [rank for rank in session.ranks if rank not in absent]
    launcher = _rank_launcher(session, job)
    monitor = RankMonitor(
        job,
        session.ranks,
        launcher,
        LaunchCoordinator(),
        session.options.timeout_ns,
        max(session.options.timeout_ns, _STARTUP_LIMIT_NS),
    )
    clean = False
    with monitor.signals():
        try:
            _preload_torch(session)
            # Before the store is made, because a process with threads should not fork.
            launcher.start(job, present)
            coordinator = _coordinator(session, listening, lambda: monitor.ended_by)
            monitor.coordinator = coordinator
            offset_at_start = coordinator.offset("start")
            with write_partial_trace(session, job, monitor.starts):
                watched = monitor.run()
            clean = watched.reason == "done"
            offset_at_end = coordinator.offset("end")
            records = collect.local_records(session, job, watched, (offset_at_start, offset_at_end))
            return _report(session, job, watched, coordinator, coordinator.gather(records))
        finally:
            monitor.finish(clean)
            session.store = None


def _rank_launcher(session: LaunchSession, job: WorkerJob) -> ProcessLauncher:
    if session.launcher == "elastic":
        return ElasticLauncher(job)
    return ProcessLauncher(session.launcher)


def _preload_torch(session: LaunchSession) -> None:
    """Import what forked ranks would otherwise each import for themselves."""
    if session.launcher == "fork":
        import torch.distributed  # noqa: F401

        import distsim.real.worker.runner  # noqa: F401

        numpy_dtype("bfloat16")  # loads ml_dtypes


def _report(
    session: LaunchSession,
    job: WorkerJob,
    watched: MonitorResult,
    coordinator: LaunchCoordinator,
    records: Sequence[Mapping[str, bytes]],
) -> LauncherResult:
    """The record on the first launcher, and the exit status on which all launchers agree."""
    if not coordinator.first:
        return LauncherResult(None, coordinator.agree_on(0))
    session.notes += [f"the launcher of node {number} has exited" for number in coordinator.gone]
    try:
        collect.check_environment_faults(session, job, watched)
        run = collect.build_real_run(session, job, watched, records)
    except EnvironmentFault:
        # The other launchers wait for the status and must not time out.
        coordinator.agree_on(_EXIT_ENVIRONMENT_FAILED)
        raise
    status = _EXIT_ENVIRONMENT_FAILED if coordinator.gone else _exit_status(run)
    return LauncherResult(run, coordinator.agree_on(status))


def _exit_status(run: RealRun) -> int:
    if run.reason == "interrupted":
        return _EXIT_ENVIRONMENT_FAILED
    return _EXIT_COMPLETED if run.outcome == "completes" else _EXIT_SCENARIO_FAILED


# --- store and coordinator ---


def _startup_fails(session: LaunchSession) -> bool:
    """The scenario is about a start-up that fails."""
    startup = session.simulation.program.startup
    return startup is not None and startup.failed


def _listening_socket(session: LaunchSession) -> socket.socket | None:
    """The store's port, taken before anything starts; None if another process serves the store."""
    fails = _startup_fails(session)
    if not fails:
        rendezvous.check_host(session.address, "--master-addr")
    if fails and session.hosts > 1:
        raise UsageError(
            "a start-up that fails can only be run with one launcher",
            "omit --nnodes and --launcher",
        )
    if _other_process_serves_store(session):
        return None
    may_move = session.hosts == 1 and not fails and session.options.master_port is None
    listening, port = rendezvous.listen(session.address, session.port, allow_other_port=may_move)
    if port != session.port:
        session.notes.append(f"port {session.port} is in use; {port} was used")
        session.port = port
    return listening


def _other_process_serves_store(session: LaunchSession) -> bool:
    startup = session.simulation.program.startup
    if startup is not None and startup.failed and not startup.entrances[0].agent:
        return True  # a rank serves the store, or no process does
    if session.number != 0 or session.launcher == "elastic":
        return True
    return session.external_rank is not None and session.external_rank.agent_store


def _coordinator(
    session: LaunchSession, listening: socket.socket | None, ended: Callable[[], str]
) -> LaunchCoordinator:
    """Connect to the store and, if there are several launchers, wait for them."""
    wait_s = max(session.options.timeout_ns, _STARTUP_LIMIT_NS) / 1e9
    store: TCPStore | None = None
    if listening is not None:
        store = rendezvous.serve_store(listening, session.address, session.port)
    elif session.hosts > 1:
        store = rendezvous.connect_store(session.address, session.port, wait_s, ended)
    session.store = store  # it must live as long as the ranks use it
    if store is None or session.hosts == 1:
        return LaunchCoordinator()
    coordinator = StoreCoordinator(store, session.number, session.hosts, wait_s)
    coordinator.meet(ended)
    return coordinator


# --- the job description ---


def _job(session: LaunchSession) -> WorkerJob:
    simulation, options = session.simulation, session.options
    launch = simulation.scenario.launch
    # The first repetition of several is a warm-up.
    repeats = options.repeat + 1 if options.repeat > 1 else options.repeat
    return WorkerJob(
        program=session.program or simulation.program,
        backend=session.backend,
        directory=session.directory,
        master_addr=session.address,
        master_port=session.port,
        init_method=_init_method(session, simulation.scenario.options.init_method),
        agent_store=True,
        # Far above `timeout_ns`, after which the launcher itself calls a run hung.
        group_timeout_ns=options.timeout_ns * 6 + 60_000_000_000,
        repeats=repeats,
        busy=_ranks_on_this_machine(session) <= device_selection.usable_cores(),
        threads=launch.omp_threads,
        local_ranks=_local_ranks(session),
        first_rank=session.ranks[0],
        devices=session.devices,
        visible=tuple(launch.visible_devices or ()),
        compute_times=_compute_times(session),
    )


def _ranks_on_this_machine(session: LaunchSession) -> int:
    """Launchers that meet at the loopback address are all on this machine."""
    launchers = session.hosts if session.address in LOOPBACK else 1
    return len(session.ranks) * launchers


def _local_ranks(session: LaunchSession) -> tuple[int, ...]:
    if session.external_rank:
        return (session.external_rank.local_rank,)
    program = session.program or session.simulation.program
    local_size = program.local_size
    if session.hosts > 1:
        local_size = program.world_size // session.hosts
    return tuple(rank % max(local_size, 1) for rank in session.ranks)


def _compute_times(session: LaunchSession) -> ComputeTimes:
    times = simulated_compute_times(session.simulation, session.ranks, session.devices.kind)
    if times:
        session.notes.append(
            "compute takes the time predicted for the scenario's cluster: this node is too slow "
            "for its FLOPs"
        )
    return times


def _init_method(session: LaunchSession, scenario_init: str | None) -> str:
    """The init_method of the run as a URL, checked where that is possible before the start."""
    url = _init_url(session, session.options.init, scenario_init)
    rendezvous.check_rendezvous_file(url)
    if url.startswith("tcp://") and not _startup_fails(session):
        rendezvous.check_host(urlsplit(url).hostname or "", f"--init-method {url}")
    return url


def _init_url(session: LaunchSession, wanted: str, scenario_init: str | None) -> str:
    if wanted == "env":
        return scenario_init or "env://"
    if wanted == "tcp":
        return f"tcp://{session.address}:{session.port}"
    if wanted == "file":
        if session.hosts > 1:
            raise UsageError(
                "--init-method file needs a file that all nodes share",
                "give it: --init-method file:///shared/folder/name",
            )
        return Path(session.directory, "rendezvous").as_uri()
    if wanted.startswith(("env://", "tcp://", "file://")):
        return wanted
    raise UsageError(
        f"unknown --init-method {wanted}", "use env, tcp, file, or a URL such as file:///tmp/name"
    )


__all__ = [
    "RealRun",
    "RealRunOptions",
    "RealRunRefused",
    "chosen_backend",
    "run_scenario",
    "run_simulation",
]
