"""The hub listens under a name that every user of the machine can connect to.

It accepts only the processes of its own capture. Whatever a stranger sends costs the stranger its
connection, and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.script_capture.hub.event_loop import Hub
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.protocol.wire import (
    HubAddress,
    SharedMemoryRegions,
    connect_to_hub,
    encode_frame,
    listen_for_ranks,
    send_introduction,
)

pytestmark = pytest.mark.skipif(not is_supported(), reason="capture needs Linux")

OTHER_USER = 65534


class RunningHub(NamedTuple):
    hub: Hub
    address: HubAddress

    def listen(self) -> bool:
        """Let the hub handle everything that has arrived."""
        heard = False
        while self.hub.listen(0.05):
            heard = True
        return heard

    def connection(self) -> socket.socket:
        connection = connect_to_hub(self.address)
        connection.settimeout(5)
        return connection


@pytest.fixture
def running() -> Iterator[RunningHub]:
    listener, address = listen_for_ranks()
    hub = Hub(listener, address.token, SharedMemoryRegions(1, 1 << 16), BACKEND_PROFILES["gloo"])
    yield RunningHub(hub, address)
    hub.close()


def frame(text: bytes, blobs: int = 0) -> bytes:
    return struct.pack("<II", len(text), blobs) + text


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True


def joins(running: RunningHub) -> bool:
    """Whether a process of the capture can still open a reply connection."""
    with running.connection() as connection:
        send_introduction(connection, running.address, ["line", os.getpid(), 1, 2, 3])
        running.listen()
        return b'["ok"]' in connection.recv(100)


def introductions(token: str) -> dict[str, bytes]:
    return {
        "garbage": frame(b"garbage"),
        "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "no token": encode_frame(["in", 1]),
        "the wrong token": encode_frame(["0" * 32, "out", os.getpid()]),
        "a token that is no text": encode_frame([1, "out", os.getpid()]),
        "a surrogate in the token": frame(b'["\\ud800", "out", 1]'),
        "no list": frame(json.dumps({"token": token}).encode()),
        "an empty list": frame(b"[]"),
        "the token alone": encode_frame([token]),
        "an unknown kind": encode_frame([token, "in", 1]),
        "a kind that is a list": encode_frame([token, ["out"], 1]),
        "a process id that is a list": encode_frame([token, "out", [[1]]]),
        "too few numbers": encode_frame([token, "line", 1]),
        "deep brackets": frame(b"[" * 250),
        "a frame of two gigabytes": struct.pack("<II", (1 << 31) - 1, 0),
        "a payload of four gigabytes": struct.pack("<II", 10, (1 << 32) - 1),
        "bytes that are no UTF-8": frame(b"\xff\xfe"),
    }


@pytest.mark.parametrize("name", introductions(""))
def test_a_bad_first_message_closes_only_its_own_connection(running: RunningHub, name: str) -> None:
    with running.connection() as stranger:
        stranger.sendall(introductions(running.address.token)[name])
        running.listen()

        assert is_closed(stranger)
    assert running.hub.state.processes == {}
    assert joins(running)


def test_a_first_message_may_arrive_byte_by_byte(running: RunningHub) -> None:
    with running.connection() as rank:
        for byte in encode_frame([running.address.token, "line", os.getpid(), 1, 2, 3]):
            rank.sendall(bytes([byte]))
            running.listen()

        assert b'["ok"]' in rank.recv(100)


def test_messages_behind_the_first_are_handled(running: RunningHub) -> None:
    with running.connection() as line, running.connection() as out:
        send_introduction(line, running.address, ["line", os.getpid(), 1, 2, 3])
        first = encode_frame([running.address.token, "out", os.getpid()])
        out.sendall(first + encode_frame([["ask", 1, "rank", 0, 1]]))
        running.listen()

        assert list(running.hub.state.ranks) == [0]


@pytest.mark.parametrize("text", [b"garbage", b"{}", b"\xff", b"[" * 100_000])
def test_a_frame_that_is_no_message_closes_the_connection_of_a_rank(
    running: RunningHub, text: bytes
) -> None:
    with running.connection() as rank:
        send_introduction(rank, running.address, ["out", os.getpid()])
        rank.sendall(frame(text))
        running.listen()

        assert is_closed(rank)
    assert running.hub.state.processes[os.getpid()].disconnected
    assert joins(running)


def test_the_token_is_not_in_the_environment_or_on_the_command_line(running: RunningHub) -> None:
    assert running.address.token not in running.address.socket_name
    assert running.address.token not in repr(os.environ)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_even_with_the_token(running: RunningHub) -> None:
    answer, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(OTHER_USER)
        with running.connection() as stranger:
            try:
                send_introduction(stranger, running.address, ["line", 1, 1, 2, 3])
                os.write(answers, stranger.recv(100) or b"closed")
            except ConnectionError:
                os.write(answers, b"closed")
        os._exit(0)
    heard = False
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        heard |= running.hub.listen(0.01)

    assert os.read(answer, 100) == b"closed"
    assert not heard  # so strangers cannot interrupt the silence in which hangs are detected
    assert running.hub.state.processes == {}
    assert joins(running)
