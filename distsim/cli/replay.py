"""`distsim replay`: a trace on the simulator again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.options import BackendOption, ClusterOption
from distsim.cli.simulate import Format, FormatOption

if TYPE_CHECKING:
    from distsim.replay import Scale
    from distsim.trace import Trace

TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A trace, as `simulate --trace F.jsonl` and `run --real` write it.")
]
ScaleOption = Annotated[
    list[str] | None,
    typer.Option("--scale", metavar="WHAT=FACTOR", help="Multiply durations: compute, or gaps (a host between its calls)."),
]
Output = Annotated[
    Path | None, typer.Option("--trace", metavar="F", help="Write the replay: F.jsonl native, F.json for Perfetto.")
]


def command(
    trace: TraceFile,
    cluster: ClusterOption = None,
    backend: BackendOption = None,
    scale: ScaleOption = None,
    output: Output = None,
    format: FormatOption = Format.text,
) -> None:
    """Simulate the calls of a trace again: as they were, at another speed, elsewhere.

    \b
    Example: distsim replay run.jsonl
    Example: distsim replay run.jsonl --cluster dgx-h100 --scale compute=0.5
    """
    from distsim.replay import replay
    from distsim.trace_io import read_trace
    from distsim.views.replayview import replay_json, replay_text

    factors = _scale(scale)
    found = replay(read_trace(trace), cluster=read_cluster(cluster), backend=backend and backend.value, scale=factors)
    if output is not None:
        _write(output, found.trace)
    console.out(console.to_json(replay_json(found, str(trace))) if format is Format.json else replay_text(found, str(trace)))
    raise typer.Exit(int(found.run.outcome != "completes"))


def _scale(given: list[str] | None) -> Scale:
    from distsim.errors import UsageError
    from distsim.replay import Scale

    factors: dict[str, float] = {}
    for text in given or ():
        name, _, value = text.partition("=")
        try:
            factors[name] = float(value)
        except ValueError:
            factors[name] = -1.0
        if name not in Scale._fields or not 0 <= factors[name] < 1e9:
            raise UsageError(f"--scale {text} is not understood", "as --scale compute=0.5 or --scale gaps=0")
    return Scale(**factors)


def read_cluster(name: str | None) -> str | dict[str, object] | None:
    """A preset's name as it is; a file's mapping."""
    if name is None or Path(name).suffix not in (".yaml", ".yml"):
        return name
    from distsim.scenario import load_mapping

    return load_mapping(name)


def _write(path: Path, trace: Trace) -> None:
    from distsim.errors import UsageError

    if path.suffix == ".jsonl":
        from distsim.trace_io import trace_lines

        console.write_file(path, trace_lines(trace))
    elif path.suffix == ".json":
        from distsim.views.chrome import chrome_trace

        console.write_file(path, chrome_trace(trace))
    else:
        raise UsageError(f"{path} is no name for a trace", "end it in .jsonl (distsim's own form) or .json (for Perfetto)")
