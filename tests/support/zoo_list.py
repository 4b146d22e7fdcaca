"""Writes the list in scenarios/zoo/README.md: ``python -m tests.support.zoo_list``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from distsim.scenario import load

ZOO = Path(__file__).resolve().parents[2] / "scenarios" / "zoo"
HEAD = """\
# Hangs that people reported

Each file is a small version of one report. It says what happened and has a link. Its `expect` block states the verdict, and the outcome
on each backend. A `_repaired` file is the repaired program. `distsim test scenarios/zoo` runs all files; `distsim simulate` explains one.
[The zoo, case by case](../../docs/explanation/zoo.md) compares the repairs in the reports with those that `check --fix` proposes.

Outcomes on gloo were observed with torch 2.13, or follow from observed rules. Outcomes on nccl and mpi come from the reports and from the
source code. `undefined` means that NCCL does not define the behaviour. An empty field means that the outcome is not known.

| file | program | verdict | gloo | nccl | mpi |
|---|---|---|---|---|---|
"""
TAIL = """
## Reports that distsim cannot reproduce

- Batches of so many messages that NCCL splits them into several launches, differently on each rank:
  https://github.com/pytorch/pytorch/issues/174942.
- Kernels of several communicators that do not fit on a GPU together: https://github.com/ROCm/rccl/issues/2191.
- Network and proxy faults: https://github.com/NVIDIA/nccl/issues/1822, https://github.com/NVIDIA/nccl/issues/2389.
"""
LINK = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


def files() -> list[Path]:
    """The numbered seeds (z), then the patterns from the field (f); each faulty file before its
    repair.
    """
    return sorted(
        ZOO.glob("*.yaml"),
        key=lambda p: (
            p.stem[0] != "z",
            p.stem.split("_")[0],
            p.stem.endswith("_repaired"),
            p.stem,
        ),
    )


def rows() -> Iterator[str]:
    for path in files():
        scenario = load(str(path))
        outcome = scenario.expect.outcome
        shown = (
            path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").removesuffix(".")
        )
        link = LINK.search(scenario.about)
        if link and not path.stem.endswith("_repaired"):
            shown += f" ([{link[1]}#{link[2]}]({link[0]}))"
        cells = (
            f"`{path.name}`",
            shown,
            scenario.expect.verdict,
            *(outcome.get(b, "") for b in ("gloo", "nccl", "mpi")),
        )
        yield "| " + " | ".join(cells) + " |\n"


def listing() -> str:
    return HEAD + "".join(rows()) + TAIL


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    (ZOO / "README.md").write_text(listing(), encoding="utf-8")
