"""What ranks and the hub say to each other: frames over a local socket, and memory that both see
for what is large.

A frame is a JSON list and the bytes of its small payloads; nothing in it is code. Memory is
anonymous and shared by fork, so that it has no name and ends with the processes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index
from typing import Any, Final

#: Payloads up to this many bytes travel in the frame.
INLINE_LIMIT: Final = 16 << 10
#: What is read at once; more would be mapped and unmapped for each message.
READ_SIZE: Final = 1 << 16
#: Address space of one rank's memory; pages that nobody touches take none.
REGION_SIZE: Final = 1 << 32
_FRAME_HEADER: Final = struct.Struct("<II")
#: In the length of a text: it will come again, so who decodes it keeps what it found.
REPEATED_FLAG: Final = 1 << 31
#: Texts that are kept.
_MAX_CACHED: Final = 1 << 9
_ALIGN: Final = 4096

#: A payload on its way: ``[n]`` is the next n bytes of the frame, ``[region, offset, n]`` lies in
#: the memory of a rank.
PayloadLocation = list[int]


#: Of numbers that are no int of Python, as numpy's in the ranks of a group, the int that they are.
_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=index).encode
_decode_json = json.JSONDecoder().raw_decode


def encode_frame(message: Sequence[object], blobs: Sequence[bytes] = ()) -> bytes:
    """A message and its small payloads as bytes."""
    text, blob = encode_message(message), b"".join(blobs)
    return _FRAME_HEADER.pack(len(text), len(blob)) + text + blob


def encode_message(message: object) -> bytes:
    """A message alone."""
    return _encode_json(message).encode()


def encode_repeated_frame(text: bytes, blobs: Sequence[bytes] = ()) -> bytes:
    """A frame of a message that is encoded already, and often said. Who hears it must not change
    it.
    """
    blob = b"".join(blobs)
    return _FRAME_HEADER.pack(len(text) | REPEATED_FLAG, len(blob)) + text + blob


@lru_cache(_MAX_CACHED)
def result_frame_prefix(source: int, count: int) -> bytes:
    """The frame of an answer up to its one payload, of ``count`` bytes: as most answers are."""
    text = encode_message(["result", [[[count]]], source])
    return _FRAME_HEADER.pack(len(text) | REPEATED_FLAG, count) + text


class EncodingCache:
    """Encodings of what is said again and again, by what it says."""

    def __init__(self) -> None:
        self._known: dict[object, bytes] = {}

    def of(self, key: object, make: Callable[[], object] | None) -> bytes:
        """The text of ``make()``, which is all that ``key`` says; without it that of the key."""
        text = self._known.get(key)
        if text is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            text = self._known[key] = encode_message(make() if make is not None else key)
        return text


class FrameDecoder:
    """Cuts a stream of bytes into frames. ``learnt``: what is kept of a message that will come
    again, which is what `feed` gives then.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._missing = 0  # bytes until the first frame can be whole
        self._known: dict[bytes, Any] = {}
        self.learnt: Callable[[list[Any]], Any] = _unchanged

    def feed(self, data: bytes) -> Sequence[tuple[Any, bytes]]:
        """Every frame that is whole now."""
        if self._held:
            self._held.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data, self._held = b"".join(self._held), []
        elif len(data) >= _FRAME_HEADER.size:  # one frame that came before, as in a loop
            text, blob = _FRAME_HEADER.unpack_from(data)
            known = (
                self._known.get(data[_FRAME_HEADER.size : len(data) - blob])
                if text & REPEATED_FLAG
                else None
            )
            if known is not None and _FRAME_HEADER.size + (text & ~REPEATED_FLAG) + blob == len(
                data
            ):
                return ((known, data[len(data) - blob :]),)
        found, at, have = list[tuple[Any, bytes]](), 0, len(data)
        while have - at >= _FRAME_HEADER.size:
            text, blob = _FRAME_HEADER.unpack_from(data, at)
            middle = at + _FRAME_HEADER.size + (text & ~REPEATED_FLAG)
            if have < middle + blob:
                break
            raw = data[at + _FRAME_HEADER.size : middle]
            found.append(
                (
                    self._repeated(raw) if text & REPEATED_FLAG else _decode_json(raw.decode())[0],
                    data[middle : middle + blob],
                )
            )
            at = middle + blob
        if at < have:
            self._held, self._missing = [data[at:]], 1
            if have - at >= _FRAME_HEADER.size:
                text, blob = _FRAME_HEADER.unpack_from(data, at)
                self._missing = _FRAME_HEADER.size + (text & ~REPEATED_FLAG) + blob - (have - at)
        return found

    def _repeated(self, text: bytes) -> Any:
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            found = self._known[text] = self.learnt(_decode_json(text.decode())[0])
        return found


def _unchanged(message: list[Any]) -> list[Any]:
    return message


class PayloadReader:
    """Takes the small payloads of a frame one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        start = self._at
        self._at += count
        return self._data[start : self._at]


class SharedMemoryRegions:
    """Shared memory, one region for each rank."""

    def __init__(self, ranks: int, size: int = REGION_SIZE) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.size = size
        self.maps = [mmap.mmap(-1, size, flags) for _ in range(ranks)]
        self.address = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]

    def busy(self, region: int, offset: int) -> bool:
        """Is the slot at this place still needed?"""
        return self.maps[region][offset] != 0

    def mark(self, region: int, offset: int, busy: bool) -> None:
        self.maps[region][offset] = int(busy)


class SharedMemoryAllocator:
    """The slots of one rank's own region. It takes them; the hub says when a slot is no longer
    needed.
    """

    def __init__(self, regions: SharedMemoryRegions, region: int) -> None:
        self.regions, self.region = regions, region
        self._live: list[tuple[int, int]] = []  # offset, end; by offset

    def take(self, count: int) -> int | None:
        """The offset of ``count`` free bytes behind a page of their own; None where there is no
        room.
        """
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


def free_payload(regions: SharedMemoryRegions, piece: PayloadLocation) -> None:
    """Give a slot back to its rank."""
    if len(piece) == 3:
        regions.mark(piece[0], piece[1] - _ALIGN, False)


def connect_to_hub(address: str) -> socket.socket:
    """A line to the hub."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(address)
    return line


def listen_for_ranks(name: str) -> tuple[socket.socket, str]:
    """A socket that has no file: it ends with its process."""
    address = f"\0distsim-{os.getpid()}-{name}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(512)
    return listener, address
