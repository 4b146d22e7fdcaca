"""`distsim doctor --live`: stopped ranks, hung workers, the bundle, dumps on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from distsim.cli.application import application
from distsim.common.errors import UsageError
from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from distsim.hang_doctor.readers.live_job import inspect_live_job, py_spy_path
from distsim.hang_doctor.readers.process_tree import REDACTED, processes_of_job
from distsim.output.text.diagnosis import doctor_text

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found in /proc, which is Linux's"
)

#: Stands for torch: py-spy shows its functions as torch's, because the paths are the same.
ALL_REDUCE = "import time\ndef all_reduce():\n    time.sleep(300)\n"
LOADER = "import time\ndef _try_get_data():\n    time.sleep(300)\n"
FETCH = "def fetch(get):\n    get()\n"
RANK = """
import os, subprocess, sys, time
from torch.distributed import distributed_c10d
from torch.utils.data import dataloader
from torch.utils.data._utils.fetch import fetch

def load():
    time.sleep(300)

if sys.argv[1:] == ["worker"]:
    print("up", flush=True)
    fetch(load)
if os.environ["RANK"] == "1":
    child = subprocess.Popen([sys.executable, "rank.py", "worker"])
    print("up", flush=True)
    dataloader._try_get_data()
print("up", flush=True)
distributed_c10d.all_reduce()
"""
LAUNCHER = """
import os, subprocess, sys, time
for rank in range(3):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "API_KEY": "hunter2"}
    subprocess.Popen([sys.executable, "rank.py", "--token=hunter3"], env=env)
