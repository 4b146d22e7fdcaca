"""Support for torchrun, srun and mpirun.

Two directions: the launch plan of a scenario contains the command lines to type for each launcher;
and a process that such a launcher started finds out which rank it is. Nothing here needs torch.
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

#: In place of the first machine's address, if the scenario has several machines and names none.
FIRST_HOST_PLACEHOLDER = "HOST0"


class RankLaunch(NamedTuple):
    """Where one rank runs, and on which device."""

    rank: int
    node: int
    local_rank: int
    device: str


class CommandLine(NamedTuple):
    """A command to type. ``node``: on which machine, None: once for all of them."""

    launcher: str
    node: int | None
    words: tuple[str, ...]


class LaunchPlan(NamedTuple):
    """How a scenario is started.

    ``sets``: (launcher, the variables that it sets). ``by``: the launcher that the scenario asks
    for, else "". ``script``: a batch script for Slurm, if the scenario asks for srun or has several
    machines and asks for no launcher.
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
    ("distsim", "all variables, in the process of each rank"),
    (
        "torchrun",
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT, "
        "OMP_NUM_THREADS=1 if it is unset; not NODE_RANK, not CUDA_VISIBLE_DEVICES",
    ),
    (
        "elastic",
        (
            "the same as torchrun; RANK may change, because each restart assigns the ranks again; "
            "the first node to arrive runs the store"
        ),
    ),
    (
        "mp.spawn",
        "none; the function gets its rank as the first argument (mp.Process: in args)",
    ),
    (
        "srun",
        "SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID, which distsim reads; "
        "with --gpus-per-task also CUDA_VISIBLE_DEVICES; not MASTER_ADDR, not MASTER_PORT",
    ),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK, which distsim reads; "
        "not MASTER_ADDR, not MASTER_PORT",
    ),
)


def launch_plan(
    scenario: Scenario, command: tuple[str, ...], backend: str, device: str = "auto"
) -> LaunchPlan:
    """The plan of a scenario.

    ``command``: the words after ``distsim`` that run it for real. ``device``: auto, cpu or cuda.
    """
    on_gpu = device == "cuda" or (device == "auto" and backend == "nccl")
    launch, world = scenario.launch, scenario.world
    launcher = launch.by or ""
    address = _plan_address(scenario)
    ranks = tuple(_rank_launch(scenario, rank, on_gpu) for rank in range(world.size))
    lines = (
        *_torchrun_lines(scenario, command, address, on_gpu),
        *_elastic_lines(scenario, command, address, on_gpu),
        *_srun_and_mpirun_lines(scenario, command, address, on_gpu),
    )
    if launcher:
        lines = _lines_of_launcher(launcher, lines, scenario)
    needs_script = launcher == "srun" or (not launcher and world.nodes > 1)
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
        sets=_variables_of_launcher(launcher),
        notes=_plan_notes(scenario, address),
        by=launcher,
        script=batch_script(scenario, command, on_gpu) if needs_script else (),
    )


def _plan_address(scenario: Scenario) -> str:
    """The address at which ranks meet; a placeholder if several machines have only a loopback."""
    launch = scenario.launch
    address = launch.master_addr
    if launch.hosts and "master_addr" not in launch.model_fields_set:
        address = launch.hosts[0]
    if scenario.world.nodes > 1 and address in LOOPBACK:
        return FIRST_HOST_PLACEHOLDER
    return address


def _rank_launch(scenario: Scenario, rank: int, on_gpu: bool) -> RankLaunch:
    node, local_rank = divmod(rank, scenario.world.ranks_per_node)
    return RankLaunch(rank, node, local_rank, _device(scenario, on_gpu, local_rank))


def _plan_notes(scenario: Scenario, address: str) -> tuple[str, ...]:
    notes = []
    if address == FIRST_HOST_PLACEHOLDER:
        notes.append(
            f"replace {FIRST_HOST_PLACEHOLDER} by the address of node 0, "
            "or set it in the scenario: launch: {master_addr: …}"
        )
    notes += real_run_notes(scenario)
    variables = scenario.launch.env
    if variables:
        notes.append(
            f"launch.env of the scenario sets {', '.join(variables)}, "
            "which overrides the launcher's values"
        )
    return tuple(notes)


def _variables_of_launcher(launcher: str) -> tuple[tuple[str, str], ...]:
    """The rows of `LAUNCHER_VARIABLES` for a launcher; all rows for ""."""
    if not launcher:
        return LAUNCHER_VARIABLES
    names = (launcher, "mp.spawn") if launcher == "mp.Process" else (launcher,)
    return tuple(row for row in LAUNCHER_VARIABLES if row[0] in names)


def _lines_of_launcher(
    launcher: str, lines: tuple[CommandLine, ...], scenario: Scenario
) -> tuple[CommandLine, ...]:
    """The lines of one launcher; for multiprocessing those of distsim, with the start method."""
    if launcher not in ("mp.spawn", "mp.Process"):
        return tuple(line for line in lines if line.launcher == launcher)
    method = "spawn" if launcher == "mp.spawn" else scenario.launch.start
    distsim_lines = [line for line in lines if line.launcher == "distsim"]
    return tuple(line._replace(words=(*line.words, "--launcher", method)) for line in distsim_lines)


def batch_script(scenario: Scenario, command: tuple[str, ...], gpu: bool) -> tuple[str, ...]:
    """The lines of a script for sbatch(1).

    Each task finds its number in SLURM_PROCID, which distsim reads, and its GPUs in
    CUDA_VISIBLE_DEVICES, which Slurm sets. The script itself has to set MASTER_ADDR.
    """
    world, launch = scenario.world, scenario.launch
    options = [
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
        *(f"#SBATCH {option}" for option in options),
        "set -euo pipefail",
        *exports,
        f"srun --kill-on-bad-exit=1 distsim {shlex.join(command)}",
    )


