"""Writes SQLite files with the tables that `nsys export --type sqlite` writes.

The tables and columns are those of NVIDIA's "SQLite Schema Reference" for Nsight Systems, as far as
the reader or a person looking at the file needs them. Payloads of NCCL have the schemas of
NVIDIA/nccl, `src/include/nvtx_payload_schemas.h`.
"""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INT, utcTime TEXT, localTime TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, contextId INT NOT NULL,
    streamId INT NOT NULL, correlationId INT, globalPid INT, demangledName INT NOT NULL,
    shortName INT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INT NOT NULL, end INT NOT NULL, eventClass INT NOT NULL, globalTid INT,
    correlationId INT, nameId INT NOT NULL, returnValue INT NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INT NOT NULL, end INT, eventType INT NOT NULL, rangeId INT, category INT, color INT,
    text TEXT, globalTid INT, endGlobalTid INT, textId INT, domainId INT, uint64Value INT,
    int64Value INT, doubleValue REAL, uint32Value INT, int32Value INT, floatValue REAL,
    jsonTextId INT, jsonText TEXT, binaryData TEXT);
CREATE TABLE NVTX_PAYLOAD_SCHEMA_ENTRIES (
    domainId INT NOT NULL, schemaId INT NOT NULL, idx INT NOT NULL, flags INT, type INT, name TEXT,
    description TEXT, arrayOrUnionDetail INT, offset INT);
"""
_PUSH_POP_RANGE = 59
_NCCL_DOMAIN = 1
#: Number of a schema -> (type, name, offset) of its entries.
_INIT, _REDUCE = 16777217, 16777218
_ENTRIES = {
    _INIT: [
        (18, "NCCL communicator ID", 0),
        (5, "No. of ranks", 8),
        (5, "Rank", 12),
        (5, "CUDA device", 16),
    ],
    _REDUCE: [(18, "NCCL communicator ID", 0), (22, "Message size [bytes]", 8)],
}
#: Microseconds of the two kernels of a step, and of the transfer.
FORWARD, BACKWARD, REDUCE = 2000, 4000, 500
STEPS = 5
REDUCED_BYTES = 1 << 20
_US = 1000


def _payload(schema: int, content: bytes) -> bytes:
    return struct.pack("<QQQQ", _NCCL_DOMAIN, schema, len(content), 32) + content


class ExportWriter:
    """One report; ``put_rank`` adds a process."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(_SCHEMA)
        self.put("TARGET_INFO_SESSION_START_TIME", 10**18, "", "")
        for schema, entries in _ENTRIES.items():
            for index, (kind, name, offset) in enumerate(entries):
                row = (_NCCL_DOMAIN, schema, index, None, kind, name, None, None, offset)
                self.put("NVTX_PAYLOAD_SCHEMA_ENTRIES", *row)
        self.texts: dict[str, int] = {}
        self.correlation = 0

    def put(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def text(self, value: str) -> int:
        if value not in self.texts:
            self.texts[value] = len(self.texts) + 1
            self.put("StringIds", self.texts[value], value)
        return self.texts[value]

    def range(self, process: int, name: str, start: int, end: int, payload: bytes | None = None):
        nothing = [None] * 9
        row = (
            start * _US,
            end * _US,
            _PUSH_POP_RANGE,
            None,
            None,
            None,
            name,
            process << 24 | process,
        )
        self.put("NVTX_EVENTS", *row, None, None, _NCCL_DOMAIN, *nothing[:8], payload)

    def call(self, process: int, name: str, start: int, end: int) -> int:
        self.correlation += 1
        row = (
            start * _US,
            end * _US,
            0,
            process << 24 | process,
            self.correlation,
            self.text(name),
            0,
        )
        self.put("CUPTI_ACTIVITY_KIND_RUNTIME", *row)
        return self.correlation

    def kernel(
        self, process: int, name: str, stream: int, launch: int, start: int, end: int
    ) -> None:
        number = self.call(process, "cudaLaunchKernel_v7000", launch, launch + 5)
        full, short = self.text(name + "(float*)"), self.text(name)
        row = (start * _US, end * _US, process % 8, 1, stream, number, process << 24, full, short)
        self.put("CUPTI_ACTIVITY_KIND_KERNEL", *row)

    def put_rank(
        self, process: int, rank: int, ranks: int, slow: float, slowest: float, nccl: str
    ) -> None:
        """``nccl``: "payloads", "ranges" without payloads, or "kernels" without ranges."""
        if nccl == "payloads":
            content = struct.pack("<QiiI4x", 0xABC, ranks, rank, rank)
            self.range(process, "ncclCommInitRankConfig", 0, 5, _payload(_INIT, content))
        step_us = round((FORWARD + BACKWARD) * slowest) + REDUCE + 200
        for step in range(STEPS):
            begin = 1000 + step * step_us
            forward = begin + 30 + round(FORWARD * slow)
            arrival = begin + 40 + round((FORWARD + BACKWARD) * slow)
            end = begin + 40 + round((FORWARD + BACKWARD) * slowest) + REDUCE
            self.range(process, f"step {step}", begin, begin + step_us)
            self.kernel(process, "gemm", 7, begin + 10, begin + 30, forward)
            self.kernel(process, "gemm", 7, begin + 50, forward, arrival - 10)
            if nccl != "kernels":
                content = struct.pack("<QQ", 0xABC, REDUCED_BYTES)
                payload = _payload(_REDUCE, content) if nccl == "payloads" else None
                self.range(process, "ncclAllReduce", begin + 85, begin + 99, payload)
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            self.kernel(process, name, 20, begin + 90, arrival, end)
            self.call(process, "cudaDeviceSynchronize_v3020", begin + 100, end + 5)

    def close(self) -> None:
        self.database.commit()
        self.database.close()


def write_job(
    folder: Path, factors: tuple[float, ...], *, one_file: bool = False, nccl: str = "payloads"
) -> Path:
    """A data-parallel job; rank r takes ``factors[r]`` times as long."""
    ranks = range(len(factors))
    for part in [ranks] if one_file else [[rank] for rank in ranks]:
        name = "node.sqlite" if one_file else f"report.{part[0]}.sqlite"
        writer = ExportWriter(folder / name)
        with closing(writer):
            for rank in part:
                slow = factors[rank]
                writer.put_rank(4000 + rank, rank, len(factors), slow, max(factors), nccl)
    return folder
