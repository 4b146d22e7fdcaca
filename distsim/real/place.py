"""Who started this process, and which rank that makes it: torchrun, srun or mpirun, by the variables that each sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from distsim.errors import EnvironmentFault


class Started(NamedTuple):
    """This process is one rank of a world that another launcher started. ``agent_store``: it serves the store already."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    agent_store: bool


#: launcher -> (a variable that only it sets, rank, world size, local rank).
_VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def found(env: Mapping[str, str], master_addr: str, master_port: int) -> Started | None:
    """The rank that the environment gives this process; None where nobody started it as one.

    ``master_addr`` and ``master_port`` hold where the launcher sets none. Raises EnvironmentFault for variables that are broken.
    """
    for launcher, (sign, *names) in _VARIABLES.items():
        if sign in env and names[0] in env and names[1] in env:
            rank, size, local = (_number(env, name) for name in names)
            address = env.get("MASTER_ADDR") or (_first_host(env) if launcher == "srun" else "") or master_addr
            port = _number(env, "MASTER_PORT") if env.get("MASTER_PORT") else master_port
            served = launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return Started(launcher, rank, size, local, address, port, served)
    return None


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "0")
    if not text.isdigit():
        raise EnvironmentFault(f"{name} is {text!r}, which is no number", "start the ranks with torchrun, srun or mpirun")
    return int(text)


def _first_host(env: Mapping[str, str]) -> str:
    """The first host of SLURM_JOB_NODELIST, as ``node[03-05,9]`` → ``node03``."""
    if env.get("SLURM_NNODES", "1") == "1":
        return "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", env.get("SLURM_JOB_NODELIST", ""))
    return f"{match[1]}{match[2] or ''}" if match else ""


__all__ = ["Started", "found"]
