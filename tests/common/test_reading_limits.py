"""Reading is limited in time and memory, in this process or in a forked trial."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distsim.common.errors import UsageError
from distsim.common.reading_limits import (
    NOTE_BYTES,
    LimitNote,
    activate,
    current_factor,
    exceeded_limits,
    factor_of_user,
    reading_limits,
    trial_reads,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux limits data"
)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def without_limits() -> Iterator[None]:
    """No test leaves limits behind."""
    earlier = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    activate(None)
    assert resource.getrlimit(resource.RLIMIT_DATA) == earlier
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def data_in_use() -> int:
    """Bytes of data of this process, as RLIMIT_DATA counts them; earlier tests may have used some."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    return pages * resource.getpagesize()


def memory_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


@pytest.mark.parametrize(
    ("text", "factor"), [("1", 1), ("0.5", 0.5), (" 10 ", 10), ("off", None), (" OFF ", None)]
)
def test_the_user_sets_the_factor(
    monkeypatch: pytest.MonkeyPatch, text: str, factor: float | None
) -> None:
    monkeypatch.setenv("DISTSIM_READ_LIMITS", text)

    assert factor_of_user() == factor


def test_without_the_variable_the_factor_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTSIM_READ_LIMITS", raising=False)

    assert factor_of_user() == 1


@pytest.mark.parametrize("text", ["", "-1", "0", "nan", "many", "inf", "1e6"])
def test_an_invalid_factor_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISTSIM_READ_LIMITS", text)
    with pytest.raises(UsageError, match="expected a positive number") as error:
        factor_of_user()

    assert error.value.remedy == "give a factor such as 10, or `off`"


@pytest.mark.parametrize(("factor", "size"), [(1, 0), (2, 0), (1, MIB), (0.5, 3 * MIB)])
def test_limits_grow_with_the_factor_and_the_size(factor: float, size: int) -> None:
    """30 s and 2 GiB, and 60 s and 2000 MiB for each MiB of the file."""
    activate(factor)
    before = memory_limit()
    with reading_limits("f", size):
        seconds = signal.getitimer(signal.ITIMER_PROF)[0]
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[5]) * os.sysconf("SC_PAGESIZE")
        expected = factor * (2048 * MIB + size * 2000)
        assert memory_limit() - used == pytest.approx(expected, abs=32 * MIB)
        assert seconds == pytest.approx(factor * (30 + 60 * size / MIB), abs=1)
    assert memory_limit() == before


def test_the_size_is_that_of_the_file_and_streams_count_as_64_mib(tmp_path: Path) -> None:
    activate(1)
    (tmp_path / "file").write_bytes(bytes(MIB))
    os.mkfifo(tmp_path / "pipe")
    seconds = {}
    for name in ("file", "pipe", "absent", "nul\0"):
        with reading_limits(tmp_path / name):
            seconds[name] = round(signal.getitimer(signal.ITIMER_PROF)[0])

    assert seconds == {"file": 90, "pipe": 30 + 64 * 60, "absent": 30, "nul\0": 30}


def test_a_lower_limit_of_the_process_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lower = data_in_use() + 1024 * MIB  # reading may take 2 GiB more at factor 1
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        activate(1)
        with reading_limits("f", 0):
            assert memory_limit() == lower
        activate(0.01)
        with reading_limits("f", 0):
            assert memory_limit() < lower
        assert memory_limit() == lower
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_too_much_memory_is_an_error_with_a_remedy() -> None:
    activate(0.01)
    with pytest.raises(UsageError) as error, reading_limits("log.txt", 0):
        bytearray(200 * MIB)

    shown = exceeded_limits("log.txt", "20 MiB of memory")
    assert (error.value.message, error.value.remedy) == (shown.message, shown.remedy)
    assert error.value.message.startswith("log.txt: reading takes more than 20 MiB of memory")


def test_a_note_names_the_file_that_is_read_and_only_while_it_is_read() -> None:
    with mmap.mmap(-1, NOTE_BYTES) as shared:
        activate(2, shared)
        assert current_factor() == 2
        for place in ("a.yaml", "b" * 2 * NOTE_BYTES):
            with reading_limits(place, 0), reading_limits("inner", 0):
                note = LimitNote.read(shared)
                assert note is not None
                assert (note.place, note.cpu_s) == (place[: NOTE_BYTES - 6], 60)
            assert LimitNote.read(shared) is None


def test_a_trial_happens_once_for_nested_blocks_and_not_for_a_pipe(tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(f"{text} ")

    with trial_reads(1), reading_limits(tmp_path), reading_limits(tmp_path):
        note("read")
    with reading_limits(tmp_path):
        note("later")
    with trial_reads(None), reading_limits(tmp_path):
        note("off")
    assert notes.read_text() == "read read later off "
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        pytest.raises(UsageError, match="not a regular file") as error,
        trial_reads(1),
        reading_limits(pipe),
    ):
        pass
    assert error.value.remedy == "copy the data to a file, and give that file"
    with trial_reads(1), reading_limits(pipe, 0):
        note("given size")
    assert notes.read_text().endswith("off given size given size ")


def test_a_process_with_limits_of_its_own_makes_no_trials(tmp_path: Path) -> None:
    activate(3)
    reads: list[int] = []
    with trial_reads(1):
        assert current_factor() == 3
        with reading_limits(tmp_path):
            reads.append(os.getpid())
    assert reads == [os.getpid()]
    activate(None)
    with trial_reads(1):
        assert current_factor() == 1
    assert current_factor() is None


def read_in_trial(act_of_child: Callable[[], object]) -> int:
    """Read a file after a trial, in which ``act_of_child`` is done; the process that has read."""
    parent = os.getpid()
    with trial_reads(0.01), reading_limits("dump.json", 0):
        if os.getpid() != parent:
            act_of_child()
        return os.getpid()


def raising(error: Exception) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "amount"),
    [
        (raising(MemoryError()), "20 MiB of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGPROF), "0.3 s of processor time"),
    ],
)
def test_a_trial_that_exceeds_a_limit_is_refused(act: Callable[[], object], amount: str) -> None:
    with pytest.raises(UsageError, match=f"reading takes more than {amount}"):
        read_in_trial(act)


def test_other_errors_of_a_trial_are_left_to_the_reader() -> None:
    assert read_in_trial(raising(ValueError())) == os.getpid()
