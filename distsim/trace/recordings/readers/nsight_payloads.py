"""Payloads of NCCL's NVTX ranges in an export of Nsight Systems: sizes, communicators, ranks.

NCCL registers a schema for each call (`src/include/nvtx_payload_schemas.h` of NVIDIA/nccl), and the
export lists its fields in ``NVTX_PAYLOAD_SCHEMA_ENTRIES``: name, type and offset. The values are in
``NVTX_EVENTS.binaryData``. NVIDIA does not document the header before them. In public exports it
has 32 bytes, with the number of the schema at 8 and the length of the values at 16. A payload of
another form is not used: its schema must be known, and its length must fit.

Types are those of `nvToolsExtPayload.h` of NVIDIA/NVTX.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Mapping
from typing import NamedTuple

_HEADER_BYTES = 32
_SCHEMA_OFFSET = 8
_LENGTH_OFFSET = 16
#: Type of an entry -> its format for `struct`: int, unsigned, 32 and 64 bits, size.
_FORMATS: Mapping[int, str] = {
    5: "<i",
    6: "<I",
    7: "<q",
    8: "<Q",
    9: "<q",
    10: "<Q",
    15: "<i",
    16: "<I",
    17: "<q",
    18: "<Q",
    22: "<Q",
}
_COMMUNICATOR = "NCCL communicator ID"
_SIZE = "Message size [bytes]"
_RANK = "Rank"
_RANK_COUNT = "No. of ranks"
_PEER = "Peer rank"
_MAX_RANKS = 1 << 17
_MAX_BYTES = 1 << 50
_ENTRY_COLUMNS = {"schemaId", "type", "name", "offset"}
_OPERATIONS = {
    "ncclAllReduce": "allreduce",
    "ncclAllGather": "allgather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclAllToAll": "alltoall",
    "ncclAlltoAll": "alltoall",
    "ncclSend": "send",
    "ncclRecv": "recv",
}


class NcclCall(NamedTuple):
    """A call of the host. ``communicator`` is empty, ``nbytes`` 0 and ``peer`` -1 if unknown."""

    operation: str
    start: int
    end: int
    communicator: str
    nbytes: int
    peer: int


class _Entry(NamedTuple):
    name: str
    format: str
    offset: int


class NcclPayloads:
    """Decodes payloads, and remembers the ranks of processes in their largest communicator."""

    def __init__(self, database: sqlite3.Connection, tables: Mapping[str, set[str]]) -> None:
        self.schemas = _schemas(database, tables)
        self.call_count = 0
        self.sized_count = 0
        #: Process -> (ranks of its largest communicator, its rank there).
        self._places: dict[int, tuple[int, int]] = {}

    def call(
        self, process: int, name: str, times: tuple[int, int], payload: object
    ) -> NcclCall | None:
        """The call of a range; None if it communicates nothing. Also notes the process's rank."""
        values = self._values(payload)
        rank, count = values.get(_RANK, -1), values.get(_RANK_COUNT, 0)
        if 0 <= rank < count < _MAX_RANKS:
            self._places[process] = max(self._places.get(process, (0, 0)), (count, rank))
        operation = _OPERATIONS.get(name)
        if operation is None:
            return None
        self.call_count += 1
        nbytes = values.get(_SIZE, -1)
        self.sized_count += nbytes >= 0
        communicator = values.get(_COMMUNICATOR)
        return NcclCall(
            operation,
            *times,
            "" if communicator is None else f"{communicator:x}",
            nbytes if 0 <= nbytes < _MAX_BYTES else 0,
            values.get(_PEER, -1),
        )

    def rank(self, process: int) -> int | None:
        """The rank of a process, if a communicator was created while Nsight Systems recorded."""
        place = self._places.get(process)
        return None if place is None else place[1]

    def world_size(self, process: int) -> int:
        """The size of the largest communicator of a process, 0 if unknown."""
        return self._places.get(process, (0, 0))[0]

    def _values(self, payload: object) -> dict[str, int]:
        if isinstance(payload, str):
            payload = payload.encode("utf-8", "surrogateescape")
        if not isinstance(payload, bytes) or len(payload) < _HEADER_BYTES:
            return {}
        (schema,) = struct.unpack_from("<I", payload, _SCHEMA_OFFSET)
        (length,) = struct.unpack_from("<Q", payload, _LENGTH_OFFSET)
        content = payload[_HEADER_BYTES:]
        if schema not in self.schemas or length > len(content):
            return {}
        found = {}
        for entry in self.schemas[schema]:
            if entry.offset + struct.calcsize(entry.format) <= length:
                (found[entry.name],) = struct.unpack_from(entry.format, content, entry.offset)
        return found


def _schemas(
    database: sqlite3.Connection, tables: Mapping[str, set[str]]
) -> dict[int, list[_Entry]]:
    table = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
    if not tables.get(table, set()) >= _ENTRY_COLUMNS:
        return {}
    found: dict[int, list[_Entry]] = {}
    query = f"SELECT schemaId, type, name, offset FROM {table}"
    for schema, kind, name, offset in database.execute(query):
        format = _FORMATS.get(kind) if isinstance(kind, int) else None
        is_placed = isinstance(schema, int) and isinstance(offset, int) and offset >= 0
        if format is not None and is_placed:
            found.setdefault(schema, []).append(_Entry(str(name), format, offset))
    return found
