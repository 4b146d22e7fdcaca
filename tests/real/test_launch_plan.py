"""The launch plan: each rank's place, and lines that people can type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distsim.common.errors import EnvironmentFault
from distsim.output.text.launch_plan import launch_plan_json, launch_plan_text
from distsim.real.launch.external_launchers import external_rank, launch_plan, wrapped_command
from tests.support.harness import Cli
from tests.support.real_runs import scenario

TWO = ("run", "scenarios/two_machines.yaml", "--real")


def test_every_rank_has_its_node_local_rank_and_device():
    two = launch_plan(scenario("two_machines"), TWO, "nccl")

    assert [(r.rank, r.node, r.local_rank, r.device) for r in two.ranks] == [
        (r, r // 4, r % 4, f"cuda:{r % 4}") for r in range(8)
    ]
    assert {r.device for r in launch_plan(scenario("two_machines"), TWO, "gloo").ranks} == {"cpu"}


def test_there_is_one_torchrun_line_per_node_and_only_the_node_rank_differs():
    lines = [
        " ".join(line.words)
        for line in launch_plan(scenario("two_machines"), TWO, "nccl").lines
        if line.launcher == "torchrun"
    ]

    assert lines[0].startswith(
        "CUDA_VISIBLE_DEVICES=0,1,2,3 OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0"
    )
    assert [line.replace("node_rank=1", "node_rank=0") for line in lines] == [lines[0]] * 2


def test_the_text_fits_80_columns_and_states_what_each_launcher_sets():
    for name in ("hybrid", "two_machines", "send_one"):
        text = launch_plan_text(
            launch_plan(scenario(name), ("run", f"scenarios/{name}.yaml", "--real"), "nccl")
        )
        assert max(map(len, text.splitlines())) <= 80
        assert "torchrun: RANK WORLD_SIZE LOCAL_RANK" in text


def test_a_folded_command_is_equivalent_in_a_shell():
    words = (
        "A=1",
        "torchrun",
        "--nnodes=2",
        "-m",
        "distsim",
        "run",
        "a file.yaml",
        "--real",
        "--set",
        "vars.n=3",
    ) * 3
    lines = wrapped_command(words, 40, "  ")

    assert len(lines) > 3
    assert all(line.endswith("\\") for line in lines[:-1])
    import shlex

    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == list(words)


def test_the_plan_as_json_gives_each_rank_its_environment():
    data = launch_plan_json(launch_plan(scenario("hybrid"), TWO, "gloo"))

    assert data["ranks"][3]["env"] == {
        "WORLD_SIZE": 4,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "RANK": 3,
        "LOCAL_RANK": 3,
        "NODE_RANK": 0,
    }
    assert json.loads(json.dumps(data)) == data


def test_without_real_the_command_only_prints(cli: Cli):
    done = cli("run", "scenarios/hybrid.yaml", "--backend", "gloo", "--set", "seed=3")

    assert done.returncode == 0
    assert "distsim run scenarios/hybrid.yaml --real --backend gloo --set seed=3" in " ".join(
        done.stdout.split()
    )


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "77",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-09],x1",
}
MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, ("torchrun", 5, 8, 1, "a", 77, True)),
        (SLURM, ("srun", 2, 4, 0, "gpu07", 29500, False)),
        (MPI, ("mpirun", 3, 4, 3, "127.0.0.1", 29500, False)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # inside sbatch, yet no step of srun
        ({}, None),
    ],
    ids=["torchrun", "srun", "mpirun", "sbatch", "nobody"],
)
def test_a_process_finds_its_rank_by_the_variables_of_its_launcher(env, expected):
    assert external_rank(env, "127.0.0.1", 29500) == expected


def test_a_broken_variable_is_an_environment_error_and_named():
    with pytest.raises(EnvironmentFault, match="RANK is 'x'"):
        external_rank({**TORCHRUN, "RANK": "x"}, "127.0.0.1", 1)


def test_a_data_parallel_scenario_states_that_devices_of_one_process_become_processes(cli: Cli):
    file = "scenarios/strategies/data_parallel.yaml"
    said = "stands for one device of the single process of torch.nn.DataParallel"

    assert said in " ".join(cli("run", file).stdout.split())
    assert any(
        said in note for note in json.loads(cli("run", file, "--format", "json").stdout)["notes"]
    )
    assert launch_plan(scenario("hybrid"), TWO, "gloo").notes == ()


def test_the_first_host_is_the_master_address(cli: Cli, tmp_path: Path):
    file = tmp_path / "two.yaml"
    file.write_text(
        "world: {nodes: 2, ranks_per_node: 1}\nlaunch: {hosts: [gpu1, gpu2]}\nprogram: [barrier]\n",
        encoding="utf-8",
    )

    assert "MASTER_ADDR=gpu1" in cli("run", file).stdout
    assert "MASTER_ADDR=other" in cli("run", file, "--master-addr", "other").stdout
