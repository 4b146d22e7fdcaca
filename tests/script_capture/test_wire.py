"""Frames between ranks and the hub: what comes again is decoded once, and a stream may be cut
anywhere.
"""

from __future__ import annotations

from typing import Any

import pytest

from distsim.script_capture.protocol.wire import (
    EncodingCache,
    FrameDecoder,
    encode_frame,
    encode_message,
    encode_repeated_frame,
)


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_a_stream_split_anywhere_gives_its_frames(step: int) -> None:
    """Plain ones and ones that come again, with payloads and without."""
    again = encode_message([["again", 3]])
    stream = (
        encode_frame([["call", 1]], [b"ab", b"c"])
        + encode_repeated_frame(again, [b"12345678"])
        + encode_repeated_frame(again, [b"87654321"])
        + encode_frame([])
    )
    frames = FrameDecoder()

    found: list[tuple[list[Any], bytes]] = []
    for at in range(0, len(stream), step):
        found += frames.feed(stream[at : at + step])

    assert found == [
        ([["call", 1]], b"abc"),
        ([["again", 3]], b"12345678"),
        ([["again", 3]], b"87654321"),
        ([], b""),
    ]
    assert found[1][0] is found[2][0]


def test_a_text_is_built_once_per_key_and_few_are_kept() -> None:
    """A program whose calls never repeat does not fill the memory."""
    texts, made = EncodingCache(), list[int]()

    def make(k: int) -> list[int]:
        made.append(k)
        return [k]

    assert [texts.of(("a",), lambda: make(1)), texts.of(("a",), lambda: make(2))] == [
        b"[1]",
        b"[1]",
    ]
    for k in range(5000):
        texts.of(k, lambda k=k: make(k))  # type: ignore[misc]
    assert len(made) == 5001
    assert len(texts._known) < 1000
