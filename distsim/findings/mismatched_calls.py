"""DS2xx: calls or messages that are matched but differ."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, two_rank_scenario

MISMATCH_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS201",
        "different collectives are matched",
        "error",
        "mismatch",
        "The k-th collective of a group is not the same operation on every member.",
        "Neither Gloo nor NCCL checks this: the ranks hang, crash or mix up data. With "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL, torch raises on Gloo.",
        "Find the first call where the members diverge: one of them skips a call, makes an extra "
        "one, or takes another branch.",
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
        "Gloo aborts or returns wrong data. NCCL hangs or returns wrong data.",
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
        "If the byte counts are equal, the bits are silently reinterpreted. Otherwise the result "
        "is as with different sizes.",
        "Cast before the call. Often one rank runs under autocast and another does not.",
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
        "Name one root on all members: the same global rank (`src`, `dst`), not each rank's own.",
        two_rank_scenario("broadcast: {tensor: x, src: rank}"),
    ),
    CodeInfo(
        "DS206",
        "collectives in different orders",
        "error",
        "mismatch",
        "The members of a group make the same collectives in different orders, so different "
        "calls are matched.",
        "Calls are matched by their number in the group, not by name. Mismatched calls hang or "
        "mix up data.",
        "Make the calls in the same order on all members. Order parameters or buckets by name or "
        "index, not by when they are ready.",
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
        "In an all_to_all, one member sends another a different number of elements than it "
        "expects.",
        "Gloo hangs or aborts. NCCL hangs or writes past the end of the part.",
        "Make `output_splits` the transpose of `input_splits` (the default), or exchange the "
        "counts first.",
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
        "Gloo accepts a shorter message and leaves the rest of the buffer unchanged; it aborts "
        "on a longer one. NCCL hangs or truncates.",
        "Use the same shape on both ends. If sizes vary, send the shape first. Two receives from "
        "one peer may be in the wrong order.",
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
        "If the byte counts are equal, the bits are silently reinterpreted. Otherwise the result "
        "is as with different sizes.",
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
        "The k-th new_group differs between ranks: other members or another order.",
        "new_group is a collective of the whole world, also for ranks that are not members. The "
        "keys in the store do not match, so all ranks hang.",
        "Create every group on every rank, in the same order.",
        two_rank_scenario(
            "{new_group: {name: g, ranks: [0, 1]}, ranks: 0}",
            "{new_group: {name: g, ranks: [1]}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS211",
        "values that must be equal differ",
        "error",
        None,
        "The calls of a captured script match, but replicas, gradients or FSDP units differ between "
        "ranks (`distsim capture --check-values`).",
        "Nothing hangs and nothing raises: the model trains on wrong numbers.",
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
