"""Parse the command that starts a program.

For example ``python train.py``, ``torchrun --nproc-per-node 4 train.py`` or ``srun -n 8 python
train.py``. Only what says which program runs, with which arguments and on how many ranks, is
evaluated; other options of a launcher are skipped. Launchers of clusters (srun, mpirun, deepspeed)
are always parsed and never run: they would submit a job.

Any other command (``bash run.sh``, ``env``, ``uv run``, …) is not understood here. It is run, and
the first Python program that it starts is parsed (`distsim.script_capture.launch.command_hook`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, NoReturn

from distsim.common.errors import UsageError
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.preload import module_file
from distsim.script_capture.launch.rank_environment import LauncherName

_EXAMPLE: Final = "distsim capture --nproc 4 -- python train.py --epochs 1"
_MODULE_OPTIONS: Final = ("-m", "--module")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
#: Numbers of processes that mean "one for each GPU" (torch/distributed/run.py).
_ONE_PER_GPU: Final = ("gpu", "auto", "cuda")


class _Launcher(NamedTuple):
    """Options of a launcher, without leading hyphens.

    ``flags`` take no value; for any other option, the next word is its value. ``two_values`` take
    two. ``exports`` set variables. ``processes`` and ``nodes`` are the options that say how many
    there are. ``total``: the processes are those of all nodes. ``name``: which variables the ranks
    get.
    """

    flags: frozenset[str]
    processes: tuple[str, ...]
    nodes: tuple[str, ...]
    name: LauncherName = "torchrun"
    total: bool = False
    one_per_gpu: bool = False
    local_rank_argument: str = ""
    two_values: frozenset[str] = frozenset()
    exports: tuple[str, ...] = ()


#: The flags are complete (torch/distributed/run.py and launch.py).
_TORCHRUN: Final = _Launcher(
    frozenset(
        {
            "standalone",
            "no-python",
            "run-path",
            "virtual-local-rank",
            "signals-to-handle-none",
            "use-env",
        }
    ),
    ("nproc-per-node",),
    ("nnodes",),
)
#: torch.distributed.launch also passes the local rank as an argument, without ``--use-env``.
_TORCH_LAUNCH: Final = _TORCHRUN._replace(local_rank_argument="--local-rank")
#: Only flags that are often given (accelerate/commands/launch.py).
_ACCELERATE: Final = _Launcher(
    frozenset(
        {
            "cpu",
            "multi-gpu",
            "tpu",
            "use-fsdp",
            "use-deepspeed",
            "debug",
            "quiet",
            "no-python",
            "ipex",
            "use-megatron-lm",
            "use-parallelism-config",
        }
    ),
    ("num-processes",),
    ("num-machines",),
    total=True,
    one_per_gpu=True,
)
#: deepspeed/launcher/runner.py; its launch.py passes ``--local_rank``.
_DEEPSPEED: Final = _Launcher(
    frozenset({"no-python", "no-local-rank", "force-multi", "save-pid", "enable-each-rank-log"}),
    ("num-gpus",),
    ("num-nodes",),
    one_per_gpu=True,
    local_rank_argument="--local_rank",
)
#: srun(1).
_SRUN: Final = _Launcher(
    frozenset(
        {
            "l",
            "label",
            "u",
            "unbuffered",
            "v",
            "verbose",
            "Q",
            "quiet",
            "O",
            "overcommit",
            "K",
            "kill-on-bad-exit",
            "exclusive",
            "pty",
            "exact",
            "overlap",
            "Z",
            "no-allocate",
        }
    ),
    ("n", "ntasks"),
    ("N", "nodes"),
    "slurm",
    total=True,
)
#: mpirun(1) of Open MPI and mpiexec(1) of MPICH.
_MPIRUN: Final = _Launcher(
    frozenset(
        {
            "allow-run-as-root",
            "oversubscribe",
            "tag-output",
            "q",
            "quiet",
            "v",
            "verbose",
            "report-bindings",
            "display-map",
            "l",
        }
    ),
    ("n", "np", "c"),
    (),
    "mpi",
    total=True,
    two_values=frozenset({"mca", "genv", "env", "gmca"}),
    exports=("x",),
)
_CLUSTER_LAUNCHERS: Final = {
    "srun": _SRUN,
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "mpiexec.hydra": _MPIRUN,
}
#: Modules that launch other programs: ``python -m NAME`` is never the script itself.
_LAUNCHER_MODULES: Final = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCH_LAUNCH,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
}


@dataclass(frozen=True)
class LaunchCommand:
    """What to run. ``ranks`` per node and ``nodes`` are None if no launcher says them.

    ``target`` is None if ``wrapper`` is a command that is not understood, and starts the program
    itself. ``one_per_gpu``: the launcher starts a rank for each GPU. ``local_rank_argument``: the
    option by which the script learns its local rank. ``environment``: variables that the command
    line sets.
    """

    target: CaptureTarget | None
    ranks: int | None = None
    nodes: int | None = None
    launcher: LauncherName = "torchrun"
    one_per_gpu: bool = False
    local_rank_argument: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()

    @property
    def is_launched(self) -> bool:
        """Whether a launcher, not the script, starts the ranks."""
        return self.ranks is not None or self.nodes is not None or self.one_per_gpu


def parse_command(words: Sequence[str]) -> LaunchCommand:
    """Parse a command line. Raises UsageError if it starts no Python program."""
    environment = {}
    words = list(words)
    while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
        environment[assignment[1]] = assignment[2]
        words.pop(0)
    if not words:
        raise UsageError("no program given", f"for example: {_EXAMPLE}")
    command = _parse_program(words)
    return replace(command, environment={**environment, **command.environment})


def _parse_program(words: list[str]) -> LaunchCommand:
    program = os.path.basename(words[0])
    arguments = words[1:]
    if program.startswith(("python", "pypy")):
        return _parse_python(arguments)
    if program == "torchrun":
        return _parse_launcher(arguments, _TORCHRUN)
    if program == "accelerate" and arguments[:1] == ["launch"]:
        return _parse_launcher(arguments[1:], _ACCELERATE)
    if program in ("deepspeed", "ds"):
        return _parse_launcher(arguments, _DEEPSPEED)
    if program in _CLUSTER_LAUNCHERS:
        return _parse_cluster_launcher(arguments, _CLUSTER_LAUNCHERS[program])
    if program == "-m":
        return LaunchCommand(_module_target(arguments))
    return _parse_file(words)


def _parse_python(words: list[str]) -> LaunchCommand:
    """Parse the words behind ``python``."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        has_value = words[0] in ("-W", "-X")
        words = words[2:] if has_value else words[1:]
    if not words:
        raise UsageError("no program after `python`", f"for example: {_EXAMPLE}")
    if words[0] == "-c":
        raise UsageError(
            "`python -c` is not supported: findings need a file with lines",
            "write the program to a file",
        )
    if words[0] != "-m":
        # ``python /path/to/torchrun``, as a started launcher is seen by the hook.
        name = os.path.basename(words[0])
        if name in ("torchrun", "accelerate", "deepspeed", "ds"):
            return _parse_program(words)
        return LaunchCommand(_file_target(words))
    if words[1:2] and words[1] in _LAUNCHER_MODULES:
        return _parse_launcher(words[2:], _LAUNCHER_MODULES[words[1]])
    return LaunchCommand(_module_target(words[1:]))


