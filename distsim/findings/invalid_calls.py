"""DS1xx: calls that no back end may be given."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, example_scenario, two_rank_scenario

INVALID_CALL_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS101",
        "peer outside the world or group",
        "error",
        "invalid",
        "A send or receive names a rank that does not exist, or one that is no member of the call's group.",
        "Gloo and NCCL look the rank up in the group: torch raises ValueError, or the call waits for a connection that"
        " never comes.",
        "Name a rank from 0 to world_size - 1 that belongs to the group. `dst` and `src` are global ranks, `group_dst` and"
        " `group_src` count inside the group; a pipeline's last stage has no next one.",
        two_rank_scenario(
            "send: {tensor: x, dst: rank + 1}", "{recv: {tensor: x, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS102",
        "send to self",
        "error",
        "invalid",
        "A send or receive names the calling rank itself.",
        "torch.distributed raises ValueError for send and recv; NCCL accepts it inside a batch only.",
        "Copy the tensor instead, or leave the call out where source and destination are one rank (`ranks:` beside the step).",
        two_rank_scenario("{send: {tensor: x, dst: 0}, ranks: 0}"),
    ),
    CodeInfo(
        "DS103",
        "root outside its group",
        "error",
        "invalid",
        "A rooted collective names a `src` or `dst` that is no member of its group.",
        "torch raises ValueError: the global rank is not part of the group. Often a position inside the group was written"
        " where a global rank is asked for.",
        "Give a member's global rank as `src` or `dst`, or its position as `group_src` or `group_dst`.",
        example_scenario(
            4,
            "groups: {hi: [2, 3]}\n",
            "{broadcast: {tensor: x, src: 0, group: hi}, ranks: rank >= 2}",
        ),
    ),
    CodeInfo(
        "DS104",
        "caller is no member of the group",
        "error",
        "invalid",
        "A rank calls an operation on a group that it does not belong to.",
        "torch warns and returns at once (the call does nothing), or raises; either way the data the code counts on never comes.",
        "Select the members only (`ranks:` beside the step), or use the group that this rank is in.",
        example_scenario(4, "groups: {hi: [2, 3]}\n", "all_reduce: {tensor: x, group: hi}"),
    ),
    CodeInfo(
        "DS105",
        "handle already spent",
        "error",
        "invalid",
        "A handle is waited for a second time, although the first wait ended its request.",
        "torch's Work may be waited for again on some back ends, raises on others, and MPI's request is gone after the"
        " first wait.",
        "Wait once for each request. In a loop, index the handle (`as: h@i`) so that each round has its own.",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
            "{wait: h, ranks: 0}",
            "{wait: h, ranks: 0}",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS106",
        "handle never bound on this rank",
        "error",
        "invalid",
        "A wait names a handle that this rank never got from a call: another rank binds it, or a later step does.",
        "In Python this is a NameError or a wait on None: the rank raises and all who count on it stand still.",
        "Let the same ranks post and wait: put the same `ranks:` beside both steps.",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
            "wait: h",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS107",
        "splits do not add up",
        "error",
        "invalid",
        "The splits of an all_to_all are not one per rank, or their sum is not the length of the tensor they cut.",
        "torch raises ValueError (splits must sum to the tensor's first dimension) before anything is sent.",
        "Give one split per group rank, with the sum of `input_splits` equal to the input's first dimension and the sum of"
        " `output_splits` equal to the output's.",
        two_rank_scenario(
            "all_to_all_single: {input: x, output: {shape: [4]}, input_splits: [1, 2], output_splits: [2, 2]}"
        ),
    ),
    CodeInfo(
        "DS108",
        "call outside init and destroy",
        "error",
        "invalid",
        "A communication call comes before init_process_group or after destroy_process_group.",
        "torch raises: the default process group has not been initialized.",
        "Communicate between the two calls. Where they are left out of the file, they stand at both ends.",
        two_rank_scenario("init_process_group", "destroy_process_group", "barrier"),
    ),
    CodeInfo(
        "DS109",
        "initialised twice",
        "error",
        "invalid",
        "init_process_group is called while the process group already exists.",
        "torch raises: trying to initialize the default process group twice.",
        "Call it once, or call destroy_process_group in between.",
        two_rank_scenario("init_process_group", "init_process_group", "barrier"),
    ),
    CodeInfo(
        "DS110",
        "buffers do not fit the operation",
        "error",
        "invalid",
        "The sizes or dtypes of a call's own tensors cannot be right: an all_gather output that is not group size times its"
        " input, an input that does not divide by the group size, input and output of different dtypes.",
        "torch raises ValueError or RuntimeError on the calling rank; some paths of Gloo compute wrong data instead.",
        "Make the gathered side group size times the share of one rank, with the same dtype; uneven parts need splits, or padding.",
        two_rank_scenario("all_gather_into_tensor: {input: x, output: {shape: [4]}}"),
    ),
    CodeInfo(
        "DS111",
        "bad ranks for a new group",
        "error",
        "invalid",
        "new_group lists a rank outside the world, or one rank twice.",
        "torch raises: the new group's rank should be within the world size, or the ranks are not unique.",
        "List each member once, from 0 to world_size - 1.",
        two_rank_scenario("new_group: {name: g, ranks: [0, 2]}"),
    ),
    CodeInfo(
        "DS112",
        "call that no back end takes",
        "error",
        "invalid",
        "An argument is refused by every back end, for a reason that has no code of its own; the message gives it.",
        "torch raises on the calling rank, and those who wait for it stand still.",
        "Follow the message: it says what the call must look like.",
        two_rank_scenario("{send: {tensor: x, dst: 1, tag: -1}, ranks: 0}"),
    ),
)
