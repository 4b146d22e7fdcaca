"""What the fields of training strategies mean, each in a sentence, with an example
(`distsim.common.field_parsing.describe_fields`).

The key is a field as the file has it, or ``strategy.field`` where it means something of its own
there.
"""

from __future__ import annotations

from distsim.common.field_parsing import FieldHelp
from distsim.scenario.strategies.field_help_serving import SERVING_FIELD_HELP as MORE

_DEFAULT_AXIS_HELP = "left out, the axis that is usually called so, where the mesh has it"
FIELD_HELP: dict[str, FieldHelp] = {
    "layers": FieldHelp(
        "The model: layers by parameters and times, `count` equal ones at once; one layer or a "
        "list.",
        [{"params": 1048576, "forward": "1 ms", "backward": "2 ms", "count": 4}],
    ),
    "tensor_parallel.layers": FieldHelp("How many equal layers.", 4),
    "context_parallel.layers": FieldHelp("How many equal layers.", 4),
    "expert_parallel.layers": FieldHelp("How many equal layers.", 4),
    "transformer.layers": FieldHelp("How many layers; left out, the preset's.", 32),
    "dtype": FieldHelp("What is sent, and what parameters are held in.", "bfloat16"),
    "group": FieldHelp(
        "Who takes part; left out: the axis `dp` where the mesh has one, else all ranks.", "dp"
    ),
    "batch": FieldHelp("Sequences of a micro-batch on a rank.", 8),
    "data_parallel.batch": FieldHelp(
        "The whole batch, first axis first: it is cut along it.", [64, 1024]
    ),
    "output": FieldHelp("What the model makes of the whole batch.", [64, 10]),
    "loss": FieldHelp("What the loss takes, on the first device.", "1 ms"),
    "optimizer": FieldHelp(
        "What the update takes: a time, `{flops, bytes}`, or the entries that stand for it.", "1 ms"
    ),
    "refresh": FieldHelp(
        "Renew the copies after the last update too; PyTorch leaves that to the next forward pass.",
        False,
    ),
    "bucket_cap_mb": FieldHelp(
        "DDP's bucket size; left out: 25, and 1 for the first bucket.", 25, "MiB"
    ),
    "find_unused_parameters": FieldHelp(
        "Look for parameters that a pass leaves out, and tell the others.", True
    ),
    "buffers": FieldHelp(
        "Elements of all buffers (running means and the like) by dtype, broadcast before every "
        "forward pass.",
        {"float32": 2048, "int64": 16},
    ),
    "forward_sync_buffers": FieldHelp(
        "Broadcast buffers before every forward pass, or at construction alone.", False
    ),
    "static_graph": FieldHelp(
        "The graph never changes: the first pass reduces when it is over and tells what was used.",
        True,
    ),
    "comm_hook": FieldHelp(
        "What reduces a bucket: allreduce, fp16_compress, bf16_compress, or PowerSGD's rank and "
        "first iteration.",
        {"powersgd": 1, "start": 10},
    ),
    "zero_redundancy_optimizer": FieldHelp(
        "Each rank updates some parameters, and broadcasts them.", True
    ),
    "ddp.frozen": FieldHelp(
        "Layers that are frozen on a rank and not on the others: construction raises.", {1: [2]}
    ),
    "ddp.no_sync": FieldHelp(
        "Reduce gradients only after the last micro-batch; by rank where they disagree.", False
    ),
    "deepspeed.group": FieldHelp("The data-parallel ranks; left out, all.", "dp"),
    "deepspeed.stage": FieldHelp(
        "ZeRO's stage: 1 shards the optimizer's states, 2 gradients too, 3 parameters too.", 3
    ),
    "skips_layer": FieldHelp("Ranks that run all layers but one.", {1: 0}),
    "reduce_bucket_size": FieldHelp("Elements of gradients that are reduced at a time.", 500000000),
    "overlap_comm": FieldHelp(
        "Reduce gradients beside the backward pass; left out, with stage 3.", True
    ),
    "reduce_scatter": FieldHelp(
        "false: a gradient larger than a bucket goes in one call (ZeRO 1 and 2).", False
    ),
    "stage3_prefetch_bucket_size": FieldHelp(
        "Elements of parameters that are gathered ahead of their use.", 50000000
    ),
    "stage3_max_reuse_distance": FieldHelp(
        "Parameters used again within so many elements stay gathered.", 1000000000
    ),
    "stage3_max_live_parameters": FieldHelp(
        "Elements of parameters that are gathered at most, ahead of their use.", 1000000000
    ),
    "stage3_param_persistence_threshold": FieldHelp(
        "Parameters of at most so many elements stay gathered.", 100000
    ),
    "zero_hpz_partition_size": FieldHelp(
        "ZeRO++ hpZ: ranks that keep a second copy of the parameters among them.", 8
    ),
    "zero_quantized_weights": FieldHelp(
        "ZeRO++ qwZ: gather parameters as int8, with scales.", True
    ),
    "zero_quantized_gradients": FieldHelp(
        "ZeRO++ qgZ: gradients as 4 bits, through all_to_alls inside and between machines.", True
    ),
    "accumulate": FieldHelp("Micro-batches of an iteration.", 4),
    "no_sync": FieldHelp("Reduce gradients only after the last micro-batch.", False),
    "inputs": FieldHelp(
        "Batches that each rank has; unequal numbers want `join`.", {0: 3, "else": 2}
    ),
    "join": FieldHelp("The context manager Join, for unequal numbers of batches.", True),
    "unused": FieldHelp("Layers that a rank's forward pass leaves out.", {1: [0]}),
    "setup": FieldHelp(
        "With construction: the broadcast of the model and the first iteration's buckets.", False
    ),
    "shard": FieldHelp(
        "The ranks that share one copy of the model; left out: the axis `dp_shard` or `dp`, else "
        "all ranks.",
        "dp",
    ),
    "replicate": FieldHelp("HSDP: the axis along which sharded copies are repeated.", "replica"),
    "zero": FieldHelp(
        "What is sharded: 3 parameters too, 2 gradients too, 1 optimizer states alone.", 3
    ),
    "root": FieldHelp(
        "What the outermost module holds itself: gathered first, kept. `at`: when it computes, "
        "first, last or both.",
        {"params": 1048576, "forward": "1 ms", "backward": "2 ms", "at": "last"},
    ),
    "reshard_after_forward": FieldHelp(
        "Free layers after the forward pass, keep them, or keep them among so many ranks.", 2
    ),
    "reshard_after_backward": FieldHelp(
        "Free layers after the backward passes before the last micro-batch too.", False
    ),
    "all_reduce_late": FieldHelp(
        "HSDP: reduce over the copies after the last micro-batch alone (set_requires_all_reduce).",
        True,
    ),
    "input_grad": FieldHelp(
        "The model's input wants a gradient, as behind something that learns.", True
    ),
    "forward_prefetch": FieldHelp(
        "Units gathered ahead by hand in the forward pass (set_modules_to_forward_prefetch).", 1
    ),
    "backward_prefetch": FieldHelp(
        "Units gathered ahead by hand in the backward pass; 0: one, as PyTorch does by itself.", 2
    ),
    "evaluate": FieldHelp("Forward passes alone, under no_grad.", True),
    "param_dtype": FieldHelp("MixedPrecisionPolicy: what is gathered.", "bfloat16"),
    "reduce_dtype": FieldHelp("MixedPrecisionPolicy: what is reduced.", "float32"),
    "clip_grad_norm": FieldHelp(
        "Gradients are clipped: their norms are reduced before the update.", True
    ),
    "clip_over": FieldHelp(
        "Axes over which the norms are summed as well, as matrices are cut there too.", "tp"
    ),
    "skips_backward": FieldHelp("Ranks that leave out the backward pass of one iteration.", {1: 0}),
    "schedule": FieldHelp(
        "The schedule's name, a CSV file in PyTorch's form, or the lines of one.", "1f1b"
    ),
    "axis": FieldHelp("The axis of the mesh along which it works.", "pp"),
    "micro_batches": FieldHelp("Micro-batches of an iteration.", 8),
    "chunks": FieldHelp("Stages on each rank; left out, as the schedule has it.", 2),
    "forward": FieldHelp(
        "What one forward pass of one part takes: a time, or `{flops, bytes}`.", "2 ms"
    ),
    "backward": FieldHelp("What one backward pass of one part takes.", "4 ms"),
    "backward_input": FieldHelp(
        "The half of a backward pass that gives the gradients of inputs.", "2 ms"
    ),
    "backward_weight": FieldHelp(
        "The half of a backward pass that gives the gradients of weights.", "2 ms"
    ),
    "last_backward": FieldHelp(
        "What a stage's last backward pass takes, where something is done beside it.", "5 ms"
    ),
    "overlapped": FieldHelp(
        "What a forward and a backward pass take that overlap; left out, both after each other.",
        "5 ms",
    ),
    "reduce_copies": FieldHelp(
        "dualpipe: sum the gradients of each stage's two copies in the end.", False
    ),
    "pipeline.data_parallel": FieldHelp(
        "Data parallelism of the stages, with PyTorch's calls for it.",
        {"axis": "dp", "params": 1048576},
    ),
    "activation": FieldHelp(
        "What travels between stages: its shape and dtype.",
        {"shape": [8, 1024], "dtype": "bfloat16"},
    ),
    "gradient": FieldHelp(
        "A tensor of the file that every backward pass adds to; left out, one of its own.", "grad"
    ),
    "hybrid.gradient": FieldHelp(
        "Elements of a rank's gradients, or the file's tensor that holds them.", 1048576
    ),
    "shapes_exchange": FieldHelp(
        "Before the first micro-batch: true as PyTorch without shapes, `vote` as with them.", True
    ),
    "defer_pp_recv": FieldHelp("Post a receive only when its stage comes to it.", True),
    "megatron": FieldHelp(
        "1f1b with Megatron-LM's calls: batches that are waited for; fewer micro-batches than "
        "stages may be.",
        True,
    ),
    "numbered": FieldHelp(
        "Tensors carry 1000 * stage + micro-batch, so that values show who got what.", True
    ),
    "pairs": FieldHelp("Pairs of matrices in a layer: attention and feed-forward.", 2),
    "sequence": FieldHelp("Tokens of a sequence.", 4096),
    "hidden": FieldHelp("The model's width.", 4096),
    "heads": FieldHelp("Attention heads, which must divide among the ranks; 0: not checked.", 32),
    "ffn": FieldHelp(
        "Width of the feed-forward part, which must divide among the ranks; 0: not checked.", 14336
    ),
    "columns": FieldHelp(
        "Matrices by columns in each pair, each with an all_reduce in the backward pass "
        "(DTensor); 1: fused.",
        [3, 2],
    ),
    "ends": FieldHelp(
        "Embedding and output cut by vocabulary: their calls, and those of the loss.",
        {"vocabulary": 128256, "loss_parallel": True, "forward": "1 ms", "backward": "2 ms"},
    ),
    "between": FieldHelp(
        "What is done between the forward and the backward pass: a time, or entries.", "1 ms"
    ),
    "sequence_parallel": FieldHelp(
        "Shard activations along the sequence between the matrices.", True
    ),
    "tensor_calls": FieldHelp(
        "dtensor: calls of PyTorch's DTensor; megatron: those of fused matrices, with gradients "
        "beside.",
        "megatron",
    ),
    "loss_parallel": FieldHelp(
        "Compute the loss from each rank's part of the logits; else gather them.", False
    ),
    "keys": FieldHelp(
        "Keys (or values) of a rank's part of the sequence: a message holds both.",
        [1, 8, 1024, 128],
    ),
    "rotate": FieldHelp("How keys and values go round.", "allgather"),
    "causal": FieldHelp(
        "Later positions do not see earlier ones' future: parts that come after its own are left "
        "out.",
        True,
    ),
    "load_balance": FieldHelp(
        "Each rank has an early and a late part, so that causal work is even.", True
    ),
    "experts": FieldHelp("How many experts.", 8),
    "hybrid.experts": FieldHelp(
        "Fields of `expert_parallel`, for a stage's layers.",
        {"experts": 8, "tokens": 4096, "hidden": 1024},
    ),
    "transformer.experts": FieldHelp(
        f"The axis of expert parallelism; {_DEFAULT_AXIS_HELP}.", "ep"
    ),
    "tokens": FieldHelp("Tokens of a rank.", 4096),
    "top_k": FieldHelp("Experts that each token goes to.", 2),
    "imbalance": FieldHelp("How unequal the router is: 0 even, 1 strongly unequal.", 0.5),
    "seed": FieldHelp("Where the router's chance starts from.", 7),
    "capacity_factor": FieldHelp(
        "An expert takes so many times its even share at most; the rest of the tokens is dropped.",
        1.25,
    ),
    "pad_to_capacity": FieldHelp(
        "Every rank sends each expert its full capacity, padded: all messages are equal.", True
    ),
    "order": FieldHelp("Refuse a mesh whose axes do not stand in this order.", "megatron"),
    "hybrid.pipeline": FieldHelp(
        "Fields of `pipeline`, or `schedule: plain`.", {"micro_batches": 8}
    ),
    "hybrid.tensor": FieldHelp(
        "Fields of `tensor_parallel`, for a stage's layers.",
        {"batch": 1, "sequence": 4096, "hidden": 4096},
    ),
    "hybrid.context": FieldHelp(
        "Fields of `context_parallel`, for a stage's layers.", {"keys": [1, 8, 1024, 128]}
    ),
    "hybrid.data": FieldHelp("The axes over which gradients are averaged.", "dp"),
    "pipeline": FieldHelp(f"The axis of the pipeline; {_DEFAULT_AXIS_HELP}.", "pp"),
    "tensor": FieldHelp(f"The axis of tensor parallelism; {_DEFAULT_AXIS_HELP}.", "tp"),
    "context": FieldHelp(f"The axis of context parallelism; {_DEFAULT_AXIS_HELP}.", "cp"),
    "data": FieldHelp(f"The axes of data parallelism; {_DEFAULT_AXIS_HELP}.", "dp"),
    "model": FieldHelp("A preset, or the model's sizes.", "llama3-8b"),
    "micro_batch": FieldHelp("Sequences of a micro-batch.", 1),
    "gradient_dtype": FieldHelp("What gradients are kept and reduced in.", "float32"),
    "recompute": FieldHelp("What the backward pass computes again instead of keeping it.", "full"),
    "attention": FieldHelp("flash: fused, its scores never reach memory; plain: they do.", "flash"),
    "attention_efficiency": FieldHelp(
        "Share of a matrix product's rate that fused attention reaches.", 0.6
    ),
    "matmul_dtype": FieldHelp(
        "What the layers' matrix products are in, where it is not dtype.", "float8_e4m3fn"
    ),
    "launch": FieldHelp("Host time to launch one operation.", "15 us"),
    "autocast": FieldHelp(
        "DDP under torch.autocast: parameters and gradients in float32, products in dtype.", True
    ),
    "tensor_overlap": FieldHelp(
        "What tensor ranks gather and scatter travels in pieces beside the products.", True
    ),
    "layers_per_stage": FieldHelp("Layers of each stage; left out, evenly.", [8, 8, 8, 8]),
    "overlap_grad_reduce": FieldHelp(
        "Reduce each layer's gradients while the next layer's are computed.", False
    ),
    "embedding_all_reduce": FieldHelp(
        "Sum the gradients of tied embeddings over the first and the last stage.", True
    ),
    "data_ranks": FieldHelp(
        "Ranks that share what is sharded, where the mesh holds only some of them.", 64
    ),
    "objects": FieldHelp("Bytes of each object, pickled.", ["1 KiB", "64 B"]),
    "object": FieldHelp(
        "Bytes of the object, pickled; by rank where they differ.", {0: "4 KiB", "else": "64 B"}
    ),
    "src": FieldHelp("The rank that gives, by its global number.", 0),
    "dst": FieldHelp("The rank that gets, by its global number.", 0),
    "group_src": FieldHelp("The rank that gives, by its number in the group.", 0),
    "group_dst": FieldHelp("The rank that gets, by its number in the group.", 0),
    "ops": FieldHelp(
        "The collectives inside the context, which go as one launch.",
        [{"all_reduce": {"tensor": "x"}}],
    ),
    "async": FieldHelp("Start the launch and go on; `as` names the request.", True),
    "as": FieldHelp("The handle of the launch's request.", "h"),
    "on": FieldHelp("The CUDA stream that is current at the call.", "comm"),
} | MORE

__all__ = ["FIELD_HELP"]
