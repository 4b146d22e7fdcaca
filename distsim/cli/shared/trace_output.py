"""Writing traces and recordings: ``--trace`` of `simulate`, `capture`, `run` and `replay`.

The suffix of the file chooses the format: .jsonl is distsim's own, .json is Chrome's for Perfetto.
Names are checked before anything runs, so that a long run is not lost to a typing error.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.cli.shared import console
from distsim.cli.shared.arguments import OutputFormat

if TYPE_CHECKING:
    from distsim.real.run import RealRunOptions, RealRunRefused
    from distsim.simulation.simulate_scenario import Simulation
    from distsim.trace.model import Trace

_INTERRUPTING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TraceWriter = Callable[["Simulation", Path], None]


# --- traces of simulations ---


def trace_writer(path: Path) -> TraceWriter:
    """The function that writes a simulation's trace in the format of the file's suffix.

    Raises UsageError for another suffix or a missing folder, before anything runs.
    """
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    writers = {".jsonl": _write_native, ".json": _write_chrome}
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if is_stream(path):
        return writers.get(suffix, _write_native)
    _check_trace_folder(path)
    if suffix not in writers:
        raise UsageError(
            f"{path}: unknown file type for a trace",
            "use a name that ends in .jsonl (distsim's format) or .json (for Perfetto)",
        )
    return writers[suffix]


def _check_trace_folder(path: Path) -> None:
    from distsim.common.errors import UsageError

    if not path.parent.is_dir():
        raise UsageError(
            f"the folder {path.parent} does not exist", "name a file in a folder that exists"
        )


def _write_native(simulation: Simulation, path: Path) -> None:
    from distsim.output.json.tensor_values import trace_header_values
    from distsim.trace.jsonl import encode_pieces, trace_lines
    from distsim.trace.model import Trace

    trace = simulation.run.trace
    header = {**trace.header, **trace_header_values(simulation)}
    with_values = Trace(header, trace.tables, trace.columns)
    console.write_file(path, encode_pieces(path, trace_lines(with_values)))


def _write_chrome(simulation: Simulation, path: Path) -> None:
    from distsim.checker.detectors.peak_memory import peak_memory
    from distsim.output.json.chrome_trace import chrome_trace_lines
    from distsim.output.trace_data.memory_over_time import memory_profiles
    from distsim.trace.jsonl import encode_pieces

    trace = simulation.run.trace
    peaks = peak_memory(simulation.scenario, simulation.program)
    memory = memory_profiles(peaks, trace, range(trace.world_size))
    console.write_file(path, encode_pieces(path, chrome_trace_lines(trace, memory)))


# --- recordings of real runs, and traces of replays ---


def check_trace_path(path: Path) -> None:
    """Check that a trace can be written there. Raises UsageError before anything runs."""
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    if is_stream(path):
        return
    _check_trace_folder(path)
    if not path.name.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz")):
        raise UsageError(
            f"{path}: unknown file type for a trace",
            "use a name that ends in .jsonl (distsim's format) or .json (for Perfetto), "
            "optionally followed by .gz",
        )
    check_output_folder(path)


def check_output_folder(path: Path) -> None:
    """Check that a file can be written there. Raises UsageError before anything runs."""
    import tempfile

    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    if is_stream(path):
        return
    _check_trace_folder(path)
    try:
        # Permissions, quotas and read-only mounts show only when a file is made.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {path.parent}: {error.strerror}",
            "name a file in a writable folder",
        ) from None


def check_is_no_input(path: Path, inputs: Iterable[str | Path]) -> None:
    """Raise UsageError if writing ``path`` would replace an input file.

    ``inputs``: files, or folders whose files are all inputs.
    """
    from distsim.common.errors import UsageError

    if not path.is_file():
        return
    written = path.resolve()
    for given in map(Path, inputs):
        files = given.rglob("*") if given.is_dir() else [given]
        if any(file.resolve() == written for file in files):
            raise UsageError(f"{path} is an input file; it was not changed", "name another file")


def write_trace_by_suffix(path: Path, trace: Trace) -> None:
    """Write a trace in the format that the suffix of the file asks for."""
    from distsim.output.json.chrome_trace import chrome_trace_lines
    from distsim.trace.jsonl import encode_pieces, trace_lines

    if path.name.endswith((".json", ".json.gz")):
        lines = chrome_trace_lines(trace)
    else:
        lines = trace_lines(trace)
    console.write_file(path, encode_pieces(path, lines))


def with_trace_path(options: RealRunOptions, trace: Path | None) -> RealRunOptions:
    """The options with the path of the trace: the partial recording is written next to it."""
    from dataclasses import replace

    return replace(options, trace=str(trace)) if trace is not None else options


def write_recording(path: Path | None, trace: Trace, report: Callable[[], str]) -> None:
    """Write the recording of a real run, if ``path`` is given, and print the report.

    The run is over and cannot be repeated cheaply. Therefore the report is printed even if the
    recording cannot be written, and Ctrl-C is ignored meanwhile.
    """
    with _signals_ignored():
        try:
            if path is not None:
                write_trace_by_suffix(path, trace)
                _remove_partial_recording(path)
        finally:
            console.out(report())


def _remove_partial_recording(path: Path) -> None:
    """Remove what was recorded during the run; the complete recording replaces it."""
    from distsim.real.results.partial_trace import partial_trace_path

    partial = partial_trace_path(path)
    if partial is not None:
        partial.unlink(missing_ok=True)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    # Only the main thread may set signal handlers.
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = _INTERRUPTING_SIGNALS if in_main_thread else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # A handler that was not installed from Python reads as None and cannot be restored.
            signal.signal(number, handler or signal.SIG_DFL)


def report_refused_run(refused: RealRunRefused, format: OutputFormat) -> None:
    """Print why a real run was not started: the findings of its simulation."""
    from distsim.output.json.simulation_result import simulation_json
    from distsim.output.text.finding_list import findings_text

    simulation = refused.simulation
    if format is OutputFormat.json:
        console.out(console.to_json({"refused": True, **simulation_json(simulation)}))
    else:
        text = findings_text(simulation.findings, simulation.scenario.file)
        if text:
            console.out(text)
    console.note(str(refused))
