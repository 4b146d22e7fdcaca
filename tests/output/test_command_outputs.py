"""The outputs of commands are the stored ones (`tests.support.command_outputs`)."""

from __future__ import annotations

import pytest

from tests.support.command_outputs import COMMANDS, FOLDER, ROOT, output_of, stored


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_of_a_command_is_the_stored_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wanted change: ``python -m tests.support.command_outputs``, then read the diff."""
    monkeypatch.chdir(ROOT)

    assert output_of(name) == stored(name).read_text(encoding="utf-8")


def test_every_stored_output_belongs_to_a_command() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(COMMANDS)
