"""What a worker has to know, and where the files of a run lie."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distsim.program.model import Program
from distsim.real.shared.device_selection import RankDevices, backend_variables
from distsim.real.worker.compute_load import ComputeTimes
from distsim.scenario.startup.init_method import ENV_VARIABLES

#: Names of folders of runs in the temporary folder begin so; the launcher's pid follows, and the
#: next run removes what a killed one left.
FOLDER_PREFIX = "distsim-run-"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class WorkerJob:
    """One run on torch.distributed. Plain values, so that every start method can hand it on.

    ``backend``: torch's name. ``directory``: boards, tables, stacks and results of the local ranks.
    ``repeats``: how often the program runs, the warm-up included. ``busy``: compute spins; else it
    sleeps (more ranks than cores). ``group_timeout_ns``: the timeout of groups that state none.
    ``agent_store``: the launcher holds the store at master_addr:master_port; else rank 0 does.
    ``local_ranks``: those of the ranks from ``first_rank`` on. ``devices``: what they work on.
    ``visible``: GPUs that they may see, where the file says so. ``prices``: how long computes of
    stated flops take where they are not done. ``parent``: the process that must outlive the workers
    (0: not looked at). ``given``: another launcher sets the variables of each rank.
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
    prices: ComputeTimes = field(default_factory=dict)
    parent: int = 0
    given: bool = False

    def local_rank(self, rank: int) -> int:
        return self.local_ranks[rank - self.first_rank]

    def board(self, rank: int) -> Path:
        return Path(self.directory, f"board-{rank}")

    def times(self, rank: int, repetition: int) -> Path:
        return Path(self.directory, f"times-{rank}-{repetition}")

    def stack(self, rank: int) -> Path:
        return Path(self.directory, f"stack-{rank}")

    def result(self, rank: int) -> Path:
        return Path(self.directory, f"result-{rank}")

    def output(self, rank: int) -> Path:
        return Path(self.directory, f"output-{rank}")

    @property
    def control_file(self) -> Path:
        return Path(self.directory, "bulletin")

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set (torch.distributed.run, "Environment Variables"), and the back
        ends' own. "": not set.
        """
        program = self.program
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        loopback = quiet if self.master_addr in LOOPBACK else {}
        if self.given:
            return loopback | self.switches(rank)
        many = (
            len(self.local_ranks) > 1
        )  # as this launcher cuts the world, which need not be as the file does
        per = max(self.local_ranks) + 1 if many else program.local_size
        node = rank // per if many else program.node(rank)
        found = {
            "RANK": rank,
            "WORLD_SIZE": program.world_size,
            "LOCAL_RANK": self.local_rank(rank),
            "LOCAL_WORLD_SIZE": per,
            "GROUP_RANK": node,
            "NODE_RANK": node,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "OMP_NUM_THREADS": self.threads,
            "TORCHELASTIC_USE_AGENT_STORE": self.agent_store,
        }
        usual = {name: str(value) for name, value in found.items()}
        entrance = self.program.startup.entrance(rank) if self.program.startup is not None else None
        if entrance is not None:  # the start-up fails: as the file has it
            own = {name: entrance.env.get(name, "") for name in ENV_VARIABLES}
            usual |= (
                own | dict(entrance.env) | {"TORCHELASTIC_USE_AGENT_STORE": str(entrance.agent)}
            )
        return usual | loopback | self.switches(rank)

    def switches(self, rank: int = 0) -> dict[str, str]:
        """Variables that the devices and the back end of the run want."""
        found = backend_variables(
            self.backend, self.devices, self.program.options, self.directory, rank
        )
        if (
            self.visible
            and self.devices.kind == "cuda"
            and "CUDA_VISIBLE_DEVICES" not in os.environ
        ):
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.visible))
        return found


# --- how what they leave travels ---


def pack_record(record: Mapping[str, bytes]) -> bytes:
    """Named pieces of bytes as one."""
    head = json.dumps({name: len(data) for name, data in record.items()}).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *record.values()])


def unpack_record(data: bytes) -> dict[str, bytes]:
    """The pieces that `pack` put together."""
    length = int.from_bytes(data[:8], "little")
    at, record = 8 + length, {}
    for name, size in json.loads(data[8:at]).items():
        record[name] = data[at : at + size]
        at += size
    return record
