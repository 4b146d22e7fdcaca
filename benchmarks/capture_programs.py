"""Published programs under `distsim capture`: program, ranks, calls, CPU seconds, result.

    python benchmarks/capture_programs.py [pattern] [--keep FOLDER]

Install their packages with pip first; docs/explanation/capture.md lists the versions. Nothing is
downloaded: models are small and random, and `capture_assets.py` generates the data sets. If a
package has no program to start, a short driver in `capture_drivers` calls it as its documentation
shows. CPU seconds include all ranks, the hub, and the imports, which happen once. ``--keep`` copies
the files that the programs wrote, and their reports, into a folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

DRIVERS = Path(__file__).parent / "capture_drivers"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "HF_DATASETS_OFFLINE": "1",
    "DS_ACCELERATOR": "cuda",
    "PYTHONWARNINGS": "ignore",
}
TITAN = (
    "-m",
    "torchtitan.train",
    "--training.steps",
    "3",
    "--training.seq_len",
    "64",
    "--training.local_batch_size",
    "4",
)


class Foreign(NamedTuple):
    """``words``: what stands behind ``--``; a name of a driver stands for its path."""

    name: str
    package: str
    ranks: int
    words: tuple[str, ...]


PROGRAMS = (
    Foreign(
        "accelerate test_ops", "accelerate", 2, ("-m", "accelerate.test_utils.scripts.test_ops")
    ),
    Foreign(
        "accelerate test_sync", "accelerate", 2, ("-m", "accelerate.test_utils.scripts.test_sync")
    ),
    Foreign(
        "accelerate test_script",
        "accelerate",
        2,
        ("-m", "accelerate.test_utils.scripts.test_script"),
    ),
    Foreign("Lightning BoringModel, ddp", "lightning", 2, ("lightning_boring.py", "ddp")),
    Foreign("Lightning BoringModel, fsdp", "lightning", 2, ("lightning_boring.py", "fsdp")),
    Foreign("DeepSpeed ZeRO-1", "deepspeed", 2, ("deepspeed_zero.py", "1")),
    Foreign("DeepSpeed ZeRO-2", "deepspeed", 2, ("deepspeed_zero.py", "2")),
    Foreign("DeepSpeed ZeRO-3", "deepspeed", 2, ("deepspeed_zero.py", "3")),
    Foreign("transformers Trainer, DDP", "transformers", 2, ("transformers_trainer.py", "ddp")),
    Foreign(
        "transformers Trainer, FSDP",
        "transformers",
        2,
        ("accelerate", "transformers_trainer.py", "fsdp"),
    ),
    Foreign("TRL SFT with PEFT", "trl", 2, ("trl_sft.py",)),
    Foreign("torchtitan debug model, FSDP", "torchtitan", 2, TITAN),
    Foreign(
        "torchtitan debug model, FSDP × TP",
        "torchtitan",
        4,
        (*TITAN, "--parallelism.tensor_parallel_degree", "2"),
    ),
    Foreign(
        "torchtitan debug model, PP",
        "torchtitan",
        2,
        (*TITAN, "--parallelism.pipeline_parallel_degree", "2"),
    ),
    Foreign(
        "torchtune full fine-tune",
        "torchtune",
        2,
        ("recipes/full_finetune_distributed.py", "--config", "torchtune.yaml"),
    ),
    Foreign("megatron-core GPT, TP × PP", "megatron-core", 4, ("megatron_gpt.py",)),
    Foreign("ignite engine", "pytorch-ignite", 2, ("ignite_engine.py",)),
    Foreign("litgpt pretrain, FSDP", "litgpt", 2, ("litgpt_pretrain.py", "tiny")),
    Foreign("accelerate loop", "accelerate", 2, ("accelerate_loop.py",)),
    Foreign("Lightning Fabric loop", "lightning", 2, ("fabric_loop.py",)),
    Foreign("mmengine Runner", "mmengine", 2, ("mmengine_runner.py",)),
    Foreign("GPT-2 with torch's pipelining", "transformers", 2, ("pipelined_gpt2.py",)),
)


class Row(NamedTuple):
    """One line of the table."""

    program: Foreign
    calls: int
    cpu_s: float
    result: str


def run(program: Foreign, folder: Path, limit_s: int) -> Row:
    """Capture it from a folder of its own."""
    words = [path_of(w) if w.endswith(".py") else w for w in program.words if w != "accelerate"]
    command = [
        sys.executable,
        "-m",
        "distsim",
        "capture",
        "--cuda",
        "--nproc",
        str(program.ranks),
        "--timeout",
        f"{limit_s}s",
        "--format",
        "json",
        "--",
        *(words if words[0] == "-m" else ["python", *words]),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = folder / f"{re.sub('[^a-zA-Z0-9]+', '-', program.name).lower()}.log"
    extra = {"ACCELERATE_USE_FSDP": "true"} if "accelerate" in program.words else {}
    with log.open("w") as errors:
        ended = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | ENVIRONMENT | extra,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    log.write_text(log.read_text(errors="replace") + ended.stdout)
    told = report_in(ended.stdout)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if told is None:
        return Row(program, 0, spent, f"no report, status {ended.returncode}")
    return Row(program, told["captured"]["calls"], spent, result(told))


def path_of(name: str) -> str:
    """A driver's, or with a folder that of a script which a package brings."""
    if "/" not in name:
        return str(DRIVERS / name)
    return next((str(p) for p in (Path(folder) / name for folder in sys.path) if p.exists()), name)


def report_in(output: str) -> dict | None:  # type: ignore[type-arg]
    """The report behind what the program wrote."""
    decoder = json.JSONDecoder()
    for start in (m.start() for m in re.finditer(r"^\{", output, re.MULTILINE)):
        try:
            found, _ = decoder.raw_decode(output[start:])
        except ValueError:
            continue
        if isinstance(found, dict) and "captured" in found:
            return found
    return None


def result(told: dict) -> str:  # type: ignore[type-arg]
    """ok, or the first cause."""
    errors = [f["code"] for f in told.get("findings", ()) if f["severity"] == "error"]
    if (told["outcome"], told["verdict"], errors) == ("completes", "ok", []):
        return "ok"
    failed = [r for r in told["captured"]["ranks"] if r["state"] in ("raised", "exited", "killed")]
    if failed:
        return f"rank {failed[0]['rank']} {failed[0]['state']}: {failed[0]['what'][:90]}"
    return f"{told['outcome']} {' '.join(errors)}"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def table(rows: list[Row]) -> str:
    head = ["| program | version | ranks | calls | CPU s | result |", "|---|---|---|---|---|---|"]
    told = [
        (p.name, version(p.package), p.ranks, calls, f"{cpu_s:.0f}", result)
        for p, calls, cpu_s, result in rows
    ]
    return "\n".join([*head, *(f"| {' | '.join(map(str, row))} |" for row in told)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--timeout", type=int, default=600)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(exist_ok=True, parents=True)
        if not (folder / "tests").exists():
            subprocess.run(
                [sys.executable, str(Path(__file__).with_name("capture_assets.py")), str(folder)],
                check=True,
            )
        rows = []
        for program in PROGRAMS:
            if re.search(given.pattern, program.name):
                rows.append(run(program, folder, given.timeout))
                print(
                    f"{program.name}: {rows[-1].result} ({rows[-1].calls} calls, {rows[-1].cpu_s:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
        print(table(rows))


if __name__ == "__main__":
    main()
