"""The names that ``--backend`` accepts, read from source text, are those of the registry."""

from __future__ import annotations

from distsim.backends import BACKEND_PROFILES
from distsim.cli.shared.backend_names import BackendName, RealBackendName, backend_names


def test_command_line_backends_are_those_of_the_registry_in_its_order() -> None:
    assert backend_names() == list(BACKEND_PROFILES)
    assert [name.value for name in BackendName] == list(BACKEND_PROFILES)
    assert [name.value for name in RealBackendName] == [*BACKEND_PROFILES, "auto"]
