"""The report of a captured run, of results that no script had to run for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.output.text.capture_report import capture_text
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate


@pytest.fixture(scope="module")
def simulation() -> Any:
    return simulate(loads("world: 2\nbackend: gloo\nprogram:\n  - barrier: {}\n"))


@pytest.mark.parametrize(
    ("threaded", "ended", "is_noted"),
    [((0, 1), "ended", True), ((), "ended", False), ((0, 1), "late", False)],
)
def test_ranks_whose_threads_made_calls_are_noted_if_the_script_ended(
    simulation: Any, threaded: tuple[int, ...], ended: str, is_noted: bool
) -> None:
    options = SimpleNamespace(
        target=SimpleNamespace(name="train.py", args=()), devices="", backend="gloo"
    )
    judged: Any = SimpleNamespace(
        simulation=simulation,
        captured=SimpleNamespace(capture_options=options, ended=ended, ranks={}),
        stands=[],
        worlds=1,
        calls=2,
        threaded=threaded,
    )

    text = " ".join(capture_text(judged).split())
    assert ("several threads made calls; only the captured order" in text) == is_noted
