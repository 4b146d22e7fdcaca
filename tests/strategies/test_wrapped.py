"""Common ways to wrap a model make the calls that were recorded from PyTorch
(tests/support/wrapped.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import wrapped

ALL = [(family, name) for family in wrapped.FAMILIES for name in wrapped.cases(family)]
RECORDED = {family: wrapped.recordings(family) for family in wrapped.FAMILIES}


@pytest.mark.parametrize(("family", "name"), ALL, ids=lambda word: word)
def test_an_expansion_makes_the_calls_recorded_from_pytorch(family: str, name: str) -> None:
    case, real = wrapped.cases(family)[name], wrapped.unpacked(RECORDED[family][name])

    assert wrapped.first_difference(case, real, wrapped.expanded(case)) == ""


def test_every_recording_has_its_configuration_and_origin() -> None:
    for family in wrapped.FAMILIES:
        assert set(RECORDED[family]) == set(wrapped.cases(family))
        assert "torch 2.13" in (wrapped.DATA / f"wrapped_{family}.json").read_text()[:200]


def test_a_dropped_doubled_or_changed_call_is_reported() -> None:
    """The comparison itself: any single spoilt call of a recording makes a difference."""
    case = wrapped.cases("fsdp")["auto"]
    real, made = wrapped.unpacked(RECORDED["fsdp"]["auto"]), wrapped.expanded(case)
    for k, call in enumerate(made[1]):
        for instead in (
            [],
            [call, call],
            [{**call, "numel": call["numel"] + 1}],
            [{**call, "ranks": [0]}],
        ):
            spoilt = [made[0], [*made[1][:k], *instead, *made[1][k + 1 :]], *made[2:]]
            assert wrapped.first_difference(case, real, spoilt) != ""


def test_the_table_in_the_docs_matches_recordings_and_expansions() -> None:
    assert wrapped.DOC.read_text(encoding="utf-8") == wrapped.table()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_recordings_match_the_installed_pytorch() -> None:
    """Every configuration is run again on Gloo processes of this machine; the recordings stay as
    they are.
    """
    pytest.importorskip("torch")
    command = [
        sys.executable,
        str(Path(__file__).resolve().parents[1] / "support" / "wrapped.py"),
        "--check",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
