"""Other people's launchers: the plan of a scenario with the lines to type, and which rank a process
is that torchrun, srun or mpirun started. Nothing here needs torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from distsim.common.errors import EnvironmentFault
from distsim.real.shared.job import LOOPBACK
from distsim.scenario import Scenario
from distsim.scenario.strategies import STRATEGIES

#: What stands for the first machine's address where the file leaves the loopback address and has
#: several machines.
FIRST_HOST_PLACEHOLDER = "HOST0"


class RankLaunch(NamedTuple):
    """One rank: the variables of its environment, and the device it works on."""

    rank: int
    node: int
    local_rank: int
    device: str


class CommandLine(NamedTuple):
    """A command to type: by which launcher, on which machine (None: once for all), its words."""

    launcher: str
    node: int | None
    words: tuple[str, ...]


class LaunchPlan(NamedTuple):
    """How a scenario is started. ``sets``: (launcher, what it sets by itself). ``by``: the launcher
    that the file asks for, else "".

    ``script``: a whole batch script for Slurm, where that is asked for or several machines are
    meant.
    """

    name: str
    world_size: int
    nodes: int
    ranks_per_node: int
    backend: str
    master_addr: str
    master_port: int
    ranks: tuple[RankLaunch, ...]
    lines: tuple[CommandLine, ...]
    sets: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    by: str = ""
    script: tuple[str, ...] = ()


#: What each launcher sets (torch.distributed.run, "Environment Variables"; srun(1), "OUTPUT
#: ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI, "MCA environment").
LAUNCHER_VARIABLES = (
    ("distsim", "all of them, in each rank's process"),
    (
        "torchrun",
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT, OMP_NUM_THREADS=1 where it is unset; "
        "not NODE_RANK, not CUDA_VISIBLE_DEVICES",
    ),
    (
        "elastic",
        "the same as torchrun; ranks are given out anew at each restart, so RANK need not be what it was; the first machine "
        "to come serves the store",
    ),
    (
        "mp.spawn",
        "nothing: the function gets its number as its first argument (mp.Process: what args holds)",
    ),
    (
        "srun",
        "SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID, which distsim reads; with --gpus-per-task also "
        "CUDA_VISIBLE_DEVICES; not MASTER_ADDR, not MASTER_PORT",
    ),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK, which distsim reads; not MASTER_ADDR, not MASTER_PORT",
    ),
)


def launch_plan(
    scenario: Scenario, command: tuple[str, ...], backend: str, device: str = "auto"
) -> LaunchPlan:
    """The plan of a scenario. ``command``: the words after ``distsim`` that run it for real.
    ``device``: auto, cpu or cuda.
    """
    gpu = device == "cuda" or (device == "auto" and backend == "nccl")
    launch, world = scenario.launch, scenario.world
    many = world.nodes > 1
    first = (
        launch.hosts[0]
        if launch.hosts and "master_addr" not in launch.model_fields_set
        else launch.master_addr
    )
    address = FIRST_HOST_PLACEHOLDER if many and first in LOOPBACK else first
    ranks = tuple(
        RankLaunch(
            r,
            r // world.ranks_per_node,
            r % world.ranks_per_node,
            _device(scenario, gpu, r % world.ranks_per_node),
        )
        for r in range(world.size)
    )
    notes = [
        f"{FIRST_HOST_PLACEHOLDER} stands for the address of machine 0; give it in the file: launch: {{master_addr: …}}"
    ] * (address == FIRST_HOST_PLACEHOLDER)
    notes += real_run_notes(scenario)
    if launch.env:
        notes.append(
            f"launch.env of the file gives ranks {', '.join(launch.env)} otherwise than the launcher does"
        )
    by = launch.by or ""
    lines = (
        *_torchrun_lines(scenario, command, address, gpu),
        *_elastic_lines(scenario, command, address, gpu),
        *_srun_and_mpirun_lines(scenario, command, address, gpu),
    )
    if by:
        lines = _lines_of_launcher(by, lines, scenario)
    script = batch_script(scenario, command, gpu) if by == "srun" or (not by and many) else ()
    sets = tuple(
        one
        for one in LAUNCHER_VARIABLES
        if not by or one[0] in (by, "mp.spawn" if by == "mp.Process" else "")
    )
    return LaunchPlan(
        scenario.name,
        world.size,
        world.nodes,
        world.ranks_per_node,
        backend,
        address,
        launch.master_port,
        ranks,
        lines,
        sets,
        tuple(notes),
        by,
        script,
    )


def _lines_of_launcher(
    by: str, lines: tuple[CommandLine, ...], scenario: Scenario
) -> tuple[CommandLine, ...]:
    """The lines of one launcher. multiprocessing's are distsim's own, with the start method."""
    if by not in ("mp.spawn", "mp.Process"):
        return tuple(line for line in lines if line.launcher == by)
    method = "spawn" if by == "mp.spawn" else scenario.launch.start
    own = tuple(line for line in lines if line.launcher == "distsim")
    return tuple(
        CommandLine("distsim", line.node, (*line.words, "--launcher", method)) for line in own
    )


def batch_script(scenario: Scenario, command: tuple[str, ...], gpu: bool) -> tuple[str, ...]:
    """The lines of a script for sbatch(1): the tasks, the first machine's name as MASTER_ADDR, one
    srun. Each task finds its number in SLURM_PROCID, which distsim reads, and its GPUs in
    CUDA_VISIBLE_DEVICES, which Slurm sets.
    """
    world, launch = scenario.world, scenario.launch
    asked = [
        f"--job-name={scenario.name}",
        f"--nodes={world.nodes}",
        f"--ntasks-per-node={world.ranks_per_node}",
        f"--cpus-per-task={launch.omp_threads}",
        *([f"--gpus-per-node={world.ranks_per_node}"] if gpu else []),
        "--time=00:10:00",
        "--output=%x-%j.out",
    ]
    address = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    exports = [
        f"export MASTER_ADDR={address}",
        f"export MASTER_PORT={launch.master_port}",
        f"export OMP_NUM_THREADS={launch.omp_threads}",
    ]
    return (
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in asked),
        "set -euo pipefail",
        *exports,
        f"srun --kill-on-bad-exit=1 distsim {shlex.join(command)}",
    )


def _elastic_lines(
    scenario: Scenario, command: tuple[str, ...], address: str, gpu: bool
) -> list[CommandLine]:
    """The same line on every machine: the rendezvous gives out the machines' numbers."""
    world = scenario.world
    words = [
        *_environment(scenario, gpu),
        "torchrun",
        f"--nproc_per_node={world.ranks_per_node}",
        f"--nnodes={world.nodes}",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={address}:{scenario.launch.master_port}",
        f"--rdzv_id={_shell_safe_name(scenario.name)}",
        "--max_restarts=0",
        "-m",
        "distsim",
        *command,
    ]
    return [CommandLine("elastic", None, tuple(words))]


