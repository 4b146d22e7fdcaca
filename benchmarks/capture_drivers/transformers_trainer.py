"""The Trainer of transformers on a tiny random Llama: ``transformers_trainer.py ddp|fsdp``."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
)
rows = torch.randint(0, 128, (32, 16))
data = [{"input_ids": row, "labels": row} for row in rows]
more = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}} if sys.argv[1] == "fsdp" else {}
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=3, report_to=[], save_strategy="no", logging_steps=1,
    disable_tqdm=True, **more,
)  # fmt: skip
Trainer(model=model, args=arguments, train_dataset=data).train()
