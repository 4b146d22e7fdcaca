"""Regenerates command outputs and scenario texts in documentation pages: `python -m
tests.support.made_docs [PAGE…]`.

A ```console frame begins with ``$ `` and a shell command, in which `distsim` is this checkout. The
rest of the frame is its standard output at 80 columns. A ```yaml frame that begins with ``#
scenarios/….yaml`` shows that file. A ```python frame that begins with ``# 4 ranks`` runs on that
number of ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
#: Every page of docs/ that shows an output or a scenario, and the README.
PAGES = (
    README,
    *(path for path in sorted(DOCS.rglob("*.md")) if "```console\n$ " in path.read_text("utf-8")),
)
#: The lines around each python frame of the lessons.
BEFORE = """import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""
AFTER = "dist.destroy_process_group()\n"
#: An output may end in this line: its first two paragraphs are shown.
CUT = "[…]"
_CONSOLE = re.compile(r"```console\n\$ ([^\n]+)\n((?:.*?\n)??)```", re.DOTALL)
_YAML = re.compile(r"```yaml\n# (scenarios/[\w/]+\.yaml)\n.*?```", re.DOTALL)
_PYTHON = re.compile(r"```python\n# (\d+) ranks\n(.*?)```", re.DOTALL)


def output(command: str, columns: int = 80) -> str:
    """Standard output of a shell command, or standard error if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder, "distsim")
        tool.write_text(
            f'#!/bin/sh\nexec {shlex.join(warm.tool(command.split()))} "$@"\n', encoding="utf-8"
        )
        tool.chmod(0o755)
        environment = {
            **os.environ,
            "COLUMNS": str(columns),
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
            timeout=900,
        )
    return done.stdout or done.stderr


def takes_long(command: str) -> bool:
    """Whether a command starts processes that import torch, or tries many scenarios."""
    return any(
        word in command
        for word in (
            " shrink ",
            " --diff",
            " --seeds ",
            " --real",
            " capture ",
            " sweep ",
            " plan ",
        )
    )


def fresh(page: str, quick: bool = False) -> str:
    """A page with fresh files and outputs; ``quick`` keeps the outputs of slow commands."""

    def scenario(match: re.Match[str]) -> str:
        text = (ROOT / match[1]).read_text(encoding="utf-8").strip("\n")
        head = "" if text.startswith(f"# {match[1]}") else f"# {match[1]}\n"
        return f"```yaml\n{head}{text}\n```"

    def console(match: re.Match[str]) -> str:
        if quick and takes_long(match[1]):
            return match[0]
        printed = output(match[1]).rstrip("\n")
        if match[2].rstrip("\n").endswith(CUT):
            printed = "\n\n".join(printed.split("\n\n")[:2]) + f"\n{CUT}"
        return f"```console\n$ {match[1]}\n{printed}\n```"

    return _CONSOLE.sub(console, _YAML.sub(scenario, page))


def scripts(page: str) -> dict[int, str]:
    """The python frames of a page as one script for each number of ranks."""
    found: dict[int, str] = {}
    for ranks, code in _PYTHON.findall(page):
        found[int(ranks)] = found.get(int(ranks), BEFORE) + code
    return {ranks: code + AFTER for ranks, code in found.items()}


def refresh(names: list[str]) -> None:
    for path in PAGES:
        if not names or path.stem in names:
            path.write_text(fresh(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", help="Names of pages. [default: all]")
    refresh(parser.parse_args().pages)
