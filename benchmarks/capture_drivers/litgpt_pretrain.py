"""litgpt's pretraining of a tiny GPT on random tokens, on two GPUs: ``litgpt_pretrain.py tiny``, as
its command is called.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from litgpt import Config
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import setup


@dataclass
class Random(DataModule):
    """Random tokens."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.randint(0, 100, (64, 17)), batch_size=self.batch_size
        )

    val_dataloader = train_dataloader


if __name__ == "__main__":
    setup(
        model_name="tiny",
        model_config=Config(
            name="tiny", block_size=16, n_layer=2, n_head=2, n_embd=32, padded_vocab_size=128
        ),
        out_dir=Path(tempfile.mkdtemp()),
        precision="32-true",
        data=Random(),
        devices=2,
        logger_name="csv",
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=8,
            micro_batch_size=2,
            max_tokens=192,
            tie_embeddings=False,
            lr_warmup_steps=1,
            max_norm=1.0,
            max_seq_length=16,
        ),
        eval=EvalArgs(interval=2, max_iters=1, initial_validation=False),
        log=LogArgs(),
    )
