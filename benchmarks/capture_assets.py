"""Random replacements for the files that the programs of `capture_programs.py` would download: a
tokenizer, texts and weights.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
from contextlib import suppress
from pathlib import Path

_TORCHTUNE = """\
output_dir: {root}/tuned
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, path: {root}/tokenizer.model, max_seq_len: 64}}
dataset: {{_component_: torchtune.datasets.instruct_dataset, source: json, data_files: {root}/instructions.json,
  split: train, packed: false}}
seed: 1
shuffle: true
model: {{_component_: torchtune.models.llama3_1.llama3_1, vocab_size: 128256, num_layers: 2, num_heads: 4, num_kv_heads: 2,
  embed_dim: 32, max_seq_len: 64}}
checkpointer: {{_component_: torchtune.training.FullModelTorchTuneCheckpointer, checkpoint_dir: {root}/weights,
  checkpoint_files: [model.pt],
  recipe_checkpoint: null, output_dir: {root}/tuned, model_type: LLAMA3}}
resume_from_checkpoint: false
batch_size: 2
epochs: 1
optimizer: {{_component_: torch.optim.AdamW, lr: 2.0e-5, fused: true}}
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
max_steps_per_epoch: 2
gradient_accumulation_steps: 2
device: cuda
enable_activation_checkpointing: false
enable_activation_offloading: false
clip_grad_norm: 1.0
compile: false
optimizer_in_bwd: false
dtype: fp32
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: {root}/logs}}
log_every_n_steps: 1
log_peak_memory_stats: true
"""


def make_assets(root: Path) -> None:
    """Write all of them below ``root``."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(
            "".join(rng.choices("abcdefghij", k=rng.randint(1, 6))) for _ in range(words)
        )

    with suppress(ImportError):  # its programs say that it is missing
        _torchtitan(root, [text(300) for _ in range(200)])
    with suppress(ImportError):
        _torchtune(root, [{"input": text(4), "output": text(4)} for _ in range(32)])


def _torchtitan(root: Path, texts: list[str]) -> None:
    """A tokenizer of bytes, and a data set where its debug model looks for one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = root / "tests" / "assets" / "tokenizer"
    folder.mkdir(parents=True)
    ends = ["<|begin_of_text|>", "<|end_of_text|>"]
    words = {
        word: k for k, word in enumerate([*ends, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens(ends)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": ends[0], "eos_token": ends[1]})
    )
    data = folder.parent / "c4_test"
    data.mkdir()
    (data / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def _torchtune(root: Path, rows: list[dict[str, str]]) -> None:
    """A tokenizer of bytes, instructions, the weights of a small Llama, and the recipe's
    configuration.
    """
    import torch
    from torchtune.models.llama3_1 import llama3_1

    (root / "tokenizer.model").write_text(
        "\n".join(f"{base64.b64encode(bytes([k])).decode()} {k}" for k in range(256))
    )
    (root / "instructions.json").write_text(json.dumps(rows))
    model = llama3_1(
        vocab_size=128256, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64
    )
    (root / "weights").mkdir()
    torch.save(model.state_dict(), root / "weights" / "model.pt")
    (root / "torchtune.yaml").write_text(_TORCHTUNE.format(root=root))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="Folder to write into.")
    make_assets(parser.parse_args().folder)
