"""DS3xx to DS5xx: ranks that stand still, races and leaks."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, example_scenario, two_rank_scenario

DEADLOCK_RACE_LEAK_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS301",
        "ranks wait for each other in a circle",
        "error",
        "deadlock",
        "Each rank of a circle waits in a call for the next one, so none ever gets to the call the others need.",
        "The job is silent until a watchdog ends it, after minutes. Messages below an eager limit (MPI) or within NCCL's buffer"
        " may hide it.",
        "Break the circle: let one side receive first, or post both directions at once with batch_isend_irecv.",
        two_rank_scenario("send: {tensor: x, dst: 1 - rank}", "recv: {tensor: z, src: 1 - rank}"),
    ),
    CodeInfo(
        "DS302",
        "waits for a rank that has already ended",
        "error",
        "deadlock",
        "A rank waits in a call for one whose program has ended (or exited) without making its part of it.",
        "The call never completes. NCCL's watchdog ends the job after its timeout; Gloo may report a closed connection.",
        "Let every member make the same number of calls: uneven batches, an early return or a skipped branch is the usual cause.",
        two_rank_scenario("{barrier: {}, ranks: 0}"),
    ),
    CodeInfo(
        "DS303",
        "waits for a rank that died or never started",
        "error",
        "deadlock",
        "A rank waits for one that was killed, raised an error or was never launched.",
        "A missing rank holds all others in init_process_group; one that died holds those who need it next, until their timeout.",
        "Read the log of the rank that is gone: it has the cause. torchrun ends the others when one fails; plain"
        " launchers do not.",
        two_rank_scenario("{fail: {message: out of memory}, ranks: 0}", "barrier"),
    ),
    CodeInfo(
        "DS304",
        "message without a counterpart",
        "error",
        "deadlock",
        "A rank waits to receive a message that nobody's program sends, or to send one that nobody's program receives.",
        "The call waits for ever. NCCL ignores tags, so a tag that differs hangs on Gloo and MPI only.",
        "Compare peer, tag and group of both ends: the message lists calls that almost fit.",
        two_rank_scenario(
            "{send: {tensor: x, dst: 1, tag: 1}, ranks: 0}",
            "{recv: {tensor: x, src: 0, tag: 2}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS305",
        "knot of receives from any source",
        "error",
        "deadlock",
        "A rank waits for a message from anyone, but every rank that could still send is itself stuck behind it.",
        "As with a circle: all wait. An early receive from any source may also have taken the message that a later"
        " call counts on.",
        "Name the source in the receive, give messages of different meaning different tags, or let one rank send first.",
        two_rank_scenario(
            "{recv: {tensor: x}, ranks: 0}",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
            "{send: {tensor: x, dst: 0}, ranks: 1}",
            "{send: {tensor: x, dst: 1}, ranks: 0}",
        ),
    ),
    CodeInfo(
        "DS306",
        "wait for a key that nobody sets",
        "error",
        "deadlock",
        "A rank waits for a key of the store, or asks for it again and again, and no rank is left that could set it.",
        "`get` and `wait` raise after the store's time-out, 5 minutes; a loop around `check` runs for ever. Others stand behind this rank.",
        "Set the key on every path that leads here, before anything that waits for the rank that reads it. Compare the spelling, and"
        " the prefix of a PrefixStore.",
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
        "A receive from any source relies on one sender (`assume_src`), but a message of another one can come first.",
        "It works until the network is slow on one side; then the data are another rank's.",
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
        "A tensor is written, or received into again, while an open isend, irecv or async collective, or another stream, still uses it.",
        "What is sent or kept depends on timing. Neither torch nor any back end warns.",
        "Wait for the request (a stream: `wait_stream`) before the tensor is touched, or give each its own tensor (`copies:`).",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
            "{compute: {time: 1 ms, writes: [x]}, ranks: 0}",
            "{wait: h, ranks: 0}",
            "{recv: {tensor: x, src: 0}, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS403",
        "buffer read before its receive is done",
        "error",
        "race",
        "A tensor is read or sent while a request that fills it is still open, or another stream still fills it.",
        "The reader may see old data, new data or a mixture.",
        "Wait for the request before the tensor is read.",
        two_rank_scenario(
            "{send: {tensor: x, dst: 1}, ranks: 0}",
            "{irecv: {tensor: x, src: 0, as: h}, ranks: 1}",
            "{compute: {time: 1 ms, reads: [x]}, ranks: 1}",
            "{wait: h, ranks: 1}",
        ),
    ),
    CodeInfo(
        "DS404",
        "another rank uses the memory, and nothing orders it",
        "error",
        "race",
        "A `put` writes, or a `get` reads, memory of another rank while that rank or a third uses it: no signal, message or collective"
        " says which comes first.",
        "The other rank takes no part in a put or get, so it reads old data, new data or a mixture, and nothing warns.",
        "Let the one signal when it is done and the other wait for the signal, or put a barrier between.",
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
        "A request (isend, irecv, an async collective or a batch with a handle) is never waited for.",
        "The rank cannot know that its data arrived or that a buffer is free again; errors of the request are lost.",
        "Keep the handle (`as: h`) and wait for it; in a loop, index it so that it is not overwritten.",
        two_rank_scenario(
            "{isend: {tensor: x, dst: 1}, ranks: 0}", "{recv: {tensor: x, src: 0}, ranks: 1}"
        ),
    ),
    CodeInfo(
        "DS502",
        "message never received",
        "warning",
        "leak",
        "A message is sent and no receive takes it before the programs end.",
        "Gloo never completes such a send; MPI keeps it in a buffer, where it may meet a later receive that meant another one.",
        "Receive it, or do not send it.",
        two_rank_scenario("{isend: {tensor: x, dst: 1}, ranks: 0}"),
    ),
)
