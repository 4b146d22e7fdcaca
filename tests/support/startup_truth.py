"""The results of real torch processes for the start-ups of `scenarios/startup`: ``python -m
tests.support.startup_truth`` writes `tests/data/startup.json`.

No distsim code runs in these processes. Each process gets the variables and arguments of the
scenario's start-up, and calls init_process_group and one all_reduce. Ports are free ones on the
loopback address; files are in a separate folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from distsim.program.lower import lower
from distsim.program.startup import startup_environment, startup_processes
from distsim.program.symbol_table import SymbolTable
from distsim.scenario import Scenario, loads
from distsim.scenario.startup.init_method import ENV_VARIABLES
from distsim.scenario.startup.records import StartupProcess, StartupResult
from distsim.scenario.startup.rendezvous import simulate_startup

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scenarios" / "startup"
RECORD = ROOT / "tests" / "data" / "startup.json"
#: Longer than five time-outs of 3 s, after which gloo gives up a connection.
_PATIENCE_S = 25.0
PORT, FILE = "29500", "/shared/meet"


def real_files() -> list[Path]:
    """The start-ups that one machine with gloo can have."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))}
    return [
        path for path, text in texts.items() if "backend: gloo" in text and "nodes:" not in text
    ]


def startup_of(scenario: Scenario) -> StartupResult:
    """The start-up of any scenario, also where nothing in it is out of the ordinary."""
    program = lower(scenario)
    return program.startup or simulate_startup(
        startup_processes(scenario, program, SymbolTable(scenario)), startup_environment(scenario)
    )


def record(path: Path) -> dict[str, dict[str, Any]]:
    """How every process of a scenario comes out, by rank."""
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    port, other = _free_ports(2)
    text = (
        path.read_text(encoding="utf-8")
        .replace(PORT, str(port))
        .replace("29501", str(other))
        .replace(FILE, str(folder / "meet"))
    )
    scenario = loads(text, str(path))
    brought = startup_of(scenario).entrances
    around = startup_environment(scenario)
    doors = [_listen(taken) for taken in around.ports_taken]
    for _ in around.files_left:
        left = [
            StartupProcess(
                r, 0, "gloo", 3 * 10**9, f"file://{folder / 'meet'}", None, r, len(brought)
            )
            for r in range(len(brought))
        ]
        _run(left, folder, {})
    try:
        names = {str(port): PORT, str(other): "29501", str(folder / "meet"): FILE}
        return _run(brought, folder, names)
    finally:
        for door in doors:
            door.close()
        shutil.rmtree(folder, ignore_errors=True)


def _run(brought: Any, folder: Path, names: dict[str, str]) -> dict[str, dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    there = {
        e.rank: context.Process(target=_rank, args=(e, folder / f"said-{e.rank}"))
        for e in brought
        if not e.absent
    }
    for rank, process in there.items():
        (folder / f"said-{rank}").unlink(missing_ok=True)
        process.start()
    limit = time.monotonic() + _PATIENCE_S
    for process in there.values():
        process.join(max(limit - time.monotonic(), 0.01))
    found = {}
    for rank, process in there.items():
        said = folder / f"said-{rank}"
        if process.is_alive():
            process.kill()
            process.join()
        found[str(rank)] = (
            json.loads(said.read_text()) if said.exists() else {"init": "still waiting"}
        )
    return {
        rank: {key: _named(value, names) for key, value in one.items()}
        for rank, one in found.items()
    }


def _named(value: Any, names: dict[str, str]) -> Any:
    """Texts without what is another one in each run."""
    if isinstance(value, str):
        for own, plain in names.items():
            value = value.replace(own, plain)
        value = re.sub(
            r"remote=\[[^]]*\]\S*",
            "remote=[…]",
            re.sub(r"\[/\S*/(gloo/\S*?):\d+\]", r"[\1]", value),
        )
        return re.sub(r"\[enforce fail at \S*/(gloo/\S*?):\d+\]", r"[enforce fail at \1]", value)
    return value


def _rank(entrance: StartupProcess, path: Path) -> None:
    import torch
    import torch.distributed as dist

    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for name in ENV_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(entrance.env)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(microseconds=entrance.timeout_ns // 1000)
    began, said = time.monotonic(), {"init": "ok"}
    try:
        given: dict[str, Any] = {
            "rank": entrance.rank_argument,
            "world_size": entrance.world_size_argument,
            "device_id": entrance.device,
        }
        if entrance.store is not None:
            given["store"] = _store(dist, entrance, limit)
        dist.init_process_group("gloo", entrance.init_method, timeout=limit, **given)
    except BaseException as error:
        said = {"init": type(error).__name__, "text": str(error)}
    said["seconds"] = round(time.monotonic() - began, 1)  # type: ignore[assignment]
    if said["init"] == "ok":
        try:
            x = torch.tensor([entrance.rank])
            dist.all_reduce(x)
            said["sum"] = x.item()
        except BaseException as error:
            said |= {"call": type(error).__name__, "call_text": str(error)}
    path.write_text(json.dumps(said))
    os._exit(0)


def _store(dist: Any, entrance: StartupProcess, limit: timedelta) -> Any:
    if entrance.store == "hash":
        store = dist.HashStore()
    else:
        port = int(str(entrance.store).rpartition(":")[2])
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            entrance.world_size_argument,
            entrance.rank_argument == 0,
            timeout=limit,
        )
    store.set_timeout(limit)
    return store


def _listen(port: int) -> socket.socket:
    door = socket.create_server(("127.0.0.1", port))
    return door


def _free_ports(count: int) -> list[int]:
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(door.getsockname()[1]) for door in doors]
    for door in doors:
        door.close()
    return ports


def main(names: list[str]) -> None:
    import torch.distributed

    found = (
        json.loads(RECORD.read_text())
        if names and RECORD.exists()
        else {"torch": torch.__version__, "scenarios": {}}
    )
    for path in real_files():
        if not names or path.stem in names:
            found["scenarios"][path.stem] = record(path)
            RECORD.write_text(
                json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
                encoding="utf-8",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="Scenarios to record. [default: all]")
    main(parser.parse_args().names)
