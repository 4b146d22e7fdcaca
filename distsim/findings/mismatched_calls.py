"""DS2xx: calls or messages that meet and do not fit."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, two_rank_scenario

MISMATCH_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS201",
        "different collectives meet",
        "error",
        "mismatch",
        "The k-th collective of a group is not the same operation on every member.",
        "Neither Gloo nor NCCL checks: both hang, crash or mix up the data. TORCH_DISTRIBUTED_DEBUG=DETAIL raises on Gloo.",
        "Find the first call where the members part: one of them leaves a call out, makes one more, or takes another branch.",
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}", "{broadcast: {tensor: x, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS202",
        "different sizes in a collective",
        "error",
        "mismatch",
        "The members of a collective give different numbers of elements.",
        "Gloo aborts or returns wrong data, NCCL hangs or returns wrong data.",
        "Make the shapes equal on all members: pad, drop the last uneven batch, or use all_to_all with splits.",
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}", "{all_reduce: {tensor: y}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS203",
        "different dtypes in a collective",
        "error",
        "mismatch",
        "The members of a collective give tensors of different dtypes.",
        "With equal byte counts the bits are reinterpreted silently; otherwise as with different sizes.",
        "Cast before the call; often one rank runs under autocast and another does not.",
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
        "The members of a reduction name different operations (`op:`).",
        "Gloo finishes and each rank may hold another result, silently; NCCL leaves it undefined.",
        "Give the same `op` on all members.",
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
        "Give one root: a global rank (`src`, `dst`) that is the same on all members, not each rank's own.",
        two_rank_scenario("broadcast: {tensor: x, src: rank}"),
    ),
    CodeInfo(
        "DS206",
        "collectives in another order",
        "error",
        "mismatch",
        "The members of a group make the same collectives in different order, so that unlike calls meet.",
        "Calls meet by their number in the group, not by their name: unlike calls hang or mix up the data.",
        "Make the calls in one order on all members; order parameters or buckets by name or index, not by when they are ready.",
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}",
            "all_reduce: {tensor: y}",
            "{all_reduce: {tensor: x}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS207",
        "splits do not agree",
        "error",
        "mismatch",
        "In an all_to_all one member sends another a different number of elements than the other expects from it.",
        "Gloo hangs or aborts, NCCL hangs or writes past the part.",
        "Make `output_splits` the transpose of `input_splits` (left out, it is), or exchange the counts first.",
        two_rank_scenario(
            "all_to_all_single: {input: x, output: z, input_splits: {0: [1, 3], 1: [2, 2]}, output_splits: {0: [1, 3], 1: [2, 2]}}"
        ),
    ),
    CodeInfo(
        "DS208",
        "message does not fit its receive",
        "error",
        "mismatch",
        "A message and the receive that takes it have different numbers of elements.",
        "Gloo accepts a shorter message and leaves the tail untouched, and aborts on a longer one; NCCL hangs or truncates.",
        "Give both ends the same shape; where sizes vary, send the shape first. Two receives from one peer may be swapped.",
        two_rank_scenario(
            "{send: {tensor: x, dst: 1}, ranks: 0}", "{recv: {tensor: y, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS209",
        "message has another dtype",
        "error",
        "mismatch",
        "A message and the receive that takes it have different dtypes.",
        "With equal byte counts the bits are reinterpreted silently; otherwise as with different sizes.",
        "Give both ends the same dtype.",
        two_rank_scenario(
            "{send: {tensor: {shape: [4], dtype: float32}, dst: 1}, ranks: 0}",
            "{recv: {tensor: {shape: [4], dtype: int32}, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS210",
        "new groups made differently",
        "error",
        "mismatch",
        "The k-th new_group is not the same on all ranks: other members or another order.",
        "new_group is a collective of the whole world, also for ranks that are no members: the stores' keys do not"
        " meet, all hang.",
        "Let every rank make every group, in one order.",
        two_rank_scenario(
            "{new_group: {name: g, ranks: [0, 1]}, ranks: 0}",
            "{new_group: {name: g, ranks: [1]}, ranks: 1}",
        ),
    ),
)
