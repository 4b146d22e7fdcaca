"""The order of events that `distsim check --format json` wrote, for `distsim simulate --schedule`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import UsageError
from distsim.reading import read_bytes

if TYPE_CHECKING:
    from distsim.check.schedule import Schedule

_REMEDY = "write it with `distsim check FILE --format json > F`: a verdict that depends on the order of events has a `schedule`"


def read_schedule(path: Path, scenario: str) -> Schedule:
    """The schedule for a scenario file: the whole output of a check, one file's part of it, or the schedule alone.

    Raises UsageError where there is none.
    """
    from distsim.check.schedule import schedule_from_json

    try:
        data = json.loads(read_bytes(path))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", _REMEDY) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON", _REMEDY) from None
    return schedule_from_json(_schedule(data, path, scenario))


def _schedule(data: object, path: Path, scenario: str) -> object:
    if isinstance(data, dict) and isinstance(data.get("files"), list):
        files = [one for one in data["files"] if isinstance(one, dict)]
        named = [one for one in files if one.get("file") == scenario] or (files if len(files) == 1 else [])
        if not named:
            raise UsageError(f"{path} says nothing of {scenario}", _REMEDY)
        data = named[0]
    if isinstance(data, dict) and "schedule" in data:
        if data["schedule"] is None:
            raise UsageError(f"{path} has no schedule: any order of events leads to its verdict", "simulate without --schedule")
        data = data["schedule"]
    return data
