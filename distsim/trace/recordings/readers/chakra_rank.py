"""The Chakra trace of one rank: its operations in order, with dependencies and steps.

Dependencies are the data dependencies. Control dependencies name the caller of an operation, under
numbers that Chakra's converter may have changed since; they count only in a trace without data
dependencies. Operations of a stream, or of a thread of the host, run one after the other. The order
is that of the numbers, which count in the order of the recording, as far as dependencies allow. In
a trace without host operations, the computations run one after the other.

Steps are those of `ProfilerStep#N`. Without them the trace is one step, as Chakra traces usually
are; communication repeats within a step, too.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.trace.recordings.readers.chakra_file import ChakraNode, read_chakra_file

HOST_LANE = 0
_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,18})(?:\(\d+\))?$")
#: `CollectiveCommType` of the schema -> the operation of torch.distributed whose size is that of
#: the rank's input, as ``comm_size`` is.
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor",
    "barrier",
)
#: The collective of an NCCL kernel, for traces that do not name it otherwise.
_IN_NAMES = {
    "reducescatter": "reduce_scatter_tensor",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all_single",
    "sendrecv": "all_to_all_single",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
_TEMPLATE = re.compile(r"<[^<>]*>")
_RETURN_TYPE = re.compile(r"^void ")
_COUNT = re.compile(r"#\d+$")


class ChakraOperation(NamedTuple):
    """An operation. ``before``: positions of those that it follows. ``label``: a short name."""

    node: ChakraNode
    label: str
    lane: int
    before: tuple[int, ...]


class ChakraRank(NamedTuple):
    """One rank. ``steps``: number of each step -> the number of its first node.

    ``are_steps_marked``: whether the trace itself names them.
    """

    file: str
    rank: int
    operations: list[ChakraOperation]
    steps: Mapping[int, int]
    are_steps_marked: bool

    @property
    def has_host(self) -> bool:
        """Whether the trace contains operations of the host."""
        return any(operation.node.on_host for operation in self.operations)

    @property
    def has_starts(self) -> bool:
        """Whether the trace contains start times."""
        return any(operation.node.start_ns for operation in self.operations)


def read_chakra_rank(path: Path) -> ChakraRank:
    """Read the trace of a rank. Raises UsageError."""
    file = read_chakra_file(path)
    nodes = _in_order(file.nodes, path)
    numbers = {node.number: position for position, node in enumerate(nodes)}
    has_data = any(node.data_deps for node in nodes)
    has_host = any(node.on_host for node in nodes)
    operations: list[ChakraOperation] = []
    lanes: dict[int, int] = {}
    last_on: dict[object, int] = {}
    for position, node in enumerate(nodes):
        before = {numbers[other] for other in _dependencies(node, has_data) if other in numbers}
        line = _line(node, has_host)
        if line is not None and line in last_on:
            before.add(last_on[line])
        last_on[line] = position
        is_on_host = node.on_host or (not has_host and node.kind in ("work", "none"))
        lane = HOST_LANE if is_on_host else lanes.setdefault(node.stream, len(lanes) + 1)
        before.discard(position)
        operations.append(ChakraOperation(node, _label(node), lane, tuple(sorted(before))))
    steps, are_marked = _steps(nodes)
    return ChakraRank(file.file, file.rank, operations, steps, are_marked)


def _dependencies(node: ChakraNode, has_data: bool) -> tuple[int, ...]:
    return node.data_deps if has_data else node.ctrl_deps


def _line(node: ChakraNode, has_host: bool) -> object:
    """What runs one operation at a time: a thread, a stream; None if nothing is known."""
    if not has_host:
        # Communication of a trace without host starts as soon as its dependencies allow.
        return "work" if node.kind in ("work", "none") else None
    return None if node.stream < 0 else (node.on_host, node.stream)


def _in_order(nodes: list[ChakraNode], path: Path) -> list[ChakraNode]:
    """The nodes by start and number, but none before its dependencies."""
    by_number = {node.number: node for node in nodes}
    has_data = any(node.data_deps for node in nodes)
    following: dict[int, list[int]] = defaultdict(list)
    missing: dict[int, int] = {}
    for node in nodes:
        before = {other for other in _dependencies(node, has_data) if other in by_number}
        before.discard(node.number)
        missing[node.number] = len(before)
        for other in before:
            following[other].append(node.number)
    ready = [(node.start_ns, node.number) for node in nodes if not missing[node.number]]
    heapq.heapify(ready)
    ordered: list[ChakraNode] = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(by_number[number])
        for other in following[number]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (by_number[other].start_ns, other))
    if len(ordered) < len(nodes):
        stuck = min(number for number, count in missing.items() if count)
        raise UsageError(
            f"{path}: the dependencies of this Chakra trace form a cycle with node {stuck}",
            "convert the trace again with `chakra_converter`",
        )
    return ordered


# --- names ---


def _label(node: ChakraNode) -> str:
    if node.kind in ("send", "recv"):
        return node.kind
    if node.kind != "collective":
        return _short_name(node.name)
    if 0 <= node.comm_type < len(_COLLECTIVES):
        return _COLLECTIVES[node.comm_type]
    name = node.name.replace("_", "").lower()
    return next((label for part, label in _IN_NAMES.items() if part in name), "collective")


def _short_name(name: str) -> str:
    """The name of an operation or a kernel without template and other arguments."""
    short = _RETURN_TYPE.sub("", name.replace("(anonymous namespace)::", ""))
    before = ""
    while before != short:
        before, short = short, _TEMPLATE.sub("", short)
    # A name that was cut may have a template without an end.
    short = _COUNT.sub("", short.partition("<")[0].partition("(")[0].strip())
    return short or name.strip() or "work"


# --- steps ---


def _steps(nodes: list[ChakraNode]) -> tuple[dict[int, int], bool]:
    """Number of each step -> its first node, and whether the trace marks them."""
    marks: dict[int, int] = {}
    for node in nodes:
        match = _STEP_NAME.match(node.name)
        if match:
            marks.setdefault(int(match[1]), node.number)
    if marks:
        return marks, True
    return {0: min(node.number for node in nodes)}, False
