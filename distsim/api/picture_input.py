"""What a view draws: an operation, a scenario that is simulated, or a trace as it was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.api.inputs import is_trace, load_scenario, load_trace
from distsim.common.errors import UsageError

if TYPE_CHECKING:
    from distsim.output.pictures.components.view_interface import (
        OperationMeasurement,
        PictureInput,
        PictureView,
    )
    from distsim.scenario import Scenario

_DEFAULT_OPERATION_RANKS = 4


@dataclass(frozen=True)
class PictureRequest:
    """What to draw; the fields are the parameters of `distsim.render`."""

    source: Scenario | str | Path | None
    view: str
    backend: str | None
    cluster: str | None
    op: str | None
    algorithm: str | None
    ranks: str | None
    steps: str | None
    time: str | None
    group: str | None
    measured: str | Path | None


def picture_input(view: PictureView, request: PictureRequest) -> PictureInput:
    """The input of a view. Raises UsageError, ScenarioErrors."""
    if view.of == "operation":
        return _input_of_operation(request)
    return _input_of_file(view, request)


def missing_rank_notes(drawn: PictureInput) -> tuple[str, ...]:
    """Notes about ranks that were asked for and do not exist."""
    from distsim.output.trace_data.selection import absent_ranks_text

    source = drawn.program or drawn.trace
    if source is None or not source.world_size:
        return ()
    message = absent_ranks_text(drawn.part, source.world_size)
    return (message,) if message else ()


def _input_of_operation(request: PictureRequest) -> PictureInput:
    """One operation on N ranks, or on the ranks of a list. Raises UsageError."""
    from distsim.output.pictures.render import PictureInput
    from distsim.output.trace_data.selection import parse_number_ranges

    algorithm = request.algorithm or ""
    text = request.ranks
    if text is None or text.strip().isdecimal():
        count = int(text or _DEFAULT_OPERATION_RANKS)
        return PictureInput(op=request.op, ranks=count, members=(), algorithm=algorithm)
    members = parse_number_ranges(text, "ranks")
    return PictureInput(op=request.op, ranks=len(members), members=members, algorithm=algorithm)


def _input_of_file(view: PictureView, request: PictureRequest) -> PictureInput:
    """A scenario or a trace, with the part of it to draw. Raises UsageError if none is named."""
    from distsim.output.trace_data.selection import parse_selection

    source = request.source
    if source is None:
        raise UsageError(
            f"the view {request.view} needs a scenario",
            f"`distsim render scenarios/hybrid.yaml --view {request.view}`",
        )
    part = parse_selection(request.ranks, request.steps, request.time, request.group)
    if is_trace(source):
        drawn = _input_of_trace(view, str(source), request)
    else:
        drawn = _input_of_scenario(view, load_scenario(source), request)
    return drawn._replace(part=part, measured=_read_measurements(request.measured))


def _input_of_trace(view: PictureView, file: str, request: PictureRequest) -> PictureInput:
    """The trace as recorded if the view can draw that, else its calls simulated."""
    from distsim.api.recorded_calls import simulate_trace
    from distsim.output.pictures.components.view_interface import PictureInput

    # Another backend or cluster changes the times, so the calls must be simulated.
    as_recorded = request.backend is None and request.cluster is None
    if view.accepts_trace and as_recorded:
        return PictureInput(trace=load_trace(file))
    simulation, _ = simulate_trace(file, backend=request.backend, cluster=request.cluster)
    return PictureInput(
        simulation.program, simulation.run, None, simulation.verdict, cost=simulation.cost
    )


def _input_of_scenario(
    view: PictureView, scenario: Scenario, request: PictureRequest
) -> PictureInput:
    """The scenario simulated, with verdict and values only if the view uses them."""
    from distsim.output.pictures.components.view_interface import PictureInput
    from distsim.simulation.simulate_scenario import simulate
    from distsim.values import compute_values

    simulation = simulate(
        scenario,
        backend=request.backend,
        cluster=request.cluster,
        with_verdict="verdict" in view.uses,
        with_values=False,
    )
    values = None
    if "values" in view.uses:
        values = compute_values(simulation.program, simulation.run.trace, at_calls=True)
    drawn = PictureInput(
        simulation.program,
        simulation.run,
        values,
        simulation.verdict,
        cost=simulation.cost,
        scenario=simulation.scenario,
    )
    launch = scenario.launch
    if launch.master_addr and launch.master_port:
        return drawn._replace(master=f"{launch.master_addr}:{launch.master_port}")
    return drawn


def _read_measurements(file: str | Path | None) -> tuple[OperationMeasurement, ...]:
    """The measured times in a file. Raises UsageError."""
    if file is None:
        return ()
    from distsim.common.file_io import read_bytes
    from distsim.output.pictures.components.view_interface import OperationMeasurement
    from distsim.real.bench.measurement import bench_from_json
    from distsim.real.calibrate.measured_points import points_from_bench
    from distsim.real.calibrate.nccl_tests import points_from_nccl_tests

    try:
        text = read_bytes(file).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}",
            "name an output of nccl-tests, or of `distsim bench --output F`",
        ) from None
    if '"distsim' in text[:400]:
        points = points_from_bench(bench_from_json(text, str(file)))
    else:
        points = points_from_nccl_tests(text, str(file)).points
    return tuple(OperationMeasurement(p.op, p.group, p.nbytes, p.ns) for p in points)