def _parse_launcher(words: list[str], launcher: _Launcher) -> LaunchCommand:
    """Parse the words behind a launcher: its options, the program, and the program's arguments."""
    options = _take_options(words, launcher)
    if not words:
        raise UsageError("no program after the launcher", f"for example: {_EXAMPLE}")
    if "no-python" in options:
        inner = parse_command(words)
        return _launched(replace(inner, local_rank_argument=""), options, launcher)
    is_module = words[0] in _MODULE_OPTIONS
    words = _without_separator(words, 1 + is_module)
    target = _module_target(words[1:]) if is_module else _file_target(words)
    return _launched(LaunchCommand(target), options, launcher)


def _parse_cluster_launcher(words: list[str], launcher: _Launcher) -> LaunchCommand:
    """Parse the words behind srun or mpirun, which start any command on each rank."""
    options = _take_options(words, launcher)
    if not words:
        raise UsageError("no program after the launcher", f"for example: {_EXAMPLE}")
    inner = parse_command(words)
    if inner.is_launched:
        # ``srun torchrun …``: torchrun starts the ranks of a node, and srun one torchrun per node.
        nodes = _number(options, (*launcher.nodes, *launcher.processes))
        return replace(inner, nodes=inner.nodes or nodes)
    command = _launched(inner, options, launcher)
    per_node = _number(options, ("ntasks-per-node", "npernode", "ppn"))
    if per_node:
        return replace(command, ranks=per_node)
    return replace(command, ranks=command.ranks or 1)


