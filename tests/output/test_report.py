"""The report's page: whole in one file, the same for the same run, and nothing of a run becomes
HTML or script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distsim.analysis.run_comparison import compare_runs
from distsim.cli.commands.run import RunArguments, _check_report_options
from distsim.cli.shared.html_report import check_report_path
from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters
from distsim.output.page import (
    report_html,
    report_run,
    report_run_from_simulation,
    report_run_from_trace,
    report_runs,
    run_summary,
)
from distsim.output.page.data_encoding import varint_bytes, zigzag_deltas, zigzag_encoded
from distsim.output.page.payload import animations
from distsim.output.text.simulation_report import simulation_report_text
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.simulation.training_metrics import training_metrics
from distsim.simulation.what_if import resource_speedups
from tests.support.harness import Cli
from tests.support.views_made import TWO_STAGE_TRAINING

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "distsim" / "output" / "page" / "web"
CHECKS = ROOT / "tests" / "web"


def simulated(text: str, file: str = "a.yaml") -> Simulation:
    return simulate(loads(text, file, ()))


PAIR = """
name: pair
world: 2
backend: gloo
tensors: {x: {shape: [4], value: rank + 1}}
program:
  - ranks: rank == 0
    steps: [{compute: {name: forward, time: 1 ms}}, {send: {tensor: x, dst: 1}}]
  - ranks: rank == 1
    steps: [{recv: {tensor: x, src: 0}}]
  - all_reduce: x
"""


def unpacked(page: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The page's data, read as `decode.js` reads it."""
    found = re.search(r'id="data">([^<]*)</script>', page)
    assert found is not None
    data = zlib.decompress(base64.b64decode(found[1]))
    length = int.from_bytes(data[:4], "little")
    head, at, columns = json.loads(data[4 : 4 + length]), 4 + length, {}
    for name, count, size in head["columns"]:
        columns[name] = numbers(data[at : at + size])
        assert len(columns[name]) == count
        at += size
    assert at == len(data)
    return head, columns


def numbers(data: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(value)
            value = shift = 0
    return found


def unfolded(value: int) -> int:
    return -(value + 1) // 2 if value % 2 else value // 2


def test_numbers_of_any_size_survive_packing():
    given = np.array([0, 1, 127, 128, 300, 2**31, 2**61], dtype=np.int64)
    signed = np.array([0, -1, 1, -(2**40), 2**40], dtype=np.int64)

    assert numbers(varint_bytes(given)) == given.tolist()
    assert numbers(varint_bytes(np.empty(0, dtype=np.int64))) == []
    assert [unfolded(v) for v in zigzag_encoded(signed).tolist()] == signed.tolist()
    assert (
        np.cumsum([unfolded(v) for v in zigzag_deltas(signed).tolist()]).tolist() == signed.tolist()
    )


def test_the_page_has_every_call_with_its_times_cost_and_tensor_contents():
    simulation = simulated(PAIR)
    head, columns = unpacked(report_html([report_run_from_simulation(simulation)]))
    (run,) = head["runs"]
    trace = simulation.run.trace

    assert columns["0.rank"] == [3, 2]
    posted = np.cumsum([unfolded(v) for v in columns["0.posted"]]).tolist()
    assert posted == trace["posted_ns"].tolist()
    started = [
        p + unfolded(v - 1) if v else -1 for p, v in zip(posted, columns["0.started"], strict=True)
    ]
    assert started == trace["started_ns"].tolist()
    assert [run["tables"]["op"][v - 1] for v in columns["0.op"]] == [
        "compute",
        "send",
        "all_reduce",
        "recv",
        "all_reduce",
    ]
    prices = [run["prices"][v - 1] if v else None for v in columns["0.price"]]
    assert prices[0] is None
    assert (
        prices[1]["ns"]
        == sum(ns for _, _, ns in prices[1]["terms"])
        == simulation.cost.p2p_ns(0, 1, 16)
    )
    assert prices[2]["ns"] == sum(ns for _, _, ns in prices[2]["terms"])
    held = {run["holdings"]["texts"][v] for v in columns["0.held_text"]}
    assert held == {"[1.0, 1.0, 1.0, 1.0]", "[2.0, 2.0, 2.0, 2.0]"}
    assert run["headline"].startswith("completes in ")
    assert run["verdict"]["word"] == "ok"


def test_the_page_loads_nothing_and_forbids_other_scripts():
    page = report_html([report_run_from_simulation(simulated(PAIR))])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]

    assert policy is not None
    assert (
        policy[1]
        == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(digests)}"
    )
    assert (
        re.findall(r"<(?:link|img|iframe|script|a)\b[^>]*(?:href|src)=\"(?!data:)[^\"]*\"", page)
        == []
    )
    assert "@import" not in page


