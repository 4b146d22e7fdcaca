"""The stores that a rank creates itself, and what must lie ready before a start-up that fails."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from distsim.common.errors import EnvironmentFault
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.real.launch.startup_faults import inject_startup_faults
from distsim.real.worker.rank_stores import (
    create_store,
    serve_startup_store,
    stated_rank_and_world,
)
from distsim.simulation.simulate_scenario import simulate
from tests.support.real_runs import written

dist = pytest.importorskip("torch.distributed")


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def program_of(arguments: str, ranks: int = 2) -> Program:
    text = f"world: {ranks}\nbackend: gloo\nprogram: [init_process_group: {{{arguments}}}]\n"
    return simulate(written(text), with_verdict=False).program


def test_a_named_store_is_of_its_kind_and_has_the_timeout_of_the_call(tmp_path: Path) -> None:
    program = lower(written("world: 3\nbackend: gloo\nprogram: [init_process_group]\n"))
    (_, call), *_ = program.calls_of(0)
    port = free_port()
    second_ns = 1_000_000_000

    def made(store: str, **changed: object) -> object:
        return create_store(dist, replace(call, store=store, **changed), 3 * second_ns)  # type: ignore[arg-type]

    local, shared = made("hash"), made(f"file://{tmp_path}/rendezvous")
    served = made(f"tcp://127.0.0.1:{port}", rank_argument=0, world_size_argument=1)

    assert isinstance(local, dist.HashStore)
    assert (type(shared).__name__, type(served).__name__) == ("FileStore", "TCPStore")
    assert isinstance(served, dist.TCPStore)
    assert served.port == port
    assert {one.timeout.total_seconds() for one in (local, shared, served)} == {3.0}  # type: ignore[attr-defined]
    assert made("etcd://here") is None, "torch itself has to refuse it"
    assert made("tcp://127.0.0.1") is None


def test_a_store_served_by_a_rank_listens_only_on_loopback() -> None:
    port = free_port()
    program = program_of(
        f"init_method: 'tcp://127.0.0.1:{port}', rank: rank, world_size: 1, timeout: 2 s"
    )

    store = serve_startup_store(dist, program, 0)

    assert store is not None
    listening = {
        line.split()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()
        if line.split()[3] == "0A"
    }
    assert f"0100007F:{port:04X}" in listening
    assert serve_startup_store(dist, program, 0) is None, "the port is taken now"
    assert serve_startup_store(dist, program, 1) is None, "rank 1 serves no store"


@pytest.mark.parametrize(
    "arguments",
    [
        "init_method: 'tcp://10.9.8.7:29512', rank: rank, world_size: 3, timeout: 2 s",
        "store: hash, rank: rank, world_size: 3, timeout: 2 s",
        "init_method: 'tcp://127.0.0.1:29512', rank: 0, world_size: 0, timeout: 2 s",
    ],
)
def test_no_rank_serves_a_store_on_another_machine_or_for_an_empty_world(arguments: str) -> None:
    assert serve_startup_store(dist, program_of(arguments), 0) is None


def test_rank_and_world_of_a_call_with_a_store_are_those_of_its_init_method_or_unstated() -> None:
    stated = program_of("init_method: 'tcp://127.0.0.1:29513', rank: 1 - rank, world_size: 3")
    plain = lower(written("world: 3\nbackend: gloo\nprogram: [init_process_group]\n"))
    (_, call), *_ = plain.calls_of(0)

    assert stated_rank_and_world(stated, 0, call) == (1, 3)
    unstated = replace(call, rank_argument=None, world_size_argument=None)
    given = replace(call, rank_argument=0, world_size_argument=2)
    assert stated_rank_and_world(plain, 0, unstated) == (-1, -1)
    assert stated_rank_and_world(plain, 0, given) == (0, 2)


# --- what lies ready before the ranks start ---


def with_launch(launch: str) -> str:
    return f"world: 2\nbackend: gloo\nlaunch: {{{launch}}}\nprogram: [init_process_group]\n"


def test_a_taken_port_is_occupied_while_the_ranks_run_and_free_afterwards() -> None:
    port = free_port()
    scenario = written(with_launch(f"ports_taken: [{port}]"))

    with (
        inject_startup_faults(scenario, None, "127.0.0.1"),
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def test_a_leftover_file_of_an_earlier_run_has_contents_and_is_removed_afterwards(
    tmp_path: Path,
) -> None:
    left = tmp_path / "rendezvous"
    scenario = written(with_launch(f"files_left: ['{left}']"))

    with inject_startup_faults(scenario, None, "127.0.0.1"):
        contents = left.read_bytes()

    assert b"default_pg" in contents
    assert not left.exists()


def test_a_leftover_file_never_overwrites_one_and_needs_its_folder(tmp_path: Path) -> None:
    mine, nowhere = tmp_path / "mine", tmp_path / "no" / "where"
    mine.write_text("precious", encoding="utf-8")

    for path, reason in ((mine, "exists already"), (nowhere, "there is no folder")):
        scenario = written(with_launch(f"files_left: ['{path}']"))
        with (
            pytest.raises(EnvironmentFault, match=reason),
            inject_startup_faults(scenario, None, "127.0.0.1"),
        ):
            pass
    assert mine.read_text(encoding="utf-8") == "precious"


def test_rendezvous_files_of_a_start_up_must_be_new_and_are_removed_afterwards(
    tmp_path: Path,
) -> None:
    meeting = tmp_path / "meeting"
    text = (
        "world: 2\nbackend: gloo\nprogram:\n"
        f"  - init_process_group: {{init_method: 'file://{meeting}', rank: rank, world_size: 3}}\n"
    )
    scenario = written(text)
    startup = simulate(scenario, with_verdict=False).program.startup
    assert startup is not None

    with inject_startup_faults(scenario, startup, "127.0.0.1"):
        meeting.write_bytes(b"left by the ranks")

    assert not meeting.exists()
    meeting.write_bytes(b"of an earlier run")
    with (
        pytest.raises(EnvironmentFault, match="meeting"),
        inject_startup_faults(scenario, startup, "127.0.0.1"),
    ):
        pass
