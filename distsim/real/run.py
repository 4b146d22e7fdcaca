"""A scenario on torch.distributed, from the first look at the machine to the record of the run."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distsim.errors import EnvironmentFault, UsageError
from distsim.real import backend as backends
from distsim.real import store as stores
from distsim.real.board import Phase, Seen, seen
from distsim.real.fleet import METHODS, ElasticFleet, Fleet
from distsim.real.job import Job
from distsim.real.judge import differences, outcome_of
from distsim.real.link import Alone, Linked
from distsim.real.merge import merged
from distsim.real.place import Started
from distsim.real.record import RealRun
from distsim.real.sameness import Held, compare
from distsim.real.standing import is_consequence, stood
from distsim.real.watch import Watch, Watched
from distsim.scenario import Scenario
from distsim.simulation import Simulation, simulate
from distsim.trace import Trace

_PREFIX = "distsim-run-"
#: Loading torch takes seconds of a core's time, in every process that does not inherit it.
_START_NS = 60_000_000_000


@dataclass(frozen=True)
class Wish:
    """How a run is wanted. ``launcher``: None takes fork, or spawn for nccl. ``init``: env, tcp, file, or a URL of torch's."""

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


class Refused(UsageError):
    """The simulation says that the run would not complete. ``simulation`` has the diagnosis."""

    exit_code = 1

    def __init__(self, simulation: Simulation) -> None:
        outcome = "is invalid" if _invalid(simulation) else f"{simulation.outcome} under {simulation.run.profile}"
        super().__init__(f"not run: the simulation says that it {outcome}", "--force runs it all the same")
        self.simulation = simulation


def _invalid(simulation: Simulation) -> bool:
    return simulation.verdict is not None and simulation.verdict.verdict == "invalid"


@dataclass
class _Session:
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


def real_run(scenario: Scenario, wish: Wish, started: Started | None = None) -> tuple[RealRun | None, int]:
    """Run a scenario for real: (the record, None on all launchers but the first; the exit status).

    ``started``: what `place.found` says of this process. Raises Refused, EnvironmentFault, UsageError, ScenarioErrors.
    """
    backends.need_torch()
    here = 1 if started else scenario.world.size // max(wish.nnodes, 1)
    chosen = backends.choose(wish.backend, scenario.backend, here)
    simulation = simulate(scenario, backend=chosen)
    if not wish.force and (simulation.outcome != "completes" or _invalid(simulation)):
        raise Refused(simulation)
    session = _session(simulation, wish, chosen, started)
    _sweep()
    session.directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    try:
        return _run(session)
    finally:
        shutil.rmtree(session.directory, ignore_errors=True)


def _session(simulation: Simulation, wish: Wish, chosen: str, started: Started | None) -> _Session:
    program, given = simulation.program, simulation.scenario.launch
    address = wish.master_addr or given.master_addr
    port = wish.master_port if wish.master_port is not None else given.master_port
    launcher = _launcher(simulation.scenario, wish, chosen)
    size = program.world_size
    if started is not None:
        if started.world_size != size:
            raise EnvironmentFault(
                f"{started.launcher} started {started.world_size} ranks, the scenario has {size}", f"start {size} ranks"
            )
        one = (started.rank,)
        return _Session(simulation, wish, chosen, "spawn" if chosen == "nccl" else "fork", one, started.master_addr,
                        started.master_port, started.rank, size, started)  # fmt: skip
    if wish.nnodes < 1 or size % wish.nnodes or not 0 <= wish.node_rank < wish.nnodes:
        raise UsageError(
            f"{size} ranks can't be cut into --nnodes {wish.nnodes}, machine {wish.node_rank} of them",
            "give --nnodes that divides the world, and --node-rank from 0 on",
        )
    if launcher == "elastic" and wish.nnodes > 1:
        raise UsageError("--launcher elastic is for one machine", "for several, start torchrun on each: see `distsim run FILE`")
    here = size // wish.nnodes
    first = wish.node_rank * here
    return _Session(simulation, wish, chosen, launcher, tuple(range(first, first + here)), address, port, wish.node_rank, wish.nnodes)


def _launcher(scenario: Scenario, wish: Wish, chosen: str) -> str:
    name = wish.launcher or (scenario.launch.start if "start" in scenario.launch.model_fields_set else None)
    if name is None:
        return "spawn" if chosen == "nccl" else "fork"
    if name not in METHODS:
        raise UsageError(f"there is no launcher {name}", f"one of {', '.join(METHODS)}")
    if name == "fork" and chosen == "nccl":
        raise UsageError(
            "--launcher fork can't be used with CUDA: a forked process can't use a CUDA context that its parent has made",
            "use --launcher spawn or forkserver",
        )
    return name


# --- the run itself ---


