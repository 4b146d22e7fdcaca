"""List the given files and read their bytes within bounds, unpacking gzip.

Files of a hung job may be damaged, huge or hostile. Every size is therefore checked before or while
data are read, never afterwards.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters, files_below, open_bytes
from distsim.hang_doctor.model.evidence import Evidence

#: Bytes of one file, and of one unpacked.
MAX_BYTES: Final = 128 << 20
_MAX_UNPACKED: Final = 64 << 20
#: Packed data that grows by a larger factor is no dump.
_MAX_GROWTH: Final = 120
#: Small files may grow to this size whatever the factor.
_ALWAYS_ALLOWED: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 14
_MAX_FILES: Final = 20_000
_SKIPPED_SUFFIXES = (
    ".py",
    ".pyc",
    ".so",
    ".pt",
    ".bin",
    ".safetensors",
    ".png",
    ".svg",
    ".yaml",
    ".yml",
    ".lock",
)
_ATTEMPT = re.compile(r"^(|.*?/)attempt_(\d{1,6})(?=/)")


class FileRefused(Exception):
    """A file that is not read, and why."""


def escaped(path: str) -> str:
    """A path as messages show it."""
    return escape_control_characters(path, one_line=True)


# --- which files ---


def list_files(paths: Sequence[str]) -> list[str]:
    """The given files, and those in the given folders. Raises UsageError if there are none."""
    found: dict[str, None] = {}
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(
                f"{escaped(path)} does not exist",
                "name dumps, logs and stacks, or the folder that contains them",
            )
        if os.path.isdir(path):
            found |= dict.fromkeys(_files_in_folder(path))
        else:
            found[path] = None
    if not found:
        raise UsageError(
            f"no files in {', '.join(escaped(path) for path in paths)}",
            "name dumps, logs and stacks",
        )
    if len(found) > _MAX_FILES:
        raise UsageError(
            f"{len(found)} files are too many (at most {_MAX_FILES})",
            "name the folder of one job's dumps",
        )
    return list(found)


def _files_in_folder(folder: str) -> list[str]:
    unreadable: list[OSError] = []
    files = [str(path) for path in files_below(folder, unreadable) if _may_be_evidence(path)]
    # Reading such a folder fails as well, so that the report lists it among the unread files.
    return sorted([*files, *(str(error.filename) for error in unreadable)])


def _may_be_evidence(path: Path) -> bool:
    return not path.name.startswith(".") and path.suffix not in _SKIPPED_SUFFIXES


class _Attempt(NamedTuple):
    """A start of the workers, for which torchrun keeps a folder ``attempt_N``."""

    folder: str
    number: int


def files_of_last_attempts(evidence: Evidence, files: list[str]) -> list[str]:
    """The files without those of earlier starts of the workers, since the hang is of the last."""
    attempts: dict[str, _Attempt] = {}
    last: dict[str, int] = {}
    for path in files:
        match = _ATTEMPT.search(path)
        if match is not None:
            attempt = _Attempt(match[1], int(match[2]))
            attempts[path] = attempt
            last[attempt.folder] = max(last.get(attempt.folder, 0), attempt.number)

    earlier = {attempt for attempt in attempts.values() if attempt.number < last[attempt.folder]}
    for attempt in sorted(earlier):
        evidence.add_note(
            f"skipped {escaped(attempt.folder)}attempt_{attempt.number}, an earlier start of the "
            "job; to read it, name it alone"
        )
    return [path for path in files if attempts.get(path) not in earlier]


# --- their bytes ---


def file_bytes(path: str) -> bytes:
    """The content of a file, unpacked. Raises FileRefused if it is too large or no file."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise FileRefused("the folder cannot be read")
    if not _is_readable_kind(status.st_mode):
        raise FileRefused("not a regular file")
    if status.st_size > MAX_BYTES:
        raise FileRefused(
            f"the file has {status.st_size >> 20} MiB; the limit is {MAX_BYTES >> 20} MiB. Shorten "
            "it: `grep -aE 'NCCL|Rank|rank[0-9]' LOG > short.log`"
        )
    with open_bytes(path) as file:
        data = file.read(MAX_BYTES + 1)
    # A pipe does not state its size.
    if len(data) > MAX_BYTES:
        raise FileRefused(f"the pipe delivered more than {MAX_BYTES >> 20} MiB")
    if data[:2] == b"\x1f\x8b":
        return _gunzip(data)
    if data[:4] in (b"BZh9", b"\xfd7zX", b"\x28\xb5\x2f\xfd"):
        raise FileRefused("unsupported compression (only gzip is supported): unpack it")
    return data


def _is_readable_kind(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _gunzip(data: bytes) -> bytes:
    """Unpack gzip as far as possible: a file that was cut off gives its intact part.

    Refused when it grows beyond a reasonable factor, before the rest is unpacked.
    """
    decompressor = zlib.decompressobj(31)  # 31: with a gzip header
    parts = []
    size = 0
    try:
        for start in range(0, len(data), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            bound = min(_MAX_UNPACKED, max(end * _MAX_GROWTH, _ALWAYS_ALLOWED))
            parts.append(decompressor.decompress(data[start:end], bound - size + 1))
            size += len(parts[-1])
            if size > bound:
                raise FileRefused(
                    f"the gzip unpacks to more than {bound >> 20} MiB from {end >> 10} KiB"
                )
    except zlib.error:
        raise FileRefused("damaged gzip data") from None
    return b"".join(parts)
