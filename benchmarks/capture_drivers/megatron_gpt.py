"""megatron-core's GPT, tensor parallel by 2 and pipelined over 2 stages, with its own 1F1B schedule
and DDP.
"""

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, VOCABULARY = 16, 128


def batches():
    while True:
        yield torch.randint(0, VOCABULARY, (2, LENGTH + 1), device="cuda")


def forward(data, model):
    rows = next(data)
    positions = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    out = model(rows[:, :-1].contiguous(), positions, mask, labels=rows[:, 1:].contiguous())
    return out, lambda loss: (loss.float().mean(), {"loss": loss.float().mean().detach()})


torch.distributed.init_process_group("nccl")
torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=2, pipeline_model_parallel_size=2
)
torch.manual_seed(1)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    pipeline_dtype=torch.float32,
    use_cpu_initialization=True,
)
gpt = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=VOCABULARY,
    max_sequence_length=LENGTH,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
).cuda()
model = DistributedDataParallel(
    config=config, ddp_config=DistributedDataParallelConfig(), module=gpt
)
config.finalize_model_grads_func = finalize_model_grads
optimizer = torch.optim.Adam(model.parameters())
step, data = get_forward_backward_func(), batches()
for _ in range(2):
    model.zero_grad_buffer()
    losses = step(
        forward_step_func=partial(forward),
        data_iterator=data,
        model=model,
        num_microbatches=4,
        seq_length=LENGTH,
        micro_batch_size=2,
        decoder_seq_length=LENGTH,
        forward_only=False,
    )
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
print(losses[-1:])
torch.distributed.destroy_process_group()
