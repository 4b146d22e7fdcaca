"""Parse the command that starts a program.

For example ``python train.py`` or ``torchrun --nproc-per-node 4 train.py``. Only what says which
program runs, with which arguments and on how many ranks, is evaluated; other options of a launcher
are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from distsim.common.errors import UsageError
from distsim.script_capture.launch.preload import module_file
from distsim.script_capture.launch.rank_process import CaptureTarget

_EXAMPLE: Final = "distsim capture --nproc 4 -- python train.py --epochs 1"
_MODULE_OPTIONS: Final = ("-m", "--module")


class _Launcher(NamedTuple):
    """Options of a launcher, without leading hyphens.

    ``flags`` take no value; for any other option, the next word is its value.
    """

    flags: frozenset[str]
    processes_option: str
    nodes_option: str


#: The flags are complete (torch/distributed/run.py).
_TORCHRUN: Final = _Launcher(
    frozenset(
        {"standalone", "no-python", "run-path", "virtual-local-rank", "signals-to-handle-none"}
    ),
    "nproc-per-node",
    "nnodes",
)
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
    "num-processes",
    "num-machines",
)


@dataclass(frozen=True)
class LaunchCommand:
    """What to run. ``ranks`` per node and ``nodes`` are None if no launcher says them."""

    target: CaptureTarget
    ranks: int | None = None
    nodes: int | None = None


def parse_command(words: Sequence[str]) -> LaunchCommand:
    """Parse a command line. Raises UsageError if it starts no Python program."""
    if not words:
        raise UsageError("no program given", f"for example: {_EXAMPLE}")
    program = os.path.basename(words[0])
    arguments = list(words[1:])
    if program.startswith(("python", "pypy")):
        return _parse_python(arguments)
    if program == "torchrun":
        return _parse_launcher(arguments, _TORCHRUN)
    if program == "accelerate" and arguments[:1] == ["launch"]:
        return _parse_accelerate(arguments[1:])
    if program == "-m":
        return LaunchCommand(_module_target(arguments))
    return LaunchCommand(_file_target(words))


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
        return LaunchCommand(_file_target(words))
    if words[1:2] and words[1] in ("torch.distributed.run", "torch.distributed.launch"):
        return _parse_launcher(words[2:], _TORCHRUN)
    return LaunchCommand(_module_target(words[1:]))


def _parse_accelerate(words: list[str]) -> LaunchCommand:
    """accelerate counts the processes of all nodes."""
    command = _parse_launcher(words, _ACCELERATE)
    if command.ranks and command.nodes:
        return LaunchCommand(command.target, command.ranks // command.nodes, command.nodes)
    return command


def _parse_launcher(words: list[str], launcher: _Launcher) -> LaunchCommand:
    """Parse the words behind a launcher: its options, the program, and the program's arguments."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] not in _MODULE_OPTIONS:
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not equals and name not in launcher.flags and words:
            value = words.pop(0)
        options[name] = value
    if not words:
        raise UsageError("no program after the launcher", f"for example: {_EXAMPLE}")
    target = _module_target(words[1:]) if words[0] in _MODULE_OPTIONS else _file_target(words)
    ranks = _process_count(options.get(launcher.processes_option))
    nodes = _process_count(options.get(launcher.nodes_option))
    return LaunchCommand(target, ranks, nodes)


def _process_count(text: str | None) -> int | None:
    """A number of processes or nodes; None for words such as ``gpu``.

    An elastic range (``1:4``) counts with its largest number.
    """
    last = (text or "").rpartition(":")[2]
    return int(last) if last.isdigit() and int(last) else None


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


def _file_target(words: Sequence[str]) -> CaptureTarget:
    """A script, or a program on the search path that is a script."""
    name = words[0]
    if not os.path.isfile(name):
        name = _script_on_path(name)
    elif not name.endswith(".py") and not _has_python_shebang(name):
        _refuse_file(f"{name} is not a Python program")
    return CaptureTarget(name, tuple(words[1:]))


def _script_on_path(name: str) -> str:
    """The file of a program on the search path, if it is a Python script."""
    found = shutil.which(name)
    if found is None:
        problem = "is not a Python file" if os.path.exists(name) else "does not exist"
        _refuse_file(f"{name} {problem}")
    if not _has_python_shebang(found):
        _refuse_file(f"{name} is not a Python file")
    return found


def _refuse_file(message: str) -> NoReturn:
    raise UsageError(message, f"give the script, for example: {_EXAMPLE}")


def _has_python_shebang(path: str) -> bool:
    """Whether the file's first line starts Python."""
    with open(path, "rb") as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line


__all__ = ["LaunchCommand", "parse_command"]
