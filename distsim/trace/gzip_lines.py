"""The bytes of a trace's file as lines and back: plain or gzip, and cut anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from os import PathLike, fspath
from typing import Final

from distsim.common.file_io import LineTooLong

_READ_BYTES: Final = 1 << 16
_GZIP_MAGIC: Final = b"\x1f\x8b"
#: zlib's own number for a gzip member (RFC 1952) with the largest window.
_GZIP_WBITS: Final = 16 + zlib.MAX_WBITS
#: Stands for a last line that ends inside a character.
_TRUNCATED_LINE: Final = "{"


def is_gzip(path: str | PathLike[str]) -> bool:
    """Is a file of this name written through gzip?"""
    return fspath(path).endswith(".gz")


def encode_pieces(path: str | PathLike[str], pieces: str | Iterable[str]) -> Iterable[str | bytes]:
    """What a file of this name holds; the same text gives the same bytes (no time and no name in
    gzip's header).
    """
    texts = [pieces] if isinstance(pieces, str) else pieces
    return _compress(texts) if is_gzip(path) else texts


def _compress(texts: Iterable[str]) -> Iterator[bytes]:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, _GZIP_WBITS)
    for text in texts:
        yield squeeze.compress(text.encode("utf-8", "backslashreplace"))
    yield squeeze.flush()


def decode_lines(raw: BufferedIOBase, first: int, later: int) -> Iterator[str]:
    """The lines of a file, plain or gzip, the first of at most so many bytes, later ones of so
    many.

    What a cut left of a gzip file is given as far as it goes. Raises LongLine, and
    UnicodeDecodeError for what is no text.
    """
    number, most, rest = 1, first, bytearray()
    for piece in _read_plain(raw):
        lines = piece.split(b"\n")
        rest += lines[0]
        for end in lines[1:]:
            if len(rest) >= most:
                raise LineTooLong(number, most)
            yield rest.decode() + "\n"
            number, most, rest = number + 1, later, bytearray(end)
        if len(rest) >= most:
            raise LineTooLong(number, most)
    if rest:
        yield _last_line(bytes(rest), number)


def _last_line(line: bytes, number: int) -> str:
    """A last line without an end. One that was cut inside a character is a cut line, whatever it
    says before.
    """
    try:
        return line.decode()
    except UnicodeDecodeError as fault:
        if number > 1 and fault.reason == "unexpected end of data":
            return _TRUNCATED_LINE
        raise


def _read_plain(raw: BufferedIOBase) -> Iterator[bytes]:
    piece = raw.read(_READ_BYTES)
    if piece[:2] == _GZIP_MAGIC:
        yield from _decompress(raw, piece)
        return
    while piece:
        yield piece
        piece = raw.read(_READ_BYTES)


def _decompress(raw: BufferedIOBase, piece: bytes) -> Iterator[bytes]:
    """What a gzip file holds, member by member, up to where it ends, is cut, or is damaged: its
    lines tell which.
    """
    inflate = zlib.decompressobj(_GZIP_WBITS)
    while piece:
        try:
            yield inflate.decompress(piece, _READ_BYTES)
            while inflate.unconsumed_tail:
                yield inflate.decompress(inflate.unconsumed_tail, _READ_BYTES)
        except zlib.error:
            return
        left = inflate.unused_data
        if inflate.eof:
            inflate = zlib.decompressobj(_GZIP_WBITS)
        piece = left or raw.read(_READ_BYTES)
