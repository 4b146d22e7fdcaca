"""How ranks and the hub exchange messages: frames over a local socket, and shared memory.

A frame is a JSON list plus the bytes of its small payloads; nothing in it is code. Large payloads
lie in shared memory. That memory is anonymous and inherited by fork, so it has no name and ends
with the processes.

Ranks often send the same message, for example in a training loop. The header of such a frame has
`REPEATED_FLAG` set, and the receiver decodes its text only once. So that the text stays the same,
what differs between two frames (numbers of calls, payloads) is in the bytes behind it.

This module knows no verbs; `distsim.script_capture.protocol.message_types` lists them.
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
#: Bytes per read. With a larger buffer the allocator maps and unmaps memory for each message.
READ_SIZE: Final = 1 << 16
#: Address space of one rank's memory; pages that are never touched take none.
REGION_SIZE: Final = 1 << 32
#: Bytes of a call's number, which precede its payloads.
CALL_NUMBER_BYTES: Final = 8
#: Length of the text, length of the payloads.
_FRAME_HEADER: Final = struct.Struct("<II")
#: Set in the length of a text that will be sent again: the receiver caches what it decodes to.
REPEATED_FLAG: Final = 1 << 31
#: Entries of each cache of texts.
_MAX_CACHED: Final = 1 << 9
_ALIGN: Final = 4096

#: Where a payload is: ``[n]`` means the next n bytes of the frame, ``[region, offset, n]`` a slot
#: in the shared memory of a rank.
PayloadLocation = list[int]


# `default` turns integers that are not Python's, such as numpy's in the ranks of a group, into int.
_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=index).encode
_decode_json = json.JSONDecoder().raw_decode


# --- frames ---
def encode_frame(message: Sequence[object], blobs: Sequence[bytes] = ()) -> bytes:
    """A message and its small payloads as bytes."""
    text = encode_message(message)
    blob = b"".join(blobs)
    return _FRAME_HEADER.pack(len(text), len(blob)) + text + blob


def encode_message(message: object) -> bytes:
    """The text of a frame alone."""
    return _encode_json(message).encode()


def encode_repeated_frame(text: bytes, blobs: Sequence[bytes] = ()) -> bytes:
    """A frame with an encoded text that is sent often.

    Its receiver shares one decoded message among all such frames, and must not change it.
    """
    blob = b"".join(blobs)
    return _FRAME_HEADER.pack(len(text) | REPEATED_FLAG, len(blob)) + text + blob


@lru_cache(_MAX_CACHED)
def result_frame_prefix(source: int, count: int) -> bytes:
    """A result with one payload of ``count`` bytes, up to the payload: what most replies are."""
    text = encode_message(["result", [[[count]]], source])
    return _FRAME_HEADER.pack(len(text) | REPEATED_FLAG, count) + text


def encoded_call_number(number: int) -> bytes:
    """A call's number as its frame carries it: in the payloads, so that the text stays the same."""
    return number.to_bytes(CALL_NUMBER_BYTES, "little")


class EncodingCache:
    """Texts of messages that are sent often, by a key that determines them."""

    def __init__(self) -> None:
        self._known: dict[object, bytes] = {}

    def of(self, key: object, make: Callable[[], object] | None) -> bytes:
        """The text of the message ``make()``; without ``make``, that of the key itself."""
        text = self._known.get(key)
        if text is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            message = key if make is None else make()
            text = self._known[key] = encode_message(message)
        return text


