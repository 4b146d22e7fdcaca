"""The environment variables that a launcher gives to a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

#: The variables with the rank and the number of ranks of a process that capture started.
RANK_VARIABLE: Final = "DISTSIM_RANK"
RANKS_VARIABLE: Final = "DISTSIM_RANKS"
#: ``torchrun`` stands for all launchers that set the same variables (accelerate, deepspeed).
LauncherName = Literal["torchrun", "slurm", "mpi"]


class RankPosition(NamedTuple):
    """A rank among ``ranks``, of which ``local_size`` are on each of ``nodes``."""

    rank: int
    ranks: int
    local_size: int
    nodes: int

    @property
    def local_rank(self) -> int:
        """The rank on its node."""
        return self.rank % self.local_size

    @property
    def node(self) -> int:
        """The number of the node."""
        return self.rank // self.local_size


def launcher_environment(launcher: LauncherName, position: RankPosition) -> dict[str, str]:
    """The variables that a launcher sets for a rank.

    The address of rank 0 is set for all of them: the batch script around srun and mpirun does it.
    """
    values: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    if launcher == "slurm":
        values |= _slurm_variables(position)
    elif launcher == "mpi":
        values |= _mpi_variables(position)
    else:
        values |= _torchrun_variables(position)
    return {name: str(value) for name, value in values.items()}


def _torchrun_variables(position: RankPosition) -> Mapping[str, object]:
    """torch/distributed/elastic/agent/server/local_elastic_agent.py."""
    return {
        "RANK": position.rank,
        "LOCAL_RANK": position.local_rank,
        "GROUP_RANK": position.node,
        "ROLE_RANK": position.rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": position.ranks,
        "LOCAL_WORLD_SIZE": position.local_size,
        "GROUP_WORLD_SIZE": position.nodes,
        "ROLE_WORLD_SIZE": position.ranks,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "distsim",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _slurm_variables(position: RankPosition) -> Mapping[str, object]:
    """srun(1), section "output environment variables"."""
    nodes = "localhost" if position.nodes == 1 else f"node[0-{position.nodes - 1}]"
    return {
        "SLURM_PROCID": position.rank,
        "SLURM_LOCALID": position.local_rank,
        "SLURM_NODEID": position.node,
        "SLURM_NTASKS": position.ranks,
        "SLURM_NPROCS": position.ranks,
        "SLURM_NTASKS_PER_NODE": position.local_size,
        "SLURM_STEP_NUM_TASKS": position.ranks,
        "SLURM_NNODES": position.nodes,
        "SLURM_JOB_NUM_NODES": position.nodes,
        "SLURM_STEP_NUM_NODES": position.nodes,
        "SLURM_JOB_ID": 1,
        "SLURM_JOBID": 1,
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }


def _mpi_variables(position: RankPosition) -> Mapping[str, object]:
    """Those of Open MPI (mpirun(1)) and of MPICH (PMI)."""
    return {
        "OMPI_COMM_WORLD_RANK": position.rank,
        "OMPI_COMM_WORLD_SIZE": position.ranks,
        "OMPI_COMM_WORLD_LOCAL_RANK": position.local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": position.local_size,
        "OMPI_COMM_WORLD_NODE_RANK": position.node,
        "PMI_RANK": position.rank,
        "PMI_SIZE": position.ranks,
        "MPI_LOCALRANKID": position.local_rank,
        "MPI_LOCALNRANKS": position.local_size,
    }


__all__ = ["LauncherName", "RankPosition", "launcher_environment"]
