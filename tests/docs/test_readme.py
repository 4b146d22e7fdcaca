"""Outputs on the pages are fresh (tests/support/made_docs.py), links lead somewhere, and the Python
frames run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import Cli
from tests.support.made_docs import PAGES, README, ROOT, fresh, scripts, takes_long

LESSONS = [path for path in PAGES if path != README]
ALL_PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_files_and_outputs_on_a_page_are_what_the_commands_print(path: Path):
    text = path.read_text(encoding="utf-8")

    assert fresh(text, quick=True) == text


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_slow_outputs_are_up_to_date(path: Path):
    text = path.read_text(encoding="utf-8")

    assert fresh(text) == text


def test_most_outputs_of_the_pages_are_regenerated_in_every_test_run():
    commands = [
        line[2:]
        for path in PAGES
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("$ ")
    ]

    assert sum(map(takes_long, commands)) <= 0.3 * len(commands)


def test_the_readme_shows_what_commands_print():
    assert README.read_text(encoding="utf-8").count("```console") >= 1


def test_the_hand_written_pages_stay_within_their_word_budget():
    prose = [
        re.sub(
            r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        )
        for path in (README, *sorted((ROOT / "docs").rglob("*.md")))
        if not is_generated(path)
    ]
    words = [word for text in prose for word in text.split() if re.search(r"\w", word)]

    assert len(words) <= 25_000


def is_generated(path: Path) -> bool:
    head = path.read_text(encoding="utf-8")[:400]
    return re.search(r"(Written|Generated) by `", head) is not None or path.stem in (
        "glossary",
        "same_calls",
    )


def test_the_readme_is_short_and_shows_a_picture_near_the_top():
    lines = README.read_text(encoding="utf-8").splitlines()

    assert len(lines) < 120
    assert any(line.startswith("![") for line in lines[:20])


@pytest.mark.parametrize("path", ALL_PAGES, ids=lambda path: path.stem)
def test_every_linked_file_exists(path: Path):
    links = re.findall(r"\]\((?![a-z]+:)([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))

    assert [link for link in links if not (path.parent / link).exists()] == []


def test_every_python_block_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

    assert blocks
    for code in blocks:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout


FRAMES = [
    (path, ranks, code)
    for path in LESSONS
    for ranks, code in scripts(path.read_text(encoding="utf-8")).items()
]


@pytest.mark.parametrize(
    ("path", "ranks", "code"), FRAMES, ids=[f"{path.stem}-{ranks}" for path, ranks, _ in FRAMES]
)
def test_the_python_of_a_lesson_runs_on_its_ranks_without_a_hang(
    path: Path, ranks: int, code: str, tmp_path: Path, cli: Cli
):
    pytest.importorskip("torch")
    file = tmp_path / f"{path.stem}_{ranks}.py"
    file.write_text(code, encoding="utf-8")
    done = cli("capture", "--nproc", ranks, "--", "python", file)

    assert (done.returncode, "completes" in done.stdout) == (0, True), (
        f"{path.name}\n{done.stdout}{done.stderr}"
    )


def test_lessons_contain_python_to_run():
    assert len(FRAMES) >= 5


def test_every_page_that_the_code_mentions_exists():
    mentioned = {
        (path.relative_to(ROOT).as_posix(), page)
        for folder in ("distsim", "tests/support", "benchmarks", "viz")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }

    assert [(path, page) for path, page in sorted(mentioned) if not (ROOT / page).exists()] == []