def _run(session: _Session) -> tuple[RealRun | None, int]:
    door = _door(session)
    job = _job(session)
    absent = {f.rank for f in job.program.faults if f.kind == "absent"}
    present = [rank for rank in session.ranks if rank not in absent]
    fleet: Any = None
    watch = Watch(job, session.ranks, _NOBODY, Alone(), session.wish.timeout_ns, max(session.wish.timeout_ns, _START_NS))
    fleet = ElasticFleet(watch.pid) if session.launcher == "elastic" else Fleet(session.launcher)
    watch.fleet = _Present(fleet, present)
    clean = False
    with watch.signals():
        try:
            _import_for(session)
            fleet.start(job, present)  # before the store: a process with threads should not fork
            watch.link = link = _link(session, door, lambda: watch.interrupted)
            before = link.offset("start")
            watched = watch.run()
            clean = watched.reason == "done"
            after = link.offset("end")
            record = _record(session, job, watched, (before, after))
            return _report(session, job, watched, link, link.gather(record))
        finally:
            watch.finish(clean)
            session.store = None


class _Present:
    """A fleet whose absent ranks never end, since they never began."""

    def __init__(self, fleet: Any, present: Sequence[int]) -> None:
        self.fleet, self.present = fleet, set(present)

    def exit_of(self, rank: int) -> int | None:
        code: int | None = self.fleet.exit_of(rank) if rank in self.present else None
        return code

    def end(self, grace_s: float) -> None:
        self.fleet.end(grace_s)


_NOBODY: Any = _Present(None, ())


def _door(session: _Session) -> Any:
    """The store's port, taken before anything starts; None where somebody else serves the store."""
    if session.number or (session.started and session.started.agent_store) or session.launcher == "elastic":
        return None
    alone = session.hosts == 1
    door, port = stores.listen(session.address, session.port, may_move=alone and session.wish.master_port is None)
    if port != session.port:
        session.notes.append(f"port {session.port} is taken; {port} was used")
        session.port = port
    return door


def _import_for(session: _Session) -> None:
    """What forked ranks would otherwise each import for themselves."""
    if session.launcher == "fork":
        import ml_dtypes  # noqa: F401  (bfloat16 numbers)
        import torch.distributed  # noqa: F401

        import distsim.real.runner  # noqa: F401


def _link(session: _Session, door: Any, ended: Callable[[], bool]) -> Alone:
    wait_s = max(session.wish.timeout_ns, _START_NS) / 1e9
    if door is not None:
        session.store = stores.serve(door, session.address, session.port)
    elif session.hosts > 1:
        session.store = stores.connect(session.address, session.port, wait_s)
    if session.hosts == 1:
        return Alone()
    link = Linked(session.store, session.number, session.hosts, wait_s)
    link.meet(ended)
    return link


