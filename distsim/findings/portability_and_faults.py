"""DS6xx to DS9xx: portability, unsupported calls, faults, and problems of the file or the check."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, example_scenario, two_rank_scenario

#: Two receives from any source, and two senders.
_TWO_SENDERS = example_scenario(
    3,
    "",
    "{recv: {tensor: x}, ranks: 0}",
    "{recv: {tensor: x}, ranks: 0}",
    "{send: {tensor: x, dst: 0}, ranks: rank > 0}",
)

PORTABILITY_AND_FAULT_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS601",
        "equal collectives in different orders",
        "warning",
        None,
        (
            "One rank calls two collectives of equal shape in a different order than the other "
            "ranks. Each call is then matched with the wrong tensor."
        ),
        "Nothing hangs or raises, but the result is wrong.",
        "Make the calls in the same order on all members of the group.",
        two_rank_scenario(
            "{all_reduce: {tensor: x}, ranks: 0}",
            "all_reduce: {tensor: z}",
            "{all_reduce: {tensor: x}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS602",
        "tag has no effect on nccl",
        "warning",
        None,
        "Messages between the same two ranks differ only in their tags. NCCL has no tags and "
        "matches messages in call order.",
        "A program that is correct on Gloo receives the wrong message on NCCL.",
        "Receive the messages in the order in which they are sent, or put sends and receives "
        "into one batch in the same order.",
        example_scenario(
            2,
            "",
            "{isend: {tensor: x, dst: 1, tag: 1, as: h}, ranks: 0}",
            "{isend: {tensor: x, dst: 1, tag: 2, as: k}, ranks: 0}",
            "{recv: {tensor: x, src: 0, tag: 2}, ranks: 1}",
            "{recv: {tensor: x, src: 0, tag: 1}, ranks: 1}",
            "{wait: all, ranks: 0}",
            backend="nccl",
        ),
    ),
    CodeInfo(
        "DS603",
        "completes only because of buffering",
        "warning",
        None,
        (
            "The program completes only if the backend buffers its sends. Or it completes only if a "
            "rank may return from a broadcast or gather before the other ranks arrive."
        ),
        (
            "MPI buffers messages up to its eager limit, NCCL up to the size of its channel buffer. "
            "With a larger tensor, or on Gloo, the program hangs."
        ),
        "Fix the deadlock. Another finding of the report, such as DS301, shows it. Do not rely on "
        "buffering.",
        example_scenario(
            2,
            "",
            "send: {tensor: x, dst: 1 - rank}",
            "recv: {tensor: x, src: 1 - rank}",
            backend="mpi",
        ),
    ),
    CodeInfo(
        "DS605",
        "receive from any source matches several senders",
        "note",
        None,
        "A receive that names no source can take messages from more than one sender.",
        (
            "The receive takes the message that arrives first. This is the purpose of such receives, "
            "so the finding is only a note."
        ),
        "Do nothing if every order is correct. Otherwise name the source. In a scenario, the "
        "key `assume_src` of recv can state the intended sender.",
        _TWO_SENDERS,
    ),
    CodeInfo(
        "DS609",
        "fails in some orders of events",
        "warning",
        None,
        (
            "The program fails in some orders of events and completes in others. Another finding describes "
            "the failure and sets the verdict. DS609 adds an order in which it happens: which message a "
            "receive from any source takes, or which sends are buffered."
        ),
        ("The program may work a hundred times, and then hang when one rank is slower than usual."),
        "Name the source of the receive, or use different tags for different kinds of messages. "
        "The finding lists the choices that lead to the failure; `distsim simulate --event-order` "
        "replays them.",
        example_scenario(
            3,
            "",
            "{recv: {tensor: x}, ranks: 0}",
            "{recv: {tensor: x, src: 1}, ranks: 0}",
            "{send: {tensor: x, dst: 0}, ranks: rank > 0}",
        ),
    ),
    CodeInfo(
        "DS610",
        "interchangeable messages in different orders",
        "warning",
        None,
        (
            "Two messages of equal size, dtype and tag between the same two ranks are probably received in the "
            "wrong order. Only the names of the tensors show this. For example, `a` arrives in `b`, "
            "and `b` in `a`."
        ),
        "Nothing hangs or raises, because the sizes match. The receiver "
        "uses an activation as a gradient, or one micro-batch as another, so the result is wrong.",
        (
            "Swap the two receives, so that they follow the order of the sends, or give the two "
            "messages different tags (not on nccl, which has no tags). If the program is correct, "
            "rename the tensors."
        ),
        """world: 2