def _elastic_lines(
    scenario: Scenario, command: tuple[str, ...], address: str, gpu: bool
) -> list[CommandLine]:
    """The same line on every machine, because the rendezvous assigns the node ranks."""
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
    """A name as one word without special characters of a shell."""
    letters = [letter if letter.isalnum() or letter in "._-" else "-" for letter in name]
    return "".join(letters).strip("-") or "distsim"


def real_run_notes(scenario: Scenario) -> list[str]:
    """How a real run differs from the PyTorch classes after which its strategies are named."""
    notes = [STRATEGIES[name].real_run_note for name in scenario.strategies]
    return [note for note in notes if note]


def _device(scenario: Scenario, gpu: bool, local_rank: int) -> str:
    """The device of a rank; cuda:k counts among the visible devices, as torch does."""
    if not gpu:
        return "cpu"
    visible = scenario.launch.visible_devices
    index = local_rank % len(visible) if visible else local_rank
    return f"cuda:{index}"


def _environment(scenario: Scenario, gpu: bool) -> list[str]:
    """Variables in front of a command, as NAME=VALUE."""
    launch = scenario.launch
    threads = f"OMP_NUM_THREADS={launch.omp_threads}"
    if not gpu:
        return [threads]
    visible = launch.visible_devices or range(scenario.world.ranks_per_node)
    return [f"CUDA_VISIBLE_DEVICES={','.join(map(str, visible))}", threads]


def _torchrun_lines(
    scenario: Scenario, command: tuple[str, ...], address: str, gpu: bool
) -> list[CommandLine]:
    """The lines of torchrun and of distsim itself, on every machine; distsim's come first."""
    world, port = scenario.world, scenario.launch.master_port
    lines = []
    if world.nodes == 1:
        lines.append(CommandLine("distsim", None, ("distsim", *command)))
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
        lines.append(CommandLine("torchrun", node, tuple(words)))
        if world.nodes > 1:
            options = (
                "--nnodes",
                str(world.nodes),
                "--node-rank",
                str(node),
                "--master-addr",
                address,
                "--master-port",
                str(port),
            )
            lines.append(CommandLine("distsim", node, ("distsim", *command, *options)))
    return sorted(lines, key=lambda line: (line.launcher != "distsim", line.node or 0))


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
    """A command in lines of at most ``width`` columns, with the shell's line continuations.

    A word that is too long for a line stays whole.
    """
    lines = []
    line = indent
    for unit in _option_units([shlex.quote(word) for word in words]):
        if len(line) + len(unit) + 3 > width and line.strip():
            lines.append(f"{line.rstrip()} \\")
            line = f"{indent}    "
        line += f"{unit} "
    return [*lines, line.rstrip()]


def _option_units(words: list[str]) -> list[str]:
    """Words that stay together on a line: an option and its value are one unit."""
    units: list[str] = []
    for word in words:
        if units and _takes_value(units[-1]) and not word.startswith("-"):
            units[-1] += f" {word}"
        else:
            units.append(word)
    return units


def _takes_value(unit: str) -> bool:
    """The unit is an option without its value so far."""
    if unit == "--real" or not unit.startswith("-"):
        return False
    return " " not in unit and "=" not in unit


# --- a process that such a launcher started ---


class ExternalRank(NamedTuple):
    """This process is one rank of a world that another launcher started.

    ``agent_store``: the launcher already serves the store.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    agent_store: bool


class _RankVariables(NamedTuple):
    """The variables of a launcher. ``marker``: set by this launcher only."""

    marker: str
    rank: str
    world_size: str
    local_rank: str


_RANK_VARIABLES = {
    "torchrun": _RankVariables("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": _RankVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "mpiexec": _RankVariables("PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": _RankVariables("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def external_rank(
    env: Mapping[str, str], master_addr: str, master_port: int
) -> ExternalRank | None:
    """The rank that the environment assigns to this process; None if no launcher started it.

    ``master_addr`` and ``master_port`` are used if the launcher sets none. Raises EnvironmentFault
    for invalid variables.
    """
    for launcher, names in _RANK_VARIABLES.items():
        if all(name in env for name in (names.marker, names.rank, names.world_size)):
            return _rank_of_launcher(env, launcher, names, master_addr, master_port)
    return None


def _rank_of_launcher(
    env: Mapping[str, str],
    launcher: str,
    names: _RankVariables,
    master_addr: str,
    master_port: int,
) -> ExternalRank:
    rank = _integer_variable(env, names.rank)
    world_size = _integer_variable(env, names.world_size)
    local_rank = _integer_variable(env, names.local_rank)
    address = env.get("MASTER_ADDR") or ""
    if not address and launcher == "srun":
        address = _first_host(env)
    port = _integer_variable(env, "MASTER_PORT") if env.get("MASTER_PORT") else master_port
    uses_agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ExternalRank(
        launcher,
        rank,
        world_size,
        local_rank,
        address or master_addr,
        port,
        agent_store=launcher == "torchrun" and uses_agent_store,
    )


def _integer_variable(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "0")
    if not text.isdigit():
        raise EnvironmentFault(
            f"{name} is {text!r}, which is not a number",
            "start the ranks with torchrun, srun or mpirun",
        )
    return int(text)


def _first_host(env: Mapping[str, str]) -> str:
    """The first host of SLURM_JOB_NODELIST, as ``node[03-05,9]`` → ``node03``."""
    if env.get("SLURM_NNODES", "1") == "1":
        return "127.0.0.1"
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", env.get("SLURM_JOB_NODELIST", ""))
    return f"{match[1]}{match[2] or ''}" if match else ""