def test_the_same_run_gives_the_same_page():
    assert report_html([report_run_from_simulation(simulated(PAIR))]) == report_html(
        [report_run_from_simulation(simulated(PAIR))]
    )


@pytest.mark.parametrize(
    "name",
    [
        "</script><script>alert(1)</script>",
        "a\u2028b\u202ec",
        "\"'<img src=x onerror=1>",
        "名前",
        "x" * 10_000,
    ],
)
def test_names_in_the_page_are_escaped(name: str):
    """A scenario's, a group's and a compute's name, whatever they are, are no part of the page's
    HTML but as escaped text.
    """
    text = PAIR.replace("name: pair", f"name: {json.dumps(name)}").replace(
        "name: forward", f"name: {json.dumps(name)}"
    )
    page = report_html([report_run_from_simulation(simulated(text))])
    head, _ = unpacked(page)

    assert {name, escape_control_characters(name)} & set(head["runs"][0]["tables"]["name"])
    assert head["runs"][0]["name"] in (name, escape_control_characters(name))
    without_scripts = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert without_scripts.count("<script") == 1  # the data
    assert "<img" not in page
    assert "\u202e" not in without_scripts
    assert "\u2028" not in without_scripts
    assert len(page) < 300_000


def test_files_are_embedded_only_if_they_may_contain_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A trace may name any file; a secret file next to the trace is not read."""
    from distsim.output.page.payload import source_texts

    inside, outside = tmp_path / "here", tmp_path / "there"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "train.py").write_text("import torch\n", encoding="utf-8")
        (folder / "secret.txt").write_text("key\n", encoding="utf-8")
    monkeypatch.chdir(inside)
    named = [
        "train.py",
        "secret.txt",
        str(outside / "train.py"),
        "../there/train.py",
        "no\0name.py",
        "gone.py",
    ]

    assert source_texts("run.jsonl", named) == {"train.py": "import torch\n"}


def test_two_runs_are_shown_side_by_side_with_their_differences():
    a, b = simulated(PAIR), simulated(PAIR.replace("1 ms", "2 ms"))
    found = compare_runs(a.run.trace, b.run.trace)
    head, columns = unpacked(
        report_html([report_run_from_simulation(a), report_run_from_simulation(b)], found)
    )

    assert [run["makespan"] for run in head["runs"]] == [a.makespan_ns, b.makespan_ns]
    assert (
        sum(cause["delta_ns"] for cause in head["comparison"]["causes"])
        == b.makespan_ns - a.makespan_ns
        == 1_000_000
    )
    assert len(columns["pair_a"]) == len(columns["pair_b"]) == 5


def test_a_hang_is_reported_with_the_ranks_that_each_rank_waits_for():
    simulation = simulated(
        PAIR.replace("recv: {tensor: x, src: 0}", "recv: {tensor: x, src: 0, tag: 5}")
    )
    head, _ = unpacked(report_html([report_run_from_simulation(simulation)]))
    waits = head["runs"][0]["waits"]

    assert {
        rank: [waits["sets"][need[2]] for need in needs]
        for rank, _, _, _, needs in waits["blocked"]
    } == {0: [[1]], 1: [[0]]}
    assert head["runs"][0]["findings"]


def test_a_recording_keeps_its_times_and_gets_a_verdict_on_its_calls():
    simulation = simulated(PAIR)
    trace = simulation.run.trace
    alone = unpacked(report_html([report_run_from_trace(trace, "run.jsonl", None)]))[0]["runs"][0]
    judged = unpacked(report_html([report_run_from_trace(trace, "run.jsonl", simulation)]))[0][
        "runs"
    ][0]

    assert (alone["verdict"], alone["note"]) == (
        None,
        "This is a recording. Its calls could not be checked.",
    )
    assert judged["verdict"]["word"] == "ok"
    assert judged["makespan"] == simulation.makespan_ns


def test_a_run_too_large_for_a_browser_is_refused_before_its_calls_are_processed(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(report_run, "MAX_ROWS", 4)

    with pytest.raises(UsageError, match="the run has 5 calls, but a report can show at most 4"):
        report_run_from_simulation(simulated(PAIR))


def test_the_head_shows_the_figures_of_the_text_report_and_the_breakdown_adds_up():
    simulation = simulated(TWO_STAGE_TRAINING)
    metrics = training_metrics(simulation)
    assert metrics is not None
    head, _ = unpacked(report_html([report_run_from_simulation(simulation)]))
    (run,) = head["runs"]
    figures = {name: value for name, value, _ in run["figures"]}
    shares = {name: share for name, _, share in run["breakdown"]}
    text = simulation_report_text(simulation)

    assert list(figures) == [
        *("time", "range", "tokens/s", "MFU", "bubble", "exposed comm", "memory")
    ]
    assert figures["range"] in text
    assert f"{figures['tokens/s'].replace(',', '')} tokens/s/GPU" in text
    assert f"bubble {figures['bubble']}" in text
    assert sum(shares.values()) == pytest.approx(1, abs=0.005)
    assert shares["backward"] == pytest.approx(metrics.shares["backward"])
    idle = sum(shares.get(name, 0) for name in ("host work, device idle", "waiting", "idle"))
    assert idle == pytest.approx(metrics.bubble, abs=0.001)


def test_a_report_lists_the_run_time_with_each_faster_resource_the_largest_effect_first(
    monkeypatch: pytest.MonkeyPatch,
):
    simulation = simulated(TWO_STAGE_TRAINING)
    head, _ = unpacked(report_html([report_run_from_simulation(simulation)]))
    times = [ns for _, ns in head["runs"][0]["speedups"]]

    expected = {one.resource: one.makespan_ns for one in resource_speedups(simulation)}
    assert dict(head["runs"][0]["speedups"]) == expected
    assert times == sorted(times)
    assert times[0] < simulation.makespan_ns
    monkeypatch.setattr(run_summary, "MAX_CALLS_FOR_SPEEDUPS", 1)
    head, _ = unpacked(report_html([report_run_from_simulation(simulation)]))
    assert head["runs"][0]["speedups"] == []


def test_the_head_of_a_run_without_a_model_shows_what_is_known():
    head, _ = unpacked(report_html([report_run_from_simulation(simulated(PAIR))]))
    (run,) = head["runs"]

    assert [name for name, *_ in run["figures"]] == ["time", "compute", "exposed comm", "waiting"]
    assert sum(share for *_, share in run["breakdown"]) == pytest.approx(1)
    hang = simulated("world: 2\nbackend: gloo\nprogram: [{ranks: 0, steps: [barrier]}]")
    head, _ = unpacked(report_html([report_run_from_simulation(hang)]))
    assert head["runs"][0]["figures"] == head["runs"][0]["breakdown"] == []


LARGE = """
name: large
world: {nodes: 128, ranks_per_node: 8}
backend: nccl
cluster: dgx-h100
mesh: {dp: 1024}
iterations: 100
tensors: {x: {shape: [1024]}}
program:
  - compute: {name: forward, time: 1 ms}
  - compute: {name: backward, time: 2 ms}
  - all_reduce: x
