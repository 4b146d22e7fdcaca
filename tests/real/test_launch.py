"""Ways to start a run: launchers, ways to meet, several launchers as several machines, torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.real.launch.external_launchers import ExternalRank
from distsim.real.run import RealRunOptions, run_scenario
from tests.support.harness import Cli
from tests.support.real_runs import ROOT, children, run, scenario, written

pytest.importorskip("torch")


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def start(*words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("init", ["env", "tcp", "file"])
def test_ranks_connect_through_the_environment_a_port_or_a_file(init: str):
    done = run(scenario("group_sum"), init=init)

    assert done.outcome == "completes"
    assert done.buffers_in_state("differs") == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "forkserver", "elastic"])
def test_every_launcher_gives_the_same_result(launcher: str, cli: Cli):
    done = cli("run", "scenarios/all_reduce.yaml", "--real", "--launcher", launcher)

    assert done.returncode == 0, done.stderr
    assert f"started by {launcher}" in done.stdout
    assert "4 of 4 buffers bitwise equal" in done.stdout


@pytest.mark.slow
def test_with_the_elastic_launcher_the_killed_rank_is_named(cli: Cli):
    done = cli(
        "run", "scenarios/killed_at_iteration_3.yaml", "--real", "--force", "--launcher", "elastic"
    )

    assert done.returncode == 1
    assert "Cause: rank 2: killed" in done.stdout


def two_launchers(name: str, *more: str) -> list[tuple[int, str, str]]:
    port = free_port()
    common = (
        "distsim",
        "run",
        f"scenarios/{name}.yaml",
        "--real",
        "--backend",
        "gloo",
        "--nnodes",
        2,
        "--master-port",
        port,
        *more,
    )
    both = [start(*common, "--node-rank", k) for k in (0, 1)]
    texts = [one.communicate(timeout=300) for one in both]
    return [(one.returncode, *text) for one, text in zip(both, texts, strict=True)]


def test_two_launchers_acting_as_two_machines_give_the_same_result_as_one():
    first, second = two_launchers("hybrid")

    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "completes" in first[1]
    assert "4 of 12 buffers bitwise equal" in first[1]
    assert "clocks agree within" in first[1]
    assert second[1] == ""


@pytest.mark.slow
def test_a_hang_across_two_launchers_ends_both_with_one_report():
    first, second = two_launchers("skipped_barrier", "--force", "--timeout", "2 s")

    assert (first[0], second[0]) == (1, 1), first[2] + second[2]
    assert "Cause: rank 2" in first[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("hybrid", 0), ("head_to_head_sends", 1)])
def test_inside_torchrun_each_process_uses_its_rank(name: str, status: int):
    ranks = scenario(name).world.size
    words = [
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--nnodes=1",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
        "-m",
        "distsim",
        "run",
        f"scenarios/{name}.yaml",
        "--real",
        "--backend",
        "gloo",
        "--force",
        "--timeout",
        "3 s",
    ]
    one = start(*words)
    text, _ = one.communicate(timeout=300)

    assert (one.returncode != 0) == (status != 0)
    assert text.count("ranks on torch.distributed with gloo, started by torchrun") == 1
    assert "the run ended as predicted" in text


def listening() -> set[tuple[str, str]]:
    """(address as /proc/net/tcp has it, inode) of every socket on which this process and its
    children wait for connections.
    """
    held = set()
    for pid in (os.getpid(), *children()):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                held.add(os.readlink(link))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        (row[1].partition(":")[0], row[9])
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in held
    }


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
WHILE_IT_RUNS = """
world: 2
tensors: {x: {shape: [8], dtype: int64, value: 1}}
program:
  - repeat: {times: 500, steps: [{all_reduce: {tensor: x}}, {sleep: {time: 2 ms}}]}
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net here")
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"init": "tcp"},
        {"init": "tcp://127.0.0.1:{port}"},
        pytest.param({"launcher": "spawn"}, marks=pytest.mark.slow),
        pytest.param({"launcher": "elastic"}, marks=pytest.mark.slow),
    ],
    ids=["fork", "tcp", "a store of the user's", "spawn", "elastic"],
)
def test_a_run_on_one_machine_is_reachable_only_by_loopback(way: dict[str, str]):
    """Also the store that rank 0 serves at an address of the user's, which torch would open to
    every network.
    """
    seen: set[tuple[str, str]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            seen.update(listening())

    before = listening()
    looker = threading.Thread(target=look)
    looker.start()
    try:
        done = run(
            written(WHILE_IT_RUNS),
            **{name: value.format(port=free_port()) for name, value in way.items()},
        )
    finally:
        over.set()
        looker.join()

    assert done.outcome == "completes"
    opened = {address for address, _ in seen - before}
    assert opened, "nothing was seen"
    assert opened <= LOOPBACK


def test_a_different_world_size_is_an_environment_error():
    started = ExternalRank("torchrun", 0, 3, 0, "127.0.0.1", free_port(), False)
    with pytest.raises(EnvironmentFault, match="started 3 ranks, the scenario has 4"):
        run_scenario(scenario("all_reduce"), RealRunOptions(backend="gloo"), started)


def test_an_occupied_port_is_replaced_and_reported():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = f"world: 2\nlaunch: {{master_port: {port}}}\nprogram: [barrier: {{}}]\n"
        done = run(written(text))

    assert done.outcome == "completes"
    assert any(f"port {port} is in use" in note for note in done.notes)


def test_a_leftover_file_of_an_earlier_run_is_named(tmp_path: Path):
    stale = tmp_path / "meet"
    stale.write_text("old")
    with pytest.raises(EnvironmentFault, match=str(stale)):
        run_scenario(scenario("group_sum"), RealRunOptions(backend="gloo", init=stale.as_uri()))


@pytest.mark.parametrize(
    "wish",
    [
        RealRunOptions(backend="gloo", nnodes=3),
        RealRunOptions(backend="gloo", init="carrier pigeon"),
        RealRunOptions(backend="gloo", launcher="smoke"),
    ],
)
def test_inconsistent_options_are_refused_before_anything_starts(wish: RealRunOptions):
    with pytest.raises(UsageError):
        run_scenario(scenario("all_reduce"), wish)
