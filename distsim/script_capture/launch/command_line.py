"""What a user types to start a program, as what has to run: ``python train.py``, ``-m module``,
``torchrun --nproc-per-node 4 …``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from distsim.common.errors import UsageError
from distsim.script_capture.launch.preload import module_file
from distsim.script_capture.launch.rank_process import CaptureTarget

_EXAMPLE = "distsim capture --nproc 4 -- python train.py --epochs 1"
#: Options of torchrun that take no value (torch/distributed/run.py); of all others the next word is
#: the value.
_TORCHRUN_FLAGS = frozenset(
    {"standalone", "no-python", "run-path", "virtual-local-rank", "signals-to-handle-none"}
)
#: Options of accelerate launch that take no value and are often given
#: (accelerate/commands/launch.py).
_ACCELERATE_FLAGS = frozenset(
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
)


@dataclass(frozen=True)
class LaunchCommand:
    """``ranks`` of a node and ``nodes``: as a launcher among the words has them, else None."""

    target: CaptureTarget
    ranks: int | None = None
    nodes: int | None = None


def parse_command(words: Sequence[str]) -> LaunchCommand:
    """The target of a command line. Raises UsageError for one that starts no Python program."""
    if not words:
        raise UsageError("there is no program to capture", f"for example: {_EXAMPLE}")
    first, rest = os.path.basename(words[0]), list(words[1:])
    if first.startswith(("python", "pypy")):
        return _parse_python(rest)
    if first == "torchrun":
        return _parse_launcher(rest, _TORCHRUN_FLAGS, "nproc-per-node", "nnodes")
    if first == "accelerate" and rest[:1] == ["launch"]:
        found = _parse_launcher(rest[1:], _ACCELERATE_FLAGS, "num-processes", "num-machines")
        per_node = found.ranks // found.nodes if found.ranks and found.nodes else found.ranks
        return LaunchCommand(found.target, per_node, found.nodes)
    if first == "-m":
        return LaunchCommand(_module_target(rest))
    return LaunchCommand(_file_target(words))


def _parse_python(words: list[str]) -> LaunchCommand:
    """The words behind ``python``."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    if not words:
        raise UsageError("python is given no program", f"for example: {_EXAMPLE}")
    if words[0] == "-c":
        raise UsageError(
            "python -c has no file whose lines could be named", "write the program to a file"
        )
    if words[0] != "-m":
        return LaunchCommand(_file_target(words))
    if words[1:2] and words[1] in ("torch.distributed.run", "torch.distributed.launch"):
        return _parse_launcher(words[2:], _TORCHRUN_FLAGS, "nproc-per-node", "nnodes")
    return LaunchCommand(_module_target(words[1:]))


def _parse_launcher(
    words: list[str], flags: frozenset[str], ranks: str, nodes: str
) -> LaunchCommand:
    found: dict[str, str] = {}
    while words and words[0].startswith("-") and words[0] not in ("-m", "--module"):
        name, equals, value = words.pop(0).lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not equals and name not in flags and words:
            value = words.pop(0)
        found[name] = value
    if not words:
        raise UsageError("the launcher is given no program", f"for example: {_EXAMPLE}")
    target = _module_target(words[1:]) if words[0] in ("-m", "--module") else _file_target(words)
    return LaunchCommand(target, _process_count(found.get(ranks)), _process_count(found.get(nodes)))


def _process_count(text: str | None) -> int | None:
    """Of processes; ``1:4`` (elastic) counts with its largest; ``gpu`` and the like are not
    known.
    """
    last = (text or "").rpartition(":")[2]
    return int(last) if last.isdigit() and int(last) else None


def _module_target(words: Sequence[str]) -> CaptureTarget:
    if not words:
        raise UsageError(
            "-m is given no module", "for example: distsim capture --nproc 2 -- -m package.train"
        )
    home = module_file(words[0])
    if not home:
        raise UsageError(
            f"there is no module {words[0]}",
            "name one as `python -m` takes it, from the folder in which it works",
        )
    return CaptureTarget(words[0], tuple(words[1:]), module=True, home=home)


def _file_target(words: Sequence[str]) -> CaptureTarget:
    name = words[0]
    if not os.path.isfile(name):
        found = shutil.which(name)
        if found is None or not _has_python_shebang(found):
            what = (
                "is no Python file" if found is not None or os.path.exists(name) else "is not there"
            )
            raise UsageError(f"{name} {what}", f"give the script, for example: {_EXAMPLE}")
        name = found
    elif not name.endswith(".py") and not _has_python_shebang(name):
        raise UsageError(
            f"{name} is no Python program", f"give the script, for example: {_EXAMPLE}"
        )
    return CaptureTarget(name, tuple(words[1:]))


def _has_python_shebang(path: str) -> bool:
    """Does the file's first line start Python?"""
    with open(path, "rb") as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line


__all__ = ["LaunchCommand", "parse_command"]
