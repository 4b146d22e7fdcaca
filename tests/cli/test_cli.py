"""The command line as a user meets it: a process, its two streams and its exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.cli.generate_docs import all_pages
from distsim.cli.shared import console
from distsim.scenario import load
from distsim.simulation.simulate_scenario import simulate

HEAVY = (
    "torch",
    "networkx",
    "scipy",
    "pygraphviz",
    "graphviz",
    "simpy",
    "numpy",
    "yaml",
    "pydantic",
    "rich",
    "ml_dtypes",
)
#: What a plain `distsim simulate` does without.
UNUSED = (
    *("torch", "networkx", "scipy", "pygraphviz", "graphviz", "simpy", "rich", "ml_dtypes"),
    *(
        "joblib",
        "optuna",
        "pyarrow",
        "pandas",
        "distributed",
        "typst",
        "asyncio",
        "multiprocessing",
        "http",
        "ssl",
        "xml",
        "sqlite3",
    ),
    *("numpy.random", "numpy.fft", "numpy.ma", "numpy.polynomial", "numpy.testing", "pydantic.v1"),
    *(
        f"distsim.{part}"
        for part in (
            "hang_doctor",
            "output.page",
            "planning",
            "real",
            "repair",
            "script_capture",
            "testing",
        )
    ),
    *(
        f"distsim.{part}"
        for part in (
            "analysis.compare",
            "scenario.startup",
            "trace.jsonl",
            "simulation.trace_replay",
            "values",
        )
    ),
    *(f"distsim.simulation.{part}" for part in ("training_metrics", "what_if")),
    *(
        f"distsim.{part}"
        for part in ("engine.link_overlap", "engine.timeout_check", "semantics.local.class_clocks")
    ),
    *(
        f"distsim.checker.{part}"
        for part in (
            *(
                "diagnosis.match_findings",
                "diagnosis.nondeterminism",
                "matching.channel_layout",
                "reading_run",
            ),
            *("detectors.buffer_races", "detectors.one_sided_races", "detectors.request_leaks"),
            *("detectors.swapped_collectives", "detectors.swapped_messages"),
        )
    ),
)
COMMANDS = (
    *("simulate", "check", "run", "replay", "compare", "bench", "calibrate"),
    *("capture", "doctor", "slow", "shrink", "demo", "learn", "plan", "sweep", "report"),
    *("render", "explain", "test", "expand", "schema", "clusters", "new", "mcp"),
)


def test_help_lists_exactly_the_existing_commands(cli):
    found = cli("--help")

    assert found.returncode == 0
    assert sorted(
        re.findall(r"^  ([a-z]+)  ", found.stdout.partition("Predict:")[2], re.MULTILINE)
    ) == sorted(COMMANDS)
    assert re.findall(r"^(\w[\w ]+):$", found.stdout, re.MULTILINE)[-6:] == [
        "Predict",
        "Plan",
        "Real runs",
        "Diagnose",
        "Write scenarios",
        "Learn and look up",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_in_80_columns_with_a_runnable_example(name):
    found = CliRunner(env={"COLUMNS": "80"}).invoke(application(), [name, "--help"])

    assert found.exit_code == 0
    assert f"Example: distsim {name}" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 80


def test_help_imports_no_heavy_library():
    """What keeps `--help` under a quarter of a second; a time itself would depend on the
    machine.
    """
    code = (
        "import sys\nfrom distsim.__main__ import main\nsys.argv = ['distsim', '--help']\n"
        f"try: main()\nexcept SystemExit: print(*[m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert found.stderr.strip() == ""


def test_simulate_imports_only_libraries_and_modules_that_it_uses(tmp_path):
    """What a start costs is what it loads: of a plain file neither a heavy library nor the parts of
    other commands.
    """
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "name: tiny\nworld: 2\ntensors: {x: {shape: [4]}}\nprogram:\n  - all_reduce: {tensor: x}\n",
        encoding="utf-8",
    )
    code = (
        f"import sys\nfrom distsim.__main__ import main\nsys.argv = ['distsim', 'simulate', {str(file)!r}]\n"
        f"try: main()\nexcept SystemExit: print(*[m for m in {UNUSED} if m in sys.modules], file=sys.stderr)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert found.stdout.startswith("tiny: completes in ")
    assert found.stderr.strip() == ""


@pytest.mark.parametrize("kind", ["plain", "ring", "ddp", "pipeline"])
def test_new_writes_a_scenario_that_meets_its_expectations_and_never_overwrites(
    cli, tmp_path, kind
):
    file = tmp_path / "mine.yaml"

    assert cli("new", file, "--kind", kind).returncode == 0
    assert cli("test", file).returncode == 0
    assert cli("new", file).returncode == 2
    assert file.read_text(encoding="utf-8").startswith("#")


def test_generated_pages_are_up_to_date(root):
    for page, text in all_pages().items():
        assert (root / "docs" / page).read_text(encoding="utf-8") == text, page


def test_version(cli):
    assert re.fullmatch(r"distsim \d+\.\d+\.\d+\n", cli("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulte",), "Did you mean 'simulate'?"),
        (("simulate",), "FILE"),
        (("simulate", "nowhere.yaml"), "nowhere.yaml"),
        (("simulate", "docs"), "docs"),
        (("explain", "al_gather"), "did you mean all_gather?"),
        (("clusters", "dgx-a10"), "did you mean dgx-a100?"),
        (("simulate", "scenarios/hybrid.yaml", "--backend", "ncl"), "nccl"),
        (("simulate", "scenarios/hybrid.yaml", "--set", "backend"), "backend"),
        (("simulate", "scenarios/hybrid.yaml", "--trace", "x.csv"), ".jsonl"),
        (("render", "scenarios/hybrid.yaml", "--view", "dataflo"), "dataflow"),
        (("test", "nowhere"), "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_usage_exits_with_2_and_an_explanation_instead_of_a_traceback(cli, arguments, said):
    found = cli(*arguments)

    assert found.returncode == 2
    assert said in found.stderr
    assert found.stdout == ""
    assert "Traceback" not in found.stderr


def test_explain_describes_every_operation_and_finding_that_it_lists(cli):
    from distsim.cli.commands.explain import explain_page

    listed = re.findall(r"^  (\w+) ", cli("explain").stdout, re.MULTILINE)

    assert len(listed) > 50
    for name in listed:
        text = explain_page(name)
        assert text.startswith(name)
        assert max(map(len, re.split(r"In a scenario|\nExample \(", text)[0].splitlines())) <= 80


def test_clusters_prints_a_preset_that_parses_to_the_same_preset(cli):
    import yaml

    from distsim.hardware.cluster import cluster_from, preset

    assert cluster_from(yaml.safe_load(cli("clusters", "dgx-a100").stdout)) == preset("dgx-a100")


def test_schema_is_a_json_schema_that_includes_the_operations(cli):
    import json

    text = cli("schema").stdout

    assert json.loads(text)["$schema"].startswith("https://json-schema.org/")
    assert "all_gather_into_tensor" in text


def test_an_internal_error_exits_with_3_and_a_traceback_only_with_debug():
    code = (
        "import sys\nimport distsim.cli.commands.explain as explain\nfrom distsim.__main__ import main\n"
        "def broken(name): return 1 // 0\nexplain.explain_page = broken\nmain()"
    )
    plain, debug = (
        subprocess.run(
            [sys.executable, "-c", code, *options, "explain", "send"],
            capture_output=True,
            text=True,
            check=False,
        )
        for options in ([], ["--debug"])
    )

    assert (plain.returncode, debug.returncode) == (3, 3)
    assert "internal error of distsim: ZeroDivisionError" in plain.stderr
    assert "Traceback" not in plain.stderr
    assert "Traceback" in debug.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes as POSIX has them")
def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "distsim", "explain"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()

    assert (process.returncode, said) == (141, "")


@pytest.mark.skipif(os.name != "posix", reason="signals and pipes as POSIX has them")
def test_ctrl_c_prints_one_line_and_no_traceback():
    """Standard input stays open, so the command waits in its read when the signal comes."""
    command = [sys.executable, "-m", "distsim", "simulate", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until_it_reads(process.pid)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)

    assert (process.returncode, said) == (130, "interrupted\n")


def wait_until_it_reads(pid: int) -> None:
    """Until the process waits for its standard input (Linux), or a second has passed."""
    for _ in range(100):
        time.sleep(0.05)
        try:
            if "poll" in Path(f"/proc/{pid}/wchan").read_text(encoding="ascii"):
                return
        except OSError:
            break
    time.sleep(1)


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    file = tmp_path / "out.txt"
    console.write_file(file, "one")
    console.write_file(file, "two")

    assert file.read_text(encoding="utf-8") == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]
    with pytest.raises(console_error(), match="cannot write"):
        console.write_file(tmp_path / "no" / "where.txt", "x")


def console_error() -> type[Exception]:
    from distsim.common.errors import UsageError

    return UsageError


def test_public_names_exist_and_are_sorted():
    import distsim

    assert dir(distsim) == sorted(distsim.__all__)
    assert all(getattr(distsim, name) is not None for name in distsim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = distsim.simulat


def test_a_simulation_reports_its_progress():
    told = []
    simulate(load("scenarios/hybrid.yaml"), tell=told.append)

    assert told == [
        "every rank's calls",
        "22 calls on 4 ranks in simulated time",
        "the verdict",
        "values",
    ]


@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
def test_long_work_shows_a_temporary_progress_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    """The line is drawn at once here; another stream than a terminal never sees one."""
    master, slave = os.openpty()
    shown = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(console, "PROGRESS_DELAY_S", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    with console.progress_phases() as tell:
        tell("the verdict")
        time.sleep(0.3)
    with console.progress_phases(shown=False) as tell:
        tell("nothing")
        time.sleep(0.05)
    shown.flush()
    text = os.read(master, 1 << 16).decode()

    assert "the verdict 0:00:00" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert text.endswith("\x1b[2K")
    assert "nothing" not in text
