"""Copies of the sample profiles of `distsim slow`, for tests that change them."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsim.trace.recordings.read_recording import SAMPLE


def copy_of_sample(folder: Path) -> Path:
    """The sample, copied into a new folder."""
    shutil.copytree(SAMPLE, folder)
    return folder


def change_profile(path: Path, edit: Callable[[Any], None]) -> None:
    """Let ``edit`` change the data of one profile in place."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    edit(data)
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