"""


def test_a_folded_run_is_shown_with_its_representative_ranks():
    simulation = simulated(LARGE)
    run = report_run_from_simulation(simulation)
    head, columns = unpacked(report_html([run]))
    (shown,) = head["runs"]

    assert simulation.program.call_count > report_run.MAX_ROWS_OF_ALL_RANKS
    assert sorted(rank for ranks in shown["classes"] for rank in ranks) == list(range(1024))
    representatives = [ranks[0] for ranks in shown["classes"]]
    assert np.flatnonzero(columns["0.rank"]).tolist() == representatives
    assert sum(columns["0.rank"]) == 300 * len(representatives)
    assert [times[0] for times in shown["ranks"]] == representatives
    assert shown["makespan"] == simulation.makespan_ns
    times = {times.rank: times for times in simulation.timeline.ranks}
    assert [tuple(row) for row in shown["ranks"]] == [times[rank] for rank in representatives]


def test_two_folded_runs_are_compared_if_their_ranks_have_the_same_representatives():
    first, second = simulated(LARGE), simulated(LARGE.replace("1 ms", "3 ms"))
    equal = report_runs([first, second])

    assert [run.representatives is None for run in equal] == [False, False]
    other = simulated(LARGE.replace("1 ms", "3 ms if rank < 512 else 1 ms"))
    assert [run.representatives is None for run in report_runs([first, other])] == [True, True]


def test_sixteen_ranks_with_two_thousand_irregular_calls_take_less_than_a_megabyte():
    text = """
