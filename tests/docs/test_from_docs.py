"""Ten tasks written from the pages of docs/ alone: each loads, comes out as it expects, and the
page that lists them tells the truth.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario import load
from distsim.scenario.format.schema.key_reference import find_key
from distsim.scenario.strategies import STRATEGIES
from distsim.simulation.expectations import check_expectations

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "data" / "from_docs").glob("*.yaml"))
PAGE = (ROOT / "docs" / "reference" / "scenario-file.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_documented_task_meets_its_expectations(file: Path) -> None:
    assert load(file).expect is not None
    assert check_expectations(file).differences == ()


def test_the_page_lists_every_task() -> None:
    assert re.findall(r"from_docs/([\w.]+\.yaml)", PAGE) == [file.name for file in FILES]
    assert len({file.name[:2] for file in FILES}) == 10


def test_the_slurm_launch_plan_has_a_complete_batch_script() -> None:
    from distsim.real.launch.external_launchers import launch_plan

    found = launch_plan(load(FILES[-1]), ("run", "plan.yaml", "--real"), "nccl")

    assert found.master_addr == "gpu1"
    assert found.script[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=4" in found.script


def test_every_key_listed_under_write_is_a_key_of_the_format() -> None:
    """Steps are in the table of operations, keys in the reference, commands in the command line."""
    cells = [
        line.split(" | ")[1]
        for line in PAGE.partition("## Ten")[0].splitlines()
        if line.startswith("| ") and "](" in line
    ]
    words = {word for cell in cells for word in re.findall(r"`([a-z_]+)`", cell)}
    keys = {word for cell in cells for word in re.findall(r"`([a-z]+):", cell)}

    assert len(cells) >= 8
    assert [
        word for word in words if word not in {*OPERATIONS, *OPERATION_ALIASES, *STRATEGIES}
    ] == []
    assert [
        key
        for key in keys
        if key not in {"async", "as", "ranks", "on", *OPERATIONS} and find_key(key) is None
    ] == []
