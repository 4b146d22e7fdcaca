"""The scenarios of a repository, and its settings under `[tool.distsim]` in pyproject.toml.

`check` and `test` use both if they are called without files. Then a YAML file is a scenario if it
has the keys `world` and `program` at the start of a line: this needs no parser, so that thousands
of other YAML files cost little. A scenario written as one flow mapping (`{world: 2, …}`) is not
found and must be named. In a folder that is named, every file is kept that may be a scenario.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from distsim.cli.shared import console
from distsim.common.errors import UsageError
from distsim.common.file_io import read_bytes
from distsim.common.message_text import did_you_mean

#: Folders that contain other people's files.
_SKIPPED_FOLDERS = {"node_modules", "site-packages", "__pycache__"}
_WORLD_KEY = re.compile(rb"^world[ \t]*:", re.MULTILINE)
_PROGRAM_KEY = re.compile(rb"^program[ \t]*:", re.MULTILINE)
_NO_SCENARIO_REMEDY = "name files or folders with scenarios, or write one: `distsim new FILE.yaml`"
#: The keys of each table under `[tool.distsim]`, with the type of their values.
_KEYS: dict[str, dict[str, type]] = {
    "check": {"paths": list, "exclude": list, "strict": bool, "max-states": int, "max-calls": int},
    "test": {"paths": list, "exclude": list},
}
_TYPE_NAMES = {list: "a list of strings", bool: "true or false", int: "a positive integer"}


@dataclass(frozen=True)
class CommandSettings:
    """The settings of one command; relative paths start at ``folder``."""

    folder: Path = Path()
    paths: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = False
    max_states: int | None = None
    max_calls: int | None = None


# --- settings ---


def command_settings(command: str) -> CommandSettings:
    """The settings in the nearest pyproject.toml with a table `[tool.distsim]`.

    The search starts in the current folder and goes up. Raises UsageError for a file that cannot be
    read, an unknown key, and a value of the wrong type.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        table = _distsim_table(file) if file.is_file() else None
        if table is not None:
            values = _checked_table(table, file).get(command, {})
            return _settings_of(values, Path(os.path.relpath(folder, here)))
    return CommandSettings()


def _distsim_table(file: Path) -> object:
    try:
        content = tomllib.loads(read_bytes(file).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}", "correct the file") from error
    tools = content.get("tool")
    return tools.get("distsim") if isinstance(tools, dict) else None


def _checked_table(table: object, file: Path) -> dict[str, dict[str, Any]]:
    tables = _as_table(table, f"{file}: tool.distsim")
    for command, values in tables.items():
        place = f"{file}: tool.distsim.{command}"
        _check_key(command, _KEYS, place)
        for key, value in _as_table(values, place).items():
            _check_key(key, _KEYS[command], f"{place}.{key}")
            _check_value(value, _KEYS[command][key], f"{place}.{key}")
    return tables


def _as_table(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{place} is not a table", "for example check = {paths = ['scenarios']}")
    return value


def _check_key(key: str, known: dict[str, Any], place: str) -> None:
    if key not in known:
        remedy = f"use one of {', '.join(known)}"
        raise UsageError(f"{place}: unknown key{did_you_mean(key, known)}", remedy)


def _check_value(value: object, wanted: type, place: str) -> None:
    # True is an int in Python, but not a number of states.
    is_valid = type(value) is wanted
    if isinstance(value, list):
        is_valid = is_valid and all(isinstance(element, str) for element in value)
    elif wanted is int:
        is_valid = is_valid and isinstance(value, int) and value > 0
    if not is_valid:
        raise UsageError(f"{place} is {value!r}", f"give {_TYPE_NAMES[wanted]}")


def _settings_of(values: dict[str, Any], folder: Path) -> CommandSettings:
    return CommandSettings(
        folder,
        tuple(values.get("paths", ())),
        tuple(values.get("exclude", ())),
        values.get("strict", False),
        values.get("max-states"),
        values.get("max-calls"),
    )


# --- discovery ---


def expand_folders(paths: list[str]) -> list[str]:
    """Each file once; a folder is replaced by the scenarios in it, at any depth, sorted.

    Files that contain neither `world` nor `program` are skipped, with a note. All others are kept,
    so that a scenario with a mistake is reported. A folder with profiles instead is one
    job, and stays as it is. Raises UsageError for a folder without scenarios.
    """
    from distsim.api.inputs import holds_profiles

    # A dictionary as an ordered set.
    files: dict[str, None] = {}
    for path in paths:
        if not Path(path).is_dir():
            files[path] = None
            continue
        candidates = sorted(file for file in _yaml_files(Path(path)) if file.is_file())
        scenarios = [file for file in candidates if _may_be_scenario(file)]
        if not candidates and holds_profiles(path):
            files[path] = None
            continue
        if not scenarios:
            raise UsageError(f"no scenario (*.yaml) in {path}", _NO_SCENARIO_REMEDY)
        others = len(candidates) - len(scenarios)
        if others:
            plural = "" if others == 1 else "s"
            console.note(f"skipped {others} other YAML file{plural} in {path}")
        files |= dict.fromkeys(map(str, scenarios))
    return list(files)


def find_scenarios(settings: CommandSettings) -> list[str]:
    """The scenarios in the configured paths, or under the current folder; prints their number.

    Raises UsageError if there is none.
    """
    roots = [settings.folder / path for path in settings.paths] or [Path()]
    for root in roots:
        if not root.exists():
            raise UsageError(
                f"{root} does not exist", "correct `paths` under tool.distsim in pyproject.toml"
            )
    # A dictionary as an ordered set.
    found: dict[str, None] = {}
    for root in roots:
        candidates = [root] if root.is_file() else _yaml_files(root)
        for file in candidates:
            if not _is_excluded(file, settings) and _is_scenario(file):
                found[str(file)] = None
    places = ", ".join(map(str, roots)) if settings.paths else "the current folder"
    if not found:
        raise UsageError(f"no scenario found in {places}", _NO_SCENARIO_REMEDY)
    plural = "" if len(found) == 1 else "s"
    console.note(f"found {len(found)} scenario{plural} in {places}")
    return list(found)


def _yaml_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        kept = [name for name in subfolders if _is_searched(Path(folder) / name)]
        # os.walk descends into what remains in this list.
        subfolders[:] = sorted(kept)
        for name in sorted(names):
            if name.endswith((".yaml", ".yml")) and not name.startswith("."):
                yield Path(folder) / name


def _is_searched(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIPPED_FOLDERS:
        return False
    is_virtual_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()
    return not is_virtual_environment


def _is_excluded(file: Path, settings: CommandSettings) -> bool:
    """Whether a pattern matches the file or a folder that contains it."""
    relative = Path(os.path.relpath(file, settings.folder))
    names = [relative.as_posix(), *(parent.as_posix() for parent in relative.parents)]
    for pattern in settings.exclude:
        if any(fnmatch(name, pattern.rstrip("/")) for name in names):
            return True
    return False


def _is_scenario(file: Path) -> bool:
    content = _content(file)
    # Unreadable and huge files are not scenarios of this repository.
    return content is not None and bool(_WORLD_KEY.search(content) and _PROGRAM_KEY.search(content))


def _may_be_scenario(file: Path) -> bool:
    """False only for a file that is not even a scenario with mistakes; unreadable files are
    reported by the command.
    """
    content = _content(file)
    return content is None or b"world" in content or b"program" in content


def _content(file: Path) -> bytes | None:
    try:
        return read_bytes(file) if file.is_file() else None
    except OSError:
        return None
