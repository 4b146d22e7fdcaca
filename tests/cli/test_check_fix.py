"""`check --fix` writes repaired scenario files, whole or not at all; `check --diff` writes none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import distsim
from distsim.cli.application import application
from distsim.repair import apply_repair
from tests.support.harness import ROOT, Cli

HEAD_TO_HEAD = ROOT / "scenarios" / "head_to_head_sends.yaml"


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A scenario that hangs, with a comment on a line that no repair changes."""
    file = tmp_path / "a.yaml"
    text = HEAD_TO_HEAD.read_text(encoding="utf-8")
    file.write_text(f"# a comment of the user\n{text}", encoding="utf-8")
    return file


def test_fix_writes_a_file_that_checks_ok(cli: Cli, failing: Path) -> None:
    done = cli("check", failing, "--fix")

    assert done.returncode == 0, done.stderr
    assert f"wrote {failing}" in done.stderr
    assert distsim.check(failing).verdict == "ok"


def test_fix_repairs_the_files_that_follow_a_trace(cli: Cli, failing: Path) -> None:
    trace = failing.with_name("t.jsonl")
    cli("simulate", failing, "--trace", trace)
    CliRunner().invoke(application(), ["check", str(trace), str(failing), "--fix"])

    assert distsim.check(failing).verdict == "ok"


def test_fix_keeps_comments_and_unchanged_lines(cli: Cli, failing: Path) -> None:
    before = failing.read_text(encoding="utf-8").splitlines()
    cli("check", failing, "--fix")
    after = failing.read_text(encoding="utf-8").splitlines()

    assert after[0] == "# a comment of the user"
    program = before[: before.index("expect:")]
    assert [line for line in program if line not in after] == [
        "  - send: {tensor: mine, dst: 1 - rank}",
        "  - recv: {tensor: theirs, src: 1 - rank}",
    ]


def test_fix_keeps_windows_line_endings(cli: Cli, failing: Path) -> None:
    failing.write_bytes(failing.read_bytes().replace(b"\n", b"\r\n"))
    cli("check", failing, "--fix")
    content = failing.read_bytes()

    assert b"batch_isend_irecv" in content
    assert content.count(b"\n") == content.count(b"\r\n")


def test_diff_prints_the_patch_and_writes_no_file(cli: Cli, failing: Path) -> None:
    before = failing.read_bytes()
    done = cli("check", failing, "--diff")

    assert done.returncode == 1
    assert "+  - batch_isend_irecv:" in done.stdout
    assert failing.read_bytes() == before


def test_fix_does_not_change_a_correct_file(cli: Cli) -> None:
    correct = ROOT / "scenarios" / "hybrid.yaml"
    before = (correct.read_bytes(), correct.stat().st_mtime_ns)
    done = cli("check", correct, "--fix")

    assert done.returncode == 0
    assert (correct.read_bytes(), correct.stat().st_mtime_ns) == before


def test_fix_does_not_change_a_file_without_a_repair(
    failing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distsim.repair.search.find_repairs", lambda *_, **__: ())
    before = failing.read_bytes()
    answer = distsim.fix(failing, write=True)

    assert not answer.written
    assert failing.read_bytes() == before


#: Every rank sends its own copy. Only the author knows whose copy all ranks should have.
_OWN_ROOTS = """\
world: 3
backend: gloo
tensors: {w: {shape: [4]}}
program:
  - broadcast: {tensor: w, src: rank}
"""


def test_fix_lists_a_repair_that_ends_an_exchange_and_writes_no_file(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "roots.yaml"
    file.write_text(_OWN_ROOTS, encoding="utf-8")
    done = cli("check", file, "--fix")

    assert done.returncode == 1
    assert "not repaired: the best repair ends an exchange of data" in done.stdout
    assert "1. line 5" in done.stdout
    assert "To apply repair 1" in done.stdout
    assert file.read_text(encoding="utf-8") == _OWN_ROOTS


def test_a_read_only_file_is_a_user_error(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write every file, so the permission itself would prove nothing there.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(distsim.UsageError, match="not writable"):
        distsim.fix(failing, write=True)


def test_a_file_that_changes_during_the_search_is_not_written(failing: Path) -> None:
    file = apply_repair.open_for_repair(failing, writable=True)
    failing.write_text("changed by an editor", encoding="utf-8")
    with pytest.raises(distsim.UsageError, match="changed during the search"):
        apply_repair.write_repaired(file, "repaired")

    assert failing.read_text(encoding="utf-8") == "changed by an editor"


@pytest.mark.parametrize("option", ["--fix", "--diff"])
def test_standard_input_cannot_be_repaired(cli: Cli, option: str) -> None:
    done = cli("check", "-", option)

    assert done.returncode == 2
    assert f"{option} needs a file" in done.stderr


def test_yaml_text_cannot_be_repaired_in_place(failing: Path) -> None:
    with pytest.raises(distsim.UsageError, match="only a file"):
        distsim.fix(failing.read_text(encoding="utf-8"), write=True)


def test_fix_of_a_trace_prints_a_patch_and_changes_no_file(
    cli: Cli, failing: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "run.jsonl"
    cli("simulate", failing, "--trace", trace)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = cli("check", trace, "--fix")

    assert done.returncode == 1
    assert "batch_isend_irecv" in done.stdout
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
