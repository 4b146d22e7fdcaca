"""What the fields of strategies beside the training step mean: averages, quorums, checkpoints,
inference (as `words`).
"""

from __future__ import annotations

from distsim.common.field_parsing import FieldHelp

SERVING_FIELD_HELP: dict[str, FieldHelp] = {
    "expert_parallel.between": FieldHelp(
        "The axis of machines: tokens go between these first, then inside along `axis`.", "machine"
    ),
    "once_per_machine": FieldHelp(
        "A token crosses to a machine once, whatever number of its experts is there, as DeepEP "
        "has it.",
        True,
    ),
    "expert_parallel.pieces": FieldHelp(
        "Pieces of the tokens: one goes round inside while the next one is between machines.", 2
    ),
    "dispatch_dtype": FieldHelp(
        "What tokens go out in, with scales if it is FP8; results come back in `dtype`.",
        "float8_e4m3fn",
    ),
    "expert_parallel.beside": FieldHelp(
        "What is computed while tokens are on their way out, as shared experts.", "1 ms"
    ),
    "megatron_ddp.group": FieldHelp("The data-parallel ranks; left out, all.", "dp"),
    "grad_dtype": FieldHelp("What gradients are kept and reduced in.", "float32"),
    "bucket_size": FieldHelp(
        "Parameters in a bucket; left out: 40 million, or a million for each rank if that is more.",
        40000000,
    ),
    "pad_buckets_for_high_nccl_busbw": FieldHelp(
        "Pad buckets to a multiple of 65536 elements.", True
    ),
    "use_distributed_optimizer": FieldHelp(
        "Each rank updates its part of every bucket; else gradients are all-reduced.", False
    ),
    "megatron_ddp.overlap_grad_reduce": FieldHelp(
        "Reduce a bucket as soon as its gradients have come; else one bucket, at the end.", False
    ),
    "overlap_param_gather": FieldHelp(
        "Gather parameters beside the next forward pass; else after the update.", False
    ),
    "average_in_collective": FieldHelp("Average in the collective, not before it.", True),
    "megatron_ddp.skips_layer": FieldHelp(
        "Ranks that leave out a layer from the second iteration on.", {1: 0}
    ),
    "symm_mem_barrier.group": FieldHelp("Who takes part; left out, all ranks.", "tp"),
    "channel": FieldHelp(
        "Which cells of the signal pad it uses; put_signal and wait_signal of the same channel "
        "use them too.",
        1,
    ),
    "ulysses.layers": FieldHelp("How many equal layers.", 4),
    "ulysses.sequence": FieldHelp(
        "Tokens of the whole sequence, which must divide among the ranks.", 32768
    ),
    "ulysses.heads": FieldHelp("Attention heads, which must divide among the ranks.", 32),
    "kv_heads": FieldHelp("Heads of keys and values; 0: as many as of queries.", 8),
    "kv_transfer.kv_heads": FieldHelp("Heads of keys and values that a rank of prefill holds.", 8),
    "head_dim": FieldHelp("Size of a head.", 128),
    # averages
    "every": FieldHelp("Steps between two averages.", 4),
    "warmup": FieldHelp("Iterations before the first average, which comes with the next one.", 100),
    "levels": FieldHelp(
        "A group for each period, the longest that divides the step counts; in place of `every`.",
        {4: "machine", 16: "world"},
    ),
    "per_parameter": FieldHelp(
        "One all_reduce for each parameter, after every so many steps, as torchft has it; else "
        "one for all.",
        True,
    ),
    "skips_average": FieldHelp("Ranks that leave out the average of one iteration.", {1: 4}),
    "pseudogradient": FieldHelp(
        "What it takes to subtract the weights from those before the local steps: a time, or "
        "entries.",
        "1 ms",
    ),
    "outer": FieldHelp("What the outer optimizer's step takes: a time, or entries.", "1 ms"),
    "fragments": FieldHelp(
        "Streaming DiLoCo: parts of the layers, averaged in turn, evenly over the steps.", 2
    ),
    "delay": FieldHelp("Streaming DiLoCo: steps from an average's start to its use.", 1),
    # quorums
    "quorums": FieldHelp("Who takes part, from an iteration on.", {0: [0, 1, 2, 3], 3: [0, 1, 3]}),
    "min_replicas": FieldHelp("The smallest quorum that there may be.", 2),
    "async_quorum": FieldHelp(
        "The quorum is found beside the forward pass: who joins gives zeros in its first step.",
        False,
    ),
    "quorum": FieldHelp("What it takes to be told a quorum.", "10 ms"),
    "commit": FieldHelp("What a step's vote takes, whether to commit.", "1 ms"),
    "stale": FieldHelp("Ranks that go on in the quorum before, from an iteration on.", {2: 3}),
    # inference
    "inference.layers": FieldHelp("How many layers, which must divide among the stages.", 32),
    "inference.tensor": FieldHelp("The axis of tensor parallelism.", "tp"),
    "inference.pipeline": FieldHelp("The axis of the pipeline.", "pp"),
    "inference.data": FieldHelp(
        "The axis of data parallel attention, over which experts are spread.", "dp"
    ),
    "inference.batch": FieldHelp("Sequences of a rank's batch, a token each in every step.", 64),
    "inference.experts": FieldHelp(
        "Feed-forward parts are experts: tokens are gathered before and scattered after them.", True
    ),
    "vocabulary": FieldHelp("Tokens that there are, which must divide among the ranks.", 128256),
    "prompt": FieldHelp("Tokens of the prompts of a rank's batch; 0: no prefill.", 2048),
    "inference.steps": FieldHelp(
        "Steps of decoding, by coordinate of the data axis where they differ.", {0: 8, "else": 4}
    ),
    "dummy_batches": FieldHelp(
        "A rank without requests steps with a dummy batch while others have some.", False
    ),
    "sync_every": FieldHelp(
        "Steps between two looks whether anybody has requests left; 0: none.", 32
    ),
    "inference.prefill": FieldHelp("What a layer takes of the prompt on a rank.", "2 ms"),
    "inference.decode": FieldHelp("What a layer takes of one step on a rank.", "100 us"),
    "kv_transfer.prefill": FieldHelp("The ranks that read prompts.", [0, 1]),
    "kv_transfer.decode": FieldHelp("The ranks that decode.", [2, 3]),
    "kv_transfer.layers": FieldHelp("How many layers.", 32),
    "kv_transfer.tokens": FieldHelp("Tokens of a prompt.", 2048),
    "kv_transfer.forward": FieldHelp("What a layer takes of a prompt.", "2 ms"),
    "decode_forward": FieldHelp("What a layer takes of one step of decoding.", "100 us"),
    "requests": FieldHelp("Prompts, one after the other.", 4),
    "kv_transfer.steps": FieldHelp("Steps of decoding for each request.", 8),
    "at_once": FieldHelp(
        "Send all layers' keys and values at the end of prefill; else each as it is done.", True
    ),
    # weights
    "trainers": FieldHelp(
        "The ranks that train, in the order of their stages; the first of each sends.", [0, 1, 2, 3]
    ),
    "rollouts": FieldHelp("The ranks that roll out, which get all weights.", [4, 5]),
    "weight_sync.params": FieldHelp(
        "The parameters in the order in which they are sent, each a shape or a size.",
        [[4096, 4096], [4096]],
    ),
    "sharded": FieldHelp(
        "The trainers hold shards; else whole copies, and nothing is gathered.", False
    ),
    "stages": FieldHelp(
        "Stages of the trainers' pipeline, each with a part of the parameters and a group of its "
        "own.",
        2,
    ),
    "packed": FieldHelp("Parameters in one broadcast.", 8),
    "barriers": FieldHelp(
        "A barrier of the group after each broadcast, as TRL's client has it.", True
    ),
    "load": FieldHelp("What loading a parameter takes on a rank of the rollout.", "1 ms"),
    "gathers": FieldHelp("Trainers that stop early: how many parameters each gathers.", {1: 2}),
    # checkpoints
    "plan": FieldHelp(
        "Bytes of each rank's plan, pickled; by rank where they differ.",
        {0: "40 KiB", "else": "12 KiB"},
    ),
    "global_plan": FieldHelp(
        "Bytes of the plan that rank 0 gives back to each; left out: as many as it got.",
        ["40 KiB", "12 KiB"],
    ),
    "results": FieldHelp("Bytes of each rank's results of writing, pickled.", "8 KiB"),
    "metadata": FieldHelp("Bytes of the metadata, pickled, which all get.", "80 KiB"),
    "write": FieldHelp("What writing a rank's part takes.", "200 ms"),
    "read": FieldHelp("What reading a rank's part takes.", "200 ms"),
    "use_collectives": FieldHelp(
        "false: every rank plans for itself, and a barrier ends it.", False
    ),
    "skips": FieldHelp("Ranks that leave out the call in one iteration.", {1: 0}),
    "stage": FieldHelp(
        "What copying the state to the host takes, which the rank waits for.", "20 ms"
    ),
    "beside": FieldHelp(
        "What the rank does until it takes the future's result: a time, or entries.", "100 ms"
    ),
}
