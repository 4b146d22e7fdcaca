"""Draws the gallery: `python viz/make.py` renders every picture of PICTURES into this folder and writes README.md and sources.json.

sources.json holds a digest of each picture's source (the DOT text, or the svg of a timeline, which distsim writes itself); the layout
engine's own output depends on the machine's fonts and is not compared.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from distsim.scenario import load  # noqa: E402  the checkout is meant, installed or not
from distsim.simulation import simulate  # noqa: E402
from distsim.views.render import render  # noqa: E402


class Shown(NamedTuple):
    """A picture: its view, the scenario or operation, and what it teaches."""

    view: str
    of: str
    about: str

    @property
    def file(self) -> str:
        return f"{Path(self.of).name}_{self.view}.svg"

    @property
    def command(self) -> str:
        what = f"--view op --op {self.of}" if self.view == "op" else f"scenarios/{self.of}.yaml --view {self.view}"
        return f"distsim render {what} -o viz/{self.file}"


PICTURES = (
    Shown("dataflow", "hybrid",
          "A model cut in two, two replicas of it: activations go right, gradients come back, weight gradients are averaged."),
    Shown("timeline", "hybrid", "The same run to scale: what each rank does, and the path that sets the pace."),
    Shown("groups", "hybrid", "The mesh behind it: each rank is in a group of its replica and in one of its stage."),
    Shown("groups", "two_machines", "Two machines of four GPUs: RANK, LOCAL_RANK, NODE_RANK and the group ranks."),
    Shown("startup", "hybrid", "How a job starts: ranks register at the store, meet, and the groups come into being."),
    Shown("startup", "never_starts", "The first hang everybody meets: one rank never starts."),
    Shown("waitfor", "ring_of_four", "Everybody sends first: a circle of four."),
    Shown("waitfor", "pipeline_wrong_order", "A pipeline whose last stage sends in the wrong order: the cause red, the victim grey."),
    Shown("dataflow", "head_to_head_sends", "Two sends that wait for each other."),
    Shown("dataflow", "any_source_ring", "A ring with isend and receives from any source, with the values that travel."),
    Shown("dataflow", "ddp_by_hand", "Three gradient buckets, each reduced while the next is computed."),
    Shown("timeline", "ddp_by_hand", "The same to scale: two of the three all_reduces are hidden behind compute."),
    Shown("timeline", "pipeline_1f1b", "One forward, one backward: the bubble at both ends."),
    Shown("timeline", "strategies/pipeline_zb1p",
          "A zero-bubble schedule: gradients of the weights (W), which nobody waits for, fill what was empty."),
    *(Shown("op", op, f"What each rank holds before and after {op}.")
      for op in ("broadcast", "reduce", "all_reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send")),
)  # fmt: skip


def picture(shown: Shown, fmt: str) -> str:
    """A picture of the gallery as text."""
    if shown.view == "op":
        return str(render("op", fmt, program=None, op=shown.of))
    done = simulate(load(str(ROOT / "scenarios" / f"{shown.of}.yaml")))
    return str(render(shown.view, fmt, program=done.program, run=done.run, values=done.values, verdict=done.verdict))


def digest(shown: Shown) -> str:
    """Changes when the picture's content does, on any machine."""
    return sha256(picture(shown, "svg" if shown.view == "timeline" else "dot").encode()).hexdigest()[:16]


def readme() -> str:
    """The gallery's page."""
    lines = [
        "# Gallery",
        "",
        "Made by `python viz/make.py` from `scenarios/`; each picture has the command that draws it alone.",
        "",
    ]
    for shown in PICTURES:
        lines += [f"## {shown.of}: {shown.view}", "", shown.about, ""]
        lines += [f"`{shown.command}`", "", f"![{shown.about}]({shown.file})", ""]
    return "\n".join(lines)


def main() -> None:
    """Draw everything."""
    for shown in PICTURES:
        (HERE / shown.file).write_text(picture(shown, "svg"), encoding="utf-8")
    sources = {shown.file: digest(shown) for shown in PICTURES}
    (HERE / "sources.json").write_text(json.dumps(sources, indent=2) + "\n", encoding="utf-8")
    (HERE / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
