"""What the tensors of a run weigh, and whether this machine can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distsim.errors import EnvironmentFault
from distsim.program.records import Program
from distsim.units import show_bytes


def tensor_bytes(program: Program, ranks: Sequence[int]) -> int:
    """Bytes of all named buffers that the calls of these ranks use, and the most that buffers without a name take at a time."""
    return sum(_rank_bytes(program, rank) for rank in ranks)


def _rank_bytes(program: Program, rank: int) -> int:
    named: dict[str, int] = {}
    open_: dict[int, int] = {}  # position -> nameless bytes that its requests hold
    most = 0
    for position, call in program.calls_of(rank):
        fresh = 0
        for one in (call, *call.parts):
            for buffer in (*one.inputs, *one.outputs, *one.reads, *one.writes, *one.adds):
                if buffer.name:
                    named[buffer.label] = buffer.nbytes
                else:
                    fresh += buffer.nbytes
        code_call = program.code_call(rank, position)
        for distance in (*code_call.waits, *code_call.drops):
            open_.pop(position - distance, None)
        most = max(most, sum(open_.values()) + fresh)
        if fresh and code_call.handled:
            open_[position] = fresh
    return sum(named.values()) + most


def check_memory(program: Program, ranks: Sequence[int]) -> None:
    """Raises EnvironmentFault where the tensors would not fit: the kernel would kill a rank, and that would look like a crash."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    needed = tensor_bytes(program, ranks)
    if free is not None and needed > free * 3 // 4:
        raise EnvironmentFault(
            f"the tensors of {len(ranks)} ranks take {show_bytes(needed)}, and {show_bytes(free)} of memory are free here",
            "make them smaller with --set, or run on a larger machine",
        )


__all__ = ["check_memory", "tensor_bytes"]
