"""Writes Chakra execution traces, without the library and the schema that the reader uses.

Field numbers are those of `schema/protobuf/et_def.proto` of mlcommons/chakra (21585d8f).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

COMPUTE, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
ALL_REDUCE = 0
_INT64, _BOOL, _STRING = 9, 27, 29
#: (kernels of the forward pass, of the backward pass, transfer), in microseconds
KERNELS = (2000, 4000, 500)


class Node(NamedTuple):
    number: int
    name: str
    kind: int
    after: tuple[int, ...] = ()
    duration_us: int = 0
    start_us: int = 0
    attributes: Mapping[str, int | bool | str] = {}


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def _attribute(name: str, value: int | bool | str) -> bytes:
    start = _bytes(1, name.encode())
    if isinstance(value, str):
        return start + _bytes(_STRING, value.encode())
    return start + _number(_BOOL if isinstance(value, bool) else _INT64, int(value))


def _node(node: Node) -> bytes:
    content = _number(1, node.number) + _bytes(2, node.name.encode()) + _number(3, node.kind)
    content += b"".join(_number(5, other) for other in node.after)
    content += _number(6, node.start_us) + _number(7, node.duration_us)
    attributes = [_attribute(*item) for item in node.attributes.items()]
    return content + b"".join(_bytes(10, attribute) for attribute in attributes)


def chakra_file(nodes: list[Node]) -> bytes:
    metadata = _bytes(2, _attribute("schema", "1.1.1-chakra.0.0.4"))
    return b"".join(varint(len(part)) + part for part in [metadata, *map(_node, nodes)])


def linked_rank(slow: float, slowest: float, steps: int = 4) -> list[Node]:
    """The host and the GPU of one rank, as Chakra's converter links them.

    Kernels take ``slow`` times as long. An NCCL kernel spins until the slowest rank arrives.
    """
    forward, backward, transfer = KERNELS
    nodes: list[Node] = []

    def add(name: str, kind: int, after: tuple[int, ...], duration_us: float, **attributes) -> int:
        number = len(nodes) + 1
        nodes.append(Node(number, name, kind, after, round(duration_us), 0, attributes))
        return number

    host: tuple[int, ...] = ()
    wait = (forward + backward) * (slowest - slow)
    for step in range(steps):
        host = (add(f"ProfilerStep#{step}", COMPUTE, host, 0, is_cpu_op=True, tid=1),)
        for name, duration in (("gemm", forward), ("dgrad", backward)):
            host = (add(f"aten::{name}", COMPUTE, host, 10, is_cpu_op=True, tid=1),)
            kernel = f"void {name}<float, 4>(float*)"
            last = add(kernel, COMPUTE, host, duration * slow, is_cpu_op=False, stream=7)
        host = (add("c10d::allreduce_", COLLECTIVE, host, 10, is_cpu_op=True, tid=1),)
        call = {"comm_type": ALL_REDUCE, "comm_size": 1 << 20, "pg_name": "0"}
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        after = (*host, last)
        reduce = add(name, COLLECTIVE, after, transfer + wait, is_cpu_op=False, stream=20, **call)
        host = (add("cudaDeviceSynchronize", COMPUTE, (*host, reduce), 5, is_cpu_op=True, tid=1),)
    return nodes


def write_linked_job(folder: Path, factors: tuple[float, ...]) -> Path:
    for rank, slow in enumerate(factors):
        (folder / f"job.{rank}.et").write_bytes(chakra_file(linked_rank(slow, max(factors))))
    return folder
