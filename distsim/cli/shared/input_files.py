"""Reading the files that a command names: scenario, trace or cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster
    from distsim.scenario import Scenario

_SCENARIO_SUFFIXES = (".yaml", ".yml")


def read_scenario(file: str, sets: list[str] | None) -> Scenario:
    """The scenario in a file, or on standard input if ``file`` is ``-``. Raises ScenarioErrors."""
    from distsim.scenario import load, load_stdin

    if file != "-":
        return load(file, sets=tuple(sets or ()))

    if sys.stdin.isatty():
        from distsim.cli.shared.console import note

        note("reading a scenario from the terminal; Ctrl-D ends it")
    return load_stdin(tuple(sets or ()))


def is_trace(file: str) -> bool:
    """Whether an argument that may name a scenario or a trace names a trace."""
    return file.endswith((".jsonl", ".jsonl.gz", ".jsonl.partial", ".jsonl.gz.partial"))


def is_scenario(file: str) -> bool:
    """Whether an argument that may name a scenario or another file names a scenario."""
    return file == "-" or Path(file).suffix in _SCENARIO_SUFFIXES


def check_scenario_suffix(file: Path | None) -> None:
    """Check the name of a scenario file to write. Raises UsageError for a wrong suffix."""
    from distsim.common.errors import UsageError

    if file is not None and file.suffix not in _SCENARIO_SUFFIXES:
        raise UsageError(
            f"-o {file}: a scenario's file ends in .yaml", f"-o {file.with_suffix('.yaml')}"
        )


def read_cluster(name: str | None) -> str | Cluster | None:
    """The name of a preset unchanged; for the name of a file, the cluster in it."""
    if name is None or Path(name).suffix not in _SCENARIO_SUFFIXES:
        return name
    from distsim.simulation.simulate_scenario import load_cluster

    return load_cluster(name)
