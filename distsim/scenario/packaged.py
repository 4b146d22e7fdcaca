"""The scenarios that are installed with distsim: found by name, without a checkout.

A wheel contains them in `distsim/scenarios`; a checkout has them in `scenarios`, next to the
package. Their name is the path below that folder without `.yaml`, such as `hybrid` or
`strategies/fsdp`.
"""

from __future__ import annotations

import os
from pathlib import Path


def packaged_scenario(name: str) -> Path | None:
    """The file of an installed scenario, or None if there is no scenario of this name."""
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        return None
    for folder in _folders():
        path = folder / f"{name}.yaml"
        # Unlike Path.is_file, this is False for a name that is too long.
        if os.path.isfile(path):
            return path
    return None


def packaged_names() -> list[str]:
    """The names of all installed scenarios."""
    for folder in _folders():
        if folder.is_dir():
            paths = folder.rglob("*.yaml")
            return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)
    return []


def _folders() -> tuple[Path, Path]:
    """Where a wheel, and where a checkout has the scenarios."""
    package = Path(__file__).parents[1]
    return package / "scenarios", package.parent / "scenarios"
