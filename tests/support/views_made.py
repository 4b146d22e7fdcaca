"""Programs and runs for the tests of the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.engine import SimulatedRun, run_program
from distsim.hardware.cost import CostModel
from distsim.output.pictures.drawing.box_diagram import BoxDiagram, DiagramNode, TableCell
from distsim.program.from_calls import build_program
from distsim.program.model import Program

Plain = Mapping[str, Any]
Made = tuple[Program, SimulatedRun]
#: A training step of two pipeline stages on GPUs, whose hosts launch kernels ahead of the device.
TWO_STAGE_TRAINING = """
name: training
world: {nodes: 1, ranks_per_node: 2}
backend: nccl
cluster: dgx-a100
mesh: {pp: 2}
program:
  - transformer:
      model: {layers: 2, hidden: 1024, heads: 16, ffn: 4096, vocabulary: 32000}
      sequence: 1024
      micro_batches: 2
      schedule: 1f1b
"""


def made(world_size: int, calls: Mapping[int, Sequence[Plain]], **more: Any) -> Made:
    """A program from plain calls, and its run."""
    program = build_program(world_size, calls, **more)
    cost = CostModel(default_cluster(program.backend), world_size, program.local_size, ())
    return program, run_program(program, BACKEND_PROFILES[program.backend], cost)


def send(peer: int, op: str = "send", **more: Any) -> Plain:
    return {"op": op, "peer": peer, "numel": 4, "tensor": "x", **more}


def recv(peer: int | None, op: str = "recv", **more: Any) -> Plain:
    return {"op": op, "peer": peer, "numel": 4, "tensor": "y", **more}


def work(name: str = "work", ms: int = 1) -> Plain:
    return {"op": "compute", "name": name, "time_ns": ms * 10**6}


def wait(*handles: str) -> Plain:
    return {"op": "wait", "handles": list(handles)}


def ring(n: int, op: str = "send") -> Made:
    """Everybody sends to the right before receiving from the left."""
    return made(n, {r: [send((r + 1) % n, op), recv((r - 1) % n)] for r in range(n)}, name="ring")


def texts(node: DiagramNode) -> list[str]:
    """All texts of a box."""
    cells = [cell for row in node.table for cell in row]
    return [line.text for line in node.lines] + [cell_text(cell) for cell in cells]


def cell_text(cell: TableCell) -> str:
    return "+".join(part.text for part in cell.parts) if cell.parts else cell.text


def box(picture: BoxDiagram, name: str) -> DiagramNode:
    return next(node for node in picture.nodes if node.id == name)
