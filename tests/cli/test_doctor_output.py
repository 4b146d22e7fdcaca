"""Names of output files of `distsim doctor`: checked before a live job is inspected."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import distsim
from distsim.cli.application import application


@pytest.mark.parametrize(
    ("name", "message"),
    [("evidence.txt", "unknown file type"), ("nowhere/evidence.zip", "does not exist")],
)
def test_a_bad_name_for_the_bundle_is_refused_before_the_inspection(
    tmp_path, monkeypatch, name, message
):
    def inspect(*_args, **_options):
        pytest.fail("the job was inspected")

    monkeypatch.setattr("distsim.api.functions.doctor", inspect)
    words = ["doctor", "--live", "4711", "-o", str(tmp_path / name)]

    error = CliRunner().invoke(application(), words).exception

    assert isinstance(error, distsim.UsageError)
    assert message in error.message
    if name.endswith(".txt"):
        assert "F.zip" in error.remedy
