"""What the tensors of a run weigh, and whether this machine can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distsim.errors import EnvironmentFault
from distsim.program.records import Program
from distsim.units import show_bytes


def tensor_bytes(program: Program, ranks: Sequence[int]) -> int:
    """Bytes of all named buffers that the calls of these ranks use."""
    total = 0
    for rank in ranks:
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for code_call in program.code(rank).calls:
            if id(code_call) in seen:
                continue
            seen.add(id(code_call))
            whole = program.resolve(rank, code_call)
            for call in (whole, *whole.parts):
                for buffer in (*call.inputs, *call.outputs, *call.reads, *call.writes, *call.adds):
                    sizes[buffer.label] = buffer.nbytes if buffer.name else 0
        total += sum(sizes.values())
    return total


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
