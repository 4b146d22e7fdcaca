"""DS3xx to DS5xx: deadlocks, races and leaks."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, example_scenario, two_rank_scenario

DEADLOCK_RACE_LEAK_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS301",
        "ranks wait for each other in a cycle",
        "error",
        "deadlock",
        "Each rank of a wait-for cycle is blocked in a call and waits for the next rank. No rank "
        "reaches the call that another one needs.",
        (
            "The job prints nothing until a watchdog ends it after minutes. For small messages, "
            "buffering may hide the cycle (below MPI's eager limit, or within NCCL's buffer)."
        ),
        "Break the cycle: let one side receive first, or post both directions together with "
        "batch_isend_irecv.",
        two_rank_scenario("send: {tensor: x, dst: 1 - rank}", "recv: {tensor: z, src: 1 - rank}"),
    ),
    CodeInfo(
        "DS302",
        "rank waits for a rank that has already ended",
        "error",
        "deadlock",
        (
            "A rank is blocked in a call that needs another rank, but that rank has already ended "
            "without making the matching call."
        ),
        "The call never completes. NCCL's watchdog ends the job after its timeout; on Gloo, ranks "
        'that need the ended rank raise "Connection closed by peer".',
        "Make the same number of calls on every member. Usual causes: uneven batches, an early "
        "return, a skipped branch.",
        two_rank_scenario("{barrier: {}, ranks: 0}"),
    ),
    CodeInfo(
        "DS303",
        "rank waits for a rank that died or never started",
        "error",
        "deadlock",
        "A rank waits for a rank that was killed, raised an error or was never launched.",
        (
            "If a rank was never started, all others wait in init_process_group. If a rank died, "
            "ranks that need it raise at once on Gloo. On NCCL they hang until the watchdog's "
            "timeout, on MPI until the launcher ends them."
        ),
        ("Read the log of the dead rank: it contains the cause."),
        two_rank_scenario("{fail: {message: out of memory}, ranks: 0}", "barrier"),
    ),
    CodeInfo(
        "DS304",
        "message without a matching call",
        "error",
        "deadlock",
        "A rank waits to receive a message that no rank sends, or to send a message that no rank "
        "receives.",
        "The call waits forever. If only the tags differ, NCCL does not hang: it ignores tags, so "
        "the receive takes the wrong message.",
        (
            "Compare peer, tag and group on both ends. The finding lists calls that differ in only "
            "one of the three."
        ),
        two_rank_scenario(
            "{send: {tensor: x, dst: 1, tag: 1}, ranks: 0}",
            "{recv: {tensor: x, src: 0, tag: 2}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS305",
        "receive from any source, but all possible senders are blocked",
        "error",
        "deadlock",
        (
            "A rank waits for a message from any source. Every rank that could still send one is "
            "itself blocked, because it waits directly or indirectly for this rank."
        ),
        (
            "All these ranks wait forever. Perhaps an earlier receive from any source took the "
            "message that a later call needs."
        ),
        "Name the source in the receive, use different tags for different kinds of messages, or "
        "let one rank send first.",
        two_rank_scenario(
            "{recv: {tensor: x}, ranks: 0}",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
            "{send: {tensor: x, dst: 0}, ranks: 1}",
            "{send: {tensor: x, dst: 1}, ranks: 0}",
        ),
    ),
    CodeInfo(
        "DS306",
        "wait for a store key that no rank sets",
        "error",
        "deadlock",
        "A rank waits for a key of the store, or polls it in a loop. No rank that is still running "
        "sets this key.",
        "`get` and `wait` raise after the store's timeout of 5 minutes. A loop around `check` "
        "runs forever. Other ranks wait for this rank.",
        "Let a rank set the key before it makes a call that waits for the reading rank, such as a "
        "barrier. Compare the spelling of the key, and the prefix of a PrefixStore.",
        "import torch.distributed as dist\n\n"
        'dist.init_process_group("gloo")\n'
        "c10d = dist.distributed_c10d\n"
        "store = c10d._get_default_store()\n"
        "if dist.get_rank() == 0:\n"
        '    store.wait(["ready"])\n'
        "dist.barrier()\n",
    ),
    CodeInfo(
        "DS401",
        "receive may take another sender's message",
        "error",
        "race",
        "A receive from any source relies on one sender (in a scenario: `assume_src`), but a "
        "message from another sender can arrive first.",
        (
            "The program works until the expected sender is slower than the other one. Then the rank "
            "receives the wrong rank's data."
        ),
        "Name the source in the receive, or give each sender its own tag.",
        example_scenario(
            3,
            "",
            "{recv: {tensor: x, assume_src: 1}, ranks: 0}",
            "{recv: {tensor: x}, ranks: 0}",
            "{send: {tensor: x, dst: 0}, ranks: rank > 0}",
        ),
    ),
    CodeInfo(
        "DS402",
        "buffer written while a request uses it",
        "error",
        "race",
        (
            "The program writes or receives into a tensor that is still in use by an isend, irecv or "
            "async collective that has not completed, or by another stream."
        ),
        ("The data that is sent or stored depends on timing. Neither torch nor any backend warns."),
        "Wait for the request (or the stream: `wait_stream`) before you change the tensor, or "
        "use separate tensors (`copies:`).",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
            "{compute: {time: 1 ms, writes: [x]}, ranks: 0}",
            "{wait: h, ranks: 0}",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS403",
        "buffer read before its receive completes",
        "error",
        "race",
        (
            "The program reads or sends a tensor that a receive, a collective or another stream has "
            "not yet filled."
        ),
        "The reader may see old data, new data or a mixture.",
        "Wait for the request before you read the tensor.",
        two_rank_scenario(
            "{send: {tensor: x, dst: 1}, ranks: 0}",
            "{irecv: {tensor: x, src: 0, as: h}, ranks: 1}",
            "{compute: {time: 1 ms, reads: [x]}, ranks: 1}",
            "{wait: h, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS404",
        "unordered access to another rank's memory",
        "error",
        "race",
        "A rank writes (`put`) or reads (`get`) memory of another rank. That rank or a third rank "
        "also uses this memory, and no signal, message or collective orders the two accesses.",
        (
            "The owner of the memory makes no call for a put or get, so it does not wait for the "
            "access. A rank reads old data, new data or a mixture, without a warning."
        ),
        "Send a signal after one access and wait for it before the other, or put a barrier "
        "between them.",
        example_scenario(
            2,
            "",
            "{put: {tensor: x, dst: 1}, ranks: 0}",
            "{compute: {time: 1 ms, reads: [x]}, ranks: 1}",
            backend="nccl",
        ),
    ),
    CodeInfo(
        "DS501",
        "request never waited for",
        "warning",
        "leak",
        "A rank never waits for the request (`Work` object) of an isend, irecv, batch or asynchronous "
        "collective.",
        (
            "The rank cannot know whether its data has arrived, or whether it may reuse the buffer. "
            "Errors of the request are lost."
        ),
        (
            "Keep the handle (`as: h`) and wait for it. In a loop, give each iteration its own "
            "handle (`as: h@i`)."
        ),
        two_rank_scenario("{all_reduce: {tensor: x, async: true}}"),
    ),
    CodeInfo(
        "DS502",
        "message never received",
        "warning",
        "leak",
        "A rank sends a message that no rank has received when the program ends.",
        (
            "The message is lost. If the job continues, a later receive may take it by mistake. Gloo drops it when the "
            "sender ends, NCCL may hang, and torch's MPI backend may end the process."
        ),
        "Receive the message, or remove the send.",
        two_rank_scenario("{isend: {tensor: x, dst: 1}, ranks: 0}"),
    ),
)
