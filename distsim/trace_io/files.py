"""The bytes of a trace's file as lines and back: plain or gzip, and cut anywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from os import PathLike, fspath
from typing import Final

from distsim.files import LongLine

_PIECE: Final = 1 << 16
_MAGIC: Final = b"\x1f\x8b"
#: zlib's own number for a gzip member (RFC 1952) with the largest window.
_GZIP: Final = 16 + zlib.MAX_WBITS
#: Stands for a last line that ends inside a character.
_OPEN_LINE: Final = "{"


def is_gzip(path: str | PathLike[str]) -> bool:
    """Is a file of this name written through gzip?"""
    return fspath(path).endswith(".gz")


def packed(path: str | PathLike[str], pieces: str | Iterable[str]) -> Iterable[str | bytes]:
    """What a file of this name holds; the same text gives the same bytes (no time and no name in gzip's header)."""
    texts = [pieces] if isinstance(pieces, str) else pieces
    return _deflated(texts) if is_gzip(path) else texts


def _deflated(texts: Iterable[str]) -> Iterator[bytes]:
    squeeze = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    for text in texts:
        yield squeeze.compress(text.encode("utf-8", "backslashreplace"))
    yield squeeze.flush()


def lines_of(raw: BufferedIOBase, first: int, later: int) -> Iterator[str]:
    """The lines of a file, plain or gzip, the first of at most so many bytes, later ones of so many.

    What a cut left of a gzip file is given as far as it goes. Raises LongLine, and UnicodeDecodeError for what is no text.
    """
    number, most, rest = 1, first, bytearray()
    for piece in _plain(raw):
        lines = piece.split(b"\n")
        rest += lines[0]
        for end in lines[1:]:
            if len(rest) >= most:
                raise LongLine(number, most)
            yield rest.decode() + "\n"
            number, most, rest = number + 1, later, bytearray(end)
        if len(rest) >= most:
            raise LongLine(number, most)
    if rest:
        yield _last(bytes(rest), number)


def _last(line: bytes, number: int) -> str:
    """A last line without an end. One that was cut inside a character is a cut line, whatever it says before."""
    try:
        return line.decode()
    except UnicodeDecodeError as fault:
        if number > 1 and fault.reason == "unexpected end of data":
            return _OPEN_LINE
        raise


def _plain(raw: BufferedIOBase) -> Iterator[bytes]:
    piece = raw.read(_PIECE)
    if piece[:2] == _MAGIC:
        yield from _inflated(raw, piece)
        return
    while piece:
        yield piece
        piece = raw.read(_PIECE)


def _inflated(raw: BufferedIOBase, piece: bytes) -> Iterator[bytes]:
    """What a gzip file holds, member by member, up to where it ends, is cut, or is damaged: its lines tell which."""
    inflate = zlib.decompressobj(_GZIP)
    while piece:
        try:
            yield inflate.decompress(piece, _PIECE)
            while inflate.unconsumed_tail:
                yield inflate.decompress(inflate.unconsumed_tail, _PIECE)
        except zlib.error:
            return
        left = inflate.unused_data
        if inflate.eof:
            inflate = zlib.decompressobj(_GZIP)
        piece = left or raw.read(_PIECE)