def _shell_safe_name(name: str) -> str:
    """A name as one word that no shell reads otherwise."""
    return (
        "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip(
            "-"
        )
        or "distsim"
    )


def real_run_notes(scenario: Scenario) -> list[str]:
    """Where a real run does otherwise than the classes of PyTorch that the scenario's strategies
    are named after.
    """
    return [
        STRATEGIES[name].real_run_note
        for name in scenario.strategies
        if STRATEGIES[name].real_run_note
    ]


def _device(scenario: Scenario, gpu: bool, local_rank: int) -> str:
    """cuda:k counts among the visible devices, as torch does."""
    if not gpu:
        return "cpu"
    visible = scenario.launch.visible_devices
    return f"cuda:{local_rank % len(visible) if visible else local_rank}"


def _environment(scenario: Scenario, gpu: bool) -> list[str]:
    launch, per = scenario.launch, scenario.world.ranks_per_node
    visible = launch.visible_devices or tuple(range(per))
    gpus = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, visible))}"] if gpu else []
    return [*gpus, f"OMP_NUM_THREADS={launch.omp_threads}"]


def _torchrun_lines(
    scenario: Scenario, command: tuple[str, ...], address: str, gpu: bool
) -> list[CommandLine]:
    world, port = scenario.world, scenario.launch.master_port
    found = [CommandLine("distsim", None, ("distsim", *command))] if world.nodes == 1 else []
    for node in range(world.nodes):
        words = [
            *_environment(scenario, gpu),
            "torchrun",
            f"--nproc_per_node={world.ranks_per_node}",
            f"--nnodes={world.nodes}",
            f"--node_rank={node}",
            f"--master_addr={address}",
            f"--master_port={port}",
            "-m",
            "distsim",
            *command,
        ]
        found.append(CommandLine("torchrun", node, tuple(words)))
        if world.nodes > 1:
            own = (
                "--nnodes",
                str(world.nodes),
                "--node-rank",
                str(node),
                "--master-addr",
                address,
                "--master-port",
                str(port),
            )
            found.append(CommandLine("distsim", node, ("distsim", *command, *own)))
    return sorted(found, key=lambda line: (line.launcher != "distsim", line.node or 0))


