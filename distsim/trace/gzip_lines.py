"""Turns the bytes of a trace file into lines and back.

The file may be plain or gzip, and it may be cut anywhere: then all that can be decoded is returned,
because a recording is most useful when its run was killed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from os import PathLike, fspath
from typing import Final

from distsim.common.file_io import LineTooLong

_READ_BYTES: Final = 1 << 16
_GZIP_MAGIC: Final = b"\x1f\x8b"
#: zlib's parameter for a gzip member (RFC 1952) with the largest window.
_GZIP_WBITS: Final = 16 + zlib.MAX_WBITS
#: Replaces a last line that ends inside a character; it is incomplete JSON as well.
_TRUNCATED_LINE: Final = "{"


def is_gzip(path: str | PathLike[str]) -> bool:
    """Whether a file of this name is compressed with gzip."""
    return fspath(path).endswith(".gz")


def encode_pieces(path: str | PathLike[str], pieces: str | Iterable[str]) -> Iterable[str | bytes]:
    """The contents of a file of this name, compressed if the name says so.

    The same text yields the same bytes, because gzip's header contains no time and no name.
    """
    texts = [pieces] if isinstance(pieces, str) else pieces
    return _compress(texts) if is_gzip(path) else texts


def _compress(texts: Iterable[str]) -> Iterator[bytes]:
    compressor = zlib.compressobj(6, zlib.DEFLATED, _GZIP_WBITS)
    for text in texts:
        yield compressor.compress(text.encode("utf-8", "backslashreplace"))
    yield compressor.flush()


def decode_lines(raw: BufferedIOBase, max_first: int, max_later: int) -> Iterator[str]:
    """The lines of a file, plain or gzip.

    ``max_first``, ``max_later``: the largest number of bytes of the first line and of later lines.
    Raises LineTooLong, and UnicodeDecodeError for a file that is not text.
    """
    number, limit = 1, max_first
    unfinished = bytearray()  # the beginning of the current line
    for piece in _read_plain(raw):
        continuation, *following = piece.split(b"\n")
        unfinished += continuation
        for beginning in following:
            if len(unfinished) >= limit:
                raise LineTooLong(number, limit)
            yield unfinished.decode() + "\n"
            number, limit = number + 1, max_later
            unfinished = bytearray(beginning)
        if len(unfinished) >= limit:
            raise LineTooLong(number, limit)
    if unfinished:
        yield _last_line(bytes(unfinished), number)


def _last_line(line: bytes, number: int) -> str:
    """A last line without a newline; if it was cut inside a character, an incomplete line."""
    try:
        return line.decode()
    except UnicodeDecodeError as fault:
        if number > 1 and fault.reason == "unexpected end of data":
            return _TRUNCATED_LINE
        raise


def _read_plain(raw: BufferedIOBase) -> Iterator[bytes]:
    """The uncompressed bytes. The first bytes decide, because a file may be named wrongly."""
    piece = raw.read(_READ_BYTES)
    if piece[:2] == _GZIP_MAGIC:
        yield from _decompress(raw, piece)
        return
    while piece:
        yield piece
        piece = raw.read(_READ_BYTES)


def _decompress(raw: BufferedIOBase, piece: bytes) -> Iterator[bytes]:
    """The contents of a gzip file, member by member, as far as they can be decompressed.

    Whether the file ended, was cut or is damaged, the parser notices by the lines.
    """
    decompressor = zlib.decompressobj(_GZIP_WBITS)
    while piece:
        try:
            # In limited pieces, because a few bytes may decompress to gigabytes.
            yield decompressor.decompress(piece, _READ_BYTES)
            while decompressor.unconsumed_tail:
                yield decompressor.decompress(decompressor.unconsumed_tail, _READ_BYTES)
        except zlib.error:
            return
        remainder = decompressor.unused_data
        if decompressor.eof:
            decompressor = zlib.decompressobj(_GZIP_WBITS)
        piece = remainder or raw.read(_READ_BYTES)
