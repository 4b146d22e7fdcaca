"""The backend names that ``--backend`` accepts, as enumerations for typer.

They are the names of the registry `distsim.backends`, but importing that registry takes 0.2 s and
loads pydantic, and ``distsim --help`` shows every command without needing either. So this module
reads the names from the source text of the backend modules. A backend that is added as one file is
therefore accepted everywhere; a test compares the result with the registry.

Limit: the name must be a literal, ``name="..."``, in a top-level ``X = BackendProfile(...)`` or
``X = replace(OTHER, ...)``, before any nested call.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import distsim

#: A profile at the top level of a module. The readings of the contract are made inside a function:
#: they are no backends.
#: A profile may also be a changed copy of another: ``replace(NCCL, name="xccl")``.
_PROFILE = re.compile(
    r'^\w+(?:: BackendProfile)? = (?:BackendProfile|replace)\([^()]*?\bname="(\w+)"', re.MULTILINE
)
#: The place of a backend in the registry; 0 if the profile has none.
_LIST_POSITION = re.compile(r"^    listed=(\d+)", re.MULTILINE)


def backend_names() -> list[str]:
    """The names of all backends, in the order of `distsim.backends.BACKEND_PROFILES`."""
    positions: dict[str, int] = {}
    for path in (Path(distsim.__file__).parent / "backends").glob("*.py"):
        source = path.read_text(encoding="utf-8")
        profile = _PROFILE.search(source)
        if profile is not None:
            position = _LIST_POSITION.search(source, profile.end())
            positions[profile[1]] = int(position[1]) if position is not None else 0
    return sorted(positions, key=lambda name: (positions[name], name))


if TYPE_CHECKING:
    # mypy cannot read an enumeration whose members are computed.
    class BackendName(StrEnum):
        """A backend whose rules can be simulated."""

    class RealBackendName(StrEnum):
        """A backend of a real run; ``auto``: the one that this machine has."""

        auto = "auto"

else:
    BackendName = StrEnum("BackendName", {name: name for name in backend_names()})
    RealBackendName = StrEnum(
        "RealBackendName", {name: name for name in (*backend_names(), "auto")}
    )
