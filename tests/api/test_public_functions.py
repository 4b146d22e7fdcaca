"""The public functions answer as the commands do, and their results are short to look at."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

import distsim
from distsim.api.functions import FUNCTIONS
from distsim.api.results import PlanAnswer
from distsim.cli.application import application
from distsim.real.run import LauncherResult, RealRunOptions
from tests.support.harness import ROOT, Cli

HYBRID = ROOT / "scenarios" / "hybrid.yaml"
RING = ROOT / "scenarios" / "ring_of_four.yaml"
TRACE = next(iter(sorted((ROOT / "traces").glob("*.jsonl"))))
LONGEST_REPR = 200
FEW_LAYOUTS = {"tp": [2], "pp": [1], "micro_batch": [1]}


def json_of_command(cli: Cli, *words: object) -> Any:
    return json.loads(cli(*words, "--format", "json").stdout)


def without_file(data: dict[str, Any]) -> dict[str, Any]:
    """The command and the function name the file differently (relative and absolute)."""
    return {key: value for key, value in data.items() if key != "file"}


def test_every_public_name_loads_from_its_module() -> None:
    assert all(getattr(distsim, name) is not None for name in distsim.__all__)


def test_importing_a_module_does_not_hide_a_public_name() -> None:
    """``import distsim.x`` puts the module x into the package, where a function x would be lost."""
    modules = {module.name for module in pkgutil.iter_modules(distsim.__path__)}

    assert modules & set(distsim.__all__) == set()


def test_simulate_returns_what_the_command_reports(cli: Cli) -> None:
    answer = distsim.simulate(HYBRID)

    assert (answer.outcome, answer.verdict) == ("completes", "ok")
    assert without_file(answer.to_json()) == without_file(json_of_command(cli, "simulate", HYBRID))
    assert repr(answer) == "<SimulationAnswer: hybrid, 4 ranks, completes in 19.09 ms, verdict ok>"


def test_load_accepts_yaml_text() -> None:
    text = (
        "world: 2\ntensors: {x: {shape: [1], value: rank}}\nprogram:\n  - all_reduce: {tensor: x}\n"
    )

    assert distsim.simulate(text).outcome == "completes"
    assert distsim.check(distsim.load(text)).ok


def test_a_mapping_is_refused_with_a_remedy() -> None:
    with pytest.raises(distsim.UsageError, match="expected a scenario, found dict"):
        distsim.simulate({"world": 2})  # type: ignore[arg-type]


def test_check_reports_the_findings_of_a_hang(cli: Cli) -> None:
    answer = distsim.check(RING)
    (of_command,) = json_of_command(cli, "check", RING)["files"]

    assert (answer.verdict, answer.ok) == ("deadlock", False)
    assert answer.findings[0].code == "DS301"
    assert without_file(answer.to_json()) == without_file(of_command)


def test_check_of_a_trace_returns_what_the_command_reports(cli: Cli) -> None:
    (of_command,) = json_of_command(cli, "check", TRACE)["files"]

    assert without_file(distsim.check(TRACE).to_json()) == without_file(of_command)


def test_simulate_of_a_trace_returns_what_the_command_reports(cli: Cli) -> None:
    of_command = json_of_command(cli, "simulate", TRACE)

    assert without_file(distsim.simulate(TRACE).to_json()) == without_file(of_command)


@pytest.mark.parametrize("scenario", [HYBRID, RING], ids=["completes", "hangs"])
def test_a_result_is_ok_if_the_command_exits_with_0(cli: Cli, scenario: Path) -> None:
    assert distsim.simulate(scenario).ok == (cli("simulate", scenario).returncode == 0)
    assert distsim.check(scenario).ok == (cli("check", scenario).returncode == 0)
    assert distsim.report(scenario).ok == (
        cli("report", scenario, "-o", "/dev/null").returncode == 0
    )


@pytest.mark.slow
def test_plan_returns_what_the_command_reports(cli: Cli) -> None:
    words = ("--gpus", "8", "--cluster", "dgx-h100", "--global-batch", "16", "--jobs", "1")
    restricted = [f"--restrict={key}={values[0]}" for key, values in FEW_LAYOUTS.items()]
    of_command = json_of_command(cli, "plan", "llama3-8b", *words, *restricted)
    answer = distsim.plan(
        "llama3-8b", gpus=8, cluster="dgx-h100", global_batch=16, jobs=1, choices=FEW_LAYOUTS
    )

    assert answer.to_json() == of_command


def test_plan_refuses_gpus_that_do_not_fill_whole_nodes_like_the_command(cli: Cli) -> None:
    words = ("--gpus", "12", "--cluster", "dgx-h100", "--global-batch", "16")
    of_command = cli("plan", "llama3-8b", *words)
    with pytest.raises(distsim.UsageError) as refused:
        distsim.plan("llama3-8b", gpus=12, cluster="dgx-h100", global_batch=16)

    assert of_command.returncode == 2
    assert str(refused.value).partition("\n")[0] in of_command.stderr


@pytest.mark.parametrize(
    "options",
    [{"choices": {"tpp": [1]}}, {"choices": {"zero": [7]}}, {"step": {"zero": 1}}],
    ids=["unknown field", "impossible value", "field that the layouts decide"],
)
def test_plan_refuses_impossible_choices(options: dict[str, Any]) -> None:
    with pytest.raises(distsim.UsageError):
        distsim.plan("llama3-8b", gpus=8, cluster="dgx-h100", global_batch=16, **options)


def test_sweep_returns_what_the_command_reports(cli: Cli) -> None:
    words = ("--grid", "backend=gloo,nccl", "--jobs", "1")
    answer = distsim.sweep(HYBRID, grid={"backend": ["gloo", "nccl"]}, jobs=1)

    assert answer.to_json() == json_of_command(cli, "sweep", HYBRID, *words)


def test_sweep_without_a_grid_is_refused_like_by_the_command(cli: Cli) -> None:
    with pytest.raises(distsim.UsageError, match="nothing to sweep"):
        distsim.sweep(HYBRID)

    assert "nothing to sweep" in cli("sweep", HYBRID).stderr


def test_compare_simulates_a_scenario_under_the_backend_of_the_trace(cli: Cli) -> None:
    answer = distsim.compare(TRACE, HYBRID)
    of_command = cli("compare", TRACE, HYBRID)

    assert answer.same == (of_command.returncode == 0)
    assert answer.to_text().strip() == of_command.stdout.strip()


def test_doctor_without_files_is_refused_like_by_the_command(cli: Cli) -> None:
    with pytest.raises(distsim.UsageError) as refused:
        distsim.doctor()

    assert str(refused.value).partition("\n")[0] in cli("doctor").stderr


def test_render_draws_an_operation_like_the_command(cli: Cli) -> None:
    words = ("--view", "operation", "--op", "all_gather", "--format", "dot")
    picture = distsim.render(view="operation", op="all_gather", format="dot")

    assert str(picture.content).strip() == cli("render", *words).stdout.strip()


def test_expand_writes_strategies_as_plain_calls() -> None:
    text = distsim.expand(ROOT / "scenarios" / "strategies" / "ddp.yaml")

    assert "all_reduce" in text
    assert distsim.simulate(text).outcome == "completes"


def test_plan_ranks_layouts_and_writes_the_best_as_a_scenario() -> None:
    answer = distsim.plan(
        "llama3-8b", gpus=8, cluster="dgx-h100", global_batch=16, jobs=1, choices=FEW_LAYOUTS
    )
    best = answer.best_scenario()

    assert answer.to_json()["layouts"]
    assert best is not None
    assert distsim.load(best).world.size == 8


def test_a_simulation_lists_what_other_orders_of_events_lead_to() -> None:
    """Rank 0 may exit before or after rank 1 has received its message."""
    text = (
        "world: 2\nbackend: gloo\ntensors: {x: {shape: [4]}}\nprogram:\n"
        "  - {isend: {tensor: x, dst: 1}, ranks: 0}\n  - {recv: {tensor: x, src: 0}, ranks: 1}\n"
    )

    assert set(distsim.simulate(text).to_json()["possible"]) == {"completes", "raises"}


def test_sweep_simulates_every_point() -> None:
    answer = distsim.sweep(HYBRID, grid={"backend": ["gloo", "nccl"]}, jobs=1)

    assert {row["backend"] for row in answer.rows} == {"gloo", "nccl"}
    assert answer.ok


def test_a_sweep_is_not_ok_if_no_point_completes() -> None:
    text = (
        'world: 2\ntensors: {x: {shape: [1]}}\nprogram:\n  - recv: {tensor: x, src: "1 - rank"}\n'
    )

    answer = distsim.sweep(text, grid={"backend": ["gloo"]}, jobs=1)

    assert [row["outcome"] for row in answer.rows] == ["hangs"]
    assert not answer.ok


def test_a_missing_file_of_measurements_is_a_usage_error(tmp_path: Path) -> None:
    scenario = "world: 2\ntensors: {x: {shape: [1]}}\nprogram:\n  - all_reduce: {tensor: x}\n"

    with pytest.raises(distsim.UsageError, match=r"cannot read .*none\.json"):
        distsim.render(scenario, view="bandwidth", measured=tmp_path / "none.json")


def test_doctor_finds_the_cause_of_a_recorded_hang() -> None:
    archive = ROOT / "tests" / "data" / "doctor" / "hangs" / "early_break.zip"

    assert distsim.doctor(archive).causes


def test_replay_and_compare_take_traces() -> None:
    answer = distsim.replay(TRACE)

    assert answer.outcome == "completes"
    assert distsim.compare(TRACE, TRACE).same


def test_a_replay_as_recorded_takes_its_cluster_as_an_argument_or_as_a_what_if() -> None:
    recorded, by_argument, by_what_if = (
        distsim.replay(TRACE, as_recorded=True, **options).raw.makespan_ns
        for options in ({}, {"cluster": "dgx-a100"}, {"what_if": ["cluster=dgx-a100"]})
    )

    assert by_argument == by_what_if != recorded


def test_a_picture_and_a_report_are_saved(tmp_path: Path) -> None:
    picture = distsim.render(HYBRID, format="dot")
    page = distsim.report(distsim.simulate(HYBRID))

    assert picture.save(tmp_path / "hybrid.dot").read_text(encoding="utf-8") == picture.content
    assert page.save(tmp_path / "hybrid.html").read_text(encoding="utf-8").startswith("<!")


def test_capture_judges_a_script(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "sum.py"
    script.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n",
        encoding="utf-8",
    )
    answer = distsim.capture([sys.executable, str(script)], nproc=2)

    assert (answer.outcome, answer.verdict) == ("completes", "ok")


def test_a_missing_script_is_a_user_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(distsim.UsageError):
        distsim.capture([sys.executable, str(tmp_path / "missing.py")], nproc=2)


@pytest.mark.parametrize("ask", [distsim.simulate, distsim.check, distsim.shrink, distsim.fix])
def test_a_misspelt_backend_is_a_user_error(ask: Any) -> None:
    with pytest.raises(distsim.UsageError, match="did you mean nccl"):
        ask(HYBRID, backend="ncll")


def test_run_real_records_a_run() -> None:
    pytest.importorskip("torch")
    answer = distsim.run_real(ROOT / "scenarios" / "send_one.yaml", backend="gloo")

    assert len(answer.trace)


def test_run_real_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RealRunOptions] = []

    def run_scenario(scenario: object, options: RealRunOptions) -> LauncherResult:
        asked.append(options)
        run: Any = object()
        return LauncherResult(run, 0)

    monkeypatch.setattr("distsim.real.run.run_scenario", run_scenario)
    distsim.run_real(RING)
    distsim.run_real(RING, backend="gloo", device="cpu", repeat=3, timeout_s=2.5, force=True)

    assert asked[0] == RealRunOptions(timeout_ns=10 * 10**9)
    assert asked[1] == RealRunOptions(
        backend="gloo", device="cpu", repeat=3, timeout_ns=2_500_000_000, force=True
    )


#: `render` takes the format from the suffix of its output.
OTHER_DEFAULTS = {("render", "format")}


def test_defaults_of_functions_are_those_of_the_commands() -> None:
    commands = get_command(application()).commands  # type: ignore[attr-defined]
    names = {function: function.__name__.removesuffix("_real") for function in FUNCTIONS}
    compared = 0
    for function, name in names.items():
        options = (
            {one.name: one.default for one in commands[name].params} if name in commands else {}
        )
        for one in inspect.signature(function).parameters.values():
            default = options.get(one.name)
            if (
                default is None
                or one.default in (one.empty, None)
                or (name, one.name) in OTHER_DEFAULTS
            ):
                continue
            assert type(one.default)(getattr(default, "value", default)) == one.default, one
            compared += 1
    assert compared >= 10


def test_no_repr_is_longer_than_two_lines() -> None:
    answers = [distsim.simulate(HYBRID), distsim.check(RING), distsim.replay(TRACE)]

    assert [repr(answer) for answer in answers if len(repr(answer)) > LONGEST_REPR] == []


def test_notebooks_show_the_report_as_html() -> None:
    page = distsim.check(RING)._repr_html_()
    tags = set(re.findall(r"</?(\w+)", page))

    assert page.startswith('<div class="distsim">')
    assert tags <= {"div", "section", "h4", "pre", "table", "thead", "tbody", "tr", "th", "td"}


def test_tables_become_data_frames() -> None:
    pytest.importorskip("pandas")
    ranks = distsim.simulate(HYBRID).to_pandas()

    assert list(ranks["rank"]) == [0, 1, 2, 3]
    assert distsim.check(RING).to_pandas()["code"].iloc[0] == "DS301"


def test_missing_pandas_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(distsim.DistsimError, match="needs pandas"):
        distsim.simulate(HYBRID).to_pandas()


def test_the_summary_of_a_plan_names_the_fastest_layout_or_says_that_none_fits() -> None:
    layout = SimpleNamespace(label=lambda: "dp 8")
    fits = SimpleNamespace(best=SimpleNamespace(layout=layout), ranked=[layout, layout])
    nothing_fits = SimpleNamespace(best=None, ranked=[])

    assert repr(PlanAnswer(fits, {})) == "<PlanAnswer: 2 layouts fit, fastest dp 8>"
    assert repr(PlanAnswer(nothing_fits, {})) == "<PlanAnswer: no layout fits>"


_LIMITED_READING = """
import threading, distsim
text = f"vars: {{x: {[0] * 20_000}}}\\n"
try:
    with distsim.limited_reading():
        distsim.load(text)
except distsim.UsageError as error:
    print(error.message)
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    distsim.limited_reading()
except distsim.UsageError as error:
    print(error.message)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits data")
def test_limited_reading_refuses_a_hostile_file_and_a_process_with_threads():
    environment = {**os.environ, "DISTSIM_READ_LIMITS": "1e-7"}
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED_READING], env=environment, capture_output=True, text=True
    )

    assert done.stderr == ""
    refused, with_threads = done.stdout.splitlines()
    assert refused.startswith("<text>: reading takes more than")
    assert with_threads == "limited_reading cannot fork a process with 2 threads"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_no_function_waits_for_the_writer_of_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distsim.common import file_io

    monkeypatch.setattr(file_io, "READ_TIMEOUT_S", 0.1)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for read in (distsim.simulate, distsim.replay, distsim.slow):
        with pytest.raises(distsim.DistsimError):
            read(pipe)
