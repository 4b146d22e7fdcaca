"""DS12x: start-ups that go wrong. Their pages; `distsim.scenario.startup` finds them."""

from __future__ import annotations

from distsim.findings.code_info import CodeInfo, two_rank_scenario


def _init_example(words: str, launch: str = "") -> str:
    """An example whose program begins with init_process_group of these arguments."""
    text = two_rank_scenario(
        f"init_process_group: {{{words}}}" if words else "init_process_group", "barrier"
    )
    return f"{launch}{text}" if launch else text


_OWN_RANK = "rank: rank, world_size: world_size"

STARTUP_FAILURE_CODES: tuple[CodeInfo, ...] = (
    CodeInfo(
        "DS121",
        "init_method that torch does not read",
        "error",
        "invalid",
        "An init_method has a scheme that nobody serves, no port, no host, no path, or says the rank twice.",
        "torch raises on every rank that has it, at once: `No rendezvous handler for htp://` (RuntimeError), `port number missing` or"
        " `path missing` (ValueError). Port 0 is taken, and then nobody finds the store.",
        "Write env://, tcp://host:port or file:///path (three strokes).",
        _init_example(f"init_method: 'tcp://127.0.0.1', {_OWN_RANK}"),
    ),
    CodeInfo(
        "DS122",
        "store that is not where ranks look",
        "error",
        "invalid",
        "MASTER_ADDR (or the host of tcp://) does not resolve, names another machine than that of rank 0, or differs from rank to rank,"
        " or ports or init_methods differ.",
        "The ranks that look in the wrong place raise DistNetworkError once the time-out (30 min by default) is over: `The client socket"
        " has timed out … while trying to connect`. Rank 0 waits a second longer and raises `Timed out … waiting for clients`.",
        "Give all ranks the same address, one that leads to the machine of rank 0 from every machine: not 127.0.0.1 with several.",
        _init_example(
            f"init_method: {{0: 'tcp://127.0.0.1:29500', 1: 'tcp://127.0.0.1:29501'}}, {_OWN_RANK}, timeout: 3 s"
        ),
    ),
    CodeInfo(
        "DS123",
        "port taken",
        "error",
        "invalid",
        "The port where rank 0 (or the launcher's agent) would serve the store belongs to another program.",
        "Rank 0 raises DistNetworkError at once (EADDRINUSE). The others connect to that other program: is it another run's store, they"
        " raise after the time-out; any other program's silence they wait out for ever.",
        "Give another MASTER_PORT, or end the run that has it (`ss -ltnp`).",
        _init_example("", "launch: {ports_taken: [29500]}\n"),
    ),
    CodeInfo(
        "DS124",
        "rank number twice, or beyond the world",
        "error",
        "invalid",
        "Two processes say the same rank, or one says a rank that is not from 0 to world_size - 1.",
        "Twice 0: the second finds the port taken. Another number twice: all wait for the number that nobody has, and raise"
        " DistStoreError after the time-out. Beyond the world: gloo raises at once (`enforce fail … rank < size`), the others wait.",
        "Give each process its own number: RANK over all machines, LOCAL_RANK on its machine.",
        _init_example(
            "init_method: 'tcp://127.0.0.1:29500', rank: rank + 1, world_size: world_size"
        ),
    ),
    CodeInfo(
        "DS125",
        "world sizes differ",
        "error",
        "invalid",
        "Processes name different world sizes, or one that is not their number; under mpi, whose launcher gives both, processes that"
        " mpirun did not start are worlds of one.",
        "Said too large, ranks wait for those that nobody started, until the time-out. Said too small on rank 0, the store opens early,"
        " and ranks may even come through: their first collective never ends.",
        "One world_size for all: machines times processes per machine.",
        _init_example(
            "init_method: 'tcp://127.0.0.1:29500', rank: rank, world_size: 'world_size + 1'"
        ),
    ),
    CodeInfo(
        "DS126",
        "file of an earlier run",
        "error",
        "invalid",
        "The file of file:// holds what an earlier run wrote. A run that ends in order removes it; one that is killed does not.",
        "Ranks find the addresses of processes that are gone and try to connect: `Connection refused` at once or `Connect timeout`"
        " after five times the time-out. Where all have written theirs before anybody reads, they come through by luck.",
        "Remove the file before each run, or name a fresh one.",
        _init_example(
            f"init_method: 'file:///shared/meet', {_OWN_RANK}",
            "launch: {files_left: [/shared/meet]}\n",
        ),
    ),
    CodeInfo(
        "DS127",
        "rank, world size or a variable missing",
        "error",
        "invalid",
        "env:// needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; tcp://, file:// and a store need rank and world_size as arguments.",
        "torch raises ValueError on the ranks that lack it, at once: `environment variable RANK expected, but not set`, `rank parameter"
        " missing`. The others wait for them.",
        "Start with torchrun, which sets all four; under srun export them from SLURM_PROCID and SLURM_NTASKS; mp.spawn sets none.",
        _init_example("", "launch: {env: {RANK: {1: null}}}\n"),
    ),
    CodeInfo(
        "DS706",
        "numbers that mpi ignores",
        "warning",
        None,
        "rank or world_size is given, and the back end is mpi, which takes both from its launcher.",
        "torch warns that they are ignored. Where they differ from the launcher's, the program counts wrong.",
        "Leave them out, and read dist.get_rank() afterwards.",
        _init_example(_OWN_RANK).replace("backend: gloo", "backend: mpi"),
    ),
    CodeInfo(
        "DS129",
        "arguments that do not go together",
        "error",
        "invalid",
        "init_process_group got a store and an init_method, a device_id on the CPU, or a store that only its own process sees.",
        "torch raises AssertionError (`Cannot specify both init_method and store.`) or ValueError at once; in a HashStore every rank"
        " waits for the others until the time-out.",
        "Give one of store and init_method; device_id with nccl alone; a TCPStore or a FileStore for several processes.",
        _init_example(f"store: 'file:///shared/meet', init_method: 'env://', {_OWN_RANK}"),
    ),
)
