"""A subfolder that cannot be read is reported by name, and hides no other file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import distsim
from distsim.common.errors import UsageError
from distsim.common.file_io import files_below
from distsim.simulation.expectations import scenario_files

LOG = "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: no\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a subfolder ``secret`` that cannot be listed, not even by root."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "b.log").write_text(LOG)
    (tmp_path / "a.yaml").write_text("world: 1\nprogram: []\n")
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if os.fspath(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    return tmp_path


def test_the_files_are_found_and_the_folder_is_reported(folder: Path) -> None:
    unreadable: list[OSError] = []

    assert files_below(folder, unreadable) == [folder / "a.yaml", folder / "b.log"]
    assert [error.filename for error in unreadable] == [str(folder / "secret")]


def test_a_check_of_all_scenarios_refuses_a_folder_that_it_cannot_read(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the folder .*secret: Permission denied"):
        scenario_files([folder])


def test_doctor_lists_the_folder_among_the_unread_files(folder: Path) -> None:
    text = distsim.doctor(folder).to_text()

    assert "b.log" in text
    assert "secret:\n  the folder cannot be read" in text
