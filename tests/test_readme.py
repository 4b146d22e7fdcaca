"""The README's outputs are real: every ```console block is run. `python tests/test_readme.py` writes them again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
#: A block's output may end in this line: the rest of the real output is left out there.
CUT = "[…]"


def output(command: str) -> str:
    """What a command line that starts with ``distsim`` prints."""
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", *shlex.split(command)]
    return subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=900).stdout


def fresh(readme: str) -> str:
    """The README with its scenario and its outputs as they are today."""

    def block(match: re.Match[str]) -> str:
        command, shown = match.groups()
        real = output(command).rstrip("\n").split("\n")
        if shown.rstrip("\n").endswith(CUT):
            paragraphs = "\n".join(real).split("\n\n")
            real = [*"\n\n".join(paragraphs[:2]).split("\n"), CUT]
        return f"```console\n$ {command}\n" + "\n".join(real) + "\n```"

    scenario = (ROOT / "scenarios" / "hybrid.yaml").read_text(encoding="utf-8").rstrip("\n")
    readme = re.sub(r"```yaml\n.*?\n```", lambda _: f"```yaml\n{scenario}\n```", readme, count=1, flags=re.DOTALL)
    return re.sub(r"```console\n\$ ([^\n]+)\n(.*?)\n```", block, readme, flags=re.DOTALL)


def test_the_scenario_and_the_outputs_in_the_readme_are_what_the_commands_print():
    text = README.read_text(encoding="utf-8")

    assert text.count("```console") >= 3
    assert fresh(text) == text


def test_every_file_that_the_readme_links_to_is_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))

    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_python_block_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

    assert blocks
    for code in blocks:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout


if __name__ == "__main__":
    README.write_text(fresh(README.read_text(encoding="utf-8")), encoding="utf-8")
