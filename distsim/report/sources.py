"""The lines that findings and calls point to: the scenario's file and the script's, as text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

#: Bytes of a file and of all files together, and files, that go into a report.
_MOST_BYTES, _MOST_TOTAL, _MOST_FILES = 200_000, 400_000, 12
#: A trace names the files that it likes; only those that may hold a program are read.
_SUFFIXES = (".yaml", ".yml", ".py")


def sources(main: str, named: Iterable[str]) -> dict[str, str]:
    """Text by file name: of ``main``, and of the other files that lie beside it or below the current folder and hold programs."""
    found: dict[str, str] = {}
    left = _MOST_TOTAL
    folders = [Path.cwd().resolve(), *([Path(main).resolve().parent] if main and main != "-" else [])]
    for name in dict.fromkeys([main, *named]):
        text = _text(name, folders) if len(found) < _MOST_FILES else None
        if text is not None and len(text) <= left:
            found[name] = text
            left -= len(text)
    return found


def _text(name: str, folders: list[Path]) -> str | None:
    try:
        path = Path(name).resolve()
        if path.suffix not in _SUFFIXES or not any(path.is_relative_to(folder) for folder in folders) or not path.is_file():
            return None
        return path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError, RuntimeError):  # no file, a NUL in its name, a circle of links
        return None
