"""The public functions. Each takes a scenario (or a file, a trace, a script) and returns an answer.

A scenario may be given as a `Scenario`, as the path of a file, or as YAML text (a string with a
line break). Errors of the user raise `UserError`, `UsageError` or `ScenarioErrors`; their text
names the place, the cause and the remedy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    SweepAnswer,
)
from distsim.common.errors import UsageError

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster
    from distsim.output.page import ReportRun
    from distsim.scenario import Scenario
    from distsim.trace.model import Trace


def load(source: str | Path, *, sets: Sequence[str] = ()) -> Scenario:
    """Read a scenario from a file, or from YAML text.

    ``sets``: changes such as ``"iterations=2"``, as ``--set`` takes them. Raises ScenarioErrors.
    """
    from distsim.scenario import load as load_file
    from distsim.scenario import loads

    if _is_yaml_text(source):
        return loads(str(source), "<text>", tuple(sets))
    return load_file(str(source), sets=tuple(sets))


def simulate(
    scenario: Scenario | str | Path,
    *,
    backend: str | None = None,
    cluster: str | Mapping[str, Any] | Cluster | None = None,
    verdict: bool = True,
    values: bool | None = None,
    max_calls: int | None = None,
) -> SimulationAnswer:
    """Simulate a scenario on a backend and a cluster, by default those of the file.

    ``verdict``: also check all event orders. ``values``: compute what tensors hold; None computes
    them for small programs. Raises ScenarioErrors, UsageError.
    """
    from distsim.simulation.simulate_scenario import simulate as simulate_scenario

    simulation = simulate_scenario(
        _scenario(scenario),
        backend=_known_backend(backend),
        cluster=cluster,
        with_verdict=verdict,
        with_values=values,
        max_calls=max_calls,
    )
    return SimulationAnswer(simulation)


def check(
    scenario: Scenario | str | Path,
    *,
    backend: str | None = None,
    strict: bool = False,
    max_states: int | None = None,
) -> CheckAnswer:
    """Find the verdict over all event orders, the findings, and the outcome on every backend.

    ``strict``: a leak counts as an error. ``max_states`` limits the search over event orders.
    """
    from distsim.simulation.check_scenario import MAX_STATES, check_scenario

    limit = MAX_STATES if max_states is None else max_states
    result = check_scenario(
        _scenario(scenario),
        backend=_known_backend(backend),
        strict=strict,
        max_states=limit,
    )
    return CheckAnswer(result)


def expand(scenario: Scenario | str | Path) -> str:
    """The scenario as YAML with its training strategies written out as plain calls."""
    return _scenario(scenario).to_yaml(flat=True)


def plan(
    model: str | Mapping[str, Any],
    *,
    gpus: int,
    cluster: str | Cluster,
    global_batch: int,
    sequence: int | None = None,
    jobs: int | None = None,
) -> PlanAnswer:
    """Rank the parallel layouts of a model's training step by their predicted time.

    ``model``: a preset's name, or the sizes of a ``transformer``. ``gpus``: their number.
    ``global_batch``: sequences per step. ``sequence``: tokens per sequence; None takes the model's.
    ``jobs``: worker processes; None uses all cores. Raises UsageError.
    """
    from distsim.hardware.cluster import cluster_from
    from distsim.hardware.cluster.presets import gpus_per_machine
    from distsim.planning.layouts import PlanRequest
    from distsim.planning.ranking import PlanOptions, plan_layouts

    machines = cluster_from(cluster)
    per_node = gpus_per_machine(machines.name)
    request = PlanRequest(model, gpus, global_batch, machines, sequence, per_node)
    return PlanAnswer(plan_layouts([request], PlanOptions(jobs=jobs)))


def sweep(
    scenario: str | Path,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    clusters: Sequence[str] = (),
    backend: str | None = None,
    output: str | Path | None = None,
    jobs: int | None = None,
) -> SweepAnswer:
    """Simulate a scenario file at every point of a grid.

    ``grid``: key of the file -> values, as ``{"backend": ["gloo", "nccl"]}``. ``output``: a CSV or
    Parquet file that keeps the rows and is resumed. Raises UsageError, ScenarioErrors.
    """
    from distsim.planning.sweep.run_sweep import SweepRequest, run_sweep
    from distsim.scenario import read_text

    is_text = _is_yaml_text(scenario)
    request = SweepRequest(
        str(scenario) if is_text else read_text(str(scenario)),
        "<text>" if is_text else str(scenario),
        {key: tuple(map(str, choices)) for key, choices in (grid or {}).items()},
        tuple(clusters),
        (),
        _known_backend(backend),
        output=None if output is None else Path(output),
        jobs=jobs,
    )
    return SweepAnswer(run_sweep(request))


def capture(
    command: Sequence[str],
    *,
    nproc: int | None = None,
    backend: str | None = None,
    cluster: str | None = None,
    options: Sequence[str] = (),
) -> CaptureAnswer:
    """Run an unmodified script on emulated ranks of this machine and judge its calls.

    ``command``: as ``["python", "train.py"]``. ``options``: further options of ``distsim capture``.
    The ranks are forked from a fresh Python process, because this one may have threads or a CUDA
    context, which a fork does not survive. Raises UsageError if the command reports no result.
    """
    words = [sys.executable, "-m", "distsim", "capture", "--format", "json"]
    given = {"--nproc": nproc, "--backend": backend, "--cluster": cluster}
    for name, value in given.items():
        if value is not None:
            words += [name, str(value)]
    done = subprocess.run(
        [*words, *options, "--", *command], capture_output=True, text=True, check=False
    )
    start = done.stdout.find("\n{\n") + 1 if not done.stdout.startswith("{") else 0
    try:
        return CaptureAnswer(json.loads(done.stdout[start:]))
    except ValueError:
        reason = done.stderr.strip() or "the script's ranks made no call"
        raise UsageError(reason, "run `distsim capture` in a terminal to see its output") from None


def doctor(*paths: str | Path) -> DoctorAnswer:
    """Find why a job hangs, from its Flight Recorder dumps, logs and stacks (files or folders)."""
    from distsim.hang_doctor import diagnose_hang, read_evidence

    return DoctorAnswer(diagnose_hang(read_evidence([str(path) for path in paths])))


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
        backend=_known_backend(backend),
        device=device,
        repeat=repeat,
        timeout_ns=round(timeout_s * 1e9),
        force=force,
    )
    run, _ = run_scenario(_scenario(scenario), options)
    assert run is not None  # only launchers of further machines have no record
    return RealRunAnswer(run)


def replay(
    trace: Trace | str | Path,
    *,
    cluster: str | None = None,
    backend: str | None = None,
    compute: float = 1.0,
    gaps: float = 1.0,
) -> ReplayAnswer:
    """Simulate the calls of a trace again, on another cluster or backend.

    ``compute`` and ``gaps`` scale the recorded compute and the pauses between calls.
    """
    from distsim.trace_replay import ReplayScale, replay_trace

    scale = ReplayScale(compute=compute, gaps=gaps)
    return ReplayAnswer(
        replay_trace(_trace(trace), cluster=cluster, backend=_known_backend(backend), scale=scale)
    )


def compare(
    first: Trace | str | Path, second: Trace | str | Path, *, tolerance: float = 0.05
) -> ComparisonAnswer:
    """Compare two recorded runs and report the first difference.

    ``tolerance``: relative difference of times that counts as equal.
    """
    from distsim.analysis.run_comparison import compare_runs

    names = (_name_of(first, "first"), _name_of(second, "second"))
    found = compare_runs(_trace(first), _trace(second), tolerance=tolerance)
    return ComparisonAnswer(found, names)


def shrink(scenario: Scenario | str | Path, *, backend: str | None = None) -> ShrinkAnswer:
    """Reduce a failing scenario to a minimal one. Raises UsageError if it does not fail."""
    from distsim.repair.shrink import shrink_scenario

    return ShrinkAnswer(shrink_scenario(_scenario(scenario), backend=_known_backend(backend)))


def fix(scenario: str | Path, *, backend: str | None = None) -> FixAnswer:
    """Repairs of a failing scenario file (or YAML text); no file is changed."""
    from distsim.repair.search import find_repairs
    from distsim.scenario import read_text

    if _is_yaml_text(scenario):
        return FixAnswer(find_repairs(str(scenario), "<text>", backend=_known_backend(backend)))
    return FixAnswer(
        find_repairs(read_text(str(scenario)), str(scenario), backend=_known_backend(backend))
    )


def render(
    scenario: Scenario | str | Path,
    *,
    view: str = "dataflow",
    format: str = "svg",
    backend: str | None = None,
    cluster: str | None = None,
) -> Picture:
    """Draw a scenario.

    ``view``: dataflow, timeline, wait-for, groups, …; ``format``: svg, png, pdf, dot or mermaid.
    """
    from distsim.output.pictures.render import PictureInput, load_view, render_picture
    from distsim.simulation.simulate_scenario import simulate as simulate_scenario
    from distsim.values import compute_values

    uses = load_view(view).uses
    done = simulate_scenario(
        _scenario(scenario),
        backend=_known_backend(backend),
        cluster=cluster,
        with_verdict="verdict" in uses,
        with_values=False,
    )
    values = None
    if "values" in uses:
        values = compute_values(done.program, done.run.trace, at_calls=True)
    drawn = PictureInput(
        done.program, done.run, values, done.verdict, cost=done.cost, scenario=done.scenario
    )
    return Picture(render_picture(view, format, drawn), format)


def report(*runs: SimulationAnswer | Scenario | str | Path) -> HtmlReport:
    """One run, or two runs compared, as a self-contained HTML page.

    A run is an answer of `simulate`, a scenario, or the path of a scenario or of a trace.
    """
    from distsim.analysis.run_comparison import compare_runs
    from distsim.output.page import report_html

    if len(runs) not in (1, 2):
        raise UsageError(f"a report shows one or two runs, not {len(runs)}", "pass one or two runs")
    shown = [_report_run(run) for run in runs]
    comparison = compare_runs(shown[0].trace, shown[1].trace) if len(shown) == 2 else None
    return HtmlReport(report_html(shown, comparison))


def _is_yaml_text(source: object) -> bool:
    return isinstance(source, str) and "\n" in source


def _scenario(source: Scenario | str | Path) -> Scenario:
    return load(source) if isinstance(source, str | Path) else source


def _known_backend(name: str | None) -> str | None:
    """Raises UsageError for a name that no backend has."""
    from distsim.backends import BACKEND_PROFILES
    from distsim.common.message_text import did_you_mean, name_list

    if name is not None and name not in BACKEND_PROFILES:
        hint = did_you_mean(name, BACKEND_PROFILES)
        raise UsageError(f"no backend `{name}`{hint}", f"known: {name_list(BACKEND_PROFILES)}")
    return name


def _trace(source: Trace | str | Path) -> Trace:
    from distsim.trace.jsonl import read_trace

    return read_trace(source) if isinstance(source, str | Path) else source


def _name_of(source: object, default: str) -> str:
    return str(source) if isinstance(source, str | Path) else default


def _report_run(run: SimulationAnswer | Scenario | str | Path) -> ReportRun:
    from distsim.output.page import report_run_from_simulation, report_run_from_trace
    from distsim.trace.jsonl import TRACE_SUFFIXES, read_trace

    if isinstance(run, SimulationAnswer):
        return report_run_from_simulation(run.raw)
    if isinstance(run, str | Path) and str(run).endswith(tuple(TRACE_SUFFIXES)):
        return report_run_from_trace(read_trace(run), str(run), None)
    return report_run_from_simulation(simulate(run).raw)


#: The functions that `distsim` itself offers.
FUNCTIONS: tuple[Callable[..., object], ...] = (
    load, simulate, check, expand, plan, sweep, capture, doctor, run_real, replay, compare, shrink,
    fix, render, report,
)  # fmt: skip
