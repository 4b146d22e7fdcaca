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
#: The name of a scenario that is given as text.
TEXT_NAME = "<text>"


def is_yaml_text(source: object) -> bool:
    """Whether a source is the text of a scenario; a path has no line break."""
    return isinstance(source, str) and "\n" in source


def is_trace(source: object) -> bool:
    """Whether a source that may be a scenario or a trace is the path of a trace."""
    return isinstance(source, str | Path) and str(source).endswith(_TRACE_SUFFIXES)


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
    """The trace in a file; a trace unchanged. Raises UserError for a file that is not a trace."""
    from distsim.trace.jsonl import read_trace

    return read_trace(source) if isinstance(source, str | Path) else source


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
