"""Stored outputs of commands, which show every change of a text or a picture.

A text is a claim of its own: columns, rounding, plurals, what is shown only sometimes. Each command
below is chosen for a module of `distsim.output` whose text no scenario's ``.out`` file shows.

``python -m tests.support.command_outputs`` regenerates the files in tests/data/command_outputs;
look at ``git diff`` afterwards. With names, it regenerates only those.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from distsim.cli.application import application

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "command_outputs"
HANGS = "tests/data/doctor/hangs"
RING = "scenarios/ring_of_four.yaml"
#: Name of the file -> words of the command, with the project's folder as working directory.
COMMANDS: dict[str, str] = {
    "check_many": f"check {RING} scenarios/any_source_ring.yaml scenarios/all_reduce.yaml scenarios/size_mismatch.yaml",
    "check_diff": "check scenarios/skipped_barrier.yaml --diff",
    "check_github": f"check {RING} --format github",
    "check_sarif": "check scenarios/skipped_barrier.yaml --format sarif",
    "compare": "compare scenarios/ring_of_four.yaml scenarios/head_to_head_sends.yaml",
    "compare_killed": "compare scenarios/killed_at_iteration_3.yaml scenarios/strategies/ddp.yaml",
    "compare_times": "compare scenarios/pipeline_1f1b.yaml scenarios/pipeline_wrong_order.yaml",
    "compare_traces": "compare traces/ring_gloo_4.jsonl traces/ring_gloo_4.jsonl",
    "compare_clusters": "compare scenarios/two_machines.yaml traces/ring_gloo_4.jsonl",
    "doctor_break": f"doctor {HANGS}/early_break.zip",
    "doctor_json": f"doctor {HANGS}/skipped_in_pair.zip --format json",
    "doctor_picture": f"doctor {HANGS}/ring_receives_first.zip --view wait-for -o OUT.dot",
    "doctor_raised": f"doctor {HANGS}/raised_before.zip",
    "doctor_slow": f"doctor {HANGS}/slow_host.zip --width 60",
    "doctor_never": f"doctor {HANGS}/never_came.zip",
    "doctor_monitored": f"doctor {HANGS}/monitored.zip",
    "doctor_queue": f"doctor {HANGS}/empty_queue.zip",
    "doctor_swapped": f"doctor {HANGS}/swapped_groups.zip",
    "explain_backends": "explain backends",
    "explain_broadcast": "explain broadcast",
    "explain_compute": "explain compute",
    "explain_cost": "explain all_reduce --cluster dgx-h100 --ranks 16 --bytes 64MiB",
    "explain_cost_of_send": "explain send --cluster dgx-h100 --ranks 2 --bytes 8KiB",
    "explain_gather": "explain gather",
    "explain_key": "explain tensors.x.shape",
    "explain_recv": "explain recv",
    "explain_strategy": "explain pipeline",
    "explain_word": "explain rendezvous",
    "plan": "plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 8 --restrict tp=2,4 --restrict pp=1,2 --restrict micro_batch=1 --restrict recompute=none --top 4",
    "plan_framework": "plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 8 --restrict tp=8 --restrict micro_batch=1 --framework megatron --top 1",
    "plan_nothing": "plan gpt3-175b --gpus 8 --cluster dgx-h100 --global-batch 8 --restrict tp=8",
    "render_overlay": "compare scenarios/send_one.yaml scenarios/send_one.yaml --cluster cpu-25gbe -o OUT.svg",
    "replay": "replay traces/ring_gloo_4.jsonl",
    "replay_changed": "replay traces/collectives_gloo_2.jsonl --as-recorded --what-if like-peers=1",
    "replay_elsewhere": "replay traces/collectives_gloo_2.jsonl --cluster dgx-h100 --scale compute=0.5",
    "run_plan": "run scenarios/two_machines.yaml",
    "run_plan_ring": f"run {RING}",
    "slow": "slow sample",
    "slow_picture": "slow sample -o OUT.svg",
    "slow_json": "slow sample --format json --steps 2-4",
    "slow_what_if": "slow sample --what-if like-peers=2 --cluster dgx-h100",
    "sweep": "sweep scenarios/send_one.yaml --grid backend=gloo,nccl --cluster cpu-10gbe,dgx-h100",
    "test": f"test scenarios/barrier.yaml {RING}",
    "test_junit": f"test scenarios/barrier.yaml {RING} --format junit",
}


def output_of(name: str) -> str:
    """Standard output and error at 80 columns, a line with the exit status, and the file OUT."""
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "OUT"))
        words = [word.replace("OUT", place) for word in COMMANDS[name].split()]
        result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
            application(), words, catch_exceptions=False
        )
        written = [path.read_text(encoding="utf-8") for path in Path(folder).iterdir()]
    output = result.output.replace(place, "OUT").replace(str(ROOT), "ROOT")
    return "".join([output, f"exit status {result.exit_code}\n", *written])


def stored(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def refresh(names: list[str]) -> None:
    os.chdir(ROOT)
    for name in names or COMMANDS:
        stored(name).write_text(output_of(name), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Regenerate tests/data/command_outputs.")
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], metavar="NAME")
    refresh(parser.parse_args().names)
