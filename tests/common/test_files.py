"""Files are written completely or not at all, read within limits, and locked by one process."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from distsim.common import file_io, file_lock
from distsim.common.errors import EnvironmentFault, UsageError
from distsim.common.file_io import (
    escape_control_characters,
    escape_json_control_characters,
    files_below,
    is_stream,
    open_bytes,
    read_bytes,
    read_lines,
    write_file,
)
from distsim.common.file_lock import FileLock

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files and streams as POSIX has them")


# --- writing ---
def test_writing_through_a_symbolic_link_keeps_the_link(tmp_path: Path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "ahead").symlink_to("new")
    write_file(tmp_path / "link", "one")
    write_file(tmp_path / "ahead", "two")

    assert (tmp_path / "link").is_symlink()
    assert ((tmp_path / "target").read_text(), (tmp_path / "new").read_text()) == ("one", "two")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ahead", "link", "new", "target"]


def test_an_overwritten_file_keeps_its_mode_bits(tmp_path: Path):
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o640)
    write_file(file, "new")

    assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (0o640, "new")


def test_a_new_file_gets_the_mode_bits_of_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "f", "new")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


def test_writing_into_a_named_pipe_keeps_the_pipe(tmp_path: Path):
    pipe, got = tmp_path / "pipe.svg", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_file(pipe, ["some ", "text"])
    reader.join(30)

    assert got == [b"some text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_writing_to_a_device_keeps_the_device():
    write_file("/dev/null", "discarded")

    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(EnvironmentFault, match="cannot write /dev/full: No space left"):
        write_file("/dev/full", "x" * 100_000)
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_read_only_file_is_refused(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may write anything")
    file = tmp_path / "f"
    file.write_text("kept")
    file.chmod(0o444)
    with pytest.raises(UsageError, match="Permission denied"):
        write_file(file, "new")

    assert file.read_text() == "kept"


@pytest.mark.parametrize("name", ["loop", "folder", "no/where", "nul\0"])
def test_a_path_that_cannot_hold_a_file_is_reported_with_a_remedy(tmp_path: Path, name: str):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot write") as error:
        write_file(f"{tmp_path}/{name}", "x")

    assert error.value.remedy


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.ENOSPC, EnvironmentFault, "free some space, or write to another disk"),
        (errno.EFBIG, EnvironmentFault, "raise the limit on the size of files (`ulimit -f`)"),
        (errno.EPIPE, UsageError, "the reader of this pipe has closed it; name a file"),
        (errno.EACCES, UsageError, "name a file in a writable folder"),
    ],
)
def test_a_failed_write_keeps_the_old_file_and_has_a_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[UsageError | EnvironmentFault],
    remedy: str,
) -> None:
    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "f").write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind) as error:
        write_file(tmp_path / "f", "new")

    assert error.value.message == f"cannot write {tmp_path}/f: {os.strerror(number)}"
    assert error.value.remedy.startswith(remedy)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "old")]


def test_a_file_that_cannot_be_synced_with_its_folder_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fail_for_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "")
        real(handle)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    write_file(tmp_path / "f", ["tw", b"o", "\udc80"])

    assert (tmp_path / "f").read_bytes() == b"two\\udc80"


def test_a_name_of_an_open_stream_writes_to_it_and_leaves_it_open(tmp_path: Path) -> None:
    link = tmp_path / "link"
    for form in ("/dev/fd/{}", "/proc/self/fd/{}", f"/proc/{os.getpid()}/fd/{{}}", str(link)):
        reading, writing = os.pipe()
        link.unlink(missing_ok=True)
        link.symlink_to(f"/dev/fd/{writing}")
        write_file(form.format(writing), form)
        os.write(writing, b"!")
        os.close(writing)
        with os.fdopen(reading) as stream:
            assert stream.read() == f"{form}!"


# --- reading ---
def test_an_input_up_to_the_limit_is_read_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * (2 << 20))
    handle = os.open(file, os.O_RDONLY)

    assert read_bytes(file, 2 << 20) == file.read_bytes() == read_bytes(handle, 3 << 20)
    assert os.lseek(handle, 0, os.SEEK_CUR) == 2 << 20, "a given descriptor stays open"
    os.close(handle)
    with pytest.raises(OSError, match="larger than 1 MiB") as error:
        read_bytes(file, (2 << 20) - 1)
    assert error.value.errno == errno.EFBIG
    with pytest.raises(IsADirectoryError):
        open_bytes(tmp_path)


def test_a_pipe_is_read_to_its_end_unless_no_data_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"some ")
    os.write(writing, b"text")
    os.close(writing)

    assert read_bytes(reading) == b"some text"
    os.close(reading)
    monkeypatch.setattr(file_io, "READ_TIMEOUT_S", 0.02)
    reading, writing = os.pipe()
    with pytest.raises(TimeoutError, match="received no data for 0 s"):
        read_bytes(reading)
    os.close(reading)
    os.close(writing)


def test_lines_are_read_up_to_a_number_of_lines_or_of_characters() -> None:
    lines = iter(["ab", "cd", "ef", "gh", "ij", "kl"])

    assert read_lines(lines, 2, 100) == ["ab", "cd"]
    assert read_lines(lines, 9, 3) == ["ef", "gh"], "the line that exceeds the size is the last"
    assert read_lines(lines, 9, 4) == ["ij", "kl"]
    assert read_lines(lines, 9, 4) == []


def test_the_files_below_a_folder_are_listed_without_links_to_folders(tmp_path: Path) -> None:
    for name in ("b/c/1", "b/2", "a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "file_link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    unreadable: list[OSError] = []

    names = ["a", "b/2", "b/c/1", "file_link"]
    assert files_below(tmp_path) == [tmp_path / name for name in names]
    assert files_below(tmp_path / "absent", unreadable) == []
    assert [error.errno for error in unreadable] == [errno.ENOENT]
    with pytest.raises(
        UsageError, match=r"cannot read the folder .*/ab\\nsent: No such file"
    ) as error:
        files_below(tmp_path / "ab\nsent")
    assert error.value.remedy == "name files, or a folder that you may read"


def test_only_pipes_terminals_and_devices_are_streams(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    paths = ["pipe", "/dev/null", "file", ".", "absent", "nul\0"]

    assert [is_stream(tmp_path / path) for path in paths] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


# --- texts ---
def test_control_characters_are_shown_escaped():
    assert escape_control_characters("a\x1b[31m\x9bb\u202ec\nd") == "a\\x1b[31m\\x9bb\\u202ec\nd"
    assert escape_control_characters("a\r\n\tb", one_line=True) == "a\\r\\n\\tb"
    assert (
        json.loads(escape_json_control_characters(json.dumps("\x9b\x7f", ensure_ascii=False)))
        == "\x9b\x7f"
    )


# --- locks ---
def test_a_locked_file_is_refused_until_the_lock_is_released(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("results")
    lock = FileLock(tmp_path / "results")
    for name in ("results", "link"):
        with pytest.raises(UsageError) as error:
            FileLock(tmp_path / name)
        assert error.value.message == f"another command is writing {tmp_path}/{name}"
        assert error.value.remedy == "wait until it ends, or name another file"
    assert sorted(os.listdir(tmp_path)) == ["link", "results.lock"]
    lock.release()
    lock.release()
    assert os.listdir(tmp_path) == ["link"]
    (tmp_path / "results.lock").write_text("left over by a killed command")
    FileLock(tmp_path / "results").release()
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing_locks(monkeypatch, number)
    both = [FileLock(tmp_path / "results") for _ in range(2)]  # neither refuses the other
    assert os.listdir(tmp_path) == []
    for lock in (*both, FileLock(tmp_path / "no" / "folder")):
        lock.release()

    monkeypatch.undo()
    FileLock(tmp_path / "results").release()
    assert os.listdir(tmp_path) == []


def test_without_locks_the_lock_file_of_another_command_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may run out of locks while another command holds one."""
    (tmp_path / "results.lock").touch()
    failing_locks(monkeypatch, errno.ENOLCK)
    FileLock(tmp_path / "results").release()
    assert os.listdir(tmp_path) == ["results.lock"]


def test_other_errors_of_a_lock_are_raised_and_close_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_locks(monkeypatch, errno.EIO)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="told to fail"):
        FileLock(tmp_path / "results")

    assert len(os.listdir("/proc/self/fd")) == open_files
    assert os.listdir(tmp_path) == []


def failing_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let each lock fail with this error."""
    import fcntl

    def fail(descriptor: int, how: int) -> None:
        raise OSError(number, "told to fail")

    monkeypatch.setattr(fcntl, "flock", fail)


def test_a_lock_file_that_its_holder_has_just_removed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this process and the next one would both have a lock."""
    real = file_lock._is_same_file
    tries: list[bool] = []

    def removed_once(descriptor: int, path: str) -> bool:
        if not tries:
            os.unlink(path)
        tries.append(real(descriptor, path))
        return tries[-1]

    monkeypatch.setattr(file_lock, "_is_same_file", removed_once)
    lock = FileLock(tmp_path / "results")

    assert tries == [False, True]
    with pytest.raises(UsageError):
        FileLock(tmp_path / "results")
    lock.release()
