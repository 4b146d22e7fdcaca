"""Programs from git checkouts under `distsim capture`, unmodified, with their own launch lines.

    python benchmarks/capture_checkouts.py FOLDER [pattern]

FOLDER holds one checkout per program, named as in `PROGRAMS`, at the commit given there. Data and
models must exist before: a byte-level or random-token data set, and a tiny random model; the words
of each program name their paths below FOLDER/data. All programs ended with ``ok`` under torch 2.13.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from capture_programs import ENVIRONMENT, report_in, result


class Checkout(NamedTuple):
    """``folder`` is below the folder of checkouts; the launch line starts there.

    ``paths``: further checkouts, or folders in them, that Python imports from.
    """

    name: str
    folder: str
    commit: str
    ranks: int
    launch: str
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


PROGRAMS = (
    Checkout(
        "pytorch/examples FSDP2",
        "examples/distributed/FSDP2",
        "77f55b9",
        2,
        "bash run_example.sh example.py 2",
    ),
    Checkout(
        "pytorch/examples FSDP × TP",
        "examples/distributed/tensor_parallelism",
        "77f55b9",
        4,
        "bash run_example.sh fsdp_tp_example.py 4",
    ),
    Checkout(
        "pytorch/examples DDP series",
        "examples/distributed/ddp-tutorial-series",
        "77f55b9",
        2,
        "torchrun --standalone --nproc_per_node=2 multigpu_torchrun.py 2 1",
    ),
    Checkout(
        "Megatron-LM simple loop, TP",
        "Megatron-LM",
        "d98e8a64dd",
        2,
        "torchrun --nproc_per_node=2 examples/run_simple_mcore_train_loop.py",
        ("Megatron-LM",),
    ),
    Checkout(
        "nanochat base_train",
        "nanochat",
        "92d63d4",
        2,
        "torchrun --standalone --nproc_per_node=2 -m scripts.base_train -- --depth=2 --head-dim=32"
        " --aspect-ratio=32 --window-pattern=L --max-seq-len=64 --device-batch-size=2"
        " --total-batch-size=512 --eval-every=-1 --core-metric-every=-1 --sample-every=-1"
        " --num-iterations=3 --eval-tokens=512",
    ),
    Checkout(
        "lingua, FSDP2",
        "lingua",
        "437d680",
        2,
        "torchrun --nproc-per-node 2 -m apps.main.train config=apps/main/configs/debug.yaml"
        " dump_dir=../data/lingua-out steps=3 data.root_dir=../data/lingua model.dim=64"
        " model.n_layers=2 model.n_heads=2 data.seq_len=64 data.batch_size=2 logging.freq=1"
        " profiling.run=false eval=null",
        ("xformers",),
    ),
    Checkout(
        "OLMo-core llm, FSDP",
        "OLMo-core",
        "fa6c5014c",
        2,
        "torchrun --nproc-per-node=2 src/examples/llm/train.py run --sequence-length=64"
        " --save-folder=../data/olmo-out --work-dir=../data/olmo-work --model.d_model=32"
        " --model.n_layers=2 --model.block.sequence_mixer.n_heads=2"
        " --model.block.feed_forward.hidden_size=64 --data_loader.global_batch_size=512"
        " --data_loader.num_workers=0 --train_module.rank_microbatch_size=128"
        " --trainer.max_duration={value:\xa03,unit:\xa0steps}"
        " --trainer.callbacks.downstream_evaluator.enabled=false"
        " --trainer.callbacks.lm_evaluator.enabled=false --trainer.metrics_collect_interval=1",
        ("OLMo-core/src",),
    ),
    Checkout(
        "torchrec DLRM, sharded embeddings",
        "dlrm/torchrec_dlrm",
        "090956e",
        2,
        "torchrun --nproc_per_node 2 dlrm_main.py --embedding_dim 8 --dense_arch_layer_sizes 16,8"
        " --over_arch_layer_sizes 16,1 --num_embeddings 100 --batch_size 8 --limit_train_batches 3"
        " --limit_val_batches 2 --limit_test_batches 2 --epochs 1",
        ("torchrec",),
        ("--no-cuda",),
    ),
    Checkout(
        "verl test_tensor_dict",
        "verl",
        "b178a3cd5",
        4,
        "torchrun --nproc-per-node=4 --standalone tests/special_distributed/test_tensor_dict.py",
        ("verl", "Megatron-LM"),
    ),
    Checkout(
        "TRL GRPO",
        "data",
        "PyPI 1.16.0",
        2,
        "accelerate launch --num_processes 2 -m trl.scripts.grpo --model_name_or_path tiny-opt"
        " --dataset_name prompts --reward_funcs think_format_reward --output_dir grpo-out"
        " --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 8"
        " --max_steps 3 --logging_steps 1 --report_to none --save_strategy no --beta 0.04"
        " --bf16 false",
    ),
)


def capture(program: Checkout, checkouts: Path, limit_s: int) -> str:
    """The line of the table: program, commit, ranks, calls, result."""
    # A no-break space stands for a space inside an argument.
    words = [word.replace("\xa0", " ") for word in program.launch.split()]
    paths = os.pathsep.join(str(checkouts / path) for path in program.paths)
    data = str(checkouts / "data")
    own = {"PYTHONPATH": paths, "OLMO_DATA_ROOT": f"{data}/olmo", "NANOCHAT_BASE_DIR": data}
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "distsim", "capture", *program.options),
            *("--timeout", f"{limit_s}s", "--format", "json", "--", *words),
        ],
        cwd=checkouts / program.folder,
        env=os.environ | ENVIRONMENT | own,
        stdout=subprocess.PIPE,
        text=True,
    )
    report = report_in(ended.stdout)
    calls = report["captured"]["calls"] if report else 0
    verdict = result(report) if report else f"no report, status {ended.returncode}"
    return f"| {program.name} | {program.commit} | {program.ranks} | {calls} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--timeout", type=int, default=900)
    given = parser.parse_args()
    print("| program | commit | ranks | calls | result |\n|---|---|---|---|---|")
    for program in PROGRAMS:
        if re.search(given.pattern, program.name):
            print(capture(program, given.checkouts.resolve(), given.timeout), flush=True)


if __name__ == "__main__":
    main()
