"""The example notebooks run, and their stored outputs are what they show today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.notebooks import notebooks, outputs_of_cells


def test_there_is_a_notebook_about_a_hang_a_layout_study_and_a_calibration() -> None:
    assert [path.stem for path in notebooks()] == ["calibration", "hang", "layout_study"]


@pytest.mark.parametrize("file", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_stores(file: Path) -> None:
    pytest.importorskip("pandas")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    stored = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]

    assert any(stored), "python -m tests.support.notebooks stores the outputs"
    assert [without_style(cell) for cell in outputs_of_cells(file)] == [
        without_style(cell) for cell in stored
    ]


def without_style(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs without the HTML of data frames, which differs between versions of pandas."""
    return [
        {**output, "data": {**output["data"], "text/html": ""}}
        if "dataframe" in "".join(output.get("data", {}).get("text/html", ""))
        else output
        for output in outputs
    ]
