"""The scenarios that are installed with distsim: found by name, without a checkout.

A wheel contains them in `distsim/scenarios`; a checkout has them in `scenarios`, next to the
package. Their name is the path below that folder without `.yaml`, such as `hybrid` or
`strategies/fsdp`.
"""

from __future__ import annotations

from pathlib import Path


def packaged_scenario(name: str) -> Path | None:
    """The file of an installed scenario, or None if there is no scenario of this name."""
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute():
        return None
    package = Path(__file__).parents[1]
    for folder in (package / "scenarios", package.parent / "scenarios"):
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
    return None
