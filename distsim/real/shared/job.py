"""The description of a run that every rank process gets, and the files in the run's folder.

A launcher and its ranks communicate only through this description and through files in one folder:
the launcher must be able to read them even if a rank is stuck or dead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distsim.operations.core.resolved_call import KernelWork
from distsim.program.model import Program
from distsim.real.shared.device_selection import RankDevices, backend_variables
from distsim.scenario.startup.init_method import ENV_VARIABLES

#: Prefix of the folders of runs in the temporary folder. The launcher's process ID follows, so that
#: the next run can remove the folder of a launcher that was killed.
FOLDER_PREFIX = "distsim-run-"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

#: `ResolvedCall.kernel_work` of a compute call -> duration in ns.
ComputeTimes = Mapping[tuple[KernelWork, ...], int]


@dataclass(frozen=True)
class WorkerJob:
    """One run on torch.distributed; plain values, so that every start method can pickle it.

    ``backend``: torch's name. ``directory``: the folder of the files that local ranks write.
    ``repeats``: how often the program runs, including the warm-up. ``busy``: compute spins;
    otherwise it sleeps (if there are more ranks than cores). ``group_timeout_ns``: the timeout of
    groups that state none. ``agent_store``: the launcher holds the store at
    master_addr:master_port; otherwise rank 0 does. ``local_ranks``: the local ranks of the ranks
    from ``first_rank`` on. ``visible``: the GPUs that ranks may see, if the scenario restricts
    them. ``compute_times``: how long computes with stated flops take if they are not really
    executed. ``parent``: the process that must outlive the workers (0: not checked).
    ``environment_is_set``: another launcher sets the variables of each rank.
    """

    program: Program
    backend: str
    directory: str
    master_addr: str
    master_port: int
    init_method: str
    agent_store: bool
    group_timeout_ns: int
    repeats: int = 1
    busy: bool = True
    threads: int = 1
    local_ranks: tuple[int, ...] = ()
    first_rank: int = 0
    devices: RankDevices = field(default_factory=RankDevices)
    visible: tuple[int, ...] = ()
    compute_times: ComputeTimes = field(default_factory=dict)
    parent: int = 0
    environment_is_set: bool = False

    def local_rank(self, rank: int) -> int:
        """The rank within its node."""
        return self.local_ranks[rank - self.first_rank]

    # --- files ---
    def progress_path(self, rank: int) -> Path:
        """The progress file of a rank."""
        return Path(self.directory, f"board-{rank}")

    def times(self, rank: int, repetition: int) -> Path:
        """The table with the times of the calls."""
        return Path(self.directory, f"times-{rank}-{repetition}")

    def stack(self, rank: int) -> Path:
        """The Python stack, written by faulthandler."""
        return Path(self.directory, f"stack-{rank}")

    def result(self, rank: int) -> Path:
        """The final contents of the rank's buffers."""
        return Path(self.directory, f"result-{rank}")

    def output(self, rank: int) -> Path:
        """Standard output and standard error."""
        return Path(self.directory, f"output-{rank}")

    @property
    def control_file(self) -> Path:
        """The file by which the launcher starts and stops repetitions."""
        return Path(self.directory, "bulletin")

    # --- environment of a rank ---
    def environment(self, rank: int) -> dict[str, str]:
        """The environment variables of a rank; "" means that the variable must not be set.

        They are those that torchrun sets (torch.distributed.run, "Environment Variables"), and
        those that the backend and the devices need.
        """
        loopback = {}
        if self.master_addr in LOOPBACK:
            loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        launcher_variables = {} if self.environment_is_set else self._launcher_variables(rank)
        return launcher_variables | loopback | self.device_variables(rank)

    def _launcher_variables(self, rank: int) -> dict[str, str]:
        """What torchrun would set; for a start-up that fails, what the scenario sets instead."""
        program = self.program
        # If this launcher has several ranks, its own cut of the world counts, which may differ from
        # that of the scenario.
        if len(self.local_ranks) > 1:
            local_size = max(self.local_ranks) + 1
            node = rank // local_size
        else:
            local_size = program.local_size
            node = program.node(rank)
        values = {
            "RANK": rank,
            "WORLD_SIZE": program.world_size,
            "LOCAL_RANK": self.local_rank(rank),
            "LOCAL_WORLD_SIZE": local_size,
            "GROUP_RANK": node,
            "NODE_RANK": node,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "OMP_NUM_THREADS": self.threads,
            "TORCHELASTIC_USE_AGENT_STORE": self.agent_store,
        }
        variables = {name: str(value) for name, value in values.items()}
        process = program.startup.entrance(rank) if program.startup is not None else None
        if process is None:
            return variables
        variables |= {name: process.env.get(name, "") for name in ENV_VARIABLES}
        variables |= process.env
        variables["TORCHELASTIC_USE_AGENT_STORE"] = str(process.agent)
        return variables

    def device_variables(self, rank: int = 0) -> dict[str, str]:
        """Variables that the devices and the backend of the run need."""
        variables = backend_variables(
            self.backend, self.devices, self.program.options, self.directory, rank
        )
        uses_cuda = self.devices.kind == "cuda"
        if uses_cuda and self.visible and "CUDA_VISIBLE_DEVICES" not in os.environ:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.visible))
        return variables


# --- records that travel ---


def pack_record(record: Mapping[str, bytes]) -> bytes:
    """Join named pieces of bytes: the length of a JSON index, the index of sizes, the pieces."""
    index = json.dumps({name: len(data) for name, data in record.items()}).encode()
    return b"".join([len(index).to_bytes(8, "little"), index, *record.values()])


def unpack_record(data: bytes) -> dict[str, bytes]:
    """The pieces that `pack_record` joined."""
    index_size = int.from_bytes(data[:8], "little")
    offset = 8 + index_size
    index = json.loads(data[8:offset])
    record = {}
    for name, size in index.items():
        record[name] = data[offset : offset + size]
        offset += size
    return record
