"""Split the pages of torch's debug server (``torch.distributed.debug``) into parts by rank.

Format: the templates ``raw_resp.html``, ``json_resp.html`` and ``pyspy_dump.html`` in
``torch/distributed/debug/_debug_handlers.py`` of torch 2.13, which put ``<h2>Rank N: ADDRESS</h2>``
before the answer of each rank. The text files of its periodic dumps have lines
``=== Rank N: ADDRESS ===``, which the log reader understands.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from distsim.hang_doctor.model.evidence import MAX_RANKS

_HEAD: Final = re.compile(r"<h[23]>\s{0,20}Rank (\d{1,7}):")
_TAG: Final = re.compile(r"<[^<>]{0,400}>")
_HEAD_BYTES: Final = 400


class ServerPart(NamedTuple):
    """The answer of one rank, as text."""

    rank: int
    text: str


def is_debug_server_page(data: bytes) -> bool:
    """Whether this is a page of the debug server."""
    head = data[:_HEAD_BYTES].lstrip().lower()
    if not head.startswith((b"<!doctype html", b"<html")):
        return False
    return b"<h2>Rank " in data or b"<h3>Rank " in data


def parts_of_page(data: bytes) -> Iterator[ServerPart]:
    """The answers in a page, without their tags."""
    text = data.decode("utf-8", "replace")
    heads = [head for head in _HEAD.finditer(text) if int(head[1]) < MAX_RANKS]
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends, strict=True):
        _, _, body = text[head.start() : end].partition("</h2>")
        body = body or text[head.end() : end]
        yield ServerPart(int(head[1]), html.unescape(_TAG.sub("", body)).strip())
