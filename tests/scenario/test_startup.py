"""Start-up: what processes bring to init_process_group, and that it ends as with real torch
(`tests/data/startup.json`).
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.findings.final_state import RankEnd
from distsim.output.pictures.drawing.palette import RED, RED_FILL
from distsim.output.pictures.views.startup import startup_diagram
from distsim.output.text.launch_plan import launch_plan_text
from distsim.program.lower import lower
from distsim.real.launch.external_launchers import launch_plan
from distsim.real.results.simulated_vs_real import compare_with_simulation
from distsim.scenario import load, loads
from distsim.scenario.startup.init_method import rendezvous_info
from distsim.scenario.startup.records import (
    InitFailure,
    RendezvousInfo,
    StartupEnvironment,
    StartupProcess,
)
from distsim.scenario.startup.rendezvous import simulate_startup
from distsim.simulation.simulate_scenario import simulate
from tests.support.real_runs import written
from tests.support.startup_truth import FOLDER, RECORD, real_files, startup_of

TRUTH: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text(encoding="utf-8"))[
    "scenarios"
]
SECOND = 1_000_000_000


def entrance(rank: int = 0, **more: Any) -> StartupProcess:
    given = {
        "backend": "gloo",
        "timeout_ns": 3 * SECOND,
        "rank_argument": rank,
        "world_size_argument": 2,
        "init_method": "tcp://127.0.0.1:29500",
    }
    return StartupProcess(rank, 0, **{**given, **more})


# --- as real torch does ---
def test_every_startup_possible_on_one_machine_was_tried_with_real_torch() -> None:
    assert sorted(TRUTH) == [path.stem for path in real_files()]


@pytest.mark.parametrize("name", TRUTH)
def test_each_process_ends_like_one_of_real_torch(name: str) -> None:
    """Error class, text and time-out. Different world sizes, and addresses of processes that are
    gone, are races in gloo: there it must not get through to a result, and that is all."""
    found = startup_of(load(str(FOLDER / f"{name}.yaml")))
    for rank, real in TRUTH[name].items():
        ending = found.endings[int(rank)]
        if name in ("world_sizes_differ", "file_left"):
            assert "sum" not in real
            assert ending.status in ("waits", "apart")
        elif real["init"] == "ok":
            assert (ending.status, real["sum"]) == ("passes", 3)
        elif real["init"] == "still waiting":
            assert (ending.status, ending.after_ns) == ("waits", 0)
        else:
            text = re.sub(r"\[enforce fail at [^]]*\]", "enforce fail:", real["text"])
            assert (ending.error, ending.text) == (real["init"], text)
            assert (
                real["seconds"] < 1
                if ending.status == "raises"
                else real["seconds"] >= ending.after_ns / SECOND - 0.1
            )


@pytest.mark.parametrize(
    ("given", "error", "text", "code"),
    [
        ({"init_method": "htp://bad"}, "RuntimeError", "No rendezvous handler for htp://", "DS121"),
        ({"init_method": "env"}, "RuntimeError", "No rendezvous handler for ://", "DS121"),
        ({"init_method": "tcp://127.0.0.1"}, "ValueError", "port number missing", "DS121"),
        (
            {"init_method": "tcp://127.0.0.1:x"},
            "ValueError",
            "Port could not be cast to integer value as 'x'",
            "DS121",
        ),
        (
            {"init_method": "tcp://127.0.0.1:99999"},
            "ValueError",
            "Port out of range 0-65535",
            "DS121",
        ),
        ({"init_method": "tcp://:29500"}, "AssertionError", "hostname cannot be None", "DS121"),
        (
            {"init_method": "tcp://h:29500?rank=0"},
            "AssertionError",
            "has node-specific arguments(rank, world_size) already.",
            "DS121",
        ),
        ({"init_method": "file://"}, "ValueError", "path missing", "DS121"),
        ({"rank_argument": -1}, "ValueError", "rank parameter missing", "DS127"),
        ({"world_size_argument": -1}, "ValueError", "world size parameter missing", "DS127"),
        (
            {"init_method": None, "store": "file:///m", "world_size_argument": -1},
            "AssertionError",
            "world_size must be positive",
            "DS127",
        ),
        (
            {"init_method": None, "store": "file:///m", "world_size_argument": 0},
            "AssertionError",
            "world_size must be positive",
            "DS127",
        ),
        (
            {"init_method": None, "store": "file:///m", "rank_argument": -1},
            "AssertionError",
            "rank must be non-negative",
            "DS127",
        ),
        (
            {"store": "file:///m"},
            "AssertionError",
            "Cannot specify both init_method and store.",
            "DS129",
        ),
        (
            {
                "init_method": "env://",
                "rank_argument": -1,
                "env": {"RANK": "zero", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            },
            "ValueError",
            "invalid literal for int() with base 10: 'zero'",
            "DS127",
        ),
        (
            {"init_method": "env://", "env": {"MASTER_ADDR": "h"}},
            "ValueError",
            "environment variable MASTER_PORT expected",
            "DS127",
        ),
        (
            {"init_method": "env://", "env": {"MASTER_ADDR": "h", "MASTER_PORT": "70000"}},
            "ValueError",
            "but was 70000",
            "DS121",
        ),
    ],
)
def test_a_startup_that_torch_refuses_is_refused_in_its_words(
    given: dict[str, Any], error: str, text: str, code: str
) -> None:
    """The texts were seen with torch 2.13, whole."""
    refused = rendezvous_info(entrance(**given))

    assert isinstance(refused, InitFailure)
    assert (refused.error, refused.code) == (error, code)
    assert text in refused.text
    assert refused.help


def test_a_startup_that_torch_accepts_has_an_address() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}

    assert rendezvous_info(entrance(1)) == RendezvousInfo("tcp", "127.0.0.1", 29500, "", 1, 2)
    assert rendezvous_info(entrance(init_method="FILE:///a/../m")) == RendezvousInfo(
        "file", "", 0, "/m", 0, 2
    )
    assert rendezvous_info(
        entrance(init_method=None, env=env, rank_argument=-1, world_size_argument=-1)
    ) == RendezvousInfo("tcp", "node0", 29500, "", 1, 2)
    assert rendezvous_info(entrance(init_method="env://", env=env)) == RendezvousInfo(
        "tcp", "node0", 29500, "", 0, 2
    )  # arguments go before variables


def test_an_agent_store_counts_no_rank_and_needs_no_rank_0() -> None:
    """torchrun's agent serves the store: without rank 0 the others still reach it, and wait for its
    key.
    """
    env = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    more = {"init_method": None, "rank_argument": -1, "world_size_argument": -1, "agent": True}
    brought = [entrance(r, env={**env, "RANK": str(r)}, absent=r == 0, **more) for r in range(3)]
    found = simulate_startup(brought, StartupEnvironment(3))

    assert found.server == "the launcher's agent"
    assert {e.missing for r, e in found.endings.items() if r} == {"the store key of rank 0"}


def test_a_startup_of_four_thousand_ranks_is_simulated() -> None:
    brought = [
        entrance(r, rank_argument=min(r, 4094), world_size_argument=4096) for r in range(4096)
    ]

    assert [c.code for c in simulate_startup(brought, StartupEnvironment(4096)).causes] == ["DS124"]


# --- in a scenario ---
HEAD = """\
world: 3
backend: gloo
tensors: {x: {shape: [1], value: rank}}
program:
  - init_process_group: {%s}
  - all_reduce: {tensor: x}
