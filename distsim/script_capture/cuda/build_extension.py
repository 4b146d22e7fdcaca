"""Build the extension that gives torch a CUDA device in CPU memory.

It is compiled once for each version of torch, and kept in the user's cache. Before it is kept it
must pass a smoke test in a process of its own, because a faulty library would end the process that
loads it. The source is ``device.cpp``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

SOURCE: Final = Path(__file__).with_name("device.cpp")
#: A build that takes longer is stopped; 40 s of CPU time is usual.
_BUILD_TIMEOUT_S: Final = 900
_COMPILER_FLAGS: Final = ("-O1", "-fPIC", "-shared", "-std=c++20", "-w")


#: What the extension must do before it is kept.
_SMOKE_TEST: Final = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1])
import torch
x = torch.ops.distsim.from_cpu(torch.ones(2, requires_grad=True).detach()).requires_grad_()
(x + x).sum().backward()
assert x.device.type == "cuda" and x.grad.sum().item() == 4
# As ranks exit: torch's own exit, with autograd's threads running, calls std::terminate at times.
os._exit(0)
"""


class TorchInstallation(NamedTuple):
    """An installed torch, from its files: torch itself is not imported."""

    folder: Path
    version: str
    has_cuda: bool  # it contains kernels for CUDA


class ExtensionUnavailable(Exception):
    """There is no extension; the text says why."""


def find_torch() -> TorchInstallation:
    """Raises ExtensionUnavailable if torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ExtensionUnavailable("torch is not installed")
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        raise ExtensionUnavailable("torch's version cannot be read") from None
    found = re.search(r"__version__\s*=\s*'([^']+)'", text)
    version = found.group(1) if found else "unknown"
    has_cuda = any((folder / "lib").glob("libtorch_cuda*"))
    return TorchInstallation(folder, version, has_cuda)


def find_compiler(environ: Mapping[str, str]) -> str:
    """CXX, else g++, c++ or clang++. Raises ExtensionUnavailable if there is none."""
    requested = environ.get("CXX")
    candidates = (requested,) if requested else ("g++", "c++", "clang++")
    for name in candidates:
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return found
    if requested:
        raise ExtensionUnavailable(f"CXX is {requested}, which does not exist")
    raise ExtensionUnavailable("no C++ compiler (g++) found")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/distsim``, by default ``~/.cache/distsim``.

    A relative path is ignored (XDG Base Directory Specification).
    """
    base = environ.get("XDG_CACHE_HOME") or ""
    cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return cache / "distsim"


def extension_library(environ: Mapping[str, str] | None = None) -> Path:
    """The path of the extension, which is built if necessary.

    Raises ExtensionUnavailable if this torch or this machine lacks something.
    """
    environ = os.environ if environ is None else environ
    torch = find_torch()
    if not (torch.folder / "include" / "ATen" / "ATen.h").is_file():
        raise ExtensionUnavailable(f"torch {torch.version} is installed without its headers")
    source = SOURCE.read_bytes()
    version = re.sub(r"[^A-Za-z0-9.]", "_", torch.version)
    target = cache_folder(environ) / f"device-{version}-{_cache_key(source, torch)}.so"
    if not target.is_file():
        _compile_extension(find_compiler(environ), torch, target)
    return target


def _cache_key(source: bytes, torch: TorchInstallation) -> str:
    digest = hashlib.sha256(source)
    digest.update("\0".join((torch.version, str(torch.folder), *_COMPILER_FLAGS)).encode())
    return digest.hexdigest()[:16]


def _compile_extension(compiler: str, torch: TorchInstallation, target: Path) -> None:
    """Compile into the cache, under another name until it works. Raises ExtensionUnavailable."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", prefix=".device-", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise ExtensionUnavailable(f"{target.parent} cannot be written: {error.strerror}") from None
    include = torch.folder / "include"
    libraries = torch.folder / "lib"
    # Linked although nothing refers to it, so that its initialisation runs before the extension's.
    cuda = ("-Wl,--no-as-needed", "-ltorch_cuda") if torch.has_cuda else ()
    command = [
        compiler,
        *_COMPILER_FLAGS,
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCE),
        "-o",
        unfinished,
        f"-L{libraries}",
        "-lc10",
        "-ltorch_cpu",
        *cuda,
        f"-Wl,-rpath,{libraries}",
    ]
    try:
        _run(command, f"{compiler} could not build the extension")
        _run([sys.executable, "-c", _SMOKE_TEST, unfinished], "the extension does not run")
        os.replace(unfinished, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _run(command: list[str], failure: str) -> None:
    """Run a program, in a session of its own so that all its processes can be ended.

    Raises ExtensionUnavailable with ``failure`` and the first error that the program printed.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            errors = process.communicate(timeout=_BUILD_TIMEOUT_S)[1]
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ExtensionUnavailable(
                    f"{failure}: no result within {_BUILD_TIMEOUT_S} s"
                ) from None
            raise
    if process.returncode:
        raise ExtensionUnavailable(f"{failure}: {_first_error(errors)}")


def _first_error(output: str) -> str:
    for line in output.splitlines():
        if "rror" in line:  # "error" or "Error"
            return line.strip()
    return output.strip()[:200].strip() or "no message"
