"""The names of scenario files that commands write."""

from __future__ import annotations

from pathlib import Path


def check_scenario_suffix(file: Path | None) -> None:
    """Check the name of a scenario file to write. Raises UsageError for a wrong suffix."""
    from distsim.common.errors import UsageError

    if file is not None and file.suffix not in (".yaml", ".yml"):
        raise UsageError(
            f"-o {file}: the name of a scenario file must end in .yaml",
            f"use -o {file.with_suffix('.yaml') if file.name else 'scenario.yaml'}",
        )
