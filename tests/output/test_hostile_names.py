"""Names that are markup, break lines, turn the direction of writing, are long or Chinese: text in
every view and every format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from distsim.common.file_io import escape_control_characters
from distsim.output.json.chrome_trace import chrome_trace_lines
from distsim.output.pictures.render import VIEW_NAMES, PictureInput, load_view, render_picture
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.trace.model import Trace

NAMES = {
    "markup": '</text><script>alert(1)</script>"&amp;<img src=x onerror=alert(1)>]]>-->',
    "quotes": 'it\'s "quoted" \\ `back` %s {x} $y -> [z]',
    "lines": "one\ntwo\r\nthree\ttab\x07bell",
    "long": "x" * 10_000,
    "arabic": "اسم طويل \u202e turned \u2066 and isolated",
    "chinese": "名前" * 40 + "😀",
}
#: A pipeline of two stages, a collective, memory, and a circle at the end where ``hangs``.
TEXT = """
name: {name}
about: {name}
world: {{nodes: 2, ranks_per_node: 2}}
backend: gloo
mesh: {{dp: 2, pp: 2}}
groups: {{all: [0, 1, 2, 3]}}
memory: {{model: {{parameters: 1 GiB, activations: 1 GiB}}}}
tensors: {{x: {{shape: [4]}}, y: {{like: x}}, z: {{shape: [1000000]}}}}
program:
  - compute: {{name: {forward}, time: 1 ms, writes: [x]}}
  - ranks: pp == 0
    steps: [{{send: {{tensor: x, group: pp, group_dst: 1}}}}]
  - ranks: pp == 1
    steps: [{{recv: {{tensor: y, group: pp, group_src: 0}}}}]
  - compute: {{name: {backward}, time: 1 ms, reads: [x]}}
  - all_reduce: {{tensor: x, group: all}}
{end}
"""
CIRCLE = "  - ranks: rank < 2\n    steps: [{send: {tensor: z, dst: 1 - rank}}, {recv: {tensor: z, src: 1 - rank}}]"


def named(name: str, end: str = "") -> Simulation:
    texts = {"name": name, "forward": f"forward {name}", "backward": f"backward {name}"}
    written = {key: json.dumps(text, ensure_ascii=False) for key, text in texts.items()}
    return simulate(loads(TEXT.format(**written, end=end), "a.yaml", ()))


def recorded(done: Simulation, name: str) -> Trace:
    """The run as a recording whose groups and streams, which a scenario holds to letters, have that
    name too.
    """
    trace = done.run.trace
    groups = [[f"{name}{i}", ranks] for i, (_, ranks) in enumerate(trace.header["groups"])]
    tables = {
        **trace.tables,
        "group": [group for group, _ in groups],
        "queue": [f"{name} {queue}" for queue in trace.tables["queue"]],
    }
    return Trace({**trace.header, "groups": groups}, tables, trace.columns)


def subjects(name: str) -> Iterator[tuple[str, PictureInput]]:
    """Every view of scenarios and of recordings, with what it draws."""
    done, stuck = (
        (PictureInput(s.program, s.run, s.values, s.verdict, cost=s.cost, scenario=s.scenario), s)
        for s in (named(name), named(name, CIRCLE))
    )
    for view in (v for v in VIEW_NAMES if load_view(v).of == "scenario"):
        yield view, (stuck if view == "wait-for" else done)[0]
        if load_view(view).accepts_trace:
            yield view, PictureInput(trace=recorded(done[1], name))
    yield from (("dataflow", stuck[0]), ("timeline", stuck[0]))


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_names_are_escaped_in_every_view_and_format(name: str):
    """Each svg is XML of shapes and words alone, is no larger than a name that is cut allows, and
    no word turns the others around.
    """
    for view, subject in subjects(name):
        for fmt in (f for f in load_view(view).formats if f in ("svg", "dot", "mermaid")):
            drawn = str(render_picture(view, fmt, subject))
            assert len(drawn) < 200_000, (view, fmt)
            assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", drawn), (
                view,
                fmt,
            )
            if fmt == "svg":
                kinds = {
                    element.tag.partition("}")[2]
                    for element in ElementTree.fromstring(drawn).iter()
                }
                assert not kinds & {"script", "img", "image", "foreignObject", "a"}, view
            elif fmt == "mermaid":
                assert "<script" not in drawn, view


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_names_are_escaped_in_the_chrome_export(name: str):
    done = named(name)

    events = json.loads("".join(chrome_trace_lines(recorded(done, name))))["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} & {
        escape_control_characters(f"forward {name}", one_line=True),
        escape_control_characters(f"forward {name}"),
    }
