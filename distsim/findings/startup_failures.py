"""DS12x: failed start-ups. `distsim.scenario.startup` finds them; this module has their pages."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, two_rank_scenario


def _init_example(words: str, launch: str = "") -> str:
    """An example whose program begins with init_process_group with these arguments."""
    text = two_rank_scenario(
        f"init_process_group: {{{words}}}" if words else "init_process_group", "barrier"
    )
    return f"{launch}{text}" if launch else text


_OWN_RANK = "rank: rank, world_size: world_size"

STARTUP_FAILURE_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS121",
        "invalid init_method",
        "error",
        "invalid",
        "An init_method has an unknown scheme, or lacks a port, host or path. Or a rank gets its "
        "number both in the URL and as an argument.",
        (
            "torch raises at once on every rank that passes it: `No rendezvous handler for htp://` "
            "(RuntimeError), `port number missing` or `path missing` (ValueError). torch accepts "
            "port 0, but then the other ranks cannot find the store."
        ),
        "Write env://, tcp://host:port or file:///path (three slashes).",
        _init_example(f"init_method: 'tcp://127.0.0.1', {_OWN_RANK}"),
    ),
    CodeInfo(
        "DS122",
        "ranks look for the store in the wrong place",
        "error",
        "invalid",
        (
            "MASTER_ADDR (or the host in tcp://) cannot be resolved, does not lead to the node of "
            "rank 0, or differs between ranks. Or the ranks use different ports or init_methods."
        ),
        "Ranks that look in the wrong place raise DistNetworkError after the timeout (30 min by "
        "default): `The client socket has timed out … while trying to connect`. Rank 0 waits one "
        "second longer and raises `Timed out … waiting for clients`.",
        "Give all ranks the same address, which must lead to the node of rank 0 from every node. "
        "127.0.0.1 does not work with several nodes.",
        _init_example(
            f"init_method: {{0: 'tcp://127.0.0.1:29500', 1: 'tcp://127.0.0.1:29501'}}, {_OWN_RANK}, timeout: 3 s"
        ),
    ),
    CodeInfo(
        "DS123",
        "port already in use",
        "error",
        "invalid",
        (
            "Another program already uses the port on which rank 0 (or the launcher's agent) has to "
            "start the store."
        ),
        (
            "Rank 0 raises DistNetworkError at once (EADDRINUSE). The other ranks connect to the "
            "other program. If that program is the store of another run, these ranks raise after the "
            "timeout. Otherwise they get no answer and wait forever."
        ),
        (
            "Choose another MASTER_PORT, or end the program that uses the port (`ss -ltnp` shows it)."
        ),
        _init_example("", "launch: {ports_taken: [29500]}\n"),
    ),
    CodeInfo(
        "DS124",
        "duplicate or invalid rank number",
        "error",
        "invalid",
        "Two processes have the same rank, or a rank is not between 0 and world_size - 1.",
        (
            "If two processes have rank 0, the second one cannot open the port of the store. If "
            "another number occurs twice, all ranks wait for the missing rank and raise "
            "DistStoreError after the timeout. If a number is world_size or larger, gloo raises at "
            "once on that rank (`enforce fail … rank < size`), and the other ranks wait."
        ),
        (
            "Give each process its own rank, unique across all nodes (RANK). Do not use LOCAL_RANK, "
            "which is unique only within a node."
        ),
        _init_example(
            "init_method: 'tcp://127.0.0.1:29500', rank: rank + 1, world_size: world_size"
        ),
    ),
    CodeInfo(
        "DS125",
        "world sizes differ",
        "error",
        "invalid",
        (
            "Processes use different world sizes, or a world size that differs from the number of "
            "processes. Under mpi, the launcher sets rank and world size, so each process that was "
            "started without mpirun gets world size 1."
        ),
        (
            "If the world size is too large, ranks wait for missing ranks until the timeout. If it "
            "is too small on some ranks, all ranks may pass start-up, but their first collective "
            "never completes: in this collective, gloo raises `Timed out waiting` or `Connection "
            "closed by peer`."
        ),
        "Use the same world_size everywhere: nodes times processes per node.",
        _init_example(
            "init_method: 'tcp://127.0.0.1:29500', rank: rank, world_size: 'world_size + 1'"
        ),
    ),
    CodeInfo(
        "DS126",
        "rendezvous file of an earlier run",
        "error",
        "invalid",
        (
            "The file in `file://…` still contains data of an earlier run. A run that ends normally "
            "removes the file, but a killed run does not."
        ),
        "Ranks find the addresses of dead processes and try to connect: `Connection refused` at "
        "once, or `Connect timeout` after five times the timeout of init_process_group. If "
        "all ranks write their addresses before any rank reads, the start-up succeeds by luck.",
        "Remove the file before each run, or use a new name.",
        _init_example(
            f"init_method: 'file:///shared/meet', {_OWN_RANK}",
            "launch: {files_left: [/shared/meet]}\n",
        ),
    ),
    CodeInfo(
        "DS127",
        "rank, world size or variable missing",
        "error",
        "invalid",
        "env:// needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. tcp://, file:// and a store "
        "need rank and world_size as arguments.",
        (
            "On the ranks without these values, torch raises ValueError at once: `environment "
            "variable RANK expected, but not set`, or `rank parameter missing`. The other ranks wait "
            "for these ranks. mpi takes rank and world size from mpirun. Without mpirun, each mpi "
            "process is a world of its own, so `check` reports a hang."
        ),
        (
            "Start the script with torchrun, which sets all four variables. Under srun, set RANK "
            "from SLURM_PROCID and WORLD_SIZE from SLURM_NTASKS. mp.spawn sets none of them, so pass "
            "rank and world_size yourself."
        ),
        _init_example("", "launch: {env: {RANK: {1: null}}}\n"),
    ),
    CodeInfo(
        "DS706",
        "arguments that mpi ignores",
        "warning",
        None,
        (
            "The program passes rank or world_size to init_process_group, but the mpi backend takes "
            "both from mpirun."
        ),
        (
            "torch warns that it ignores the arguments. If they differ from mpirun's values, the "
            "rest of the program uses wrong numbers."
        ),
        (
            "Remove the arguments. Call dist.get_rank() and dist.get_world_size() after "
            "init_process_group."
        ),
        _init_example(_OWN_RANK).replace("backend: gloo", "backend: mpi"),
    ),
    CodeInfo(
        "DS129",
        "conflicting arguments",
        "error",
        "invalid",
        (
            "The arguments of init_process_group conflict: a store together with an init_method, a "
            "device_id for the CPU, or a store that only its own process can see."
        ),
        (
            "torch raises AssertionError (`Cannot specify both init_method and store.`) or "
            "ValueError at once. With a HashStore, which other processes cannot see, every rank "
            "waits for the others until the timeout."
        ),
        "Pass either store or init_method, and device_id only with nccl. Use a TCPStore or a "
        "FileStore for several processes.",
        _init_example(f"store: 'file:///shared/meet', init_method: 'env://', {_OWN_RANK}"),
    ),
)