def _job(session: _Session) -> Job:
    simulation, wish = session.simulation, session.wish
    program = simulation.program
    init = _init(session, simulation.scenario.options.init_method)
    per = max(program.world_size // session.hosts if session.hosts > 1 else program.local_size, 1)
    local = (session.started.local_rank,) if session.started else tuple(rank % per for rank in session.ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Job(
        program, session.backend, session.directory, session.address, session.port, init, True,
        group_timeout_ns=wish.timeout_ns * 6 + 60_000_000_000, repeats=wish.repeat + (wish.repeat > 1),
        busy=len(session.ranks) * (session.hosts if session.address in ("127.0.0.1", "localhost") else 1) <= cores,
        threads=simulation.scenario.launch.omp_threads, local_ranks=local, first_rank=session.ranks[0], devices=backends.devices(),
    )  # fmt: skip


def _init(session: _Session, written: str | None) -> str:
    wanted = session.wish.init
    if wanted == "env":
        found = written or "env://"
    elif wanted == "tcp":
        found = f"tcp://{session.address}:{session.port}"
    elif wanted == "file":
        if session.hosts > 1:
            raise UsageError("--init file needs a file that all machines share", "give it: --init file:///shared/folder/name")
        found = Path(session.directory, "rendezvous").as_uri()
    elif "://" in wanted:
        found = wanted
    else:
        raise UsageError(f"there is no --init {wanted}", "env, tcp, file, or a URL such as file:///tmp/name")
    stores.check_file(found)
    return found


# --- what is left ---


def _record(session: _Session, job: Job, watched: Watched, clocks: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, bytes]:
    """All that the ranks of this machine left, as bytes that can travel."""
    values = session.simulation.values
    record: dict[str, bytes] = {}
    held: list[Held] = []
    overhead = 0
    for rank in session.ranks:
        for repetition in range(len(watched.starts_ns) or 1):
            path = job.slots(rank, repetition)
            if path.exists():
                record[f"slots {rank} {repetition}"] = path.read_bytes()
        if values is not None:
            found, cost = compare(job.program, values, rank, job.result(rank), session.backend)
            held += found
            overhead = max(overhead, cost)
        if job.output(rank).exists():
            record[f"output {rank}"] = job.output(rank).read_bytes()[-4000:]
        if rank in watched.stacks:
            record[f"stack {rank}"] = watched.stacks[rank].encode()
    facts = {"ranks": session.ranks, "held": held, "overhead_ns": overhead, "clocks": clocks, "starts_ns": watched.starts_ns}
    return {"facts": json.dumps(facts).encode(), **record}


@dataclass
class _Gathered:
    """The records of all launchers together."""

    tables: dict[int, dict[int, bytes]] = field(default_factory=dict)  # repetition -> rank -> table
    zeros_ns: dict[int, dict[int, int]] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    overhead_ns: int = 0
    error_ns: int = 0


def _gathered(records: Sequence[Mapping[str, bytes]], starts_ns: Sequence[int]) -> _Gathered:
    out = _Gathered()
    for record in records:
        facts = json.loads(record["facts"])
        (first, error), (last, later) = facts["clocks"]
        offset = (first + last) // 2
        out.error_ns = max(out.error_ns, error, later, abs(first - last) // 2)
        out.overhead_ns = max(out.overhead_ns, facts["overhead_ns"])
        out.held += [Held(*one) for one in facts["held"]]
        for name, data in record.items():
            what, _, who = name.partition(" ")
            if what == "slots":
                rank, repetition = map(int, who.split())
                out.tables.setdefault(repetition, {})[rank] = data
                zero = starts_ns[repetition] if repetition < len(starts_ns) else 0
                out.zeros_ns.setdefault(repetition, {})[rank] = zero - offset
            elif what == "stack":
                out.stacks[int(who)] = data.decode(errors="replace")
            elif what == "output":
                out.outputs[int(who)] = data.decode(errors="replace")
    return out


def _report(session: _Session, job: Job, watched: Watched, link: Alone, records: Sequence[Mapping[str, bytes]]) -> tuple[RealRun | None, int]:
    if not link.first:
        return None, link.agree_on(0)
    try:
        _environment_faults(session, watched)
        run = _judged(session, job, watched, _gathered(records, watched.starts_ns))
    except EnvironmentFault:
        link.agree_on(4)
        raise
    return run, link.agree_on(_status(run))


def _status(run: RealRun) -> int:
    """0 completes, 1 the scenario fails, 4 it was ended from outside."""
    if run.reason == "interrupted":
        return 4
    return 0 if run.outcome == "completes" else 1


def _environment_faults(session: _Session, watched: Watched) -> None:
    """What is no fault of the scenario: ranks that never came, or broke before their program began."""
    broken = [s for s in watched.seen.values() if s.phase == Phase.BROKEN]
    if broken:
        raise EnvironmentFault(f"rank {broken[0].rank} could not start: {broken[0].message}", "see the message above")
    if watched.reason == "start":
        late = [r for r, s in sorted(watched.seen.items()) if s.phase in (Phase.NEW, Phase.LOADING)]
        raise EnvironmentFault(f"too few ranks came: {late} did not start in time", "try again, or give a longer --timeout")


def _judged(session: _Session, job: Job, watched: Watched, got: _Gathered) -> RealRun:
    simulation, program = session.simulation, job.program
    start_ns = watched.starts_ns[-1] if watched.starts_ns else 0
    left = stood(program, watched.seen, watched.exits, start_ns, simulation.run.standstill)
    outcome = outcome_of(left.standstill.ends, got.held, simulation.outcome)
    traces = [_trace(session, job, got, k, left.standstill, outcome) for k in sorted(got.tables) or [0]]
    counted = traces[1:] if len(traces) > 1 and len(traces) == job.repeats else traces
    ordered = sorted(counted, key=lambda t: t.makespan_ns)
    trace = ordered[(len(ordered) - 1) // 2] if outcome == "completes" else traces[-1]
    bad = {e.rank for e in left.standstill.ends if e.status in ("raised", "crashed") and not is_consequence(e)}
    return RealRun(
        simulation, session.backend, session.started.launcher if session.started else session.launcher, outcome, watched.reason,
        left.standstill, left.findings, left.culprits, differences(simulation, outcome, left.standstill.ends), trace,
        tuple(t.makespan_ns for t in counted), tuple(got.held), got.stacks,
        {r: text for r, text in got.outputs.items() if r in bad and text.strip()}, got.overhead_ns, got.error_ns,
        session.wish.timeout_ns, tuple(session.notes),
    )  # fmt: skip


def _trace(session: _Session, job: Job, got: _Gathered, repetition: int, left: Any, outcome: str) -> Trace:
    import torch

    header = {
        "backend": session.backend, "cluster": "", "launcher": session.launcher, "torch": torch.__version__,
        "repetition": repetition, "clock_error_ns": got.error_ns, "recording_ns_per_call": got.overhead_ns,
        "compute": "busy" if job.busy else "asleep", "cores": os.cpu_count(),
    }  # fmt: skip
    return merged(job.program, got.tables.get(repetition, {}), got.zeros_ns.get(repetition, {}), left, outcome, header)


def _sweep() -> None:
    """Remove what launchers that were killed have left in the temporary folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def median_ns(makespans_ns: Sequence[int]) -> int:
    return round(statistics.median(makespans_ns)) if makespans_ns else 0


__all__ = ["RealRun", "Refused", "Wish", "median_ns", "real_run"]
