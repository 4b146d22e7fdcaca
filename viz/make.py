"""Draws the gallery: `python viz/make.py` renders the examples of every view into this folder and
writes README.md and sources.json. `python viz/make.py hybrid_timeline.svg` draws only the named
pictures; the page and the digests still cover all of them.

sources.json contains a digest of each picture's source: the DOT text, or the SVG if distsim writes
it itself. The output of the layout engine depends on the installed fonts and is not compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from distsim.output.pictures.render import VIEW_NAMES, PictureInput, load_view, render_picture  # noqa: E402
from distsim.scenario import load  # noqa: E402  use this checkout, not an installed distsim
from distsim.simulation.simulate_scenario import Simulation, simulate  # noqa: E402


class Shown(NamedTuple):
    """A picture: its view, the scenario or operation, and a sentence about it."""

    view: str
    of: str
    about: str

    @property
    def file(self) -> str:
        return f"{Path(self.of).name}_{self.view}.svg"

    @property
    def command(self) -> str:
        operation = load_view(self.view).of == "operation"
        what = (
            f"--view {self.view} --op {self.of}"
            if operation
            else f"scenarios/{self.of}.yaml --view {self.view}"
        )
        return f"distsim render {what} -o viz/{self.file}"


PICTURES = tuple(
    Shown(name, *example) for name in VIEW_NAMES for example in load_view(name).examples
)


@lru_cache(maxsize=1)
def simulated(name: str) -> Simulation:
    """The last simulation is cached: consecutive pictures of one scenario share it."""
    return simulate(load(str(ROOT / "scenarios" / f"{name}.yaml")))


def picture(shown: Shown, fmt: str) -> str:
    """A picture of the gallery as text."""
    if load_view(shown.view).of == "operation":
        return str(render_picture(shown.view, fmt, PictureInput(op=shown.of)))
    done = simulated(shown.of)
    return str(
        render_picture(
            shown.view,
            fmt,
            PictureInput(
                done.program,
                done.run,
                done.values,
                done.verdict,
                cost=done.cost,
                scenario=done.scenario,
            ),
        )
    )


def digest(shown: Shown) -> str:
    """Changes if the content of the picture changes; does not depend on the machine."""
    fmt = "dot" if "dot" in load_view(shown.view).formats else "svg"
    return sha256(picture(shown, fmt).encode()).hexdigest()[:16]


def readme() -> str:
    """The text of the gallery's page."""
    lines = [
        "# Gallery",
        "",
        "`python viz/make.py` draws these pictures from `scenarios/`. The command below each title draws that picture alone.",
        "",
    ]
    cells = [
        f'<a href="{p.file}"><img src="{p.file}" width="230" alt="{p.of}: {p.view}"></a><br>{p.of}: {p.view}'
        for p in PICTURES
    ]
    for first in range(0, len(cells), 4):
        lines.append("| " + " | ".join([*cells[first : first + 4], *[""] * 3][:4]) + " |")
        lines += ["| --- | --- | --- | --- |"] if first == 0 else []
    lines.append("")
    for shown in PICTURES:
        lines += [f"## {shown.of}: {shown.view}", "", shown.about, ""]
        lines += [f"`{shown.command}`", "", f"![{shown.about}]({shown.file})", ""]
    return "\n".join(lines)


def main(names: list[str]) -> None:
    """Draw the named pictures, by default all, and write the page and the digests."""
    unknown = set(names) - {shown.file for shown in PICTURES}
    if unknown:
        sys.exit(f"no such picture: {', '.join(sorted(unknown))}; viz/README.md lists all")
    for shown in PICTURES:
        if names and shown.file not in names:
            continue
        (HERE / shown.file).write_text(picture(shown, "svg"), encoding="utf-8")
    sources = {shown.file: digest(shown) for shown in PICTURES}
    (HERE / "sources.json").write_text(json.dumps(sources, indent=2) + "\n", encoding="utf-8")
    (HERE / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="Pictures to draw. [default: all]")
    main(parser.parse_args().names)
