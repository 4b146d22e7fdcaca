"""Chakra execution traces (``.et``): recognised, not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distsim.common.errors import UsageError
from distsim.recordings.recording import Recording


def is_chakra_name(path: Path) -> bool:
    """Whether the file's name is that of a Chakra trace."""
    return path.suffix == ".et"


def read_chakra(paths: Sequence[Path]) -> Recording:
    """Raises UsageError."""
    raise UsageError(f"{paths[0]}: Chakra traces are not supported", "give profiler traces")
