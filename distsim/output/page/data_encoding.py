"""Encodes a report's data as one text: JSON and columns of integers, deflated, in base64.

Base64 cannot be parsed as HTML or script, whatever the names in a file are. The numbers of a column
are written with seven bits per byte, lowest first; the eighth bit is set if more bytes follow
(LEB128). Signed numbers are zigzag-encoded first: 0, -1, 1, -2 become 0, 1, 2, 3. Differences of
neighbouring numbers are small, and identical ranks give identical bytes, which deflate compresses.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def varint_bytes(numbers: Numbers) -> bytes:
    """Non-negative numbers as LEB128 bytes, one after the other."""
    values = numbers.astype(np.uint64)
    most = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    pieces = np.empty((len(values), most), dtype=np.uint8)
    used = np.ones(len(values), dtype=np.int64)
    for k in range(most):
        pieces[:, k] = (values >> np.uint64(7 * k)) & np.uint64(127)
        used[pieces[:, k] > 0] = k + 1
    at = np.arange(most)
    pieces[at[None, :] < (used - 1)[:, None]] |= 128
    found: bytes = pieces[at[None, :] < used[:, None]].tobytes()
    return found


def zigzag_encoded(numbers: Numbers) -> Numbers:
    """Signed numbers as non-negative numbers: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    values = numbers.astype(np.int64)
    return (values << 1) ^ (values >> 63)


def zigzag_deltas(numbers: Numbers) -> Numbers:
    """Each number as its difference to the one before, zigzag-encoded."""
    found = numbers.astype(np.int64)
    found[1:] -= numbers[:-1]
    return zigzag_encoded(found)


def encoded_payload(head: Mapping[str, object], columns: Mapping[str, Numbers]) -> str:
    """Base64 of the deflated sequence: length of the JSON in four bytes, the JSON, the columns.

    ``columns``: non-negative numbers. ``head`` gets the key `columns`: [name, count, bytes] of
    each, in order.
    """
    written = {name: varint_bytes(numbers) for name, numbers in columns.items()}
    listed = [[name, len(columns[name]), len(data)] for name, data in written.items()]
    text = json.dumps(
        {**head, "columns": listed}, ensure_ascii=True, separators=(",", ":"), allow_nan=False
    ).encode("ascii")
    whole = b"".join([len(text).to_bytes(4, "little"), text, *written.values()])
    return base64.b64encode(zlib.compress(whole, 6)).decode("ascii")