backend: gloo
tensors: {act: {shape: [4], copies: 4}, input: {like: act}}
program:
  - ranks: 0
    steps:
      - repeat: {times: 4, index: m, steps: [{send: {tensor: act@m, dst: 1}}]}
  - ranks: 1
    steps:
      - recv: {tensor: input@0, src: 0}
      - recv: {tensor: input@2, src: 0}
      - recv: {tensor: input@1, src: 0}
      - recv: {tensor: input@3, src: 0}
""",
    ),
    CodeInfo(
        "DS611",
        "barrier and signals share a channel",
        "warning",
        None,
        "Symmetric memory stores signals in cells: one for each sender and channel (a number, default 0). "
        "A barrier uses the same cells as put_signal and wait_signal on its channel. Here the barrier "
        "takes a signal of put_signal, or wait_signal takes a signal of the barrier.",
        (
            "The barrier accepts any signal in the cell. A rank returns from the barrier before the "
            "other rank arrives, so the barrier orders nothing. The later wait_signal then gets the "
            "barrier's signal, or waits forever."
        ),
        "Give the barrier its own channel, for example handle.barrier(channel=1), or wait for "
        "every signal before the barrier.",
        """world: 2
backend: nccl
program:
  - put_signal: {dst: 1}
    ranks: 0
  - symm_mem_barrier
  - wait_signal: {src: 0}
    ranks: 1
