"""The report in a real browser: opened from the disk, without a request and without a word on the
console; hands, keys, both themes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.common.units import show_ns
from distsim.output.page import report_html, report_run_from_simulation
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate
from tests.support import browser
from tests.support.harness import Cli

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(browser.browser() is None, reason="there is no Chromium here")

AXE = ROOT / "tests" / "web" / "node_modules" / "axe-core" / "axe.min.js"
#: The rules that axe-core finds broken, each with its elements.
VIOLATIONS = """axe.run().then((result) => result.violations.map(
  (rule) => [rule.id, rule.help, rule.nodes.map((node) => node.html.slice(0, 200))]))"""
CHOSEN = "distsim.model.chosen.row"
WIDTH = "(distsim.timeline.view.to - distsim.timeline.view.from)"
#: Where the middle of a call's span is on the screen.
PLACE = """((row) => {
  const t = distsim.timeline, run = distsim.model.runs[0], box = t.canvas.getBoundingClientRect();
  const time = (run.started[row] + run.finished[row]) / 2, line = t.lineOf(0, run.rank[row]);
  return [box.left + t.x(time), box.top + t.y(line) + t.lane(0).top + 4];
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    folder = tmp_path_factory.mktemp("browser")
    with browser.page(folder) as found:
        found.size(1280, 900)
        yield found


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("hybrid") / "hybrid.html", "hybrid")


def written(path: Path, name: str) -> Path:
    simulation = simulate(load(str(ROOT / "scenarios" / f"{name}.yaml"), sets=()))
    path.write_text(report_html([report_run_from_simulation(simulation)]), encoding="utf-8")
    return path


def opened(page: browser.Page, path: Path) -> None:
    page.said.clear()
    page.requests.clear()
    page.theme("light")
    page.open(path)
    page.run("distsim.timeline.canvas.scrollIntoView({block: 'center', behavior: 'instant'})")


def test_the_report_opens_without_requests_or_messages_and_shows_the_outcome_first(
    page: browser.Page, hybrid: Path
):
    opened(page, hybrid)

    assert page.requests == [hybrid.resolve().as_uri()]
    assert page.said == []
    assert page.run("document.querySelector('header.verdict h1').innerText") == "hybrid"
    said = (ROOT / "scenarios" / "hybrid.out").read_text(encoding="utf-8").splitlines()[0]
    assert page.run(
        "document.body.firstElementChild.querySelector('.outcome').innerText"
    ) == said.removeprefix("hybrid: ")


def test_a_click_shows_the_match_cost_and_wait_of_a_call(page: browser.Page, hybrid: Path):
    opened(page, hybrid)
    backward = page.run(
        "[...distsim.model.runs[0].name].findIndex((n) => distsim.model.runs[0].head.tables.name[n] === 'backward')"
    )
    page.click(*page.run(f"{PLACE}({backward})"))
    computes = page.run("document.querySelector('.details').innerText")
    page.key("[")
    receives = page.run("document.querySelector('.details').innerText")

    assert computes.startswith("backward")
    assert "No wait: this call returned without blocking." in computes
    assert receives.startswith("recv(activation_grad, from 1, 16 KiB)")
    assert re.search(r"Why it waits 9\.\d+ ms", receives)
    assert "rank 1 computes forward and backward, line 22" in receives
    assert "Matches 1 call" in receives
    price = simulate(load(str(ROOT / "scenarios/hybrid.yaml"))).cost.p2p_ns(1, 0, 16 << 10)
    assert f"Predicted cost: {show_ns(price)}" in receives
    assert "transfer" in receives


def test_keys_zoom_to_nanoseconds_and_back_move_select_and_step(page: browser.Page, hybrid: Path):
    opened(page, hybrid)
    page.run("distsim.timeline.canvas.focus()")
    whole = page.run(WIDTH)
    for _ in range(60):
        page.key("+")
    close = page.run(WIDTH)
    page.key("0")
    page.key("ArrowDown")
    page.key("ArrowDown")
    rank = page.run(f"distsim.model.runs[0].rank[{CHOSEN}]")
    page.key("]")
    call = page.run(f"distsim.model.runs[0].position[{CHOSEN}]")
    page.key(".")
    later = page.run("distsim.model.now")
    page.key(",")

    assert close <= 20
    assert page.run(WIDTH) == whole
    assert (rank, call) == (1, 1)
    arrived = simulate(load(str(ROOT / "scenarios/hybrid.yaml"))).run.trace
    first = int(arrived["finished_ns"][(arrived["rank"] == 1) & (arrived["position"] == 0)][0])
    assert later > page.run("distsim.model.now") == first
    assert "values" in page.run("document.querySelector('#step table').innerText")
    page.key("Enter")
    assert page.run("document.activeElement.className") == "details"
    page.key("?")
    assert page.run("document.querySelector('dialog').open")
    page.key("Escape")


def test_a_search_marks_its_results_and_steps_through_them(page: browser.Page, hybrid: Path):
    opened(page, hybrid)
    page.run("distsim.timeline.canvas.focus()")
    page.key("/")
    page.type("op:all_reduce")
    found = page.run("document.querySelector('.search output').textContent")
    page.key("Enter")

    assert found == "4 calls"
    assert (
        page.run(f"distsim.model.runs[0].head.tables.op[distsim.model.runs[0].op[{CHOSEN}]]")
        == "all_reduce"
    )
    page.run("document.querySelector('.search input').blur(), distsim.timeline.canvas.focus()")
    page.key("n")
    assert page.run("document.querySelector('.search output').textContent").startswith(
        "2 of 4: rank "
    )


def test_a_copied_address_restores_the_view_the_call_and_the_search(
    page: browser.Page, hybrid: Path
):
    opened(page, hybrid)
    page.run("distsim.model.find('rank:1'), distsim.model.choose(0, 3)")
    page.run("distsim.timeline.show({from: 1000000, to: 4000000})")
    page.wait("location.hash.includes('time=1000000-4000000')")
    address = page.run("location.href")
    page.send("Page.navigate", url="about:blank")
    page.send("Page.navigate", url=address)
    page.wait("document.documentElement?.dataset.ready === 'yes'")

    assert page.run("[distsim.timeline.view.from, distsim.timeline.view.to]") == [1e6, 4e6]
    assert page.run(CHOSEN) == 3
    assert page.run("document.querySelector('.search input').value") == "rank:1"


def test_all_controls_have_a_name_and_headings_have_no_gaps(page: browser.Page, hybrid: Path):
    opened(page, hybrid)
    page.run("distsim.model.choose(0, 1)")

    unnamed = "[...document.querySelectorAll('button, a, select, input, canvas[tabindex]')]"
    unnamed += ".filter((e) => !(e.innerText || e.getAttribute('aria-label') || '').trim())"
    assert page.run(f"{unnamed}.map((e) => e.outerHTML)") == []
    levels = page.run("[...document.querySelectorAll('h1, h2, h3, h4')].map((h) => +h.tagName[1])")
    gaps = [pair for pair in itertools.pairwise(levels) if pair[1] > pair[0] + 1]
    assert gaps == []
    page.run("document.querySelector('.skip').click()")
    assert page.run("document.activeElement.tagName") == "MAIN"


LLAMA = """
name: llama
world: {{nodes: {nodes}, ranks_per_node: 8}}
backend: nccl
cluster: dgx-h100
mesh: {{pp: 8, dp: {dp}, tp: 8}}
program:
  - transformer: {{model: llama3-70b, sequence: 8192, micro_batches: 8, zero: 1}}
"""


@pytest.mark.parametrize("nodes", [128, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_report_of_thousands_of_ranks_takes_at_most_two_seconds_of_page_time(
    page: browser.Page, tmp_path: Path, nodes: int
):
    """Time of the page's own thread, so that what else the machine does counts little."""
    text = LLAMA.format(nodes=nodes, dp=nodes // 8)
    simulation = simulate(loads(text, "a.yaml", ()))
    path = tmp_path / "large.html"
    path.write_text(report_html([report_run_from_simulation(simulation)]), encoding="utf-8")
    page.send("Performance.enable", timeDomain="threadTicks")
    opened(page, path)
    metrics = page.send("Performance.getMetrics")["metrics"]
    seconds = {one["name"]: one["value"] for one in metrics}

    assert path.stat().st_size < 3_000_000
    assert page.run("distsim.timeline.lines.length") == 8
    assert seconds["TaskDuration"] < 2
    assert (page.said, len(page.requests)) == ([], 1)


@pytest.mark.slow
@pytest.mark.skipif(not AXE.exists(), reason="`npm ci` was not run in tests/web")
def test_reports_have_no_violation_that_axe_finds(page: browser.Page, tmp_path: Path):
    """A completed run, a hang and a folded run: with a selected call, all texts open, both themes."""
    folded = simulate(loads(LLAMA.format(nodes=128, dp=16), "a.yaml", ()))
    hang = simulate(load(str(ROOT / "scenarios" / "ring_of_four.yaml")))
    completed = simulate(load(str(ROOT / "scenarios" / "hybrid.yaml")))
    found = {}
    for name, simulation in (("ok", completed), ("hang", hang), ("folded", folded)):
        path = tmp_path / f"{name}.html"
        path.write_text(report_html([report_run_from_simulation(simulation)]), encoding="utf-8")
        opened(page, path)
        page.theme("dark" if simulation is hang else "light")
        page.run(f"{AXE.read_text(encoding='utf-8')};0")
        page.run("document.querySelectorAll('details').forEach((text) => { text.open = true; })")
        page.run("distsim.timeline.canvas.focus()")
        page.key("ArrowDown")
        page.key("]")
        found[name] = page.run(VIOLATIONS)
    page.theme("light")

    assert found == {"ok": [], "hang": [], "folded": []}


def test_mouse_and_touch_move_and_zoom_the_timeline(page: browser.Page, hybrid: Path):
    opened(page, hybrid)
    left, top, width, height = page.run(
        "(() => { const b = distsim.timeline.canvas.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
    )
    x, y = left + width / 2, top + height / 2
    whole = page.run(WIDTH)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)
    page.wait(f"{WIDTH} < {whole * 0.5}")
    before = page.run("distsim.timeline.view.from")
    page.drag((x, y), (x - 100, y))

    assert page.run("distsim.timeline.view.from") > before
    page.drag(
        (left + width * 0.4, top + 8), (left + width * 0.5, top + 8)
    )  # on the axis: that stretch
    assert page.run(WIDTH) < whole * 0.1


def test_both_themes_a_narrow_window_and_print_are_drawn_without_messages(
    page: browser.Page, hybrid: Path
):
    opened(page, hybrid)
    light = page.run("distsim.timeline.back")
    page.theme("dark")
    page.wait(f"distsim.timeline.back !== {light!r}")
    page.size(420, 800)
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    overflow = page.run(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    page.theme("light", media="print")
    printed = len(page.send("Page.printToPDF")["data"])
    page.theme("light")
    page.size(1280, 900)

    assert overflow <= 0
    assert printed > 20_000
    assert page.said == []


def test_a_cycle_is_drawn_as_one_and_links_to_its_calls(page: browser.Page, tmp_path: Path):
    opened(page, written(tmp_path / "ring.html", "ring_of_four"))

    assert page.run("document.querySelectorAll('.graph .core').length") == 4
    assert page.run("document.querySelectorAll('.graph .edge').length") == 4
    # Nothing ran: a critical path or curves of bandwidth would be empty cards.
    assert page.run("['path', 'collectives'].filter((id) => document.getElementById(id))") == []
    page.run("document.querySelector('#waits button').click()")
    told = page.run("document.querySelector('.details').innerText")
    assert "Why this call never returns" in told
    assert "a wait-for cycle" in told
    assert (
        page.run("document.querySelector('.lines .marked').innerText").split(maxsplit=1)[0] == "11"
    )


def test_hostile_names_are_escaped_in_the_browser(page: browser.Page, tmp_path: Path):
    name = "</script><img src=x onerror=alert(1)>" + "名" * 5000
    text = f"""
name: '{name}'
world: 2
backend: gloo
tensors: {{x: {{shape: [4]}}}}
program:
  - compute: {{name: '{name}', time: 1 ms}}
  - all_reduce: x
"""
    path = tmp_path / "hostile.html"
    path.write_text(
        report_html([report_run_from_simulation(simulate(loads(text, "a.yaml", ())))]),
        encoding="utf-8",
    )
    opened(page, path)
    page.run("distsim.model.choose(0, 0)")

    assert page.run("document.images.length") == 0
    assert (
        page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    )
    assert (page.said, page.requests) == ([], [path.resolve().as_uri()])


STEPS = """
name: steps
world: {nodes: 2, ranks_per_node: 2}
backend: gloo
memory: {model: {parameters: 1 GiB, activations: 3 GiB}}
tensors: {x: {shape: [1024]}}
iterations: 50
program:
  - compute: {name: forward, time: 2 ms}
  - compute: {name: backward, time: 4 ms}
  - all_reduce: x
"""


def test_equal_steps_share_a_line_traffic_has_bytes_and_memory_has_a_curve(
    page: browser.Page, tmp_path: Path
):
    path = tmp_path / "steps.html"
    path.write_text(
        report_html([report_run_from_simulation(simulate(loads(STEPS, "a.yaml", ())))]),
        encoding="utf-8",
    )
    opened(page, path)

    steps = page.run(
        "[...document.querySelectorAll('#steps tbody tr')].map((one) => one.innerText)"
    )
    assert len(steps) == 1
    assert steps[0].split("\t")[:2] == ["0 to 49", "× 50"]
    assert page.run("document.querySelector('#path tbody tr').innerText.includes('× 50')")
    page.run("document.querySelector('#steps tbody tr').click()")
    assert page.run(WIDTH) < page.run("distsim.model.end") / 40

    # a ring of 4: each rank sends 6 quarters of 4 KiB to the next, 50 times
    pairs = page.run(
        "[...document.querySelectorAll('#groups tbody tr')].map((one) => one.innerText.split('\\t').slice(0, 3))"
    )
    assert pairs == [[str(r), str((r + 1) % 4), "300 KiB"] for r in range(4)]
    assert page.run("document.querySelectorAll('#groups .matrix .on').length") == 4

    words = page.run(
        "[...document.querySelectorAll('#memory .filled text')].map((one) => one.textContent)"
    )
    assert {"parameters 1 GiB", "activations up to 3 GiB", "4 GiB"} <= set(words)
    assert "step 0 of 50, × 50 identical" in page.run("document.querySelector('#memory').innerText")
    assert page.said == []


def test_reports_of_a_check_a_trace_and_a_comparison_open_without_messages(
    page: browser.Page, tmp_path: Path, cli: Cli
):
    scenario, trace = ROOT / "scenarios" / "hybrid.yaml", tmp_path / "run.jsonl"
    cli("simulate", scenario, "--trace", trace)
    cli("check", ROOT / "scenarios" / "ring_of_four.yaml", "--report", tmp_path / "check.html")
    cli("report", trace, "-o", tmp_path / "trace.html")
    cli("compare", scenario, trace, "--report", tmp_path / "compare.html")

    opened(page, tmp_path / "check.html")
    assert "gloo" in page.run("document.querySelector('#overview').innerText")
    assert page.run("document.querySelectorAll('#waits .graph .core').length") == 4
    opened(page, tmp_path / "trace.html")
    assert (
        page.run("document.querySelector('#overview').innerText").count("Times are recorded times")
        == 1
    )
    opened(page, tmp_path / "compare.html")
    assert (
        page.run("distsim.model.runs.length")
        == page.run("document.querySelectorAll('header.verdict').length")
        == 2
    )
    assert page.run("distsim.timeline.lines.length") == 8
    assert (page.said, len(page.requests)) == ([], 1)


@pytest.mark.slow
def test_reports_of_a_capture_and_of_a_real_run_open_without_messages(
    page: browser.Page, tmp_path: Path, cli: Cli
):
    script = tmp_path / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    captured = cli(
        "capture",
        "--nproc",
        "2",
        "--report",
        tmp_path / "captured.html",
        "--",
        sys.executable,
        script,
    )
    run = (
        "run",
        ROOT / "scenarios" / "hybrid.yaml",
        "--real",
        "--backend",
        "gloo",
        "--report",
        tmp_path / "real.html",
    )
    real = cli(*run)

    assert (captured.returncode, real.returncode) == (0, 0)
    opened(page, tmp_path / "captured.html")
    assert "all_reduce(x)" in page.run("document.querySelector('.source').innerText")
    page.run("distsim.model.choose(0, distsim.model.runs[0].first[1] - 1)")
    assert "line 4" in page.run("document.querySelector('.details').innerText")
    opened(page, tmp_path / "real.html")
    assert page.run(
        "[...document.querySelectorAll('header.verdict h1')].map((one) => one.innerText)"
    ) == [
        "A hybrid, for real",
        "B hybrid, simulated",
    ]
    assert "Recorded on torch.distributed with gloo" in page.run(
        "document.querySelector('#overview').innerText"
    )
    assert page.said == []


TRAIN = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1024) * dist.get_rank()
dist.all_reduce(x)
"""
HEAVY = """
name: heavy
world: {nodes: 8, ranks_per_node: 8}
backend: gloo
jitter: 0.3
tensors: {x: {shape: [4096]}, y: {like: x}}
program:
  - repeat:
      times: 1000
      index: i
      steps:
        - compute: {name: forward, time: 1 ms}
        - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}
        - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}
        - wait: {handles: [s, r]}
        - all_reduce: {tensor: x}
"""


@pytest.mark.slow
def test_panning_64_ranks_with_5000_calls_takes_at_most_33_ms_per_frame(
    page: browser.Page, tmp_path: Path
):
    """Time of the page's own thread, so that what else the machine does counts little."""
    simulation = simulate(loads(HEAVY, "a.yaml", ()), with_verdict=False, with_values=False)
    path = tmp_path / "heavy.html"
    path.write_text(report_html([report_run_from_simulation(simulation)]), encoding="utf-8")
    opened(page, path)
    page.send("Performance.enable", timeDomain="threadTicks")

    def spent_ms() -> float:
        return next(
            1000 * one["value"]
            for one in page.send("Performance.getMetrics")["metrics"]
            if one["name"] == "TaskDuration"
        )

    for closer in (1, 8, 200, 5000):
        page.run(
            f"distsim.timeline.show({{from: 0, to: distsim.model.end / {closer}}}), distsim.timeline.paint()"
        )
        frames = []
        for _ in range(15):
            before = spent_ms()
            page.run("distsim.timeline.pan(0.013), distsim.timeline.paint()")
            frames.append(spent_ms() - before)
        assert sorted(frames)[len(frames) // 2] <= 33, f"at {closer}: {frames}"