def _launched(
    command: LaunchCommand, options: Mapping[str, str], launcher: _Launcher
) -> LaunchCommand:
    """The command as the launcher runs it."""
    ranks = _number(options, launcher.processes)
    nodes = _number(options, launcher.nodes)
    if launcher.total and ranks and nodes:
        ranks = max(ranks // nodes, 1)
    wants_gpus = any(options.get(name) in _ONE_PER_GPU for name in launcher.processes)
    is_unsaid = launcher.one_per_gpu and "cpu" not in options
    hides_local_rank = not {"use-env", "no-local-rank"}.isdisjoint(options)
    return replace(
        command,
        ranks=ranks,
        nodes=nodes or (1 if launcher.name == "torchrun" else None),
        launcher=launcher.name,
        environment={**command.environment, **_exported_variables(options, launcher)},
        one_per_gpu=ranks is None and (wants_gpus or is_unsaid),
        local_rank_argument="" if hides_local_rank else launcher.local_rank_argument,
    )


def _take_options(words: list[str], launcher: _Launcher) -> dict[str, str]:
    """Remove the launcher's options from the front of ``words``."""
    options: dict[str, str] = {}
    known = (*launcher.processes, *launcher.nodes)
    while words and words[0].startswith("-") and words[0] not in _MODULE_OPTIONS:
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        short = name[:1]
        if not equals and len(name) > 1 and short in known and name[1:].isdigit():
            name, equals, value = short, "=", name[1:]  # -n8
        if not equals and name not in launcher.flags and words:
            value = words.pop(0)
            if name in launcher.two_values and words:
                words.pop(0)
        if name in launcher.exports and name in options:
            value = f"{options[name]}\n{value}"
        options[name] = value
    return options


def _without_separator(words: list[str], program_end: int) -> list[str]:
    """The words without the ``--`` between the program and its arguments.

    Launchers parse their words with argparse, which drops it: `torchrun -m package.train -- --depth
    4` passes `--depth 4`.
    """
    if words[program_end : program_end + 1] == ["--"]:
        return [*words[:program_end], *words[program_end + 1 :]]
    return words


def _exported_variables(options: Mapping[str, str], launcher: _Launcher) -> dict[str, str]:
    """Variables that options such as ``-x NAME=VALUE`` set."""
    lines = [line for name in launcher.exports for line in options.get(name, "").splitlines()]
    assignments = [_ASSIGNMENT.fullmatch(line) for line in lines]
    return {found[1]: found[2] for found in assignments if found is not None}


def _number(options: Mapping[str, str], names: Sequence[str]) -> int | None:
    """A number of processes or nodes; None for words such as ``gpu``.

    An elastic range (``1:4`` or ``1-4``) counts with its largest number.
    """
    for name in names:
        last = re.split("[:-]", options.get(name, ""))[-1]
        if last.isdigit() and int(last):
            return int(last)
    return None


def _module_target(words: Sequence[str]) -> CaptureTarget:
    """The module and its arguments behind ``-m``."""
    if not words:
        raise UsageError(
            "no module after -m", "for example: distsim capture --nproc 2 -- -m package.train"
        )
    home = module_file(words[0])
    if not home:
        raise UsageError(
            f"module {words[0]} not found",
            "name it as for `python -m`, and run the command in the same folder",
        )
    return CaptureTarget(words[0], tuple(words[1:]), module=True, home=home)


def _parse_file(words: Sequence[str]) -> LaunchCommand:
    """A script, a program on the search path that is a script, or a command that starts one."""
    name = words[0]
    path = name if os.path.isfile(name) else shutil.which(name)
    if path is None:
        problem = "is not a Python file" if os.path.exists(name) else "does not exist"
        _refuse_file(f"{name} {problem}")
    if path.endswith(".py") or _has_python_shebang(path):
        return LaunchCommand(CaptureTarget(path, tuple(words[1:])))
    if not os.access(path, os.X_OK):
        _refuse_file(f"{name} is neither a Python program nor executable")
    return LaunchCommand(None, wrapper=tuple(words))


def _file_target(words: Sequence[str]) -> CaptureTarget:
    """The script behind ``python`` or a launcher."""
    name = words[0]
    if os.path.isfile(name):
        return CaptureTarget(name, tuple(words[1:]))
    target = _parse_file(words).target
    if target is None:
        _refuse_file(f"{name} is not a Python program")
    return target


def _refuse_file(message: str) -> NoReturn:
    raise UsageError(message, f"give the script, for example: {_EXAMPLE}")


def _has_python_shebang(path: str) -> bool:
    """Whether the file's first line starts Python."""
    with open(path, "rb") as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line


__all__ = ["LaunchCommand", "parse_command"]
