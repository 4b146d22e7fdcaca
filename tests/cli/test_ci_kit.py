"""What CI systems use: discovery of scenarios, settings, JUnit reports, hooks, recipes and project files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from distsim.cli.shared.project_files import command_settings, expand_folders, find_scenarios
from distsim.common.errors import UsageError
from distsim.output.junit import expectations_junit
from distsim.simulation.expectations import ScenarioTestResult, check_expectations

ROOT = Path(__file__).resolve().parents[2]
OK = "world: 2\nbackend: gloo\ntensors: {x: {shape: [4]}}\nprogram:\n  - all_reduce: {tensor: x}\n"
PASSES = OK + "expect: {outcome: completes}\n"
FAILS = OK + "expect: {outcome: hangs}\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two scenarios, and with files that are none or belong to others."""
    files = {
        "a.yaml": PASSES,
        "deep/b.yml": PASSES,
        "config.yaml": "world: 2\njobs: []\n",
        ".hidden/c.yaml": OK,
        "node_modules/d.yaml": OK,
        "env/pyvenv.cfg": "",
        "env/e.yaml": OK,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_distsim(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell line whose `distsim` is this checkout's."""
    program = f'distsim() {{ {shlex.quote(sys.executable)} -m distsim "$@"; }}\n{line}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_only_scenarios_of_the_repository_are_found(repository, capsys):
    assert find_scenarios(command_settings("check")) == ["a.yaml", "deep/b.yml"]
    assert "found 2 scenarios in the current folder" in capsys.readouterr().err


def test_a_named_folder_is_searched_for_all_files_that_may_be_scenarios(repository, capsys):
    (repository / "mistake.yaml").write_text("wrld: 2\nprogram: []\n")
    (repository / "flow.yaml").write_text("{world: 1, program: []}\n")
    (repository / "values.yaml").write_text("lr: 0.1\n")
    (repository / "more").mkdir()
    (repository / "more" / "values.yaml").write_text("lr: 0.1\n")

    found = ["a.yaml", "config.yaml", "deep/b.yml", "flow.yaml", "mistake.yaml"]
    assert expand_folders([".", "a.yaml"]) == found
    assert capsys.readouterr().err == "skipped 2 other YAML files in .\n"
    with pytest.raises(UsageError, match=r"no scenario .* in more"):
        expand_folders(["more"])


def test_a_repository_without_scenarios_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no scenario found"):
        find_scenarios(command_settings("check"))


def test_settings_select_scenarios_also_from_a_subfolder(repository, monkeypatch):
    settings = (
        '[tool.distsim]\ncheck = {paths = ["deep", "a.yaml"], exclude = ["deep/"], strict = true}\n'
    )
    (repository / "pyproject.toml").write_text(settings)
    assert find_scenarios(command_settings("check")) == ["a.yaml"]
    monkeypatch.chdir(repository / "deep")
    assert command_settings("check").strict
    assert find_scenarios(command_settings("check")) == ["../a.yaml"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("check = {pahts = []}", "check.pahts: unknown key.*paths"),
        ("chekc = {}", "chekc: unknown key.*check"),
        ("check = {strict = 1}", "strict is 1"),
        ("check = {max-states = 0}", "max-states is 0"),
        ("check = {paths = [1]}", "paths is"),
        ("check = 3", "not a table"),
        ("check = {", "cannot read"),
    ],
)
def test_a_wrong_setting_is_named_with_its_place(tmp_path, monkeypatch, settings, message):
    (tmp_path / "pyproject.toml").write_text(f"[tool.distsim]\n{settings}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        command_settings("check")


def test_check_reads_strict_from_the_settings(tmp_path):
    leak = OK.replace("all_reduce: {tensor: x}", "isend: {tensor: x, dst: 1}\n    ranks: 0")
    leak += "  - recv: {tensor: x, src: 0}\n    ranks: 1\n  - barrier: {}\n"
    (tmp_path / "leak.yaml").write_text(leak.replace("gloo", "nccl"))
    assert run_distsim("distsim check", tmp_path).returncode == 0
    (tmp_path / "pyproject.toml").write_text("[tool.distsim.check]\nstrict = true\n")
    assert run_distsim("distsim check", tmp_path).returncode == 1


def test_junit_reports_each_status(tmp_path):
    texts = {"passes": PASSES, "fails": FAILS, "unreadable": "world: [", "silent": OK}
    results = []
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        results.append(check_expectations(tmp_path / f"{name}.yaml"))
    root = ElementTree.fromstring(expectations_junit(results).encode())

    (suite,) = root
    kinds = [[child.tag for child in case] for case in suite]
    assert kinds == [[], ["failure"], ["error"], ["skipped"]]
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "1", "1", "1"]
    assert "expected hangs, found completes" in suite[1][0].get("message", "")


def test_junit_escapes_control_characters():
    error = UsageError("bad \x1b[31m name \x00 \ud800", "rename <it>")
    text = expectations_junit([ScenarioTestResult("a\x07.yaml", None, (), error)])
    (case,) = ElementTree.fromstring(text.encode())[0]
    assert case.get("name") == r"a\x07.yaml"
    assert r"bad \x1b[31m name \x00 \ud800" in (case[0].text or "")


def hooks() -> list[dict]:
    return yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


@pytest.mark.parametrize("hook", hooks(), ids=lambda hook: hook["id"])
def test_a_pre_commit_hook_fails_only_for_a_bad_scenario(hook, repository):
    assert hook["pass_filenames"] is False
    assert run_distsim(hook["entry"], repository).returncode == 0
    (repository / "bad.yaml").write_text(
        FAILS.replace("all_reduce", "recv")
        .replace("x}\n", "x, src: 0}\n    ranks: 1\n", 1)
        .replace("hangs", "completes")
    )
    assert run_distsim(hook["entry"], repository).returncode == 1


def test_the_action_runs_its_command_without_interpreting_the_input(repository, monkeypatch):
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    default = action["inputs"]["arguments"]["default"]
    monkeypatch.setenv("DISTSIM_ARGUMENTS", default)
    assert run_distsim(step["run"], repository).returncode == 0
    monkeypatch.setenv("DISTSIM_ARGUMENTS", "check\n  a.yaml\n  --format json\n")
    assert '"verdict": "ok"' in run_distsim(step["run"], repository).stdout
    monkeypatch.setenv("DISTSIM_ARGUMENTS", "check a.yaml; touch made")
    assert run_distsim(step["run"], repository).returncode == 2
    assert not (repository / "made").exists()


def test_the_gitlab_recipe_writes_its_report(repository):
    page = (ROOT / "docs/how-to/hang-in-ci.md").read_text()
    recipe = re.search(r"```yaml\n# \.gitlab-ci\.yml\n(.*?)```", page, re.DOTALL)
    assert recipe is not None
    job = yaml.safe_load(recipe[1])["distsim"]
    lines = [line for line in job["script"] if line.startswith("distsim ")]
    done = run_distsim("\n".join(lines), repository)
    assert done.returncode == 0, done.stderr
    report = ElementTree.parse(repository / job["artifacts"]["reports"]["junit"]).getroot()
    assert report.get("tests") == "2"


def test_the_workflow_runs_the_script_that_exists():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["run"]["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_citation_names_the_packages_version():
    from distsim import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == "Apache-2.0"


def test_issue_forms_have_what_github_requires():
    forms = [
        path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
    ]
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        assert all("label" in part["attributes"] for part in form["body"])
