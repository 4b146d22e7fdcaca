"""The content of a file that may be compressed with gzip, up to a limit."""

from __future__ import annotations

import gzip
import stat
import zlib
from pathlib import Path

from distsim.common.errors import UsageError
from distsim.common.file_io import open_bytes

#: The largest file, uncompressed. JSON of this size needs about 10 GiB while it is parsed.
LARGEST_FILE = 2 << 30
_GZIP_MAGIC = b"\x1f\x8b"
#: A read of a given length allocates all of it at once, so files are read in pieces.
_PIECE_BYTES = 16 << 20


def read_content(path: Path, too_large: str) -> bytes:
    """The uncompressed content. Raises UsageError if it is unreadable or larger than the limit.

    ``too_large``: the remedy for a file beyond the limit.
    """
    pieces: list[bytes] = []
    length = 0
    try:
        # A device such as /dev/zero never ends.
        if stat.S_ISCHR(path.stat().st_mode):
            raise UsageError(f"{path} is a device", "name a file or a pipe")
        with open_bytes(path) as raw:
            # The content decides, because names lose or gain `.gz` when files are copied.
            is_gzip = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
            file = gzip.open(raw) if is_gzip else raw  # noqa: SIM115
            while length <= LARGEST_FILE:
                piece = file.read(_PIECE_BYTES)
                if not piece:
                    return b"".join(pieces)
                pieces.append(piece)
                length += len(piece)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}", "check the file") from None
    raise UsageError(f"{path} is larger than 2 GiB", too_large)
