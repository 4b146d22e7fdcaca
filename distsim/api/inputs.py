"""The inputs of the public functions: scenarios, traces, clusters and names of backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.common.errors import UsageError

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster
    from distsim.scenario import Scenario
    from distsim.trace.model import Trace

_SCENARIO_SUFFIXES = (".yaml", ".yml")
_TRACE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.partial", ".jsonl.gz.partial")
#: Files of other tools, besides the folders and the .json files of PyTorch's profiler.
_RECORDING_SUFFIXES = (".json.gz", ".csv", ".parquet", ".et", ".et.gz", ".sqlite")
#: Formats with a file per rank.
_PER_RANK = frozenset({".json", ".et", ".sqlite"})
#: The recorded job that comes with distsim.
_SAMPLE = "sample"
_PROFILE_START_BYTES = 4096
_PROFILE_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"distributedInfo"')
#: The name of a scenario that is given as text.
TEXT_NAME = "<text>"


def is_yaml_text(source: object) -> bool:
    """Whether a source is the text of a scenario; a path has no line break."""
    return isinstance(source, str) and "\n" in source


def is_trace(source: object) -> bool:
    """Whether a source is the path of a trace, or of a recording that is read as one."""
    if not isinstance(source, str | Path) or is_yaml_text(source):
        return False
    return str(source).endswith(_TRACE_SUFFIXES) or _is_recording(source)


def _is_recording(source: str | Path) -> bool:
    """Whether a path names a job that another tool recorded."""
    name = str(source)
    if not name:  # Path("") is the working directory.
        return False
    path = Path(source)
    if name.endswith(_RECORDING_SUFFIXES):
        return True
    if path.is_dir():
        return not any(path.glob("*.yaml"))  # a folder of scenarios
    if name == _SAMPLE:
        return not path.exists()
    return name.endswith(".json") and _starts_like_profile(path)


def holds_profiles(folder: str | Path) -> bool:
    """Whether a folder contains the recordings of single ranks, such as profiles."""
    files = [path for path in Path(folder).iterdir() if path.is_file()]
    return any(is_trace(path) and _PER_RANK.intersection(path.suffixes) for path in files)


def _starts_like_profile(path: Path) -> bool:
    """Whether a JSON file may come from PyTorch's profiler; a scenario may be JSON as well."""
    try:
        # Opening a pipe waits for its writer.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(_PROFILE_START_BYTES)
    except OSError:
        return False
    return any(key in start for key in _PROFILE_KEYS)


def is_scenario(file: str) -> bool:
    """Whether a path that may name a scenario or another file names a scenario."""
    return file == "-" or Path(file).suffix in _SCENARIO_SUFFIXES


def load_scenario(source: Scenario | str | Path, sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, in YAML text, or on standard input (``-``)."""
    from distsim.scenario import Scenario, load, load_stdin, loads

    if isinstance(source, Scenario):
        return source
    if not isinstance(source, str | Path):
        raise UsageError(
            f"expected a scenario, found {type(source).__name__}",
            "give a path, YAML text, or the result of distsim.load",
        )
    if is_yaml_text(source):
        return loads(str(source), TEXT_NAME, tuple(sets))
    if source == "-":
        return load_stdin(tuple(sets))
    return load(str(source), sets=tuple(sets))


def scenario_text(source: str | Path) -> tuple[str, str]:
    """The text of a scenario, and the name that messages give it."""
    from distsim.scenario import read_text

    if is_yaml_text(source):
        return str(source), TEXT_NAME
    return read_text(source), "<stdin>" if source == "-" else str(source)


def load_trace(source: Trace | str | Path) -> Trace:
    """The trace in a file; a trace unchanged. Profiles of another tool become a trace.

    Raises UsageError for a file that is not a trace, and for a recording that cannot be one.
    """
    from distsim.trace.jsonl import read_trace

    if not isinstance(source, str | Path):
        return source
    if not _is_recording(source):
        return read_trace(source)
    from distsim.trace.recordings.read_recording import read_recording
    from distsim.trace.recordings.readers.distsim_trace import FORMAT
    from distsim.trace.recordings.recording_trace import trace_of_recording

    recording = read_recording([source])
    if recording.format == FORMAT:
        return read_trace(recording.files[0])
    return trace_of_recording(recording, str(source))


def read_cluster(
    cluster: str | Mapping[str, Any] | Cluster | None,
) -> str | Mapping[str, Any] | Cluster | None:
    """The cluster in a file; anything else, such as the name of a preset, unchanged."""
    if not isinstance(cluster, str) or Path(cluster).suffix not in _SCENARIO_SUFFIXES:
        return cluster
    from distsim.simulation.simulate_scenario import load_cluster

    return load_cluster(cluster)


def load_machines(cluster: str | Mapping[str, Any] | Cluster) -> Cluster:
    """A cluster, from its file or the name of a preset. Raises UsageError."""
    from distsim.hardware.cluster import cluster_from

    found = read_cluster(cluster)
    assert found is not None
    return cluster_from(found)


def known_backend(name: str | None) -> str | None:
    """Raises UsageError for a name that no backend has."""
    if name is None:
        return None
    from distsim.backends import BACKEND_PROFILES
    from distsim.common.message_text import did_you_mean, name_list

    if name not in BACKEND_PROFILES:
        hint = did_you_mean(name, BACKEND_PROFILES)
        raise UsageError(f"no backend `{name}`{hint}", f"known: {name_list(BACKEND_PROFILES)}")
    return str(name)
