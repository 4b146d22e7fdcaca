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
import hmac
import json
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index
from typing import Any, Final, NamedTuple

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
#: A first message is shorter than this. Nothing longer is kept for a stranger.
_MAX_INTRODUCTION_BYTES: Final = 256
#: Elements of each first message (`distsim.script_capture.protocol.message_types`).
_INTRODUCTION_LENGTHS: Final = {"out": 2, "line": 5, "notices": 4}
#: ``struct ucred``: process, user and group.
_PEER_CREDENTIALS: Final = struct.Struct("3i")

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


class BadFrame(Exception):
    """A frame whose text is not a message."""


class FrameDecoder:
    """Cuts a stream of bytes into frames. Raises BadFrame.

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
                message = _decoded(text)
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
            found = self._known[text] = self.on_repeated(_decoded(text))
        return found


def _decoded(text: bytes) -> list[Any]:
    try:
        message = _decode_json(text.decode())[0]
    except (ValueError, RecursionError):
        raise BadFrame from None
    if not isinstance(message, list):
        raise BadFrame
    return message


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
class HubAddress(NamedTuple):
    """Where the hub listens, and the secret without which it accepts no connection.

    Ranks inherit both by fork. The secret is never in a file, in the environment or on a command
    line, where another process could read it.
    """

    socket_name: str
    token: str


def connect_to_hub(address: HubAddress) -> socket.socket:
    """A new connection to the hub. Its first message is sent with `send_introduction`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address.socket_name)
    return connection


def send_introduction(
    connection: socket.socket, address: HubAddress, introduction: Sequence[object]
) -> None:
    """Send the first message of a connection, with the secret in front."""
    connection.sendall(encode_frame([address.token, *introduction]))


def listen_for_ranks() -> tuple[socket.socket, HubAddress]:
    """A listening socket and its address.

    The name is in the abstract namespace: it has no file, and ends with its process. Such a name
    has no permissions either, so any user of the machine can connect. Therefore the hub checks
    `is_same_user` and `parse_introduction` before it reads anything else.
    """
    socket_name = f"\0distsim-{os.getpid()}-{os.urandom(4).hex()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_name)
    listener.listen(512)
    return listener, HubAddress(socket_name, os.urandom(16).hex())


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this process (unix(7))."""
    size = _PEER_CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _pid, user, _group = _PEER_CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


class BadIntroduction(Exception):
    """The first bytes of a connection are not what a rank of this capture sends."""


def parse_introduction(data: bytes, token: str) -> tuple[list[Any], bytes] | None:
    """The first message of a connection, and the bytes behind it; None if it is not complete.

    The bytes may come from a stranger: nothing is decoded before its size and form are known.
    Raises BadIntroduction.
    """
    if len(data) < _FRAME_HEADER.size:
        return None
    text_length, blob_length = _FRAME_HEADER.unpack_from(data)
    if text_length > _MAX_INTRODUCTION_BYTES or blob_length:
        raise BadIntroduction
    end = _FRAME_HEADER.size + text_length
    if len(data) < end:
        return None
    try:
        message = json.loads(data[_FRAME_HEADER.size : end])
    except (ValueError, RecursionError):
        raise BadIntroduction from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise BadIntroduction
    given, *introduction = message
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        raise BadIntroduction
    kind = introduction[0] if introduction else None
    if not isinstance(kind, str) or len(introduction) != _INTRODUCTION_LENGTHS.get(kind):
        raise BadIntroduction
    if any(type(number) is not int for number in introduction[1:]):
        raise BadIntroduction
    return introduction, data[end:]
