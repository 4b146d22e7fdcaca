"""The expected outputs next to the scenarios, also those of strategies: the output of ``distsim
simulate FILE`` and its exit status.

``python -m tests.support.scenario_outputs`` regenerates them in the project's folder; look at
``git diff scenarios`` afterwards. With names of scenarios, it regenerates only those.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from typer.testing import CliRunner

from distsim.cli.application import application

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = [*sorted(ROOT.glob("scenarios/*.yaml")), *sorted(ROOT.glob("scenarios/startup/*.yaml"))]


def output_of(path: Path) -> str:
    """Standard output at 80 columns, then a line with the exit status. The working directory must
    be the project's.
    """
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        application(), ["simulate", str(path.relative_to(ROOT))], catch_exceptions=False
    )
    return f"{result.stdout}exit status {result.exit_code}\n"


def refresh(names: list[str]) -> None:
    from tests.support.strategy_checks import STRATEGY_SCENARIOS

    os.chdir(ROOT)
    for path in (*SCENARIOS, *STRATEGY_SCENARIOS):
        if not names or path.stem in names:
            path.with_suffix(".out").write_text(output_of(path), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="Names of scenarios. [default: all]")
    refresh(parser.parse_args().names)
