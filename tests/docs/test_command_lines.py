"""Every command line that README and docs show: its command and options exist, and it runs.

The quick ones run in this process, in a folder that holds what they name; those that start
processes or take long have the mark `slow`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.real.bench.measurement import BenchResult, BenchRow, bench_to_json
from distsim.trace.recordings.read_recording import SAMPLE
from tests.real.test_calibrate import LOG
from tests.support.command_lines import ROOT, Line, frames, spans

SCRIPT = """import argparse
import torch
import torch.distributed as dist
argparse.ArgumentParser().parse_known_args()
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
dist.destroy_process_group()
"""
ANY_SOURCE = """world: 3
tensors: {x: {shape: [1]}}
program:
  - {send: {tensor: x, dst: 0}, ranks: [1, 2]}
  - {recv: {tensor: x}, ranks: 0}
  - {recv: {tensor: x, src: 1}, ranks: 0}
"""
ON_A_MESH = "world: 8\nmesh: {dp: 2, tp: 4}\ntensors: {x: {shape: [4]}}\nprogram:\n  - all_reduce: {tensor: x, group: tp}\n"
#: Lines that are not run here -> why not.
ASIDE = {
    r"python3 -m venv": "makes an environment from the network; `.ci/run` does it",
    r"-m pytest": "is this suite",
    r"doctor --(torchrun|live)": "needs a live launcher; tests/hang_doctor/test_live.py has one",
    r"--backend nccl$|--device cuda|nccl\.sh": "needs a GPU",
    r"distsim run scenarios/hybrid.yaml --real --trace": "needs a GPU: the file says nccl",
    r"support\.(archive|mutation)": "records or changes the whole project: minutes to hours",
    r"support\.(made_docs|notebooks|(scenario|command)_outputs|(price|outcome)_table)|viz/make|cli\.generate_docs": "writes into the project; tests compare it all",
    r"benchmarks/doctor.py|benchmarks/smpi.py": "needs arguments, or SimGrid",
}
#: Lines that start processes, or take longer than a second or two.
SLOW = re.compile(
    r"--real|capture|bench\b|benchmarks/|capture --|scenarios/ |scenarios/$|shrink|--fix|--diff|llama3|doctor_does"
)
LINES = frames()
RUN = [line for line in LINES if not any(re.search(pattern, line.text) for pattern in ASIDE)]
QUICK = [line for line in RUN if not SLOW.search(line.text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the lines name: the scenarios, a script, traces, what a hung job left, logs, a
    measurement.
    """
    here = tmp_path_factory.mktemp("lines")
    for line in RUN:
        for name in re.findall(r"scenarios/[\w/]+\.yaml", line.text):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, here / name)
    for name in ("docs", "tests", "benchmarks", "viz"):
        (here / name).symlink_to(ROOT / name)
    for name in ("train.py", "t.py", "script.py", "package/train.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(SCRIPT, encoding="utf-8")
    for name in ("all_reduce_perf.log", "nccl_allreduce.log", "nccl_alltoall.log"):
        (here / name).write_text(LOG, encoding="utf-8")
    row = BenchRow("all_reduce", 2, 4, 4096, 300, 250, 400, 9)
    (here / "here.json").write_text(
        bench_to_json(
            BenchResult((row, row._replace(nbytes=1 << 20, median_ns=9000)), {"cores": 2}, 1.5)
        ),
        encoding="utf-8",
    )
    with zipfile.ZipFile(
        ROOT / "tests" / "data" / "doctor" / "hangs" / "early_break.zip"
    ) as packed:
        packed.extractall(here / "dumps")
    (here / "stacks").mkdir()
    shutil.copytree(SAMPLE, here / "profiles")
    shutil.move(here / "dumps" / "rank_5.log", here / "train.log")
    for name in ("a.yaml", "b.yaml", "run.yaml"):
        shutil.copyfile(here / "scenarios" / "hybrid.yaml", here / name)
    (here / "train.yaml").write_text(ON_A_MESH, encoding="utf-8")
    (here / "any.yaml").write_text(ANY_SOURCE, encoding="utf-8")
    cluster = "preset: dgx-a100\nnics: {count: 1, bandwidth: 100 Gbit/s}\n"
    (here / "mycluster.yaml").write_text(cluster, encoding="utf-8")
    for name in ("run", "h", "real", "before", "after", "hybrid"):
        assert (
            inside(here, ["simulate", "scenarios/hybrid.yaml", "--trace", f"{name}.jsonl"])[0] == 0
        )
    (here / "order.json").write_text(
        inside(here, ["check", "any.yaml", "--format", "json"])[1], encoding="utf-8"
    )
    return here


def inside(here: Path, words: list[str]) -> tuple[int, str]:
    """A command of distsim in this process: its exit status, and all that it printed."""
    before = Path.cwd()
    os.chdir(here)
    try:
        done = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(application(), words)
    finally:
        os.chdir(before)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return getattr(
            done.exception, "exit_code", 3
        ), f"{done.output}{type(done.exception).__name__}: {done.exception}"
    return done.exit_code, done.output


def ready(line: Line, folder: Path, tmp_path: Path) -> tuple[list[str], Path]:
    """The words with a file for each that stands for one, and where to run: elsewhere what writes
    many files.
    """
    given = {"FILE": "any.yaml", "FILE…": "any.yaml"}
    words = [given.get(word, word) for word in line.words]
    return words, tmp_path if {"learn", "new", "--install"} & set(words) else folder


@pytest.mark.parametrize(
    "line", [*LINES, *spans()], ids=lambda line: f"{line.page}: {line.text[:60]}"
)
def test_command_and_options_on_the_page_exist(line: Line) -> None:
    words = line.words
    if words[0] != "distsim":
        assert line.span is False
        scripts = [word for word in words if word.endswith(".py")]
        assert [name for name in scripts if not (ROOT / name).exists()] == []
        if "-m" in words:
            module = words[words.index("-m") + 1]
            assert module in ("pytest", "venv") or find_spec(module) is not None
        return
    commands = get_command(application()).commands  # type: ignore[attr-defined]
    assert words[1] in commands
    own = words[: words.index("--")] if "--" in words else words
    known = {
        name
        for parameter in commands[words[1]].params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert [
        word
        for word in own[2:]
        if word.startswith("-") and word != "-" and word.partition("=")[0] not in known
    ] == []


@pytest.mark.parametrize("line", QUICK, ids=lambda line: f"{line.page}: {line.text[:70]}")
def test_a_command_line_of_the_pages_runs(line: Line, folder: Path, tmp_path: Path) -> None:
    """With status 0, or 1 where it has something to report."""
    words, here = ready(line, folder, tmp_path)
    status, printed = inside(here, words[1:])

    assert status in (0, 1), printed
    assert (status == 0) or re.search(
        r"DS\d\d\d|proved|differ|earlier|later|part|straggler", printed
    ), printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [line for line in RUN if line not in QUICK],
    ids=lambda line: f"{line.page}: {line.text[:70]}",
)
def test_a_slow_command_line_of_the_pages_runs(line: Line, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words, here = ready(line, folder, tmp_path)
    start = [sys.executable, "-m", "distsim"] if words[0] == "distsim" else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run(
        [*start, *words[1:]],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )

    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert done.stdout or "-o" in words


def test_few_lines_are_excluded_and_all_of_them_exist() -> None:
    aside = [line for line in LINES if line not in RUN]

    assert len(aside) <= 0.2 * len(LINES)
    assert [
        pattern for pattern in ASIDE if not any(re.search(pattern, line.text) for line in LINES)
    ] == []
    assert len(QUICK) >= 45
