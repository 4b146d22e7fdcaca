"""Unmodified programs on the hub: the numbers are right, what hangs is named with its line, nothing
is left behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import tests.support.capture_programs as programs
from distsim import testing
from distsim.common.errors import UsageError
from distsim.output.text.capture_report import capture_text
from distsim.repair.from_trace import find_trace_repairs
from distsim.repair.proposals import ADDS_CALLS
from distsim.script_capture.launch import preload
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.command_line import parse_command
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.launch.rank_environment import RankPosition, launcher_environment
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.evaluation import CaptureResult, evaluate_capture
from distsim.trace.jsonl import trace_lines

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def lines_of(judged: CaptureResult, code: str) -> set[str]:
    """The source text at the places of a finding."""
    return {
        source_text(p.file, p.line)
        for f in judged.simulation.findings
        if f.code == code
        for p in f.places
    }


@pytest.mark.parametrize(
    "program",
    [
        programs.every_collective,
        programs.messages_and_groups,
        programs.ddp,
        programs.alive_for_a_while,
    ],
)
def test_a_correct_script_completes_with_correct_values(program):
    ranks = 2 if program is programs.alive_for_a_while else 4

    judged = testing.run(program, ranks)

    assert (judged.outcome, judged.captured.ended) == ("completes", "ended")


def knows_what_is_late() -> None:
    """A module of a name that nothing else loads, in the place of those that torch loads late; the
    file speaks of nn.
    """
    assert "this" in sys.modules


def test_late_imports_of_torch_happen_once_for_all_ranks(
    monkeypatch,
):
    """Seconds that each rank of DistributedDataParallel or an optimizer would take for itself."""
    monkeypatch.setattr(preload, "_LATE", ("this",))
    monkeypatch.delitem(sys.modules, "this", raising=False)

    assert testing.run(knows_what_is_late, 2).outcome == "completes"


def leaves_without_a_word() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_exited_early_is_not_reported_as_skipping_a_branch():
    """Where it left is not known, and no text pretends to know it."""
    judged = testing.run(leaves_without_a_word, 3, check=False)
    text = capture_text(judged)

    assert [(s.state, s.what) for s in judged.stands] == [
        ("waits", "barrier"),
        ("exited", "with code 7"),
        ("killed", "SIGKILL"),
    ]
    (finding,) = [f for f in judged.simulation.findings if f.severity == "error"]
    assert "rank 1  has exited with code 7" in finding.message
    assert "rank 2  was killed" in finding.message
    assert "DS608" not in text
    assert not re.search(r", \?| at$", text, flags=re.MULTILINE)


def reduces_a_metric_on_rank_0() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(4):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        if dist.get_rank() == 0 and step == 2:
            dist.all_reduce(loss.detach())


def test_an_extra_call_in_a_branch_is_named_with_the_ddp_call_that_it_met():
    judged = testing.run(reduces_a_metric_on_rank_0, 2, check=False)

    head = judged.simulation.findings[0].message.partition("\n")[0]

    assert head.startswith("rank 0 makes one extra all_reduce (")
    assert head.endswith(", in backward())")
    assert "DDP" not in " ".join(judged.simulation.findings[0].help)


def test_a_syntax_error_in_a_script_shows_no_frame_of_distsim(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("def f(:\n")
    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), 2, keep_output=True))
    )

    assert judged.outcome == "raises"
    assert "SyntaxError" in judged.captured.outputs[0]
    assert "child.py" not in judged.captured.outputs[0]
    assert "all ranks finished" not in capture_text(judged)


@pytest.mark.parametrize("name", programs.FAULTS)
def test_a_planted_fault_is_named_with_its_ranks_and_the_line_of_the_script(name):
    fault = programs.FAULTS[name]

    judged = testing.run(fault.program, fault.ranks, check=False)

    verdict = judged.simulation.verdict
    assert verdict is not None
    assert verdict.verdict == fault.verdict
    assert not fault.core or set(verdict.core or verdict.culprits) >= set(fault.core)
    assert any(line.startswith(fault.line) for line in lines_of(judged, fault.code)), lines_of(
        judged, fault.code
    )


def test_the_requested_backend_determines_the_rules():
    """Two sends that come first hang on gloo at every size; mpi buffers small ones."""
    outcomes = {
        b: testing.run(programs.both_send_first, 2, backend=b, check=False).outcome
        for b in ("gloo", "mpi")
    }

    assert outcomes == {"gloo": "hangs", "mpi": "completes"}


def test_two_captures_write_equal_traces_even_with_a_wildcard_receive():
    def traced() -> str:
        return "".join(trace_lines(testing.run(programs.any_source, 4).simulation.run.trace))

    assert traced() == traced()


def test_a_failure_of_one_rank_is_reported_with_its_traceback_and_output():
    with pytest.raises(testing.RanksFailed) as failed:
        testing.run(programs.raises, 2)

    assert "rank 1 raised" in str(failed.value)
    assert 'raise ValueError("bad batch")' in str(failed.value)
    assert "ValueError: bad batch" in testing.outputs_by_rank(failed.value.judged)[1]


# --- the command ---
HANGS = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"here is {rank}\\n", end="", flush=True)
dist.recv(torch.ones(1), 1 - rank)
dist.send(torch.ones(1), 1 - rank)
"""