time.sleep(300)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[int]:
    """A launcher with three ranks, of which rank 1 waits for a worker process."""
    packages = ("torch", "torch/distributed", "torch/utils", "torch/utils/data")
    # Without these files, Python prefers an installed torch.
    files = {f"{name}/__init__.py": "" for name in (*packages, "torch/utils/data/_utils")}
    files |= {
        "torch/distributed/distributed_c10d.py": ALL_REDUCE,
        "torch/utils/data/dataloader.py": LOADER,
        "torch/utils/data/_utils/fetch.py": FETCH,
        "rank.py": RANK,
        "launcher.py": LAUNCHER,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    launcher = subprocess.Popen(
        [sys.executable, "launcher.py"], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    said = b""
    until = time.monotonic() + 60
    while said.count(b"up") < 4 and time.monotonic() < until:
        said += os.read(launcher.stdout.fileno(), 4096)
    pids = [process.pid for process in processes_of_job(launcher.pid)]
    try:
        yield launcher.pid
    finally:
        for pid in [*pids, launcher.pid]:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


def pid_of(root: int, rank: int, is_child: bool = False) -> int:
    return next(
        process.pid
        for process in processes_of_job(root)
        if process.rank == rank and (process.child_of is not None) == is_child
    )


def wait_for_state(pid: int, state: str) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == state:
            return
        time.sleep(0.05)


def diagnosed(path: Path) -> Diagnosis:
    return diagnose_hang(read_evidence([str(path)]))


def test_ranks_and_their_children_are_found_below_a_launcher(job: int) -> None:
    """A worker inherits RANK from its rank, and is no rank."""
    found = [(process.rank, process.child_of) for process in processes_of_job(job)]

    parent = pid_of(job, 1)
    assert sorted(found, key=str) == [(0, None), (1, parent), (1, None), (2, None)]
    assert [process.rank for process in processes_of_job(pid_of(job, 2))] == [2]


def test_a_stopped_rank_is_named_live_and_from_the_bundle(job: int, tmp_path: Path) -> None:
    pid = pid_of(job, 2)
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
    bundle = tmp_path / "hang.zip"

    result = CliRunner().invoke(
        application(), ["doctor", "--live", str(job), "-o", str(bundle), "--format", "json"]
    )
    found = diagnosed(bundle)

    assert result.exit_code == 1
    assert json.loads(result.stdout)["culprits"] == [2]
    assert (found.main and found.main.kind, found.culprits) == ("stopped", (2,))
    assert f"kill -CONT {pid}" in " ".join(found.main.details if found.main else [])
    wait_for_state(pid, "T")
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_bundle_contains_no_environment_value_and_no_option(job: int) -> None:
    found, _ = inspect_live_job(job, 0.1)

    text = json.dumps(found)
    assert "hunter2" not in text
    assert "hunter3" not in text
    rank = next(one for one in found["processes"] if not one["is_child"])
    assert rank["environment"]["API_KEY"] == REDACTED
    assert rank["environment"]["WORLD_SIZE"] == "3"


@pytest.mark.skipif(
    py_spy_path() is None, reason="py-spy takes the stacks of live processes; it is not installed"
)
def test_a_hung_worker_of_a_data_loader_is_named(job: int, tmp_path: Path) -> None:
    bundle = tmp_path / "hang.zip"
    CliRunner().invoke(application(), ["doctor", "--live", str(job), "-o", str(bundle)])
    found = diagnosed(bundle)

    assert found.main is not None
    assert (found.main.kind, found.main.ranks, found.culprits) == ("data_loader", (1,), ())
    assert f"worker process {pid_of(job, 1, is_child=True)} does not move" in found.main.title
    assert {frame.name for _, _, frame in found.main.lines if frame} >= {"load"}


# --- bundles, without live processes ---


def process(rank: int, state: str = "S", **more: Any) -> dict[str, Any]:
    frames = [
        {"name": "all_reduce", "file": "torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "train", "file": "train.py", "line": 7},
    ]
    return {
        "pid": 100 + rank,
        "rank": rank,
        "is_child": False,
        "state": state,
        "stacks": [{"thread": "MainThread", "main": True, "frames": frames}],
        **more,
    }


def bundle(path: Path, *processes: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path / "hang.zip", "w") as archive:
        job = {"format": "distsim-live", "host": "node1", "processes": list(processes)}
        archive.writestr("live.json", json.dumps(job))
    return path / "hang.zip"


def test_a_rank_in_an_uninterruptible_wait_is_suspected(tmp_path: Path) -> None:
    waits = process(1, "D", wait_channel="nfs_wait_bit_killable", stacks=[])
    found = diagnosed(bundle(tmp_path, process(0), waits, process(2)))

    assert found.main is not None
    assert (found.main.kind, found.main.ranks, found.culprits) == ("kernel_wait", (1,), ())
    assert "nfs_wait_bit_killable" in found.main.title


def test_a_rank_that_has_exited_is_suspected(tmp_path: Path) -> None:
    found = diagnosed(bundle(tmp_path, process(0), process(1, "Z", stacks=[])))

    assert found.main is not None
    assert (found.main.kind, found.main.grade, found.main.ranks) == ("crash", "suspected", (1,))


def test_oom_kills_of_a_control_group_are_noted(tmp_path: Path) -> None:
    found = diagnosed(bundle(tmp_path, process(0, memory_events={"oom_kill": 2})))

    assert any("caused 2 OOM kills" in note for note in found.evidence.notes)


@pytest.mark.parametrize(
    "damaged",
    [
        {"rank": -1},
        {"rank": 1 << 30},
        {"rank": 0, "stacks": "x"},
        {"rank": 0, "stacks": [{"frames": [{"line": "7"}]}], "cpu_share": "x"},
        {"rank": 0, "stacks": [{"frames": [{"line": 7, "values": [1]}]}], "native": [3]},
        "no process",
    ],
)
def test_a_damaged_bundle_is_read_as_far_as_possible(tmp_path: Path, damaged: Any) -> None:
    found = diagnosed(bundle(tmp_path, process(1), damaged))

    assert 1 in found.evidence.ranks
    assert found.culprits == ()


def test_a_bundle_needs_a_live_job(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("Traceback\n")
    with pytest.raises(UsageError, match="only a live job has a bundle"):
        CliRunner().invoke(
            application(),
            ["doctor", str(tmp_path), "-o", str(tmp_path / "x.zip")],
            catch_exceptions=False,
        )
    with pytest.raises(UsageError, match="has RANK in its environment"):
        processes_of_job(os.getpid())


def test_torchs_pipe_is_asked_for_a_dump(tmp_path: Path) -> None:
    """A thread stands for torch's watchdog: it reads the pipe and writes the dump."""
    pipe, dump = tmp_path / "trigger3.pipe", tmp_path / "fr_3"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    environment = {
        **os.environ,
        "RANK": "3",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "trigger"),
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_"),
    }
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)

    def watch() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                if os.read(descriptor, 16):
                    dump.write_bytes(b"a dump")
                    return
            except BlockingIOError:
                pass
            time.sleep(0.05)

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    try:
        time.sleep(0.3)
        _, dumps = inspect_live_job(rank.pid, 0.1)
    finally:
        rank.kill()
        rank.wait()
        watchdog.join()
        os.close(descriptor)

    assert dumps == {3: b"a dump"}


def test_without_py_spy_the_report_says_that_no_calls_were_recorded(tmp_path: Path) -> None:
    """Nothing was recorded, so no rank "has finished all recorded calls"."""
    sleeps = {"stacks": [], "wait_channel": "futex_wait"}
    job = {
        "format": "distsim-live",
        "has_stacks": False,
        "processes": [process(0, **sleeps), process(1, **sleeps)],
    }
    (tmp_path / "live.json").write_text(json.dumps(job))

    text = doctor_text(diagnosed(tmp_path), width=200)

    assert "no call and no stack of ranks 0 and 1 is known, only the state of each process" in text
    assert "rank 1: process 101 sleeps in futex_wait, uses 0% of a CPU" in text
    assert "next: install py-spy" in text
    assert "finished all recorded calls" not in text


def test_a_process_whose_rank_is_not_a_number_is_inspected(tmp_path: Path) -> None:
    environment = {**os.environ, "RANK": "abc"}
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    rank = subprocess.Popen(command, env=environment)
    try:
        found, _ = inspect_live_job(rank.pid, 0.1)
    finally:
        rank.kill()
        rank.wait()
    (tmp_path / "live.json").write_text(json.dumps(found))

    text = doctor_text(diagnosed(tmp_path), width=200)

    assert text.startswith("a process of unknown rank: ")
    assert f"the rank of process {rank.pid} is unknown, because RANK" in text
