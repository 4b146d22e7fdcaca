"""What ranks and the hub say to each other: frames over a local socket, and memory that both see for what is large.

A frame is a JSON list and the bytes of its small payloads; nothing in it is code. Memory is anonymous and shared by fork, so that
it has no name and ends with the processes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

#: Payloads up to this many bytes travel in the frame.
INLINE: Final = 16 << 10
#: Address space of one rank's memory; pages that nobody touches take none.
ARENA: Final = 1 << 32
_HEAD: Final = struct.Struct("<II")
_ALIGN: Final = 4096

#: A payload on its way: ``[n]`` is the next n bytes of the frame, ``[region, offset, n]`` lies in the memory of a rank.
Piece = list[int]


def frame(message: Sequence[object], blobs: Sequence[bytes] = ()) -> bytes:
    """A message and its small payloads as bytes."""
    text = json.dumps(message, separators=(",", ":")).encode()
    blob = b"".join(blobs)
    return _HEAD.pack(len(text), len(blob)) + text + blob


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[list[Any], bytes]]:
        """Every frame that is whole now."""
        held = self._held
        held += data
        while len(held) >= _HEAD.size:
            text, blob = _HEAD.unpack_from(held)
            end = _HEAD.size + text + blob
            if len(held) < end:
                return
            message = json.loads(held[_HEAD.size : _HEAD.size + text])
            payload = bytes(held[_HEAD.size + text : end])
            del held[:end]
            yield message, payload


class Blobs:
    """Takes the small payloads of a frame one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        start = self._at
        self._at += count
        return self._data[start : self._at]


class Regions:
    """Shared memory, one region for each rank."""

    def __init__(self, ranks: int, size: int = ARENA) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.size = size
        self.maps = [mmap.mmap(-1, size, flags) for _ in range(ranks)]
        self.address = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]

    def busy(self, region: int, offset: int) -> bool:
        """Is the slot at this place still needed?"""
        return self.maps[region][offset] != 0

    def mark(self, region: int, offset: int, busy: bool) -> None:
        self.maps[region][offset] = int(busy)


class Arena:
    """The slots of one rank's own region. It takes them; the hub says when a slot is no longer needed."""

    def __init__(self, regions: Regions, region: int) -> None:
        self.regions, self.region = regions, region
        self._live: list[tuple[int, int]] = []  # offset, end; by offset

    def take(self, count: int) -> int | None:
        """The offset of ``count`` free bytes behind a page of their own; None where there is no room."""
        need = -(-count // _ALIGN) * _ALIGN + _ALIGN
        self._live = [slot for slot in self._live if self.regions.busy(self.region, slot[0])]
        start = at = 0
        for at, (offset, end) in enumerate(self._live):  # noqa: B007
            if offset - start >= need:
                break
            start = end
        else:
            at = len(self._live)
            if self.regions.size - start < need:
                return None
        self._live.insert(at, (start, start + need))
        self.regions.mark(self.region, start, True)
        return start + _ALIGN

    def address(self, offset: int) -> int:
        return self.regions.address[self.region] + offset


def free(regions: Regions, piece: Piece) -> None:
    """Give a slot back to its rank."""
    if len(piece) == 3:
        regions.mark(piece[0], piece[1] - _ALIGN, False)


def connect(address: str) -> socket.socket:
    """A line to the hub."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(address)
    return line


def listen(name: str) -> tuple[socket.socket, str]:
    """A socket that has no file: it ends with its process."""
    address = f"\0distsim-{os.getpid()}-{name}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(512)
    return listener, address