"""
ME = "rank: rank, world_size: world_size"


def test_every_kind_of_startup_failure_states_its_cause_first_and_once() -> None:
    """One error per file, and it names who is to blame; those who wait are lines of it."""
    for path in sorted(FOLDER.glob("*.yaml")):
        done = simulate(load(str(path)))
        errors = [f for f in done.findings if f.severity == "error"]
        if done.program.startup is not None and done.program.startup.failed:
            assert [len(errors), bool(errors[0].help), bool(errors[0].places)] == [1, True, True], (
                path.stem
            )
            waiting = [r for r, e in done.program.startup.endings.items() if e.status == "waits"]
            assert not waiting or " wait" in errors[0].message, path.stem


def test_the_backend_decides_where_ranks_with_the_same_number_block() -> None:
    """gloo exchanges addresses in init_process_group; nccl makes communicators at first use, and
    mpi asks nobody.
    """
    text = (
        HEAD % "init_method: 'tcp://127.0.0.1:29500', rank: 'min(rank, 1)', world_size: world_size"
    )
    positions = {
        backend: {
            b.position for b in simulate(loads(text), backend=backend).run.final_state.blocked
        }
        for backend in ("gloo", "nccl", "mpi")
    }

    assert positions == {"gloo": {0}, "nccl": {1}, "mpi": set()}


def test_differently_assigned_numbers_are_no_failure_and_not_simulated() -> None:
    with pytest.raises(ScenarioErrors, match="write `rank: rank`"):
        simulate(
            loads(
                HEAD % f"init_method: 'tcp://127.0.0.1:29500', {ME.replace(': rank', ': 2 - rank')}"
            )
        )


def test_a_launcher_without_variables_needs_arguments_and_the_own_launcher_needs_none() -> None:
    launch = "launch: {by: %s}\n"
    told = {
        by: simulate(loads(launch % by + HEAD % "")).outcome
        for by in ("torchrun", "elastic", "mp.spawn", "mp.Process", "srun", "mpirun")
    }
    implied = simulate(
        loads("launch: {by: srun}\nworld: 2\nbackend: gloo\nprogram: [barrier]\n")
    ).outcome

    assert told == {"torchrun": "completes", "elastic": "completes"} | dict.fromkeys(
        ("mp.spawn", "mp.Process", "srun", "mpirun"), "raises"
    )
    assert implied == "completes"
    exported = "env: {RANK: rank, WORLD_SIZE: world_size, MASTER_ADDR: n0, MASTER_PORT: 29500}"
    assert simulate(loads(f"launch: {{by: srun, {exported}}}\n" + HEAD % "")).outcome == "completes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("launch: {by: torchrn}\n", "torchrun"),
        ("launch: {ports_taken: [0]}\n", "1 to 65535"),
        ("launch: {env: [RANK]}\n", "a mapping of variables"),
        ("launch: {env: {RANK: true}}\n", "null for an unset variable"),
        ("launch: {env: {RANK: {one: 1}}}\n", "else"),
    ],
)
def test_mistakes_in_launch_are_reported(text: str, words: str) -> None:
    with pytest.raises(ScenarioErrors, match=words):
        loads(text + HEAD % "")


def test_launch_settings_survive_writing() -> None:
    text = (
        "launch: {by: srun, env: {RANK: {1: null, else: rank}, A: b}, hosts: [n0], "
        "ports_taken: [1], files_left: [/m]}\n"
    ) + HEAD % ME
    scenario = loads(text)

    assert loads(scenario.to_yaml()) == scenario


# --- pictures and plans ---
def test_the_failing_rank_is_red_and_shows_the_torch_error() -> None:
    columns = startup_diagram(lower(load(str(FOLDER / "rank_beyond.yaml"))))
    red = {i.column: [t.text for t in i.lines] for i in columns.items if i.border == RED}

    assert [c.fill == RED_FILL for c in columns.columns] == [False, False, False, True]
    assert red[3][:2] == ["raises", "RuntimeError"]
    assert red[1][1] == "for the store key of rank 2"


def test_a_file_store_and_a_tcp_store_look_different() -> None:
    heads = {
        name: startup_diagram(lower(load(str(FOLDER / f"{name}.yaml")))).columns[0].lines
        for name in ("tcp", "file")
    }

    assert [line.text for line in heads["tcp"]] == [
        "TCP store",
        "127.0.0.1:29500",
        "a key-value table on rank 0",
    ]
    assert [line.text for line in heads["file"]] == [
        "file store",
        "/shared/meet",
        "ranks append keys, all ranks read them",
    ]


def test_for_slurm_the_plan_has_a_complete_script_without_indentation() -> None:
    scenario = loads(
        "name: job\n"
        "launch: {by: srun, omp_threads: 2}\n"
        "world: {nodes: 2, ranks_per_node: 4}\n"
        "backend: nccl\n"
        "program: [barrier]\n"
    )
    made = launch_plan(scenario, ("run", "job.yaml", "--real"), "nccl")

    assert {line.launcher for line in made.lines} == {"srun"}
    assert (
        "\n#!/bin/bash\n#SBATCH --job-name=job\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n"
        in launch_plan_text(made)
    )
    assert made.script[-1] == "srun --kill-on-bad-exit=1 distsim run job.yaml --real"
    assert "#SBATCH --gpus-per-node=4" in made.script
    assert "#SBATCH --cpus-per-task=2" in made.script


@pytest.mark.parametrize(
    ("by", "launcher", "words"),
    [
        ("mp.spawn", "distsim", "--launcher spawn"),
        ("mp.Process", "distsim", "--launcher forkserver"),
        ("elastic", "elastic", "--rdzv_backend=c10d"),
        ("mpirun", "mpirun", "mpirun -np 2"),
    ],
)
def test_the_plan_prints_the_command_lines_of_the_launcher_in_the_file(
    by: str, launcher: str, words: str
) -> None:
    scenario = loads(
        f"launch: {{by: {by}, start: forkserver}}\nworld: 2\nbackend: gloo\nprogram: [barrier]\n"
    )
    lines = launch_plan(scenario, ("run", "f.yaml", "--real"), "gloo").lines

    assert {line.launcher for line in lines} == {launcher}
    assert all(words in " ".join(line.words) for line in lines)


# --- for real ---
def test_a_real_startup_ends_as_simulated_with_the_same_finding() -> None:
    """A number beyond the world, which one rank raises at once for; and a port that is taken, held
    by distsim meanwhile.
    """
    from tests.support.real_runs import run
    from tests.support.startup_truth import _free_ports

    (port,) = _free_ports(1)
    method = f"init_method: 'tcp://127.0.0.1:{port}'"
    beyond = run(written(HEAD % f"{method}, rank: 'rank + rank // 2', world_size: world_size"))
    taken = run(written(f"launch: {{ports_taken: [{port}]}}\n" + HEAD % f"{method}, {ME}"))

    assert [
        (r.outcome, r.differences, [f.code for f in r.findings], r.culprits)
        for r in (beyond, taken)
    ] == [
        ("raises", (), ["DS124"], (2,)),
        ("raises", (), ["DS123"], (0,)),
    ]


def test_which_of_two_processes_with_one_rank_finds_its_port_taken_is_a_race() -> None:
    """The real run beside the simulated one: either of them may raise, and neither both nor the
    third rank in their place.
    """
    simulation = simulate(load(str(FOLDER / "rank_zero_twice.yaml")))
    first, second, third = simulation.run.final_state.ends

    def differs(*ends: RankEnd) -> bool:
        return bool(
            compare_with_simulation(
                simulation, "raises", [end._replace(rank=rank) for rank, end in enumerate(ends)], ()
            ).differences
        )

    assert [end.status for end in (first, second, third)] == ["blocked", "raised", "blocked"]
    assert not differs(first, second, third)
    assert not differs(second, first, third)
    assert differs(second, second, third)
    assert differs(first, third, second)


def test_success_of_all_ranks_with_a_leftover_file_is_luck() -> None:
    """Each may read the address that another has just written anew; one alone does not come
    through.
    """
    simulation = simulate(load(str(FOLDER / "file_left.yaml")))
    stuck = simulation.run.final_state.ends
    through = [end._replace(status="ended", position=2) for end in stuck]

    assert not compare_with_simulation(simulation, "wrong-data", through, ()).differences
    assert compare_with_simulation(simulation, "hangs", [through[0], *stuck[1:]], ()).differences


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in TRUTH if n not in ("tcp", "file", "given_store", "other_machine")]
)
def test_every_failing_startup_fails_for_real_as_simulated(name: str, tmp_path: Any) -> None:
    from tests.support.real_runs import run
    from tests.support.startup_truth import _free_ports

    port, other = _free_ports(2)
    text = (
        (FOLDER / f"{name}.yaml")
        .read_text(encoding="utf-8")
        .replace("29500", str(port))
        .replace("29501", str(other))
    )
    done = run(written(text.replace("/shared/meet", str(tmp_path / "meet"))))

    assert (done.differences, done.outcome in ("raises", "hangs") or name == "file_left") == (
        (),
        True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("by", ["mpirun", "torchrun", "elastic", "mp.spawn", "mp.Process"])
def test_a_printed_line_runs_with_its_program(by: str, tmp_path: Any) -> None:
    """Typed into a shell as it stands: Open MPI's mpirun (where there is one), torchrun, its
    elastic rendezvous, spawn and fork.
    """
    import os
    import shutil
    import subprocess
    import sys

    from tests.support.startup_truth import _free_ports

    if by == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    (port,) = _free_ports(1)
    file = tmp_path / "ours.yaml"
    text = f"launch: {{by: {by}, start: fork, master_port: {port}}}\nworld: 2\nbackend: gloo\nprogram: [barrier]\n"
    file.write_text(text, encoding="utf-8")
    (line,) = launch_plan(loads(text), ("run", str(file), "--real"), "gloo").lines
    tool = tmp_path / "distsim"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m distsim "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    path = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    typed = " ".join(line.words)
    done = subprocess.run(
        ["/bin/sh", "-c", typed],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **root, "PATH": path, "PYTHONPATH": str(FOLDER.parent.parent)},
    )

    assert done.returncode == 0, typed + done.stdout + done.stderr
    assert "the run ended as simulated" in done.stdout
