"""Draws every view at 4, 64 and 1 024 ranks for inspection: `python viz/look.py FOLDER [VIEW…]`
writes SVG and PNG files, and each PNG also in greyscale and as seen with deuteranopia.

Deuteranopia uses the matrix of Machado, Oliveira and Fernandes, "A Physiologically-based Model for
Simulation of Color Vision Deficiency" (2009), severity 1, on linear RGB; greyscale uses the luminance
of sRGB (IEC 61966-2-1).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from distsim.output.pictures.drawing.svg_conversion import convert_svg  # noqa: E402
from distsim.output.pictures.render import VIEW_NAMES, PictureInput, load_view, render_picture  # noqa: E402
from distsim.scenario import loads  # noqa: E402  use this checkout, not an installed distsim
from distsim.simulation.simulate_scenario import Simulation, simulate  # noqa: E402

SIZES = (4, 64, 1024)
SEEN = {
    "grey": "0.2126 0.7152 0.0722 0 0 " * 3 + "0 0 0 1 0",
    "deutan": "0.367322 0.860646 -0.227968 0 0 0.280085 0.672501 0.047413 0 0 -0.011820 0.042940 0.968881 0 0 0 0 0 1 0",
}
#: dp, pp, tp of each size.
_MESHES = {4: (2, 2, 1), 64: (4, 4, 4), 1024: (16, 8, 8)}

#: A pipeline within each replica, tensor parallelism within each stage.
_TRAINS = """
name: training, {n} ranks
world: {{nodes: {nodes}, ranks_per_node: {local}}}
backend: nccl
cluster: dgx-a100
mesh: {{dp: {dp}, pp: {pp}, tp: {tp}}}
iterations: {steps}
program:
  - transformer:
      model: {{layers: 8, hidden: 1024, heads: 16, ffn: 4096, vocabulary: 32000}}
      sequence: 1024
      micro_batches: 4
      schedule: 1f1b
"""
#: The last four ranks form a wait-for cycle; all other ranks are blocked by them.
_HANGS = """
name: hang, {n} ranks
world: {{nodes: {nodes}, ranks_per_node: {local}}}
backend: gloo
tensors: {{x: {{shape: [1048576]}}, y: {{like: x}}}}
program:
  - compute: {{name: forward, time: 2 ms}}
  - ranks: rank >= world_size - 4
    steps:
      - send: {{tensor: x, dst: "world_size - 4 + (rank + 1) % 4"}}
      - recv: {{tensor: y, src: "world_size - 4 + (rank + 3) % 4"}}
  - barrier
"""
#: Every rank sends to the next rank and receives from any source.
_MESSAGES = """
name: messages, {n} ranks
world: {{nodes: {nodes}, ranks_per_node: {local}}}
backend: gloo
tensors: {{x: {{shape: [65536]}}, y: {{like: x}}}}
program:
  - compute: {{name: forward, time: 1 ms}}
  - isend: {{tensor: x, dst: (rank + 1) % world_size, as: s}}
  - recv: {{tensor: y}}
  - wait: s
  - compute: {{name: backward, time: 1 ms + rank % 2 * 1 ms}}
"""


class Look(NamedTuple):
    """A picture: the name of its file, its view, and its input."""

    file: str
    view: str
    subject: PictureInput


def texts(n: int) -> dict[str, str]:
    """The three scenarios at ``n`` ranks."""
    dp, pp, tp = _MESHES[n]
    local = min(n, 8) if n > 4 else 2
    given = {"n": n, "nodes": n // local, "local": local, "dp": dp, "pp": pp, "tp": tp, "steps": 3}
    named = {"trains": _TRAINS, "hangs": _HANGS, "messages": _MESSAGES}
    return {name: text.format(**given) for name, text in named.items()}


def made(name: str, text: str) -> Simulation:
    """A simulation; with a verdict only for the scenario that hangs."""
    return simulate(
        loads(text, f"{name}.yaml", ()), with_verdict=name == "hangs", with_values=False
    )


def subject(done: Simulation) -> PictureInput:
    """The input of a view, from a simulation."""
    return PictureInput(
        done.program, done.run, done.values, done.verdict, cost=done.cost, scenario=done.scenario
    )


def looks(views: tuple[str, ...] = VIEW_NAMES) -> Iterator[Look]:
    """Every view at every size."""
    for n in SIZES:
        done = {name: subject(made(name, text)) for name, text in texts(n).items()}
        for view in views:
            if load_view(view).of == "operation":
                if n == SIZES[0]:
                    yield from (
                        Look(f"{view}_{op}_{m}", view, PictureInput(op=op, ranks=m))
                        for op in ("all_reduce", "gather")
                        for m in (4, 8)
                    )
                continue
            for name in {
                "wait-for": ("hangs",),
                "spacetime": ("messages", "trains"),
                "timeline": ("trains", "hangs"),
                "dataflow": ("trains", "hangs"),
            }.get(view, ("trains",)):
                yield Look(f"{view}_{name}_{n}", view, done[name])


def seen(svg: str, matrix: str) -> str:
    """The picture with a colour filter."""
    at = svg.index(">", svg.index("<svg")) + 1
    lens = f'<filter id="eyes" x="0" y="0" width="1" height="1"><feColorMatrix values="{matrix}"/></filter><g filter="url(#eyes)">'
    return f'{svg[:at]}{lens}<rect width="100%" height="100%" fill="#fff"/>{svg[at:].replace("</svg>", "</g></svg>")}'


def main(folder: Path, views: tuple[str, ...]) -> None:
    """Draw all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for look in looks(views):
        svg = str(render_picture(look.view, "svg", look.subject))
        (folder / f"{look.file}.svg").write_text(svg, encoding="utf-8")
        for name, text in (
            ("", svg),
            *((f"_{eyes}", seen(svg, matrix)) for eyes, matrix in SEEN.items()),
        ):
            (folder / f"{look.file}{name}.png").write_bytes(convert_svg(text, "png", 96.0))
        sys.stderr.write(f"{look.file}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Folder to write into.")
    parser.add_argument("views", nargs="*", help="Views to draw. [default: all]")
    options = parser.parse_args()
    main(options.folder, tuple(options.views) or VIEW_NAMES)