""",
    ),
    CodeInfo(
        "DS701",
        "receive from any source not supported",
        "error",
        None,
        "The backend has no receive from any source.",
        "NCCL raises ValueError: the source rank must be given.",
        "Name the source, or use gloo for this group (each group may have its own backend).",
        example_scenario(
            2,
            "",
            "{recv: {tensor: x}, ranks: 0}",
            "{send: {tensor: x, dst: 0}, ranks: 1}",
            backend="nccl",
        ),
    ),
    CodeInfo(
        "DS702",
        "dtype not supported by the backend",
        "error",
        None,
        "The backend cannot send or reduce tensors of this dtype.",
        "torch raises RuntimeError on every calling rank.",
        "Cast to a supported dtype, or use another backend for this group (`distsim explain "
        "backends` has the table).",
        example_scenario(
            2, "", "all_reduce: {tensor: {shape: [4], dtype: bfloat16}}", backend="mpi"
        ),
    ),
    CodeInfo(
        "DS703",
        "reduce operation not supported by the backend",
        "error",
        None,
        "The backend does not have this reduction, or does not have it for this dtype.",
        "torch raises ValueError or RuntimeError on every calling rank. For example, NCCL has no "
        "bitwise reductions.",
        (
            "Use a supported reduction (for example, replace `avg` by a sum and a division), or "
            "another backend for this group."
        ),
        example_scenario(
            2, "", "all_reduce: {tensor: {shape: [4], dtype: int32}, op: band}", backend="nccl"
        ),
    ),
    CodeInfo(
        "DS704",
        "operation not supported by the backend",
        "error",
        None,
        "The backend does not have this operation, or not with use_local_synchronization.",
        "torch raises on every calling rank. For example, only gloo has monitored_barrier.",
        "Use a supported operation (`distsim explain backends` has the table).",
        example_scenario(2, "", "monitored_barrier", backend="nccl"),
    ),
    CodeInfo(
        "DS705",
        "behaviour undefined by the backend",
        "warning",
        None,
        (
            "Neither the manual nor the source of the backend defines the behaviour of this program. "
            "One example: rank 0 puts its first send to rank 1 and its first receive from rank 1 "
            "into one batch, but rank 1 makes these two calls one after the other. Another "
            "example, with `async_op=True`: rank 0 uses group a before group b, and rank 1 group b "
            "before group a."
        ),
        "The program may complete here and hang on another version or machine. `check` "
        "reports `undefined` and lists what may happen.",
        (
            "Do what the finding proposes: put both directions into one batch on both ranks, or use "
            "the groups in the same order on all ranks."
        ),
        example_scenario(
            2,
            "options: {init: eager}\n",
            "{batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1}}, {irecv: {tensor: z, src: 1}}], as: h}, ranks: 0}",
            "{irecv: {tensor: z, src: 0, as: h}, ranks: 1}",
            "{isend: {tensor: x, dst: 0, as: k}, ranks: 1}",
            "wait: all",
            backend="nccl",
        ),
    ),
    CodeInfo(
        "DS801",
        "rank killed by a fault",
        "note",
        None,
        "A fault that the scenario injects (`faults:`) kills this rank at the place shown.",
        (
            "The process ends without a message. The ranks that need it raise at once on Gloo; on "
            "NCCL and MPI they hang. If no rank needs it, the verdict is ok, because all calls "
            "match, but the outcome is `crashes`."
        ),
        ("Nothing to fix. Look at the effect on the other ranks."),
        example_scenario(
            2, "faults: [{rank: 1, kind: kill, before_call: 0}]\n", "{compute: 1 ms, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS802",
        "rank raised an error",
        "error",
        None,
        "A rank ends with a Python error: a `fail` step, a fault of the kind `raise`, or a call "
        "that the backend rejects.",
        "The rank exits. The ranks that need it raise at once on Gloo. On NCCL they hang until the "
        "watchdog's timeout, on MPI until the launcher ends them.",
        "Fix the error of this rank first: the other ranks fail because of it.",
        two_rank_scenario("{fail: {message: out of memory}, ranks: 0}"),
    ),
    CodeInfo(
        "DS803",
        "rank exited early",
        "warning",
        None,
        "A rank ends its program with `exit` and an error code.",
        "On gloo, ranks that still need this rank raise; on nccl and mpi they hang. If no rank "
        "needs it, the verdict is ok, because all calls match. torchrun still ends the job.",
        "Let all ranks decide together: all_reduce the condition before they exit.",
        two_rank_scenario("{exit: {code: 1}, ranks: 0}"),
    ),
    CodeInfo(
        "DS804",
        "wait exceeds its timeout",
        "error",
        None,
        (
            "A call waits longer than the timeout of its group, because other ranks are still busy. "
            "DS804 also reports a monitored_barrier that can never complete."
        ),
        "On gloo the call raises; on nccl the watchdog ends the process. If the other ranks are "
        "only slow, the program would have completed with a longer timeout.",
        "Raise the timeout of the group, or move the slow work so that no rank waits for it.",
        example_scenario(
            2, "options: {timeout: 1 s}\n", "{compute: {time: 3 s}, ranks: 0}", "barrier"
        ),
    ),
    CodeInfo(
        "DS805",
        "rank never started",
        "error",
        None,
        "A rank of the world is never launched.",
        "All other ranks wait in init_process_group until its timeout (DS303). This is the most "
        "common hang. If no rank waits, as in the example, the verdict is ok, because it "
        "covers only the ranks that start.",
        "Check that world_size is nnodes times nproc_per_node, that all nodes run the launcher, "
        "and that MASTER_ADDR is reachable.",
        example_scenario(
            2, "faults: [{rank: 0, kind: absent}, {rank: 1, kind: absent}]\n", "barrier"
        ),
    ),
    CodeInfo(
        "DS806",
        "out of device memory",
        "error",
        None,
        "The peak memory of some ranks (parameters, gradients, optimizer states, activations) "
        "exceeds the memory of their device.",
        (
            "These ranks run out of memory in the first step, and the other ranks wait for them. "
            "This check does not count the memory of the CUDA context, NCCL and the allocator (`plan` "
            "does), so a step that barely fits may fail too."
        ),
        "Shard more (ZeRO 1 to 3, more tensor or pipeline ranks), recompute activations, or use "
        "smaller micro-batches.",
        example_scenario(2, "memory: {rank: {parameters: 100 GB, optimizer: 600 GB}}\n", "barrier"),
    ),
    CodeInfo(
        "DS807",
        "NCCL communicator id arrives too late",
        "error",
        None,
        (
            "Without `device_id`, NCCL creates the communicator of a group at the first call. The "
            "first rank of the group publishes the id of the communicator in the store. The other "
            "ranks wait for the id, at most for the timeout of `init_process_group`."
        ),
        (
            "The waiting ranks raise `DistBackendError: … retrieving ncclUniqueId from [0] via c10d "
            "key-value store …: wait timeout`. This often happens when rank 0 prepares data or loads "
            "a checkpoint while the other ranks wait in a barrier (nccl#708, pytorch#82091)."
        ),
        (
            "Pass a longer `timeout` to `init_process_group`, or do the slow work of the first rank "
            "before the job starts. With `device_id`, no call waits for the id, but NCCL's watchdog "
            "still limits every call."
        ),
        example_scenario(
            2,
            "options: {timeout: 1 s}\n",
            "{sleep: {time: 3 s}, ranks: 0}",
            "barrier",
            backend="nccl",
        ),
    ),
    CodeInfo(
        "DS901",
        "selector selects no rank",
        "warning",
        None,
        "A `ranks:` selector is true for no rank, so its steps never run.",
        "Usually the condition is wrong, for example `stage == 2` in a mesh of two stages.",
        "Correct the selector or `world`, or remove the steps.",
        two_rank_scenario("{barrier: {}, ranks: rank == 7}"),
    ),
    CodeInfo(
        "DS902",
        "verdict is incomplete",
        "warning",
        None,
        "The program allows more orders of events than the search limit. Receives from any source "
        "and sends that may be buffered multiply the number of orders.",
        "The verdict is the worst result found so far.",
        (
            "Name the sources where possible, or run `distsim check` with a higher limit "
            "(`--max-states`)."
        ),
        "# With a low limit: distsim check FILE --max-states 5\n" + _TWO_SENDERS,
    ),
    CodeInfo(
        "DS903",
        "ranks that never communicated",
        "error",
        None,
        "The ranks of a captured script made no collective call and sent no message, so capture "
        "checked nothing.",
        "Each rank trains its own model on its own data. Often a library found no GPU, or the script "
        "did not see the launcher's variables.",
        "Call `init_process_group` and wrap the model (DDP, FSDP). Run `distsim capture --cuda` if "
        "the script communicates only on GPUs.",
        "import torch\n\nmodel = torch.nn.Linear(4, 4)\nmodel(torch.ones(2, 4)).sum().backward()\n",
    ),
    CodeInfo(
        "DS604",
        "completes only on some backends",
        "warning",
        None,
        "The program completes on its own backend. On another backend it hangs, raises, crashes "
        "or is undefined.",
        "The program runs on a laptop with gloo and hangs on the cluster with nccl, or the other "
        "way round.",
        "If the program runs on one backend only, ignore this. Otherwise run `distsim check FILE "
        "--backend NAME`. Two habits "
        "work on every backend: put messages into batches, and use groups in the same order on all "
        "ranks.",
        example_scenario(
            2,
            "groups: {a: [0, 1], b: [0, 1]}\n",
            "{all_reduce: {tensor: x, group: a, async: true, as: h}, ranks: 0}",
            "all_reduce: {tensor: z, group: b, async: true, as: k}",
            "{all_reduce: {tensor: x, group: a, async: true, as: h}, ranks: 1}",
            "wait: all",
        ),
    ),
    CodeInfo(
        "DS606",
        "group without the world's timeout",
        "warning",
        None,
        "The scenario sets a timeout for the world but creates a group without one. `new_group` "
        "does not inherit it.",
        "The group uses the backend's default, 30 minutes (nccl: 10). If a member never arrives, "
        "the job looks frozen long after the world's timeout.",
        "Set the timeout again where you create the group: `new_group: {…, timeout: 60 s}` or "
        "`groups: {g: {ranks: […], timeout: 60 s}}`.",
        example_scenario(
            2,
            "options: {timeout: 60 s}\ngroups: {pair: [0, 1]}\n",
            "all_reduce: {tensor: x, group: pair}",
        ),
    ),
    CodeInfo(
        "DS607",
        "request dropped before it completes",
        "warning",
        None,
        "The program drops the request of an isend, irecv or batch, or overwrites its handle. DS607 "
        "appears only if another failure ends the program; otherwise DS304 or DS501 reports the request.",
        (
            "Gloo cancels a message whose request is dropped, unless the peer has already made the "
            "matching call. So the outcome depends on which rank arrives first. torch's MPI backend "
            "ends the process. NCCL continues."
        ),
        "Keep the request (`as: h`) and wait for it. In a loop, give each iteration its own "
        "handle (`as: h@i`).",
        example_scenario(
            3,
            "",
            "{isend: {tensor: x, dst: 1}, ranks: 2}",
            "{recv: {tensor: y, src: 1 - rank}, ranks: rank < 2}  # another failure: ranks 0 and 1 hang",
            "{send: {tensor: y, dst: 1 - rank}, ranks: rank < 2}",
            "{recv: {tensor: x, src: 2}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS608",
        "collective that some members cannot reach",
        "note",
        None,
        (
            "A `ranks:` selector excludes some members of the group from a collective. These members "
            "call that collective less often than the other members."
        ),
        (
            "A collective waits for every member. If a member makes fewer calls than the others, "
            "the others wait forever."
        ),
        "Move the call out of the selector, or create a group of the ranks that take part.",
        two_rank_scenario("{all_reduce: {tensor: x, async: true}, ranks: 0}"),
    ),
)
