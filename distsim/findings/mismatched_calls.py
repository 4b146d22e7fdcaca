"""DS2xx: calls that are matched but differ, and DS612: values that differ although calls match."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, two_rank_scenario

MISMATCH_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS201",
        "ranks call different collectives",
        "error",
        "mismatch",
        "The k-th collective of a group is not the same operation on every member.",
        (
            "Neither Gloo nor NCCL detects this: the ranks hang, crash or get wrong data. With "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL, torch raises under both."
        ),
        (
            "Find the first call at which the members differ. One of them skips a call, makes an "
            "extra call, or takes another branch."
        ),
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}", "{broadcast: {tensor: x, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS202",
        "different sizes in a collective",
        "error",
        "mismatch",
        "The members of a collective pass different numbers of elements.",
        "Gloo aborts, hangs or returns wrong data. NCCL hangs or returns wrong data.",
        "Make the shapes equal on all members: pad, drop the last uneven batch, or use "
        "all_to_all with splits.",
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}", "{all_reduce: {tensor: y}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS203",
        "different dtypes in a collective",
        "error",
        "mismatch",
        "The members of a collective pass tensors of different dtypes.",
        (
            "If the byte counts are equal, each rank silently reads the data as its own dtype. "
            "Otherwise, Gloo aborts or returns wrong data, and NCCL hangs or returns wrong data, as "
            "with different sizes (DS202)."
        ),
        (
            "Cast the tensors to one dtype before the call. A common cause: one rank runs under "
            "autocast and another does not."
        ),
        two_rank_scenario(
            "{all_reduce: {tensor: {shape: [4], dtype: float32}}, ranks: 0}",
            "{all_reduce: {tensor: {shape: [4], dtype: int32}}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS204",
        "different reduce operations",
        "error",
        "mismatch",
        "The members of a reduction pass different operations (`op:`).",
        "On Gloo the call completes, and the ranks may silently get different results. On NCCL "
        "the result is undefined.",
        "Pass the same `op` on all members.",
        two_rank_scenario(
            "{all_reduce: {tensor: x, op: sum}, ranks: 0}",
            "{all_reduce: {tensor: x, op: max}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS205",
        "different roots",
        "error",
        "mismatch",
        "The members of a rooted collective name different roots.",
        "Gloo hangs; NCCL hangs or returns garbage. torch's DETAIL mode does not check roots.",
        (
            "Pass the same root (the same global rank as `src` or `dst`) on all members. A common "
            "mistake: each rank passes its own number."
        ),
        two_rank_scenario("broadcast: {tensor: x, src: rank}"),
    ),
    CodeInfo(
        "DS206",
        "collectives in different orders",
        "error",
        "mismatch",
        ("The members of a group call the same collectives in different orders."),
        (
            "Backends match the k-th call of each member, whatever its operation. Mismatched calls "
            "hang or produce wrong data."
        ),
        (
            "Make the calls in the same order on all members. Sort parameters or buckets by name or "
            "index; do not process them in the order in which they become ready."
        ),
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}",
            "all_reduce: {tensor: y}",
            "{all_reduce: {tensor: x}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS207",
        "splits do not match",
        "error",
        "mismatch",
        (
            "In an all_to_all, one member sends more or fewer elements to another member than that "
            "member expects."
        ),
        "Gloo aborts or returns wrong data. NCCL hangs or writes past the end of the receive buffer.",
        (
            "For each pair of ranks, `output_splits[j]` on rank i must equal `input_splits[i]` on "
            "rank j. If the ranks do not know these counts, exchange them first. If a scenario omits "
            "`output_splits`, distsim fills them in."
        ),
        two_rank_scenario(
            "all_to_all_single: {input: x, output: z, input_splits: {0: [1, 3], 1: [2, 2]}, output_splits: {0: [1, 3], 1: [2, 2]}}"
        ),
    ),
    CodeInfo(
        "DS208",
        "message size differs from its receive",
        "error",
        "mismatch",
        "A message and the receive that takes it have different numbers of elements.",
        (
            "If the message is shorter, Gloo leaves the rest of the buffer unchanged. If it is "
            "longer, Gloo aborts. NCCL hangs or truncates the message."
        ),
        (
            "Use the same shape on both ends. If sizes vary, send the shape first. Also check "
            "whether two receives from one peer are in the wrong order."
        ),
        two_rank_scenario(
            "{send: {tensor: x, dst: 1}, ranks: 0}", "{recv: {tensor: y, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS209",
        "message dtype differs from its receive",
        "error",
        "mismatch",
        "A message and the receive that takes it have different dtypes.",
        (
            "If the byte counts are equal, the receiver silently reads the bits as its own dtype. "
            "Otherwise, Gloo aborts or leaves a part of the buffer unchanged, and NCCL hangs or "
            "truncates the message, as with different sizes (DS208)."
        ),
        "Use the same dtype on both ends.",
        two_rank_scenario(
            "{send: {tensor: {shape: [4], dtype: float32}, dst: 1}, ranks: 0}",
            "{recv: {tensor: {shape: [4], dtype: int32}, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS210",
        "new groups differ",
        "error",
        "mismatch",
        (
            "The k-th new_group call lists different members on different ranks, or lists them in a "
            "different order."
        ),
        (
            "new_group is a collective of the whole world: ranks that are not members must call it "
            "too. The ranks wait for different keys of the store, so all of them hang."
        ),
        "Create every group on every rank, in the same order.",
        two_rank_scenario(
            "{new_group: {name: g, ranks: [0, 1]}, ranks: 0}",
            "{new_group: {name: g, ranks: [1]}, ranks: 1}",
        ),
    ),
    # The calls match, so this is no DS2xx: it does not change the verdict.
    CodeInfo(
        "DS612",
        "values that must be equal differ",
        "error",
        None,
        "The calls of a captured script match, but replicas, gradients or FSDP units differ between "
        "ranks (`distsim capture --check-values`).",
        "Nothing hangs or raises: the model trains on wrong numbers.",
        "Find what differs between the ranks at the named step: a seed, no_sync(), a write to a "
        "parameter, or a checkpoint that only some ranks load.",
        "import torch\nimport torch.distributed as dist\n\n"
        'dist.init_process_group("gloo")\n'
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "with torch.no_grad():\n"
        "    model.module.bias.add_(dist.get_rank())\n"
        "model(torch.ones(1, 2)).sum().backward()\n",
    ),
)
