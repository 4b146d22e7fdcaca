"""A command runs in a child process, which its parent and the kernel can end while C code runs.

The programs below do what the command line does, without its imports: they fork, and then read
something that never ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distsim.cli.shared import console
from distsim.common.reading_limits import reading_limits

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

#: Hashing this tuple takes 2**60 steps of C code, in which no handler of a signal runs.
START = """
import os, signal, sys, time
from distsim.cli.supervision import continue_in_child
from distsim.common.reading_limits import reading_limits

def hash_bomb():
    bomb = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    hash(bomb)

def say(text):
    os.write(1, f"{text}\\n".encode())

continue_in_child()
say(os.getpid())
"""


def start(program: str, factor: str = "1") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START + program],
        cwd=ROOT,
        env={**os.environ, "DISTSIM_READ_LIMITS": factor},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(program: str, factor: str = "1") -> tuple[int, str]:
    """The exit status of a program, and what it writes to standard error."""
    with start(program, factor) as process:
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def child_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process, which need not be a child of this one, has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    with stat.open(encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def test_a_reader_stuck_in_c_code_is_ended_at_its_deadline():
    status, errors = end_of("with reading_limits('dump.json', 0): hash_bomb()", factor="0.01")

    assert status == 2
    assert errors.startswith("dump.json: reading takes more than 0.3 s of processor time")
    assert "DISTSIM_READ_LIMITS=10" in errors


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits data")
def test_a_reader_that_takes_too_much_memory_is_refused():
    program = """
from distsim.common.errors import UsageError
try:
    with reading_limits("log.txt", 0):
        bytearray(200 << 20)
except UsageError as error:
    sys.exit(str(error))
"""
    status, errors = end_of(program, factor="0.01")

    assert status == 1
    assert errors.startswith("log.txt: reading takes more than 20 MiB of memory")


def test_the_limits_are_off_after_the_block_and_if_the_user_says_so():
    program = """
for _ in range(3):
    with reading_limits("a", 0):
        pass
started = time.process_time()
while time.process_time() < started + 0.1:
    pass
bytearray(200 << 20)
"""
    assert end_of(program, factor="0.002") == (0, "")
    inside = program.replace("pass\nstarted", "pass\nwith reading_limits('a', 0):\n  started")
    inside = inside.replace("\nwhile", "\n  while").replace("    pass\nbyte", "    pass\n  byte")
    assert end_of(inside, factor="off") == (0, "")
    assert end_of(inside, factor="0.002")[0] == 2


def test_ctrl_c_ends_a_process_stuck_in_c_code():
    with start("hash_bomb()") as process:
        child = child_of(process)
        process.send_signal(signal.SIGINT)

        assert process.wait(timeout=20) == 130
        assert has_ended(child)
        assert process.stderr is not None
        assert process.stderr.read().endswith("interrupted\n")


def test_one_ctrl_c_of_a_terminal_interrupts_the_cleaning_up_only_once():
    program = """
try:
    say("ready")
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.1)
    say("cleaned up")
    sys.exit(7)
"""
    with start(program) as process:
        child = child_of(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # A terminal signals both processes of the group.
        os.kill(child, signal.SIGINT)
        process.send_signal(signal.SIGINT)

        assert process.stdout.readline() == "cleaned up\n"
        assert process.wait(timeout=20) == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("program", ["time.sleep(60)", "hash_bomb()"])
def test_the_child_ends_with_its_parent(program: str, number: signal.Signals):
    if program == "hash_bomb()" and sys.platform != "linux":
        pytest.skip("only Linux ends a process that runs C code")
    with start(program) as process:
        child = child_of(process)
        process.send_signal(number)

        assert process.wait(timeout=20) == -number
        wait_until(lambda: has_ended(child))


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("sys.exit(5)", 5, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 3, "SIGSEGV ended the process"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 4, "SIGKILL ended the command"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1, ""),
    ],
)
def test_the_parent_ends_as_its_child_did(program: str, status: int, text: str):
    found, errors = end_of(program)

    assert found == status
    assert text in errors


def test_a_process_that_imports_distsim_has_no_limits():
    before = signal.getitimer(signal.ITIMER_PROF)
    with reading_limits(__file__):
        assert signal.getitimer(signal.ITIMER_PROF) == before


# --- trials, for processes that must not be ended ---

TRIAL = """
import os, re, sys
from distsim.common.errors import UsageError
from distsim.common.reading_limits import reading_limits, trial_reads

def hash_bomb():
    bomb = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    hash(bomb)

def quadratic():
    re.search("a*a*a*b", "a" * 20_000)

def refusal(read):
    try:
        with trial_reads(0.01), reading_limits("dump.json", 0):
            read()
    except UsageError as error:
        return error.message
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits data")
def test_a_trial_refuses_what_takes_too_long_or_too_much_and_the_process_goes_on():
    program = """
for read in (hash_bomb, quadratic, lambda: bytearray(200 << 20)):
    print(refusal(read), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", TRIAL + program], cwd=ROOT, capture_output=True, text=True
    )

    refused = "dump.json: reading takes more than"
    assert done.stderr == ""
    assert [line.partition(" of ")[0] for line in done.stdout.splitlines()] == [
        f"{refused} 0.3 s",
        f"{refused} 0.3 s",
        f"{refused} 20 MiB",
    ]


@pytest.mark.parametrize(
    "words", [("run", "s.yaml", "--real"), ("capture", "--cluster", "s.yaml", "--", "t.py")]
)
def test_commands_that_start_processes_have_the_limits_too(tmp_path: Path, words: tuple[str, ...]):
    (tmp_path / "s.yaml").write_text(f"vars: {{x: {[0] * 20_000}}}")
    (tmp_path / "t.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "distsim", *words],
        cwd=tmp_path,
        env={**os.environ, "DISTSIM_READ_LIMITS": "1e-7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2, done.stderr
    assert "s.yaml: reading takes more than" in done.stderr


def test_ctrl_c_removes_a_progress_bar_whose_block_still_runs():
    class Bar:
        stops = 0

        def start(self) -> None:
            pass

        def stop(self) -> None:
            self.stops += 1

    bar = Bar()
    with console.shown_after_delay(bar):  # type: ignore[arg-type]
        console.stop_progress()
        assert bar.stops == 1
    console.stop_progress()
    assert bar.stops == 2  # at the end of the block
