"""How many modules a reader goes through who follows one call from YAML to verdict, time and
text.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: One call, as the walk of docs/explanation/architecture.md has it, but of a tensor that is declared nowhere.
ONE_CALL = "world: 4\nprogram:\n  - all_reduce: {tensor: {shape: [1024], dtype: float32}}\n"
#: Prints the files of the package of which a function runs, the second time: by then all is loaded.
#: What was kept is forgotten.
COUNT = """
import contextlib, io, os, sys
import distsim
from distsim.cli.process import run_and_exit

def simulate():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run_and_exit()

def note(frame, event, arg):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
        ran.add(frame.f_code.co_filename.removeprefix(PACKAGE))

PACKAGE, ran = os.path.dirname(distsim.__file__) + os.sep, set()
simulate()
for module in [one for name, one in sys.modules.items() if name.startswith("distsim")]:
    for kept in vars(module).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()
sys.setprofile(note)
simulate()
sys.setprofile(None)
print(*sorted(ran), sep="\\n")
"""
#: More than a reader would like; fewer, larger modules were harder to read. Lower it where two
#: modules on the path turn out to have one subject. The last one added sets the limits of a reader.
MOST = 89


def test_one_call_from_yaml_to_report_runs_through_a_limited_number_of_modules(
    tmp_path: Path,
) -> None:
    """All that `simulate` prints of itself counts, the timeline, the critical path and the band of
    the prices among it. Modules count of which a function runs, so neither tables and types that
    are only read nor what runs once, while modules load."""
    file = tmp_path / "one.yaml"
    file.write_text(ONE_CALL, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", COUNT, "simulate", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    ran = done.stdout.split()

    assert done.stderr == ""
    assert {
        "cli/commands/simulate.py",
        "checker/verdict.py",
        "output/text/simulation_report.py",
    } <= set(ran)
    assert len(ran) <= MOST, "\n".join(ran)
