"""Unpack tar and zip archives of dumps and logs, in memory and within bounds."""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Final

#: Bytes of all members together, and how many members there may be.
_MAX_BYTES: Final = 64 << 20
_MAX_MEMBERS: Final = 4096
#: A member that grows by a larger factor is no dump.
_MAX_GROWTH: Final = 120


class ArchiveRefused(Exception):
    """An archive that is not read, and why."""


def is_archive(data: bytes) -> bool:
    """Whether these are the bytes of a zip or tar archive."""
    return data[:4] == b"PK\x03\x04" or data[257:262] == b"ustar"


def archive_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file in an archive.

    Raises ArchiveRefused for an archive that is damaged or too large.
    """
    try:
        yield from _zip_members(data) if data[:2] == b"PK" else _tar_members(data)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError):
        raise ArchiveRefused("the archive is damaged or has a password") from None


def _zip_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [e for e in archive.infolist() if not e.is_dir()]
        total = sum(e.file_size for e in entries)
        if len(entries) > _MAX_MEMBERS or total > min(
            _MAX_BYTES, max(len(data) * _MAX_GROWTH, 1 << 20)
        ):
            raise ArchiveRefused(
                f"the archive unpacks to {total >> 20} MiB in {len(entries)} files, which is too "
                "much: unpack it and name the folder"
            )
        left = _MAX_BYTES
        for entry in entries:
            with archive.open(entry) as file:
                part = file.read(min(entry.file_size, left) + 1)
            if len(part) > min(entry.file_size, left):
                raise ArchiveRefused("the archive unpacks to more than the size in its header")
            left -= len(part)
            yield entry.filename, part


def _tar_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for number, entry in enumerate(archive):
            if number > _MAX_MEMBERS:
                raise ArchiveRefused(
                    f"the archive has more than {_MAX_MEMBERS} files: unpack it and name the folder"
                )
            file = archive.extractfile(entry) if entry.isreg() and entry.size <= len(data) else None
            if file is not None and not entry.name.rsplit("/", 1)[-1].startswith("._"):
                yield entry.name, file.read()
