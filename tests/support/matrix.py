"""Wheel and sdist, installed in clean environments with the lowest and the newest dependencies that
pyproject.toml allows.

    python -m tests.support.matrix                    every installed Python from 3.11 to 3.14; writes docs/contributing/matrix.md (ten minutes)
    python -m tests.support.matrix --python 3.12      one version; writes nothing
    python -m tests.support.matrix --allow-missing    report a missing Python, but do not fail

Needs uv (`pip install uv`). Each environment runs the commands of README.md on a scenario whose
output is known, in a folder from which the checkout cannot be imported; those made from the wheel
also run the quick tests, which need no torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing" / "matrix.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
COLUMNS = ("install", "simulate", "check", "render", "tests")
#: Quick, without torch, and with something of every library: models, YAML, clocks, fits, graphs,
#: pictures, numbers, the command line.
TESTS = (
    "common/test_units.py",
    "common/test_expr.py",
    "hardware/test_cluster.py",
    "scenario/test_grammar.py",
    "semantics/test_rules_matching.py",
    "values/test_values.py",
    "real/test_calibrate_nccl.py",
    "operations/test_table.py",
    "trace/test_trace.py",
    "output/test_dot.py",
)
TEST_TOOLS = ("pytest", "hypothesis", "typst")


@dataclass
class Result:
    """One environment. ``said``: column -> "yes", or what went wrong; a column that wasn't tried is
    not there.
    """

    python: str
    source: str
    resolution: str
    said: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(word != "yes" for word in self.said.values())


class Failed(Exception):
    """A command that ended otherwise than it should; its last line of output."""


def ran(*command: object, cwd: Path, expected: Sequence[int] = (0,)) -> str:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | {
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in expected:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-3000:])
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Failed(f"status {done.returncode}: {lines[-1] if lines else 'no output'}")
    return done.stdout


def find_uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise SystemExit("uv is not installed: pip install uv")
    return found


def interpreter(uv: str, version: str) -> str | None:
    """Where a Python of this version is: one that uv finds, or one of pyenv's. Nothing is
    downloaded.
    """
    command = [uv, "python", "find", "--no-python-downloads", "--no-project", version]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return found.stdout.strip()
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return next((str(path) for path in sorted(kept.glob(f"{version}.*/bin/python{version}"))), None)


def built(uv: str, folder: Path) -> dict[str, Path]:
    """The wheel and the sdist."""
    ran(uv, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def test_tools() -> list[str]:
    """What the quick tests need, with the bounds of the extra `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        line
        for line in project["optional-dependencies"]["dev"]
        if re.split(r"\W", line)[0] in TEST_TOOLS
    ]


def requirements() -> list[str]:
    return list(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "dependencies"
        ]
    )


def dependencies() -> list[str]:
    return [re.split(r"[^\w-]", line)[0] for line in requirements()]


def elsewhere(folder: Path) -> Path:
    """The project without its package: what the tests read, and nothing that could be imported in
    the package's place.
    """
    away = folder / "away"
    away.mkdir()
    for name in (
        "tests",
        "scenarios",
        "docs",
        "traces",
        "viz",
        "pyproject.toml",
        "README.md",
        "CONTRIBUTING.md",
        "constraints.txt",
    ):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, away / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, away / name)
    return away


def attempt(
    uv: str, python: str, away: Path, artifact: Path, result: Result, folder: Path
) -> Result:
    """Make the environment and run everything in it, to the first thing that fails."""
    environment = folder / f"{result.python}-{result.source}-{result.resolution}"
    binaries, column = environment / "bin", "install"
    try:
        ran(uv, "venv", "--quiet", "--no-project", "--python", python, environment, cwd=folder)
        # The lowest that has a wheel for this Python: what must be built from source first says
        # nothing of distsim.
        wheels = (
            "--only-binary",
            ":all:",
            *(("--no-binary", "torch-distsim") if result.source == "sdist" else ()),
        )
        how = (
            "--quiet",
            *wheels,
            "--resolution",
            RESOLUTIONS[result.resolution],
            "--python",
            binaries / "python",
        )
        # Named beside the artifact: only what is named counts as direct, and so is taken at its
        # lower bound.
        ran(uv, "pip", "install", *how, artifact, *requirements(), *test_tools(), cwd=folder)
        result.versions = versions(uv, binaries / "python", folder)
        result.said[column] = "yes"
        for column, act in (
            ("simulate", simulate),
            ("check", check),
            ("render", render),
            ("tests", run_tests),
        ):
            if column != "tests" or result.source == "wheel":
                act(binaries, away)
                result.said[column] = "yes"
    except Failed as failed:
        result.said[column] = str(failed)
    shutil.rmtree(environment, ignore_errors=True)
    return result


def versions(uv: str, python: Path, folder: Path) -> dict[str, str]:
    lines = ran(
        uv, "pip", "list", "--quiet", "--python", python, "--format", "freeze", cwd=folder
    ).splitlines()
    return {
        name.lower().replace("_", "-"): version
        for name, _, version in (line.partition("==") for line in lines)
    }


def simulate(binaries: Path, away: Path) -> None:
    found = ran(binaries / "distsim", "simulate", "scenarios/hybrid.yaml", cwd=away)
    if f"{found}exit status 0\n" != (away / "scenarios" / "hybrid.out").read_text(encoding="utf-8"):
        raise Failed("another output than scenarios/hybrid.out")


def check(binaries: Path, away: Path) -> None:
    ran(binaries / "distsim", "check", "--help", cwd=away)
    ran(binaries / "distsim", "check", "scenarios/ring_of_four.yaml", cwd=away, expected=(1,))
    ran(binaries / "distsim", "check", "scenarios/hybrid.yaml", cwd=away)


def render(binaries: Path, away: Path) -> None:
    picture = away / "picture.svg"
    ran(
        binaries / "distsim",
        "render",
        "scenarios/hybrid.yaml",
        "--view",
        "dataflow",
        "-o",
        picture,
        cwd=away,
    )
    if "<svg" not in picture.read_text(encoding="utf-8"):
        raise Failed("no picture came")


def run_tests(binaries: Path, away: Path) -> None:
    files = [f"tests/{name}" for name in TESTS if (away / "tests" / name).exists()]
    ran(binaries / "python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=away)


# --- the page ---


def page(results: Sequence[Result], missing: Sequence[str]) -> Iterator[str]:
    yield "# Tested Python versions and dependencies"
    yield ""
    yield "Written by `python -m tests.support.matrix`. It installs the wheel and the sdist in clean environments, with the lowest and the newest"
    yield "dependencies that `pyproject.toml` allows (the lowest that have a wheel for this Python). `simulate` must print"
    yield "`scenarios/hybrid.out`, `check` must return the documented exit status, and `render` must draw a picture."
    yield f"With the wheel, {len(TESTS)} quick test files run too. A dash marks tests that were not run."
    yield ""
    yield f"| Python | from | dependencies | {' | '.join(COLUMNS)} |"
    yield f"|---|---|---|{'---|' * len(COLUMNS)}"
    for result in results:
        cells = [result.said.get(column, "–").replace("|", "/") for column in COLUMNS]
        yield f"| {result.python} | {result.source} | {result.resolution} | {' | '.join(cells)} |"
    for version in missing:
        yield f"| {version} | – | – | {' | '.join(['not available here'] + ['–'] * (len(COLUMNS) - 1))} |"
    yield ""
    yield "The versions that these environments had, oldest and newest:"
    yield ""
    yield "| dependency | lowest | newest |"
    yield "|---|---|---|"
    for name in [*dependencies(), *TEST_TOOLS]:
        yield f"| {name} | {' | '.join(held(results, name, side) for side in RESOLUTIONS)} |"


def held(results: Sequence[Result], name: str, resolution: str) -> str:
    found = {
        result.versions.get(name.lower().replace("_", "-"), "")
        for result in results
        if result.resolution == resolution
    }
    return ", ".join(sorted(found - {""})) or "–"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", choices=PYTHONS, action="append", help="test one version; write no page"
    )
    parser.add_argument("--allow-missing", action="store_true")
    options = parser.parse_args()
    uv, results, missing = find_uv(), list[Result](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts, away = built(uv, folder), elsewhere(folder)
        for version in options.python or PYTHONS:
            python = interpreter(uv, version)
            if python is None:
                missing.append(version)
                sys.stdout.write(f"{version}: not available here\n")
                continue
            exact = subprocess.run(
                [python, "-V"], capture_output=True, text=True, check=True
            ).stdout.split()[1]
            for source, artifact in artifacts.items():
                for resolution in RESOLUTIONS:
                    result = attempt(
                        uv, python, away, artifact, Result(exact, source, resolution), folder
                    )
                    results.append(result)
                    sys.stdout.write(f"{exact} {source} {resolution}: {result.said}\n")
                    sys.stdout.flush()
    if not options.python:
        PAGE.write_text("\n".join(page(results, missing)) + "\n", encoding="utf-8")
    return int(
        any(result.failed for result in results) or bool(missing and not options.allow_missing)
    )


if __name__ == "__main__":
    sys.exit(main())
