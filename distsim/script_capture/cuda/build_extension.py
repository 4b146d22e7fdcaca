"""The extension that gives torch a device: built once for a torch and a compiler, and kept in the
user's cache.
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
#: A build that takes longer is given up; 40 s of CPU is usual.
_BUILD_TIMEOUT_S: Final = 900
_COMPILER_FLAGS: Final = ("-O1", "-fPIC", "-shared", "-std=c++20", "-w")


#: What the extension must do before it is kept: an error in its first lines would end the process
#: that loads it.
_SMOKE_TEST: Final = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1])
import torch
x = torch.ops.distsim.from_cpu(torch.ones(2, requires_grad=True).detach()).requires_grad_()
(x + x).sum().backward()
assert x.device.type == "cuda" and x.grad.sum().item() == 4
os._exit(0)  # as ranks leave: torch's own end, with autograd's threads about, ends in std::terminate at times
"""


class TorchInstallation(NamedTuple):
    """An installed torch, as its files tell: torch itself is not imported."""

    folder: Path
    version: str
    has_cuda: bool  # brings kernels for CUDA


class ExtensionUnavailable(Exception):
    """Why there is no extension. The text is a reason in words."""


def find_torch() -> TorchInstallation:
    """Raises NoBuild where torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ExtensionUnavailable("torch is not installed")
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        raise ExtensionUnavailable("torch's version can't be read") from None
    found = re.search(r"__version__\s*=\s*'([^']+)'", text)
    return TorchInstallation(
        folder, found.group(1) if found else "unknown", any((folder / "lib").glob("libtorch_cuda*"))
    )


def find_compiler(environ: Mapping[str, str]) -> str:
    """CXX, else g++, c++ or clang++. Raises NoBuild where there is none."""
    named = environ.get("CXX")
    for name in (named,) if named else ("g++", "c++", "clang++"):
        if name and (found := shutil.which(name, path=environ.get("PATH"))):
            return found
    raise ExtensionUnavailable(
        f"CXX names {named}, which is not there" if named else "there is no C++ compiler (g++) here"
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/distsim``, where that is not set ``~/.cache/distsim`` (XDG Base Directory
    Specification).
    """
    base = environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "distsim"


def extension_library(environ: Mapping[str, str] | None = None) -> Path:
    """The path of the built extension. Raises NoBuild where this torch, or this machine, gives
    none.
    """
    environ = os.environ if environ is None else environ
    torch = find_torch()
    if not (torch.folder / "include" / "ATen" / "ATen.h").is_file():
        raise ExtensionUnavailable(f"torch {torch.version} is installed without its headers")
    source = SOURCE.read_bytes()
    name = f"device-{re.sub(r'[^A-Za-z0-9.]', '_', torch.version)}-{_cache_key(source, torch)}.so"
    target = cache_folder(environ) / name
    if not target.is_file():
        _compile_extension(find_compiler(environ), torch, target)
    return target


def _cache_key(source: bytes, torch: TorchInstallation) -> str:
    digest = hashlib.sha256(source)
    digest.update("\0".join((torch.version, str(torch.folder), *_COMPILER_FLAGS)).encode())
    return digest.hexdigest()[:16]


def _compile_extension(compiler: str, torch: TorchInstallation, target: Path) -> None:
    """Compile into the cache; nobody ever sees half a file. Raises NoBuild."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, half = tempfile.mkstemp(suffix=".so", prefix=".device-", dir=target.parent)
        os.close(handle)
    except OSError as fault:
        raise ExtensionUnavailable(f"{target.parent} can't be written: {fault.strerror}") from None
    include, libraries = torch.folder / "include", torch.folder / "lib"
    cuda = (
        ("-Wl,--no-as-needed", "-ltorch_cuda") if torch.has_cuda else ()
    )  # linked, so that it starts before
    command = [
        compiler,
        *_COMPILER_FLAGS,
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCE),
        "-o",
        half,
        f"-L{libraries}",
        "-lc10",
        "-ltorch_cpu",
        *cuda,
        f"-Wl,-rpath,{libraries}",
    ]
    try:
        _run(command, f"{compiler} could not build it")
        _run([sys.executable, "-c", _SMOKE_TEST, half], "what was built does not run")
        os.replace(half, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(half)


def _run(command: list[str], failure: str) -> None:
    """Run a program in a session of its own, so that all of it ends with this process's patience.
    Raises NoBuild.
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
        except BaseException as fault:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(fault, subprocess.TimeoutExpired):
                raise ExtensionUnavailable(f"{failure} within {_BUILD_TIMEOUT_S} s") from None
            raise
    if process.returncode:
        first = next(
            (line for line in errors.splitlines() if "rror" in line),
            errors.strip()[:200] or "no message",
        )
        raise ExtensionUnavailable(f"{failure}: {first.strip()}")