def test_the_command_names_the_line_and_writes_a_trace_that_check_accepts(tmp_path, cli):
    (tmp_path / "train.py").write_text(HANGS)

    words = (
        "capture",
        "--nproc",
        "2",
        "--trace",
        "t.jsonl",
        "-o",
        "s.yaml",
        "--",
        "python",
        "train.py",
    )
    captured = cli(*words, cwd=tmp_path)
    checked = cli("check", "s.yaml", cwd=tmp_path)

    assert captured.returncode == checked.returncode == 1, captured.stderr
    assert "DS301: ranks 0 → 1 → 0 wait for each other" in captured.stdout
    assert "train.py:5" in captured.stdout
    assert "dist.recv(torch.ones(1), 1 - rank)" in captured.stdout
    assert '"file": "train.py", "line": 5' in (tmp_path / "t.jsonl").read_text()
    assert "DS301" in checked.stdout


def test_ctrl_c_leaves_no_process(tmp_path):
    """The ranks stand in a sleep; the parent gets the signal alone."""
    (tmp_path / "train.py").write_text(
        HANGS.replace("dist.recv", "import time; time.sleep(600); dist.recv")
    )
    words = [sys.executable, "-m", "distsim", "capture", "--nproc", "2", "--", "python", "train.py"]
    command = subprocess.Popen(
        words,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert command.stdout is not None
    seen = [command.stdout.readline(), command.stdout.readline()]
    ranks = [int(p.name) for p in Path("/proc").glob("[0-9]*") if parent_of(p) == command.pid]

    command.send_signal(signal.SIGINT)
    command.communicate(timeout=30)

    assert sorted(seen) == ["here is 0\n", "here is 1\n"]
    assert len(ranks) == 3  # the ranks, and who ends what they start
    assert command.returncode == 130
    assert [pid for pid in ranks if os.path.exists(f"/proc/{pid}")] == []


def parent_of(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


# --- parts ---
@pytest.mark.parametrize(
    ("words", "ranks", "nodes"),
    [
        ("python train.py --x 1", None, None),
        ("python3.11 -u train.py", None, None),
        ("train.py", None, None),
        ("-m train", None, None),
        ("torchrun --nproc_per_node=4 train.py", 4, 1),
        ("torchrun --standalone --nnodes 2 --nproc-per-node 4 train.py a b", 4, 2),
        ("python -m torch.distributed.run --nproc-per-node 2 -m train", 2, 1),
        ("accelerate launch --cpu --num_processes 4 train.py", 4, 1),
        ("python -m accelerate.commands.launch --num_processes 2 train.py", 2, 1),
        ("python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py", 2, 1),
        ("deepspeed --num_gpus=4 --num_nodes 2 train.py --deepspeed", 4, 2),
        ("srun -N2 -n 8 --gres=gpu:4 -u python train.py", 4, 2),
        ("srun --nodes=2 --ntasks-per-node=4 --exclusive python train.py", 4, 2),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node 4 train.py", 4, 2),
        ("mpirun -np 4 --mca btl tcp -x A=1 python -u train.py", 4, None),
        ("A=1 B=2 torchrun --nproc-per-node=gpu train.py", None, 1),
    ],
)
def test_a_command_line_is_parsed_like_by_its_launcher(words, ranks, nodes, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    found = parse_command(words.split())

    assert (found.target.name.removesuffix(".py"), found.ranks, found.nodes) == (
        "train",
        ranks,
        nodes,
    )


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("torchrun -m train -- --depth 4", ("--depth", "4")),
        ("torchrun train.py -- -- --depth 4", ("--", "--depth", "4")),
        ("accelerate launch train.py -- --depth 4", ("--depth", "4")),
        ("torchrun train.py --depth 4 -- x", ("--depth", "4", "--", "x")),
        ("python train.py -- --depth 4", ("--", "--depth", "4")),
    ],
)
def test_launchers_drop_two_hyphens_behind_the_program(words, arguments, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    assert parse_command(words.split()).target.args == arguments


@pytest.mark.parametrize(
    "words", ["", "python", "python -c 1", "nothing.py", "-m nothing_at_all", "torchrun"]
)
def test_a_command_that_starts_no_program_is_refused_with_an_example(words):
    with pytest.raises(UsageError):
        parse_command(words.split())


def test_a_launcher_passes_on_variables_and_the_local_rank(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    mpi = parse_command(
        ["A=1", "mpirun", "-n", "2", "-x", "B=2", "-x", "C", "-x", "D=4", "python", "train.py"]
    )
    launch = parse_command(
        ["python", "-m", "torch.distributed.launch", "--nproc_per_node", "2", "train.py"]
    )
    deepspeed = parse_command(["deepspeed", "train.py"])

    assert mpi.environment == {"A": "1", "B": "2", "D": "4"}
    assert mpi.launcher == "mpi"
    assert launch.local_rank_argument == "--local-rank"
    assert (deepspeed.local_rank_argument, deepspeed.one_per_gpu) == ("--local_rank", True)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}),
        ("slurm", {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}),
        ("mpi", {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
    ],
)
def test_a_rank_gets_the_variables_of_its_launcher(launcher, variables):
    found = launcher_environment(launcher, RankPosition(5, 8, 4, 2))

    assert variables.items() <= found.items()
    assert ("RANK" in found) == (launcher == "torchrun")


SHELL_SCRIPT = """\
set -e
python -c "print('one line')"
python prepare.py
export SETTING=7
torchrun --nproc_per_node=$RANKS train.py --x 1
python train.py
echo finished
"""
STARTED_BY_SHELL = """\
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(f"{os.environ['SETTING']} {sys.argv[1:]} {dist.get_world_size()}")
"""


def test_a_shell_script_runs_and_the_program_that_it_launches_is_captured(tmp_path):
    (tmp_path / "run.sh").write_text(SHELL_SCRIPT)
    (tmp_path / "prepare.py").write_text("print('prepared')\n")
    (tmp_path / "train.py").write_text(STARTED_BY_SHELL)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    (tools / "torchrun").write_text(f"#!{sys.executable}\nraise SystemExit('the launcher ran')\n")
    (tools / "torchrun").chmod(0o755)
    environment = {**os.environ, "RANKS": "2", "PATH": f"{tools}:{os.environ['PATH']}"}
    words = ("-m", "distsim", "capture", "--", "env", "bash", "run.sh")

    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(programs.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == ["one line", "prepared", *["7 ['--x', '1'] 2"] * 2, "finished"]
    assert "train.py: completes" in done.stdout
    assert "not run, because one program is captured: python train.py" in done.stderr


def test_only_installed_modules_are_imported_before_the_ranks_fork(tmp_path):
    (tmp_path / "own.py").write_text("import json\nraise SystemExit('never run here')")
    script = tmp_path / "train.py"
    script.write_text(
        "import own\nfrom torch import nn\ntry:\n    import numpy as np\nexcept ImportError: pass\ndef f():\n    import late"
    )

    assert preload.external_imports(str(script)) == ["torch", "numpy", "json"]


@pytest.mark.parametrize(("command", "name"), [("check", "train.py"), ("simulate", "train")])
def test_a_python_file_given_as_a_scenario_is_answered_with_the_command_to_type(
    command, name, tmp_path, cli
):
    (tmp_path / name).write_text("# a comment\n" + HANGS)

    asked = cli(command, name, cwd=tmp_path)

    assert asked.returncode == 2
    assert f"distsim capture --nproc 2 -- python {name}" in asked.stdout + asked.stderr


REPAIRED = {
    "circle": ("batch_isend_irecv", "dist.recv("),
    "wrong tag": ("set tag to", "tag="),
    "another dtype": ("set tensor to", "dist.all_reduce("),
}


@pytest.mark.parametrize("name", REPAIRED)
def test_a_hang_is_repaired_without_guessing_future_calls(name):
    """Order and arguments alone; the scenario of the calls names the script's lines."""
    fault, (words, line) = programs.FAULTS[name], REPAIRED[name]
    trace = testing.run(fault.program, fault.ranks, check=False).simulation.run.trace

    found = find_trace_repairs(trace, "x.jsonl")

    assert words in " ".join(found[0].words)
    assert all(fix.kind < ADDS_CALLS for fix in found)
    assert any(
        line in source_text(programs.__file__, int(number))
        for number in re.findall(r"# \S+:(\d+)$", found[0].patch, re.MULTILINE)
    )


def test_ranks_that_leave_a_loop_early_get_the_same_number_of_iterations():
    fault = programs.FAULTS["early break"]
    trace = testing.run(fault.program, fault.ranks, check=False).simulation.run.trace

    found = find_trace_repairs(trace, "x.jsonl")

    assert any("Join" in " ".join(repair.words) for repair in found)
    assert any("drop_last=True" in " ".join(repair.words) for repair in found)


@pytest.mark.parametrize("name", ["barrier behind rank 0"])
def test_no_repair_is_proposed_if_it_needs_unknown_calls(name):
    fault = programs.FAULTS[name]
    trace = testing.run(fault.program, fault.ranks, check=False).simulation.run.trace

    assert find_trace_repairs(trace, "x.jsonl") == ()
