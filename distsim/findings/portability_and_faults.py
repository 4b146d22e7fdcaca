"""DS6xx to DS9xx: luck, refusals of a back end, faults, and remarks about the file."""

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
        "met by order, not by name",
        "warning",
        None,
        "Two collectives of equal shape are called in another order on some rank: they meet, but with each other's tensors.",
        "Nothing hangs and nothing raises: the result is wrong data.",
        "Make the calls in one order on all members of the group.",
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
        "Messages of one pair are told apart by tag, but NCCL has no tags: they meet in the order of their calls.",
        "A program that is right on Gloo receives one message in place of another on NCCL.",
        "Receive in the order in which the messages are sent, or put sends and receives into one batch in the same order.",
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
        "passes only thanks to buffering",
        "warning",
        None,
        "The program gets through only because a back end buffers its sends; where a send waits for its receive, it"
        " stands still.",
        "MPI buffers up to its eager limit and NCCL up to its channel buffer: a larger tensor, or Gloo, and it hangs.",
        "Repair the circle that the finding beside this one shows; do not rely on the buffer.",
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
        "receive from any source has a choice",
        "note",
        None,
        "More than one sender's message can be taken by a receive that names no source.",
        "The order of arrival decides. That is what such receives are for, so this is a remark, not a verdict.",
        "Nothing, if any order is right. Else name the source, or say which sender is meant with `assume_src`.",
        _TWO_SENDERS,
    ),
    CodeInfo(
        "DS609",
        "the order of events decides",
        "warning",
        None,
        "The program goes wrong in some orders of events and gets through in others: it depends on whose message an open receive"
        " takes, or on which sends are buffered.",
        "It passes a hundred times and hangs the next, when the network is slow on one side.",
        "Name the source of the receive, or give messages of different meaning different tags. The finding lists the choices that"
        " lead there; `distsim simulate --event-order` follows them.",
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
        "messages met by order, not by name",
        "warning",
        None,
        "Two equal messages between the same two ranks are received in another order than they are sent, as the tensors' names tell: other"
        " messages of the program go from the first's tensor to the second's place, and the other way round.",
        "Nothing hangs and nothing raises, for messages of one size fit each other: an activation is taken for a gradient, or one"
        " micro-batch for another. The result is wrong data.",
        "Exchange the two receives, so that they stand in the order of the sends; or give the two messages tags of their own (nccl knows"
        " no tags). If the names mislead, rename the tensors: names alone are the evidence.",
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
        "signal and barrier take each other's",
        "warning",
        None,
        "A barrier of symmetric memory uses the cells of the signal pad that put_signal and wait_signal of its channel use too, and a"
        " signal given by hand meets the barrier's wait, or the barrier's signal a wait by hand.",
        "The kernel takes what stands in the cell. A rank leaves the barrier before the other has come, so what the barrier was to order"
        " is in no order; and the wait that the signal was meant for takes the barrier's signal, or none is left and it spins for ever.",
        "Give the barrier a channel of its own, as handle.barrier(channel=1); or let every signal be waited for before the barrier.",
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
        "receive from any source refused",
        "error",
        None,
        "The back end has no receive from any source.",
        "NCCL raises ValueError: the source rank must be given.",
        "Name the source, or use gloo for this group (a group may have a back end of its own).",
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
        "dtype not supported by the back end",
        "error",
        None,
        "The back end cannot send or reduce tensors of this dtype.",
        "torch raises RuntimeError on every calling rank.",
        "Cast to a supported dtype, or use another back end for this group; `distsim explain backends` has the table.",
        example_scenario(
            2, "", "all_reduce: {tensor: {shape: [4], dtype: bfloat16}}", backend="mpi"
        ),
    ),
    CodeInfo(
        "DS703",
        "reduce operation not supported by the back end",
        "error",
        None,
        "The back end has no such reduction, or not for this dtype.",
        "torch raises ValueError or RuntimeError on every calling rank: NCCL has no bitwise reductions.",
        "Use an operation it has (`avg` is sum and a division), or another back end for this group.",
        example_scenario(
            2, "", "all_reduce: {tensor: {shape: [4], dtype: int32}, op: band}", backend="nccl"
        ),
    ),
    CodeInfo(
        "DS704",
        "operation not supported by the back end",
        "error",
        None,
        "The back end does not offer this operation, or torch does not make this group.",
        "torch raises on every calling rank: monitored_barrier is gloo's alone.",
        "Use an operation it has; `distsim explain backends` has the table.",
        example_scenario(2, "", "monitored_barrier", backend="nccl"),
    ),
    CodeInfo(
        "DS705",
        "behaviour left undefined by the back end",
        "warning",
        None,
        "The back end's manual or its source leaves open what this program does: two ranks first meet in calls that connect"
        " other directions than each other (one batches a send and a receive, the other makes them one by one), or groups that"
        " share ranks are used in another order on different ranks.",
        "It may pass here and hang on another version or another machine.",
        "Batch the two directions on both ranks, or use the groups in one order, as the message says.",
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
        "A fault of the file (`faults:`) kills this rank at the place shown.",
        "The process is gone without a word; those who need it wait, or see a closed connection.",
        "Nothing: the file asked for it. Look at what it does to the others.",
        example_scenario(2, "faults: [{rank: 1, kind: kill, before_call: 0}]\n", "barrier"),
    ),
    CodeInfo(
        "DS802",
        "rank raised an error",
        "error",
        None,
        "A rank ends with a Python error: a `fail` step, a fault of the kind `raise`, or a call that the back end refuses.",
        "The rank leaves; those who need it wait until their timeout unless a launcher ends them.",
        "Repair the error of this rank first; the hangs of the others follow from it.",
        two_rank_scenario("{fail: {message: out of memory}, ranks: 0}"),
    ),
    CodeInfo(
        "DS803",
        "rank exited early",
        "warning",
        None,
        "A rank ends its program by `exit` before the others.",
        "Whoever still needs it stands still.",
        "Let all ranks decide together: all_reduce the condition before leaving.",
        two_rank_scenario("{exit: {code: 1}, ranks: 0}"),
    ),
    CodeInfo(
        "DS804",
        "wait outlasts its timeout",
        "error",
        None,
        "A call waits longer than its group's timeout while other ranks still move, or a monitored_barrier that nobody will complete.",
        "The back end raises (gloo), or its watchdog ends the process (nccl), although the program would have got through.",
        "Raise the timeout of the group, or move the slow work off the path that others wait for.",
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
        "All others wait in init_process_group until its timeout: the first hang everybody meets.",
        "Check that world_size is nnodes times nproc_per_node, that all machines run the launcher, and that"
        " MASTER_ADDR is reachable.",
        example_scenario(2, "faults: [{rank: 1, kind: absent}]\n", "barrier"),
    ),
    CodeInfo(
        "DS806",
        "does not fit the device's memory",
        "error",
        None,
        "What ranks hold at their peak (parameters, gradients, optimizer states, activations) is more than their device has.",
        "The first step ends with out of memory on these ranks, and the others wait for them. The sum leaves out the allocator's and the"
        " libraries' own needs, so that a close fit may fail too.",
        "Shard more (ZeRO 1 to 3, more tensor or pipeline ranks), recompute activations, or take smaller micro-batches.",
        example_scenario(2, "memory: {rank: {parameters: 100 GB, optimizer: 600 GB}}\n", "barrier"),
    ),
    CodeInfo(
        "DS901",
        "selector selects nobody",
        "warning",
        None,
        "A `ranks:` selector is true for no rank, so its steps are never run.",
        "Usually a condition that was meant otherwise: `stage == 2` in a mesh of two stages.",
        "Correct the selector, or take the steps out.",
        two_rank_scenario("{barrier: {}, ranks: rank == 7}"),
    ),
    CodeInfo(
        "DS902",
        "verdict is not complete",
        "warning",
        None,
        "Not every order of events was looked at, so the verdict is the worst found so far.",
        "Receives from any source, and sends that may be buffered, give more orders than the bound allows.",
        "Name the sources where you can, or run `distsim check` with a larger bound (`--max-states`).",
        _TWO_SENDERS,
    ),
    CodeInfo(
        "DS604",
        "fine on one back end, not on another",
        "warning",
        None,
        "Under the file's own back end the program gets through; under another one it hangs, raises, crashes or is left undefined.",
        "It runs on a laptop with gloo and stands still on the cluster with nccl, or the other way round.",
        "If the other back end is meant as well, look at it: `distsim check FILE --backend nccl`. Messages in batches and"
        " one order of groups on all ranks work everywhere. Else ignore this.",
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
        "The file sets a timeout for the world, and a group is made without one. `new_group` does not inherit it.",
        "The group takes the back end's default, 30 minutes (nccl 10): when a member stays away, the job looks frozen although the"
        " world would have given up long before.",
        "Say the timeout again where the group is made: `new_group: {…, timeout: 60 s}` or `groups: {g: {ranks: […], timeout: 60 s}}`.",
        example_scenario(
            2,
            "options: {timeout: 60 s}\ngroups: {pair: [0, 1]}\n",
            "all_reduce: {tensor: x, group: pair}",
        ),
    ),
    CodeInfo(
        "DS607",
        "handle of a message not kept",
        "warning",
        None,
        "The request that isend, irecv or a batch returns is dropped, or its name is bound again, before it was waited for.",
        "Gloo cancels a message whose request is gone unless its counterpart already waits for it; torch's MPI ends the process. NCCL"
        " goes on. So it works or not by who comes first.",
        "Keep the request (`as: h`) and wait for it; in a loop give each round its own (`as: h@i`).",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1}, ranks: 0}", "{recv: {tensor: x, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS608",
        "collective that not all members can reach",
        "note",
        None,
        "A collective stands under a selector that leaves out members of its group, and they make fewer calls of its kind.",
        "A collective waits for every member. A call that differs only in place is fine: this is said where one is missing.",
        "Move it out of the selector, or make a group of those who take part.",
        two_rank_scenario("{all_reduce: {tensor: x}, ranks: 0}", "barrier"),
    ),
)