def _srun_and_mpirun_lines(
    scenario: Scenario, command: tuple[str, ...], address: str, gpu: bool
) -> list[CommandLine]:
    world, env = scenario.world, _environment(scenario, gpu)
    master = [f"MASTER_ADDR={address}", f"MASTER_PORT={scenario.launch.master_port}"]
    gpus = [f"--gpus-per-node={world.ranks_per_node}"] if gpu else []
    threads = [word for word in env if word.startswith("OMP")]
    slurm = [
        *threads,
        *master,
        "srun",
        f"--nodes={world.nodes}",
        f"--ntasks-per-node={world.ranks_per_node}",
        *gpus,
    ]
    exported = [word for pair in [*env, *master] for word in ("-x", pair)]
    mpi = [
        "mpirun",
        "-np",
        str(world.size),
        "--map-by",
        f"ppr:{world.ranks_per_node}:node",
        *exported,
    ]
    return [
        CommandLine("srun", None, (*slurm, "distsim", *command)),
        CommandLine("mpirun", None, (*mpi, "distsim", *command)),
    ]


def wrapped_command(words: tuple[str, ...], width: int, indent: str) -> list[str]:
    """A command in lines of at most ``width``, broken as a shell reads it; what can't be broken
    stays whole.
    """
    lines, line = [], indent
    for word in _option_units([shlex.quote(w) for w in words]):
        if len(line) + len(word) + 3 > width and line.strip():
            lines.append(f"{line.rstrip()} \\")
            line = f"{indent}    "
        line += f"{word} "
    return [*lines, line.rstrip()]


def _option_units(words: list[str]) -> list[str]:
    """Options with a word of their own behind them stay together with it."""
    found: list[str] = []
    for word in words:
        if (
            found
            and found[-1].startswith("-")
            and " " not in found[-1]
            and "=" not in found[-1]
            and not word.startswith("-")
            and found[-1] != "--real"
        ):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


# --- a process that they started ---


class ExternalRank(NamedTuple):
    """This process is one rank of a world that another launcher started. ``agent_store``: it serves
    the store already.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    agent_store: bool


#: launcher -> (a variable that only it sets, rank, world size, local rank).
_RANK_VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "mpiexec": ("PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def external_rank(
    env: Mapping[str, str], master_addr: str, master_port: int
) -> ExternalRank | None:
    """The rank that the environment gives this process; None where nobody started it as one.

    ``master_addr`` and ``master_port`` hold where the launcher sets none. Raises EnvironmentFault
    for variables that are broken.
    """
    for launcher, (sign, *names) in _RANK_VARIABLES.items():
        if sign in env and names[0] in env and names[1] in env:
            rank, size, local = (_integer_variable(env, name) for name in names)
            address = (
                env.get("MASTER_ADDR")
                or (_first_host(env) if launcher == "srun" else "")
                or master_addr
            )
            port = _integer_variable(env, "MASTER_PORT") if env.get("MASTER_PORT") else master_port
            served = launcher == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return ExternalRank(launcher, rank, size, local, address, port, served)
    return None


def _integer_variable(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "0")
    if not text.isdigit():
        raise EnvironmentFault(
            f"{name} is {text!r}, which is no number",
            "start the ranks with torchrun, srun or mpirun",
        )
    return int(text)


def _first_host(env: Mapping[str, str]) -> str:
    """The first host of SLURM_JOB_NODELIST, as ``node[03-05,9]`` → ``node03``."""
    if env.get("SLURM_NNODES", "1") == "1":
        return "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", env.get("SLURM_JOB_NODELIST", ""))
    return f"{match[1]}{match[2] or ''}" if match else ""
