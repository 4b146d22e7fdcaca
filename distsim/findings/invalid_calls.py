"""DS1xx: calls that are invalid on every backend."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, example_scenario, two_rank_scenario

INVALID_CALL_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS101",
        "peer outside the world or group",
        "error",
        "invalid",
        "A send or receive names a rank that does not exist or that is not a member of the "
        "call's group.",
        (
            "Depending on the backend, torch raises ValueError, or the call waits for a connection "
            "that is never made: on gloo until the timeout, 30 minutes by default."
        ),
        (
            "Name a rank from 0 to world_size - 1 that belongs to the group. `dst` and `src` are "
            "global ranks; `group_dst` and `group_src` are positions in the group. A common cause: "
            "the last stage of a pipeline sends to `rank + 1`."
        ),
        two_rank_scenario(
            "send: {tensor: x, dst: rank + 1}", "{recv: {tensor: x, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS102",
        "send to self",
        "error",
        "invalid",
        "The `dst` or `src` of a send or receive is the calling rank itself.",
        "torch raises ValueError for send and recv. NCCL accepts such a message only inside a "
        "batch.",
        "Copy the tensor instead, or skip the call if source and destination are the same rank "
        "(`ranks:` selects the callers).",
        two_rank_scenario("{send: {tensor: x, dst: 0}, ranks: 0}"),
    ),
    CodeInfo(
        "DS103",
        "root outside its group",
        "error",
        "invalid",
        "A rooted collective names a `src` or `dst` that is not a member of its group.",
        (
            "torch raises ValueError: the global rank is not part of the group. A common cause: the "
            "code passes a group rank (a position in the group) where torch expects a global rank."
        ),
        "Pass a member's global rank as `src` or `dst`, or its position in the group as "
        "`group_src` or `group_dst`.",
        example_scenario(
            4,
            "groups: {hi: [2, 3]}\n",
            "{broadcast: {tensor: x, src: 0, group: hi}, ranks: rank >= 2}",
        ),
    ),
    CodeInfo(
        "DS104",
        "caller is not a member of the group",
        "error",
        "invalid",
        "A rank calls an operation on a group that it does not belong to.",
        "torch warns and returns at once (the call does nothing), or raises. Either way, the "
        "rank does not get the expected data.",
        (
            "Call the operation only on members of the group (in a scenario: add `ranks:` to the "
            "step), or use a group that this rank belongs to."
        ),
        example_scenario(4, "groups: {hi: [2, 3]}\n", "all_reduce: {tensor: x, group: hi}"),
    ),
    CodeInfo(
        "DS105",
        "handle waited for twice",
        "error",
        "invalid",
        "A rank calls `wait()` twice for one request. The first wait completed it.",
        (
            "Depending on the backend and the call, the second `wait()` returns, raises or hangs "
            "(on Gloo: for a message). An MPI request no longer exists after its first wait."
        ),
        "Wait once for each request. In a loop, index the handle (`as: h@i`), so that each "
        "iteration has its own.",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
            "{wait: h, ranks: 0}",
            "{wait: h, ranks: 0}",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS106",
        "unknown handle on this rank",
        "error",
        "invalid",
        (
            "A wait names a handle that no earlier call on this rank created. Another rank or a "
            "later step creates it."
        ),
        "In Python this is a NameError or a wait on None. The rank raises. Ranks that wait "
        "for this rank hang, or raise on Gloo.",
        ("Start the request and wait for it on the same ranks: give both steps the same `ranks:`."),
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
        (
            "The number of splits of an all_to_all differs from the group size, or the sum of the "
            "splits differs from the first dimension of the tensor."
        ),
        "torch raises ValueError before it sends anything: splits must sum to the tensor's first "
        "dimension.",
        (
            "Give one split for each rank of the group. The sum of `input_splits` must be the first "
            "dimension of the input. The sum of `output_splits` must be the first dimension of the "
            "output."
        ),
        two_rank_scenario(
            "all_to_all_single: {input: x, output: {shape: [4]}, input_splits: [1, 2], output_splits: [2, 2]}"
        ),
    ),
    CodeInfo(
        "DS108",
        "call before init or after destroy",
        "error",
        "invalid",
        "A communication call comes before init_process_group or after destroy_process_group.",
        "torch raises: the default process group has not been initialized.",
        (
            "Move the call between init_process_group and destroy_process_group. If a scenario "
            "contains neither of them, distsim adds them at its start and end."
        ),
        two_rank_scenario("init_process_group", "destroy_process_group", "barrier"),
    ),
    CodeInfo(
        "DS109",
        "initialised twice",
        "error",
        "invalid",
        "A rank calls init_process_group although the process group already exists.",
        "torch raises: trying to initialize the default process group twice.",
        "Call init_process_group once, or call destroy_process_group in between.",
        two_rank_scenario("init_process_group", "init_process_group", "barrier"),
    ),
    CodeInfo(
        "DS110",
        "wrong buffer size or dtype",
        "error",
        "invalid",
        (
            "The input and output tensors of one call do not match. Examples: the output of "
            "all_gather is not exactly group-size times as large as its input, an input is not "
            "divisible by the group size, or input and output have different dtypes."
        ),
        "torch raises ValueError or RuntimeError on the calling rank. Some code paths of Gloo "
        "compute wrong data instead.",
        (
            "The output of all_gather must have (group size × input) elements; the input of "
            "reduce_scatter must have (group size × output) elements. Both tensors need the same "
            "dtype. For uneven parts, use splits or padding."
        ),
        two_rank_scenario("all_gather_into_tensor: {input: x, output: {shape: [4]}}"),
    ),
    CodeInfo(
        "DS111",
        "bad ranks for a new group",
        "error",
        "invalid",
        "new_group lists a rank outside the world, or lists a rank twice.",
        "torch raises an error: the rank is outside the world size, or the ranks are not unique.",
        "List each member once, from 0 to world_size - 1.",
        two_rank_scenario("new_group: {name: g, ranks: [0, 2]}"),
    ),
    CodeInfo(
        "DS112",
        "call that every backend rejects",
        "error",
        "invalid",
        (
            "Every backend rejects an argument of this call. The text of the finding gives the "
            "reason. (Common reasons have their own codes.)"
        ),
        "torch raises on the calling rank. Ranks that need this rank hang, or raise on Gloo.",
        "Correct the argument that the finding names.",
        two_rank_scenario("{send: {tensor: x, dst: 1, tag: -1}, ranks: 0}"),
    ),
)