class FrameDecoder:
    """Cuts a stream of bytes into frames.

    ``on_repeated`` converts a message that will be repeated into what `feed` returns for it, each
    time it arrives.
    """

    def __init__(self) -> None:
        self._incomplete: list[bytes] = []
        #: Bytes until the first frame of `_incomplete` can be complete.
        self._missing = 0
        self._known: dict[bytes, Any] = {}
        self.on_repeated: Callable[[list[Any]], Any] = _unchanged

    def feed(self, data: bytes) -> Sequence[tuple[Any, bytes]]:
        """Every frame that is now complete: its message and its payloads.

        This runs for each message of a captured program, hence no helper calls on the way.
        """
        if self._incomplete:
            self._incomplete.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return []
            data = b"".join(self._incomplete)
            self._incomplete = []
        elif len(data) >= _FRAME_HEADER.size:
            # Fast path for loops: the data is exactly one frame, and its text is known.
            text_length, blob_length = _FRAME_HEADER.unpack_from(data)
            if text_length & REPEATED_FLAG:
                known = self._known.get(data[_FRAME_HEADER.size : len(data) - blob_length])
                whole = _FRAME_HEADER.size + (text_length & ~REPEATED_FLAG) + blob_length
                if known is not None and whole == len(data):
                    return ((known, data[len(data) - blob_length :]),)
        return self._split(data)

    def _split(self, data: bytes) -> list[tuple[Any, bytes]]:
        """The complete frames of ``data``; the rest is kept for the next call of `feed`."""
        frames: list[tuple[Any, bytes]] = []
        start = 0
        end = len(data)
        while end - start >= _FRAME_HEADER.size:
            text_length, blob_length = _FRAME_HEADER.unpack_from(data, start)
            text_end = start + _FRAME_HEADER.size + (text_length & ~REPEATED_FLAG)
            if end < text_end + blob_length:
                break
            text = data[start + _FRAME_HEADER.size : text_end]
            if text_length & REPEATED_FLAG:
                message = self._repeated(text)
            else:
                message = _decode_json(text.decode())[0]
            frames.append((message, data[text_end : text_end + blob_length]))
            start = text_end + blob_length
        if start < end:
            self._incomplete = [data[start:]]
            self._missing = 1
            if end - start >= _FRAME_HEADER.size:
                text_length, blob_length = _FRAME_HEADER.unpack_from(data, start)
                whole = _FRAME_HEADER.size + (text_length & ~REPEATED_FLAG) + blob_length
                self._missing = whole - (end - start)
        return frames

    def _repeated(self, text: bytes) -> Any:
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            found = self._known[text] = self.on_repeated(_decode_json(text.decode())[0])
        return found


def _unchanged(message: list[Any]) -> list[Any]:
    return message


class PayloadReader:
    """Reads the small payloads of a frame one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        start = self._position
        self._position += count
        return self._data[start : self._position]


# --- shared memory ---
class SharedMemoryRegions:
    """Shared memory, one region for each rank.

    A region consists of slots. The first page of a slot holds only the byte that says whether the
    slot is in use; the payload is on the pages behind it.
    """

    def __init__(self, ranks: int, size: int = REGION_SIZE) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.size = size
        self.maps = [mmap.mmap(-1, size, flags) for _ in range(ranks)]
        self.address = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]

    def is_in_use(self, region: int, offset: int) -> bool:
        """Whether the slot that starts at ``offset`` is still needed."""
        return self.maps[region][offset] != 0

    def mark(self, region: int, offset: int, in_use: bool) -> None:
        """Mark a slot as in use or free."""
        self.maps[region][offset] = int(in_use)


class SharedMemoryAllocator:
    """The slots of one rank's own region. The rank takes slots; the hub frees them."""

    def __init__(self, regions: SharedMemoryRegions, region: int) -> None:
        self.regions = regions
        self.region = region
        self._live: list[tuple[int, int]] = []  # (start, end) of each slot, ordered

    def take(self, count: int) -> int | None:
        """The offset of ``count`` free bytes; None if there is no room.

        First fit: the slot lies in the first gap between the live slots that is large enough.
        """
        need = -(-count // _ALIGN) * _ALIGN + _ALIGN
        self._live = [slot for slot in self._live if self.regions.is_in_use(self.region, slot[0])]
        start = 0
        position = len(self._live)
        for k, (next_start, next_end) in enumerate(self._live):
            if next_start - start >= need:
                position = k
                break
            start = next_end
        else:
            if self.regions.size - start < need:
                return None
        self._live.insert(position, (start, start + need))
        self.regions.mark(self.region, start, True)
        return start + _ALIGN

    def address(self, offset: int) -> int:
        """The memory address of an offset in this region."""
        return self.regions.address[self.region] + offset


def free_payload(regions: SharedMemoryRegions, location: PayloadLocation) -> None:
    """Give a slot back to its rank; nothing for a payload that is in a frame."""
    if len(location) == 3:
        region, offset, _ = location
        regions.mark(region, offset - _ALIGN, False)


# --- sockets ---
def connect_to_hub(address: str) -> socket.socket:
    """A new connection to the hub."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    return connection


def listen_for_ranks(name: str) -> tuple[socket.socket, str]:
    """A listening socket and its address.

    The address is in the abstract namespace: it has no file, and ends with its process.
    """
    address = f"\0distsim-{os.getpid()}-{name}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(512)
    return listener, address
