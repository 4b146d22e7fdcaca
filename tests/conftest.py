"""Fixtures for all tests: the project's folder, and the command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import LIMIT_S, ROOT, Cli

# Tests start hundreds of processes that import distsim. Without bytecode each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def cli() -> Cli:
    """``cli("simulate", "x.yaml")`` runs ``distsim simulate x.yaml`` in a process of its own, from
    the project's folder.

    Unless it has an environment of its own, it is a fork of a process that has imported distsim
    where warm.py can have one.
    """
    from tests.support import warm

    def run(
        *args: object,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), **(env or {})}
        words = [str(arg) for arg in args]
        command = [sys.executable, "-m", "distsim"] if env else warm.tool(words)
        return subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            input=input,
            env=environment,
            cwd=cwd,
            timeout=LIMIT_S,
            check=False,
        )

    return run


@pytest.fixture(autouse=True)
def _own_processes_only(request: pytest.FixtureRequest) -> None:
    """Tests of real runs look at the processes that they start themselves."""
    if request.path.parent.name == "real":
        from tests.support.real_runs import forget_others

        forget_others()