name: irregular
world: {nodes: 2, ranks_per_node: 8}
backend: gloo
jitter: 0.3
tensors: {x: {shape: [4096]}, y: {like: x}}
program:
  - repeat:
      times: 400
      index: i
      steps:
        - compute: {name: forward, time: 1 ms}
        - isend: {tensor: x, dst: (rank + 1) % world_size, as: s}
        - irecv: {tensor: y, src: (rank - 1) % world_size, as: r}
        - wait: {handles: [s, r]}
        - all_reduce: {tensor: x}
"""
    simulation = simulate(loads(text, "a.yaml", ()), with_verdict=False, with_values=False)

    assert len(simulation.run.trace) == 32_000
    assert len(report_html([report_run_from_simulation(simulation)]).encode()) < 1_000_000


# --- the command line ---


def test_collectives_are_animated_with_each_of_their_algorithms_but_messages_are_not():
    scenario = loads(
        "world: 3\nbackend: gloo\ntensors: {x: {shape: [6]}}\nprogram:\n  - all_reduce: x\n"
        "  - {send: {tensor: x, dst: 1}, ranks: rank == 0}\n"
        "  - {recv: {tensor: x, src: 0}, ranks: rank == 1}\n"
    )

    found = animations(simulate(scenario, with_verdict=False).run.trace)

    assert {(entry["op"], entry["n"]) for entry in found} == {("all_reduce", 3)}
    assert {"ring", "tree"} <= {entry["algorithm"] for entry in found}


def test_commands_write_a_report_and_keep_their_exit_status(tmp_path: Path, cli: Cli):
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    made = cli("report", ROOT / "scenarios" / "send_one.yaml", "-o", good)
    hangs = cli("check", ROOT / "scenarios" / "ring_of_four.yaml", "--report", bad)

    assert (made.returncode, made.stdout, made.stderr) == (0, "", f"wrote {good}\n")
    assert hangs.returncode == 1
    assert unpacked(bad.read_text(encoding="utf-8"))[0]["runs"][0]["profiles"][0][:2] == [
        "gloo",
        "hangs",
    ]


def test_a_trace_can_be_reported_and_compared(tmp_path: Path, cli: Cli):
    scenario, trace, both = (
        ROOT / "scenarios" / "send_one.yaml",
        tmp_path / "a.jsonl",
        tmp_path / "both.html",
    )
    cli("simulate", scenario, "--trace", trace, "--report", tmp_path / "a.html")

    assert cli("report", trace, "-o", tmp_path / "b.html").returncode == 0
    assert cli("compare", trace, scenario, "--report", both).returncode == 0
    assert len(unpacked(both.read_text(encoding="utf-8"))[0]["runs"]) == 2


def test_an_unwritable_report_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(UsageError, match="must end in"):
        check_report_path(tmp_path / "a.pdf")
    with pytest.raises(UsageError, match="does not exist"):
        check_report_path(tmp_path / "no" / "a.html")
    with pytest.raises(UsageError, match="prints a launch plan"):
        _check_report_options(RunArguments("a.yaml", report=tmp_path / "a.html"))


# --- the script ---


def test_scripts_of_the_page_share_one_scope_without_duplicate_names():
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(WEB.glob("*.js"))}
    named = Counter(
        name
        for text in texts.values()
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE
        )
    )

    assert {name for name, count in named.items() if count > 1} == set()
    assert [name for name, text in texts.items() if len(text.splitlines()) > 400] == []
    assert [
        name
        for name, text in texts.items()
        if re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|fetch\(|XMLHttp", text)
    ] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here")
def test_the_tests_of_the_script_pass():
    done = subprocess.run(
        ["node", "--test", str(CHECKS)], capture_output=True, text=True, cwd=ROOT, check=False
    )

    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(
    not (CHECKS / "node_modules" / ".bin" / "tsc").exists(),
    reason="`npm ci` was not run in tests/web",
)
def test_the_script_passes_lint_and_type_checks():
    done = subprocess.run(
        ["npm", "run", "check"], capture_output=True, text=True, cwd=CHECKS, check=False
    )

    assert done.returncode == 0, done.stdout[-3000:]
