"""Runs `distsim` as a separate process without importing everything first: a server that has imported
it forks for each command.

A command behaves the same (own process, streams, folder and environment); only the time for imports
is saved, about a second. Tests about imports, signals, encodings or limits start a normal process.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What commands import when they need it: whole packages, and modules.
PACKAGES = (
    "analysis",
    "checker",
    "cli",
    "engine",
    "hang_doctor",
    "hardware",
    "output",
    "program",
    "real.calibrate",
    "repair",
    "scenario",
    "semantics",
    "simulation",
    "trace",
    "values",
)
#: A client that a shell can start: it hands its streams, words, folder and environment over, and
#: ends with the command's status.
CLIENT = (
    f"#!{sys.executable} -IS\n"
    + """import array, json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "server"))
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
server.sendmsg([len(asked).to_bytes(8, "little") + asked[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(asked[1:])
status = server.recv(8)
sys.exit(int.from_bytes(status, "little") if status else 70)
"""
)


class Warm:
    """A server for this process, started at the first command; it ends when this process does."""

    def __init__(self, more: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="distsim-warm-"))
        self.tool = self.folder / "distsim"
        self.tool.write_text(CLIENT, encoding="utf-8")
        self.tool.chmod(0o755)
        reader, self._alive = os.pipe()  # closed when this process ends, however it ends
        self.server = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), str(reader), more],
            pass_fds=(reader,),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        os.close(reader)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == b"ready\n"
        atexit.register(self.end)

    def end(self) -> None:
        os.close(self._alive)
        self.server.wait()
        for name in ("distsim", "server"):
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rmdir()


_SERVERS: dict[str, Warm] = {}


def tool(words: Iterable[str] = ()) -> list[str]:
    """How a command with these words begins: one that runs ranks forks from a server that has
    imported torch, too.

    What starts processes in other ways is a process of its own, and so is a capture with a GPU,
    which must come before torch.
    """
    given = set(words)
    if {
        "--cuda",
        "bench",
        "sweep",
        "plan",
        "--pid",
        "--torchrun",
        "elastic",
        "spawn",
        "forkserver",
    } & given:
        return [sys.executable, "-m", "distsim"]
    more = "torch" if {"--real", "capture"} & given else ""
    if more not in _SERVERS:
        _SERVERS[more] = Warm(more)
    return [str(_SERVERS[more].tool)]


def servers() -> set[int]:
    """The processes of the servers that live on behind a test."""
    return {one.server.pid for one in _SERVERS.values()}


def serve(folder: str, alive: int, more: str) -> None:
    """Import, then fork for each command until the other end of a pipe is closed."""
    import selectors

    for package in PACKAGES:
        for module in pkgutil.walk_packages(
            [str(ROOT.joinpath("distsim", *package.split(".")))], f"distsim.{package}."
        ):
            importlib.import_module(module.name)
    for name in ("networkx", "graphviz", "rich.table"):
        importlib.import_module(name)
    assert "torch" not in sys.modules
    if more and importlib.util.find_spec(more):
        importlib.import_module(more)
        for module in pkgutil.walk_packages([str(ROOT / "distsim" / "real")], "distsim.real."):
            importlib.import_module(module.name)
    importlib.import_module(
        "distsim.scenario.format.schema.key_reference"
    ).format_keys()  # what answers to mistakes are taken from
    gc.freeze()  # else the collector of each child copies every page
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, "server"))
    listener.listen(16)
    print("ready", flush=True)
    waiting: dict[int, socket.socket] = {}
    chosen = selectors.DefaultSelector()
    chosen.register(listener, selectors.EVENT_READ)
    chosen.register(alive, selectors.EVENT_READ)
    while True:
        for key, _ in chosen.select(0.005 if waiting else None):
            if key.fileobj == alive:
                return
            client, _ = listener.accept()
            waiting[_fork(client)] = client
        for pid in list(waiting):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                client = waiting.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):  # the client was killed
                    client.sendall((code if code >= 0 else 128 - code).to_bytes(8, "little"))
                client.close()


def _fork(client: socket.socket) -> int:
    descriptors = array.array("i")
    head, ancillary, _, _ = client.recvmsg(9, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    asked = head[8:]
    while len(asked) < int.from_bytes(head[:8], "little"):
        asked += client.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        client.close()
        _command(*json.loads(asked), list(descriptors))
    for one in descriptors:
        os.close(one)
    return pid


def _command(words: list[str], cwd: str, environment: dict[str, str], streams: list[int]) -> None:
    """In the child: take the streams and go the way of `python -m distsim`."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["distsim", *words]
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    from distsim.cli.process import prepare_streams, run_and_exit

    status: object = 1
    try:
        prepare_streams()
        run_and_exit()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
