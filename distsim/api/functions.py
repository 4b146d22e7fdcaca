"""The public functions. Each takes a scenario (or a file, a trace, a script) and returns an answer.

A scenario may be given as a `Scenario`, as the path of a file, as ``-`` for standard input, or as
YAML text (a string with a line break). Errors of the user raise `UserError`, `UsageError` or
`ScenarioErrors`; their text names the place, the cause and the remedy.

The commands of `distsim.cli` call these functions. docs/explanation/architecture.md names the
exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.api.inputs import (
    is_trace,
    is_yaml_text,
    known_backend,
    load_machines,
    load_scenario,
    load_trace,
    read_cluster,
    scenario_text,
)
from distsim.api.limited_reading import limited_reading
from distsim.api.printed_json import printed_json
from distsim.api.results import (
    CaptureAnswer,
    CheckAnswer,
    ComparisonAnswer,
    DoctorAnswer,
    FixAnswer,
    HtmlReport,
    Picture,
    PlanAnswer,
    RealRunAnswer,
    ReplayAnswer,
    ShrinkAnswer,
    SimulationAnswer,
    SlowAnswer,
    SweepAnswer,
)
from distsim.common.errors import DistsimError, UsageError

if TYPE_CHECKING:
    from distsim.checker.replay_schedule import ReplaySchedule
    from distsim.hang_doctor import Evidence
    from distsim.hardware.cluster import Cluster
    from distsim.output.page import ReportRun
    from distsim.scenario import Scenario
    from distsim.simulation.simulate_scenario import Simulation
    from distsim.trace.model import Trace

#: Called with a description of the current step.
PhaseCallback = Callable[[str], None]
#: Called with the numbers of items done and of all items.
CountCallback = Callable[[int, int], None]


def load(source: str | Path, *, sets: Sequence[str] = ()) -> Scenario:
    """Read a scenario from a file, from standard input (``-``), or from YAML text.

    ``sets``: changes such as ``"iterations=2"``, as ``--set`` takes them. Raises ScenarioErrors.
    """
    return load_scenario(source, sets)


def simulate(
    scenario: Scenario | str | Path,
    *,
    backend: str | None = None,
    cluster: str | Mapping[str, Any] | Cluster | None = None,
    verdict: bool = True,
    values: bool | None = None,
    strict: bool = False,
    schedule: ReplaySchedule | None = None,
    max_calls: int | None = None,
    fold: bool | None = None,
    progress: PhaseCallback | None = None,
) -> SimulationAnswer:
    """Simulate a scenario on a backend and a cluster, by default those of the file.

    The path of a trace simulates the recorded calls. ``verdict``: also check all event orders.
    ``values``: compute what tensors hold; None computes them for small programs. ``strict``: a leak
    counts as an error. ``schedule``: an event order that a check found. ``max_calls``: a limit on
    simulated calls. ``fold``: simulate ranks with equal roles once; None decides by the size.
    ``progress`` is called with a description of each step. Raises ScenarioErrors, UsageError.
    """
    backend = known_backend(backend)
    if is_trace(scenario):
        from distsim.api.recorded_calls import simulate_trace

        simulation, notes = simulate_trace(str(scenario), backend=backend, cluster=cluster)
        return SimulationAnswer(simulation, notes, strict=strict)
    from distsim.simulation.simulate_scenario import simulate as simulate_scenario

    simulation = simulate_scenario(
        load_scenario(scenario),
        backend=backend,
        cluster=cluster,
        with_verdict=verdict,
        with_values=values,
        schedule=schedule,
        max_calls=max_calls,
        fold=fold,
        tell=progress or (lambda phase: None),
    )
    return SimulationAnswer(simulation, strict=strict)


def check(
    scenario: Scenario | str | Path,
    *,
    backend: str | None = None,
    strict: bool = False,
    max_states: int | None = None,
    max_calls: int | None = None,
    fold: bool | None = None,
) -> CheckAnswer:
    """Find the verdict over all event orders, the findings, and the outcome on every backend.

    The path of a trace checks the recorded calls. ``strict``: a leak counts as an error.
    ``max_states`` limits the search over event orders. ``max_calls``, ``fold``: see `simulate`.
    """
    from distsim.simulation.check_scenario import MAX_STATES, check_scenario

    backend = known_backend(backend)
    limit = MAX_STATES if max_states is None else max_states
    if is_trace(scenario):
        from distsim.api.recorded_calls import check_trace

        return CheckAnswer(*check_trace(str(scenario), backend=backend, max_states=limit))
    result = check_scenario(
        load_scenario(scenario),
        backend=backend,
        strict=strict,
        max_states=limit,
        max_calls=max_calls,
        fold=fold,
    )
    return CheckAnswer(result)


def expand(scenario: Scenario | str | Path) -> str:
    """The scenario as YAML with its training strategies written out as plain calls."""
    return load_scenario(scenario).to_yaml(flat=True)


def plan(
    model: str | Mapping[str, Any],
    *,
    gpus: int | Sequence[int],
    cluster: str | Cluster | Sequence[str | Cluster],
    global_batch: int,
    sequence: int | None = None,
    ranks_per_node: int | None = None,
    step: Mapping[str, Any] | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    memory_reserve: int | None = None,
    framework: str | None = None,
    jobs: int | None = None,
    address: str | None = None,
    output: str | Path | None = None,
    budget: int | None = None,
    seed: int = 0,
    top: int = 15,
    progress: CountCallback | None = None,
) -> PlanAnswer:
    """Rank the parallel layouts of a model's training step by their predicted time.

    ``model``: a preset's name, or the sizes of a ``transformer``. ``gpus``, ``cluster``: one or
    several. ``global_batch``: sequences per step. ``sequence``: tokens per sequence; None takes the
    model's maximum, but at most 8192. ``ranks_per_node``: None takes the cluster's. ``step``:
    further fields of ``transformer``. ``choices``: the only values to try, as ``{"tp": [1, 2]}``.
    ``memory_reserve``: bytes per rank for the CUDA context and NCCL; None estimates it.
    ``framework``: try only what `megatron`, `torchtitan` or `deepseek` supports. ``jobs``: worker
    processes; None uses all cores. ``address``: a Dask or Ray cluster. ``output``: a CSV or
    Parquet file that keeps the rows and is resumed. ``budget``: try this many layouts, chosen by a
    guided search that starts from ``seed``. ``top``: rows in the text. ``progress`` is called with
    the numbers of layouts done and of all layouts. Raises UsageError.
    """
    from dataclasses import replace

    from distsim.planning.evaluate_layouts import PlanOptions, plan_layouts
    from distsim.planning.plan_request import checked_plan_request, for_framework

    gpu_counts = [gpus] if isinstance(gpus, int) else list(gpus)
    given_clusters: list[Any] = list(cluster) if isinstance(cluster, list | tuple) else [cluster]
    clusters = [load_machines(given) for given in given_clusters]
    requests = [
        checked_plan_request(
            model,
            gpu_count,
            machines,
            global_batch,
            sequence=sequence,
            ranks_per_node=ranks_per_node,
            step=step,
            choices=choices,
        )
        for gpu_count in gpu_counts
        for machines in clusters
    ]
    if framework is not None:
        requests = [for_framework(request, framework) for request in requests]
    if memory_reserve is not None:
        _check_memory_reserve(memory_reserve, clusters)
    requests = [replace(request, reserve_nbytes=memory_reserve) for request in requests]
    options = PlanOptions(
        jobs=jobs,
        address=address,
        output=None if output is None else Path(output),
        budget=budget,
        seed=seed,
        simulate_top=top,
    )
    # The scenario of a layout names the preset or the file, not the name within the file.
    preset_of = {
        machines.name: given
        for machines, given in zip(clusters, given_clusters, strict=True)
        if isinstance(given, str)
    }
    ranked = plan_layouts(requests, options, progress or (lambda done, total: None))
    return PlanAnswer(ranked, preset_of, top)


def _check_memory_reserve(nbytes: int, clusters: Sequence[Cluster]) -> None:
    """Raises UsageError for a reserve that leaves no memory of a device for the model."""
    from distsim.common.units import show_bytes

    for cluster in clusters:
        capacity = cluster.device.memory_nbytes
        if nbytes >= capacity:
            raise UsageError(
                f"the memory reserve of {show_bytes(nbytes)} is not less than the memory of "
                f"{cluster.device.name} ({show_bytes(capacity)})",
                "reserve what the CUDA context and NCCL hold, usually 1 to 3 GiB",
            )


def sweep(
    scenario: str | Path,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    clusters: Sequence[str] = (),
    sets: Sequence[str] = (),
    backend: str | None = None,
    max_calls: int | None = None,
    output: str | Path | None = None,
    jobs: int | None = None,
    address: str | None = None,
    budget: int | None = None,
    seed: int = 0,
    top: int = 15,
    progress: CountCallback | None = None,
) -> SweepAnswer:
    """Simulate a scenario file at every point of a grid.

    ``grid``: key of the file -> values, as ``{"backend": ["gloo", "nccl"]}``. Without ``grid`` and
    ``clusters``, the file's ``sweep`` block is the grid. ``sets``: see `load`. ``output``: a CSV or
    Parquet file that keeps the rows and is resumed. The other parameters are those of `plan` and
    `simulate`. Raises UsageError, ScenarioErrors.
    """
    from distsim.planning.sweep.run_sweep import SweepRequest, grid_from_block, run_sweep
    from distsim.planning.sweep.sweep_request import with_grid

    text, file = scenario_text(scenario)
    request = SweepRequest(
        text,
        file,
        grid_from_block(grid or {}),
        clusters=tuple(clusters),
        sets=tuple(sets),
        backend=known_backend(backend),
        max_calls=max_calls,
        output=None if output is None else Path(output),
        jobs=jobs,
        address=address,
        budget=budget,
        seed=seed,
    )
    result = run_sweep(with_grid(request), progress or (lambda done, total: None))
    return SweepAnswer(result, top)


def capture(
    command: Sequence[str],
    *,
    nproc: int | None = None,
    backend: str | None = None,
    cluster: str | None = None,
    options: Sequence[str] = (),
) -> CaptureAnswer:
    """Run an unmodified script on emulated ranks of this machine and check its calls.

    ``command``: as ``["python", "train.py"]``. ``options``: further options of ``distsim capture``.
    The ranks are forked from a fresh Python process, because this one may have threads or a CUDA
    context, which a fork does not survive. Raises UsageError if the command reports no result.
    """
    import subprocess
    import sys

    arguments = [sys.executable, "-m", "distsim", "capture", "--format", "json"]
    given = {"--nproc": nproc, "--backend": backend, "--cluster": cluster}
    for name, value in given.items():
        if value is not None:
            arguments += [name, str(value)]
    process = subprocess.run(
        [*arguments, *options, "--", *command], capture_output=True, text=True, check=False
    )
    data = printed_json(process.stdout)
    if data is None:
        reason = process.stderr.strip() or "the ranks of the script made no call"
        raise UsageError(reason, "run `distsim capture` in a terminal to see its output")
    return CaptureAnswer(data)


def doctor(
    *paths: str | Path,
    pids: Sequence[int] = (),
    torchrun: int | None = None,
    live: int | None = None,
    interval_s: float = 3.0,
    width: int | None = None,
) -> DoctorAnswer:
    """Find why a job hangs, from its Flight Recorder dumps, logs and stacks (files or folders).

    ``pids``: live ranks whose stacks are taken. ``torchrun``: the process of a launcher; the stacks
    of all its ranks are taken. ``live``: the process of a launcher or of a rank; all ranks below it
    and their child processes are inspected twice, ``interval_s`` seconds apart, and the answer has
    a bundle of what was seen. ``width``: columns of the text. Raises UsageError.
    """
    from distsim.common.reading_limits import reading_limits
    from distsim.hang_doctor import diagnose_hang, read_evidence

    if not paths and not pids and torchrun is None and live is None:
        raise UsageError(
            "no input was given",
            "`distsim doctor dumps/ train.log`, or --pid PID of a live rank",
        )
    evidence = read_evidence([str(path) for path in paths])
    if pids or torchrun is not None:
        from distsim.hang_doctor.model.reconcile import reconcile
        from distsim.hang_doctor.readers.live_processes import add_live_processes

        add_live_processes(evidence, list(pids), torchrun)
        reconcile(evidence)
    bundle = b""
    if live is not None:
        bundle = _inspect_live(evidence, live, interval_s)
    with reading_limits("the files", evidence.input_bytes):
        return DoctorAnswer(diagnose_hang(evidence), width, bundle)


def _inspect_live(evidence: Evidence, root: int, interval_s: float) -> bytes:
    """Enter the state of a live job into the evidence; return its bundle."""
    from distsim.hang_doctor.model.reconcile import reconcile
    from distsim.hang_doctor.readers.input_files import read_dump_bytes
    from distsim.hang_doctor.readers.live_bundle import read_live_job
    from distsim.hang_doctor.readers.live_job import bundle_bytes, inspect_live_job

    job, dumps = inspect_live_job(root, interval_s)
    read_live_job(evidence, job, f"processes below {root}")
    for rank, dump in dumps.items():
        read_dump_bytes(evidence, dump, f"fr_rank_{rank}")
    reconcile(evidence)
    return bundle_bytes(job, dumps)


def slow(
    *paths: str | Path,
    steps: str | None = None,
    ideal: str = "peers",
    cluster: str | Mapping[str, Any] | Cluster | None = None,
    what_if: Sequence[str] = (),
    jobs: int = 4,
    progress: CountCallback | None = None,
) -> SlowAnswer:
    """Find out why a job is slow, from the profiles or traces of its ranks (files or folders).

    ``steps``: analyse only these steps, for example ``"10-40"``. ``ideal``: the reference for
    slowdowns, ``"peers"`` or ``"mean"``. ``cluster``: compare communication with its predicted
    times. ``what_if``: predict a step with changes: ``"like-peers=2"``, ``"compute@6-7=0.8"``,
    ``"cluster=dgx-h100"``. ``jobs``: processes that read ranks. ``progress`` is called with the
    numbers of files read and of all files. Raises UsageError.
    """
    from dataclasses import replace

    from distsim.analysis.slow_jobs.analyze import analyze_recording, select_steps
    from distsim.analysis.slow_jobs.job_changes import what_if_step
    from distsim.api.job_changes import parse_changes
    from distsim.trace.recordings.read_recording import read_recording

    if not paths:
        raise UsageError("no input was given", "`distsim slow profiles/`")
    if ideal not in ("peers", "mean"):
        raise UsageError(f"ideal: unknown value {ideal!r}", "use peers or mean")
    machines = None if cluster is None else load_machines(cluster)
    changes = parse_changes(what_if)
    other_machines = load_machines(changes.cluster) if changes.cluster else None
    recording = read_recording(paths, jobs=jobs, progress=progress)
    selected = select_steps(recording, steps)
    job = analyze_recording(recording, selected, uses_mean=ideal == "mean", cluster=machines)
    if changes:
        step = what_if_step(job, changes, other_machines)
        job = replace(job, what_if=replace(step, changes=tuple(what_if)))
    return SlowAnswer(job)


def run_real(
    scenario: Scenario | str | Path,
    *,
    backend: str | None = None,
    device: str = "auto",
    repeat: int = 1,
    timeout_s: float = 10.0,
    force: bool = False,
) -> RealRunAnswer:
    """Run a scenario on torch.distributed on this machine and record it.

    ``repeat``: measured repetitions after one warm-up. ``timeout_s``: stop a run that hangs after
    this many seconds. ``force``: run it although the simulation hangs. Raises EnvironmentFault if
    torch or the backend is missing.
    """
    from distsim.real.run import RealRunOptions, run_scenario

    options = RealRunOptions(
        backend=known_backend(backend),
        device=device,
        repeat=repeat,
        timeout_ns=round(timeout_s * 1e9),
        force=force,
    )
    run = run_scenario(load_scenario(scenario), options).run
    assert run is not None  # only launchers of further machines have no record
    return RealRunAnswer(run)


def replay(
    trace: Trace | str | Path,
    *,
    cluster: str | None = None,
    backend: str | None = None,
    compute: float = 1.0,
    gaps: float = 1.0,
    as_recorded: bool = False,
    what_if: Sequence[str] = (),
) -> ReplayAnswer:
    """Simulate the calls of a trace again, on another cluster or backend.

    ``compute`` and ``gaps`` scale the recorded compute and the pauses between calls.
    ``as_recorded``: communication takes its recorded time, or with a cluster the time that the
    engine predicts there. ``what_if``: further changes, as those of `slow`.
    """
    from distsim.api.job_changes import parse_changes
    from distsim.simulation.trace_replay import ReplayScale, replay_trace
    from distsim.simulation.trace_replay.as_recorded import replay_as_recorded

    source = load_trace(trace)
    scale = ReplayScale(compute=compute, gaps=gaps)
    name = str(trace) if isinstance(trace, str | Path) else "trace"
    changes = parse_changes(what_if)
    if as_recorded and backend is not None:
        raise UsageError(
            "a replay as recorded keeps the rules of the recorded backend",
            "omit the backend, or replay without as_recorded",
        )
    if changes and not as_recorded:
        raise UsageError("what-ifs change a replay as recorded", "set as_recorded")
    if as_recorded:
        other_machines = read_cluster(cluster or changes.cluster or None)
        recorded = replay_as_recorded(
            source, name=name, scale=scale, changes=changes, cluster=other_machines
        )
        return ReplayAnswer(recorded, name)
    machines = read_cluster(cluster)
    try:
        result = replay_trace(source, cluster=machines, backend=known_backend(backend), scale=scale)
    except UsageError as error:
        if not isinstance(trace, str | Path):
            raise
        raise UsageError(f"{trace}: {error.message}", error.remedy) from None
    return ReplayAnswer(result, name)


def compare(
    first: Trace | Scenario | str | Path,
    second: Trace | Scenario | str | Path,
    *,
    tolerance: float = 0.0,
    cluster: str | None = None,
) -> ComparisonAnswer:
    """Compare two runs and report the first difference.

    A run is a trace, or a scenario, which is simulated on ``cluster`` and under the backend of the
    other run. ``tolerance``: the share of the first run's makespan by which the end of a call may
    differ.
    """
    from distsim.analysis.run_comparison import compare_runs
    from distsim.api.compared_runs import read_two_runs, source_name

    runs = read_two_runs(first, second, cluster)
    found = compare_runs(runs[0].trace, runs[1].trace, tolerance=tolerance)
    names = (source_name(first, "first"), source_name(second, "second"))
    return ComparisonAnswer(found, runs, names)


def shrink(
    scenario: Scenario | str | Path, *, backend: str | None = None, tries: int | None = None
) -> ShrinkAnswer:
    """Reduce a failing scenario to a minimal one. Raises UsageError if it does not fail.

    ``tries``: the largest number of smaller scenarios to check.
    """
    from distsim.repair.shrink import MAX_SHRINK_TRIALS, shrink_scenario

    return ShrinkAnswer(
        shrink_scenario(
            load_scenario(scenario),
            backend=known_backend(backend),
            most=tries or MAX_SHRINK_TRIALS,
        )
    )


def fix(scenario: str | Path, *, backend: str | None = None, write: bool = False) -> FixAnswer:
    """Search for repairs of a failing scenario file (or YAML text).

    ``write``: replace the file by the best repair. It stays unchanged if no repair checks ok, or if
    the best one ends an exchange of data. Raises UsageError if the file is not writable, or changes
    during the search.
    """
    from distsim.repair.search import find_repairs

    backend = known_backend(backend)
    if is_yaml_text(scenario) or scenario == "-":
        if write:
            raise UsageError("only a file can be repaired in place", "name a scenario file")
        text, name = scenario_text(scenario)
        return FixAnswer(find_repairs(text, name, backend=backend))
    from distsim.repair.apply_repair import open_for_repair, write_repaired

    file = open_for_repair(Path(scenario), writable=write)
    repairs = find_repairs(file.text, str(scenario), backend=backend)
    is_written = write and bool(repairs) and not repairs[0].ends_exchanges
    if is_written:
        write_repaired(file, repairs[0].text)
    return FixAnswer(repairs, written=is_written)


def render(
    scenario: Scenario | str | Path | None = None,
    *,
    view: str = "dataflow",
    format: str = "svg",
    backend: str | None = None,
    cluster: str | None = None,
    op: str | None = None,
    algorithm: str | None = None,
    ranks: str | None = None,
    steps: str | None = None,
    time: str | None = None,
    group: str | None = None,
    measured: str | Path | None = None,
) -> Picture:
    """Draw a scenario, a trace, or one operation.

    ``view``: dataflow, timeline, wait-for, groups, …; ``format``: svg, png, pdf, dot or mermaid.
    ``op``, ``algorithm``: the operation that the views ``operation`` and ``algorithm`` draw;
    they need no scenario. ``ranks`` (``"0-7,12"``), ``steps``, ``time`` (``"1 ms..2 ms"``) and
    ``group`` choose a part of the run. ``measured``: measured times that the view ``bandwidth``
    adds.
    """
    from distsim.api.picture_input import PictureRequest, missing_rank_notes, picture_input
    from distsim.output.pictures.render import load_view, render_picture

    request = PictureRequest(
        source=scenario,
        view=view,
        backend=known_backend(backend),
        cluster=cluster,
        op=op,
        algorithm=algorithm,
        ranks=ranks,
        steps=steps,
        time=time,
        group=group,
        measured=measured,
    )
    drawn = picture_input(load_view(view), request)
    return Picture(render_picture(view, format, drawn), format, missing_rank_notes(drawn))


def report(
    *runs: SimulationAnswer | Scenario | str | Path,
    backend: str | None = None,
    cluster: str | None = None,
    max_calls: int | None = None,
    progress: PhaseCallback | None = None,
) -> HtmlReport:
    """One run, or two runs compared, as a self-contained HTML page.

    A run is an answer of `simulate`, a scenario, or the path of a scenario or of a trace. The other
    parameters are those of `simulate`.
    """
    from distsim.analysis.run_comparison import compare_runs
    from distsim.output.page import report_html, report_runs

    if len(runs) not in (1, 2):
        raise UsageError(
            f"a report shows one or two runs, but {len(runs)} were given", "pass one or two runs"
        )
    reported: list[_ReportedRun] = []
    for run in runs:
        if is_trace(run):
            reported.append(_recorded_run(str(run), backend, cluster))
            continue
        answer = run
        if not isinstance(answer, SimulationAnswer):
            answer = simulate(
                answer, backend=backend, cluster=cluster, max_calls=max_calls, progress=progress
            )
        reported.append(_ReportedRun(answer.raw, answer.ok, ()))
    if progress is not None:
        progress("the report")
    shown = report_runs([each.run for each in reported])
    comparison = compare_runs(shown[0].trace, shown[1].trace) if len(shown) == 2 else None
    return HtmlReport(
        report_html(shown, comparison),
        ok=all(each.ok for each in reported),
        notes=tuple(note for each in reported for note in each.notes),
    )


class _ReportedRun(NamedTuple):
    """A run for a report.

    ``ok``: the simulation is, or the recording is complete and no finding on it is an error.
    """

    run: ReportRun | Simulation
    ok: bool
    notes: tuple[str, ...]


def _recorded_run(file: str, backend: str | None, cluster: str | None) -> _ReportedRun:
    """A trace as it was recorded, with the verdict and findings on its calls if possible."""
    from distsim.output.page import report_run_from_trace
    from distsim.trace.run_end import is_partial

    trace = load_trace(file)
    simulation = None
    try:
        answer = simulate(file, backend=backend, cluster=cluster)
        simulation, notes = answer.raw, answer.notes
    except DistsimError as error:
        notes = (f"the calls of {file} cannot be checked: {error}",)
    run = report_run_from_trace(trace, file, simulation)
    has_errors = any(finding.severity == "error" for finding in run.findings)
    return _ReportedRun(run, not is_partial(trace) and not has_errors, notes)


#: The functions that `distsim` itself offers.
FUNCTIONS: tuple[Callable[..., object], ...] = (
    load, simulate, check, expand, plan, sweep, capture, doctor, slow, run_real, replay, compare,
    shrink, fix, render, report, limited_reading,
)  # fmt: skip
