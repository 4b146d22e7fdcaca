"""docs/contributing/extending.md does what it says: its files, put into a copy of the package, add an
operation, a backend and an algorithm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contributing" / "extending.md").read_text(encoding="utf-8")
#: Path inside the project -> what the page writes there.
BLOCKS = {m[1]: m[2] for m in re.finditer(r"```python\n# (distsim/\S+)\n(.*?)```", PAGE, re.DOTALL)}
BOUND = re.search(r"```python\n(    bindings = .*\n)```", PAGE)
HEAD = "world: 4\ntensors: {x: {shape: [2], value: rank + 1}, parts: {shape: [4, 2]}}\n"

Run = Callable[..., Any]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package with every block of the page in its place: a new file, or the end of one that
    there is.
    """
    # With the compiled modules, which fit because a copy keeps the times of the files.
    shutil.copytree(ROOT / "distsim", tmp_path / "distsim")
    for name, text in BLOCKS.items():
        place = tmp_path / name
        before = place.read_text(encoding="utf-8") + "\n\n" if place.exists() else ""
        place.write_text(before + text, encoding="utf-8")
    return tmp_path


def done(copy: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own that imports the copy."""
    command = (
        [sys.executable, "-c", code] if code else [sys.executable, "-m", "distsim", *arguments]
    )
    return subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


#: Answers many commands in one process, because a start takes longer than most answers.
_SEVERAL = """
import json, sys
from typer.testing import CliRunner
from distsim.cli.application import application
for words in json.loads(sys.argv[1]):
    answer = CliRunner().invoke(application(), words)
    print(json.dumps([answer.stdout, answer.exit_code]))
"""


def answers(copy: Path, *commands: Sequence[str]) -> list[tuple[str, int]]:
    """Output and exit status of each command."""
    found = subprocess.run(
        [sys.executable, "-c", _SEVERAL, json.dumps(commands)],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "NO_COLOR": "1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return [tuple(json.loads(line)) for line in found.stdout.splitlines()]


def simulated(copy: Path, text: str, *more: str) -> dict[str, Any]:
    return all_simulated(copy, (text, *more))[0]


def all_simulated(copy: Path, *questions: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON of the simulation of each text, with options."""
    commands = []
    for number, (text, *more) in enumerate(questions):
        (copy / f"s{number}.yaml").write_text(HEAD + text, encoding="utf-8")
        commands.append(["simulate", f"s{number}.yaml", "--format", "json", *more])
    return [json.loads(output) for output, _ in answers(copy, *commands)]


def test_extending_page_has_a_file_for_each_example_that_the_package_does_not_mention() -> None:
    assert list(BLOCKS) == [
        "distsim/operations/scan.py",
        "distsim/backends/ucc.py",
        "distsim/backends/xgloo.py",
        "distsim/operations/core/algorithms.py",
        "distsim/output/pictures/views/headcount.py",
    ]
    for path in (ROOT / "distsim").rglob("*.py"):
        assert not re.search(r"\bucc\b|\bscan\b", path.read_text(encoding="utf-8")), path


def test_an_operation_is_one_file_that_no_backend_supports_without_a_row(copy: Path) -> None:
    text = "backend: gloo\nprogram:\n  - scan: {tensor: x}\n"
    refused = simulated(copy, text)
    assert (refused["verdict"], refused["outcome"]) == ("ok", "raises")
    assert "Backend gloo does not support scan" in json.dumps(refused["findings"])

    assert BOUND is not None
    place = copy / "distsim" / "operations" / "scan.py"
    row = place.read_text(encoding="utf-8").replace(
        "import GroupRanks", "import BackendBinding, GroupRanks"
    )
    place.write_text(row.replace("    first_field", BOUND[1] + "    first_field"), encoding="utf-8")
    sleeping = text.replace("  - ", "  - {sleep: 1 s, ranks: rank == 2}\n  - ")
    taken, late = all_simulated(copy, (text,), (sleeping,))
    assert (taken["verdict"], taken["outcome"]) == ("ok", "completes")
    assert taken["values"]["x"] == {"0": 1.0, "1": 3.0, "2": 6.0, "3": 10.0}
    assert [r["waiting_ns"] >= 10**9 for r in late["ranks"]] == [False, False, False, True]


def test_a_new_operation_is_explained_drawn_in_the_schema_and_found_when_missing(
    copy: Path,
) -> None:
    drawing = ("render", "--view", "operation", "--op", "scan", "-o", "scan.svg")
    (page, _), (schema, _), (_, status) = answers(
        copy, ["explain", "scan"], ["schema"], list(drawing)
    )

    assert "A rank waits for all ranks before it." in page
    assert '"scan"' in schema
    assert status == 0
    assert "<svg" in (copy / "scan.svg").read_text(encoding="utf-8")
    late = simulated(copy, "backend: gloo\nprogram:\n  - {scan: {tensor: x}, ranks: rank < 3}\n")
    assert late["verdict"] == "deadlock"


def test_a_backend_is_one_file(copy: Path) -> None:
    other = "rank + 1 - 2 * (rank % 2)"
    sends = f"backend: ucc\nprogram:\n  - send: {{tensor: x, dst: {other}}}\n  - recv: {{tensor: x, src: {other}}}\n"
    eager, rendezvous, reduced, refused = all_simulated(
        copy,
        (sends,),
        (sends, "--set", "options.rndv_threshold=4 B"),
        ("backend: ucc\nprogram:\n  - all_reduce: {tensor: x}\n",),
        ("backend: ucc\nprogram:\n  - all_to_all: {input: parts, output: parts}\n",),
    )
    assert (eager["outcome"], rendezvous["outcome"]) == ("completes", "hangs")
    assert (reduced["verdict"], reduced["outcome"]) == ("ok", "completes")
    assert "Backend ucc does not support all_to_all" in json.dumps(refused["findings"])

    (copy / "s.yaml").write_text(HEAD + "backend: gloo\nprogram:\n  - barrier\n", encoding="utf-8")
    checked, run, checked_on_ucc, schema, page = answers(
        copy,
        ["check", "s.yaml"],
        ["simulate", "s.yaml", "--backend", "ucc"],
        ["check", "s.yaml", "--backend", "ucc"],
        ["schema"],
        ["explain", "backends"],
    )
    assert "completes on gloo, nccl, ucc, mpi, xgloo" in checked[0]
    assert (run[1], checked_on_ucc[1]) == (0, 0)
    assert '"ucc"' in schema[0]
    assert "ucc CPU" in page[0]


def test_a_copied_backend_keeps_its_operations_but_not_its_excluded_dtypes(
    copy: Path,
) -> None:
    text = "backend: xgloo\nprogram:\n  - all_reduce: {tensor: x}\n"
    taken, refused = all_simulated(copy, (text,), (text, "--set", "tensors.x.dtype=bfloat16"))
    assert taken["outcome"] == "completes"
    assert refused["outcome"] == "raises"
    assert "xgloo: all_reduce does not support bfloat16" in json.dumps(refused["findings"])
    page = done(copy, "explain", "backends").stdout
    assert "xgloo CPU" in page
    assert "u ucc, m mpi, x xgloo" in page
    assert max(map(len, page.splitlines())) <= 80


def test_two_backends_of_one_name_are_refused_with_the_module(copy: Path) -> None:
    place = copy / "distsim" / "backends" / "xgloo.py"
    text = place.read_text(encoding="utf-8")
    place.write_text(text.replace('    name="xgloo",\n', ""), encoding="utf-8")
    assert (
        "distsim.backends.xgloo defines a second backend gloo"
        in done(copy, code="import distsim.backends").stderr
    )


def add_copy_of_nccl(copy: Path) -> None:
    """A backend `xccl` with the rules of NCCL."""
    (copy / "distsim" / "backends" / "xccl.py").write_text(
        "from dataclasses import replace\n\nfrom distsim.backends.nccl import NCCL\n\n"
        'XCCL = replace(NCCL, name="xccl", listed=3)\n',
        encoding="utf-8",
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_zero_3", "pipeline_fsdp"])
def test_a_copy_of_nccl_expands_strategies_like_nccl(copy: Path, strategy: str) -> None:
    """Strategies use streams if the backend has them, whatever its name."""
    add_copy_of_nccl(copy)
    scenario = str(ROOT / "scenarios" / "strategies" / f"{strategy}.yaml")

    def expanded(backend: str) -> str:
        return done(copy, "expand", scenario, "--set", f"backend={backend}").stdout

    def makespan(*arguments: str) -> int:
        run = done(copy, "simulate", scenario, "--format", "json", *arguments)
        found: int = json.loads(run.stdout)["makespan_ns"]
        return found

    assert "backend: xccl" in expanded("xccl")
    assert expanded("xccl").replace("xccl", "nccl") == expanded("nccl") != expanded("gloo")
    assert makespan("--set", "backend=xccl") == makespan("--backend", "xccl") == makespan()


def test_async_save_refuses_a_copy_of_nccl_like_nccl(copy: Path) -> None:
    add_copy_of_nccl(copy)
    text = "backend: xccl\nprogram:\n  - dcp_async_save: {plan: 1 KiB, results: 1 KiB, metadata: 1 KiB}\n"
    (copy / "s.yaml").write_text(HEAD + text, encoding="utf-8")
    assert "this group has only xccl" in done(copy, "expand", "s.yaml").stderr


def test_a_view_is_one_file(copy: Path) -> None:
    scenario = str(ROOT / "scenarios" / "hybrid.yaml")
    drawn = done(copy, "render", scenario, "--view", "headcount", "--format", "mermaid")

    assert '["4 ranks"]' in drawn.stdout
    assert "headcount" in done(copy, "render", "--help").stdout


def test_an_algorithm_is_one_function_whose_schedule_determines_the_cost(copy: Path) -> None:
    """One round instead of three: on four ranks of one machine two latencies less."""
    text = "backend: gloo\ncluster: {preset: cpu-10gbe%s}\nprogram:\n  - all_gather: {input: x, output: parts}\n"
    ring, direct = all_simulated(copy, (text % "",), (text % ", algorithms: {all_gather: direct}",))
    assert ring["makespan_ns"] - direct["makespan_ns"] == 2 * 15_000


def test_the_table_tests_hold_for_the_additions(copy: Path) -> None:
    """The columns of `scan` agree with each other, and its schedule and that of `direct` are
    proven, by the tests that all rows have.
    """
    shutil.copytree(ROOT / "tests" / "support", copy / "tests" / "support")
    for name in ("test_table.py", "test_algorithms.py"):
        shutil.copy(ROOT / "tests" / "operations" / name, copy / name)
    code = (
        "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', 'scan or direct', "
        "'test_table.py', 'test_algorithms.py']))"
    )
    run = done(copy, code=code)
    assert run.returncode == 0, run.stdout
    assert int(re.findall(r"(\d+) passed", run.stdout)[0]) > 20
