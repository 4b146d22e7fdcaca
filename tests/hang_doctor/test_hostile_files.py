"""`distsim doctor` on files that mean harm, or are damaged: refused one by one, by name, before
they cost anything.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from distsim.common import file_io
from distsim.hang_doctor import diagnose_hang, read_evidence
from distsim.hang_doctor.readers import flight_recorder, input_files, safe_pickle
from distsim.hang_doctor.readers.file_names import rank_of_file_name
from distsim.hang_doctor.readers.input_files import MAX_BYTES
from tests.hang_doctor.test_logs import watchdog
from tests.support.doctor_dumps import dump, entry, write


def test_a_pipe_without_a_writer_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "READ_TIMEOUT_S", 0.1)
    os.mkfifo(tmp_path / "fr_rank_0")

    (file,) = read_evidence([str(tmp_path / "fr_rank_0")]).files

    assert "received no data for" in file.problem


class Call:
    """A pickle that would run a command of the shell."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def problem(tmp_path: Path, data: bytes, name: str = "nccl_trace_rank_0") -> str:
    (tmp_path / name).write_bytes(data)
    (file,) = read_evidence([str(tmp_path / name)]).files
    return file.problem


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(
    tmp_path: Path, protocol: int
) -> None:
    mark = tmp_path / "owned"

    said = problem(tmp_path, pickle.dumps(Call(f"touch {mark}"), protocol))

    assert "would load or call Python code" in said
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02\x58\xff\xff\xff\xffabc.",  # a text of 4 GiB
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"abc.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2 GiB
        b"\x80\x02\x72\xff\xff\xff\xff.",  # memo at 4 billion, of an empty stack
        b"\x80\x02}(" + b"K\x01" * 3 + b"u.",  # a dict with an odd number of items
        b"\x80\x02" + b"(" * 1000 + b".",
        b"\x80\x02" + b"]" * 300_000 + b".",
        b"\x80\x02" + b"]" * 100 + b"a" * 200 + b".",
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02\x82\x01.",  # the extension registry
        b"\x80\x02",
        b"\x80\x02.",
    ],
)
def test_a_damaged_or_unbounded_pickle_is_refused(tmp_path: Path, data: bytes) -> None:
    assert problem(tmp_path, data).startswith(("unsafe or damaged pickle", "this pickle is not"))


def nested_tuple(depth: int) -> bytes:
    """A pickle that builds a tuple of 2**depth paths and puts it on the stack."""
    return b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * depth


@pytest.mark.parametrize(
    "data",
    [
        nested_tuple(60) + b"}h\x00K\x01s.",  # as a key: its hash would take 2**60 steps
        nested_tuple(60) + b".",
        b"\x80\x02}K\x01\x85K\x01s.",  # a flat tuple as a key
        b"\x80\x02}NK\x01s.",
        b"\x80\x02}G" + struct.pack(">d", 1.5) + b"K\x01s.",
        b"\x80\x02}\x8a\x09" + ((1 << 61) - 1).to_bytes(9, "little") + b"K\x01s.",  # hash 0
    ],
)
def test_a_key_whose_hash_could_be_slow_is_refused(tmp_path: Path, data: bytes) -> None:
    started = time.process_time()

    assert problem(tmp_path, data).startswith("unsafe or damaged pickle: it has a ")
    assert time.process_time() - started < 0.3


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("dump7.pickle.gz", 7),
        ("v2-final", None),
        ("rank_7" + ".txt" * 100, None),
        ("-" * 300 + "rank_7.log", 7),
        ("rank_" * 50_000, None),
        ("7." * 50_000, None),
    ],
)
def test_the_rank_in_a_long_file_name_is_found_at_once(name: str, rank: int | None) -> None:
    started = time.process_time()

    assert rank_of_file_name(name, is_dump=True) == rank
    assert time.process_time() - started < 0.3


def test_plain_data_is_read_like_by_pickle() -> None:
    data = {
        "a": [1, -2, 2**40, 1.5, None, True, ("x", "é\n"), (1, 2, 3, 4)],
        "b": {1: {"c": []}},
        "long": "y" * 300,
        "": [[], {}, (), ""],
    }
    data["same"] = data["a"]

    for protocol in range(6):
        assert safe_pickle.loads_plain(pickle.dumps(data, protocol)) == data


def test_a_dump_that_contains_itself_is_read_in_finite_time(tmp_path: Path) -> None:
    looped: dict[str, Any] = dump([entry(1, "all_reduce")])
    looped["entries"][0]["frames"] = looped["entries"]
    looped["entries"].append(looped["entries"])

    assert problem(tmp_path, pickle.dumps(looped, 2)) == "damaged entries: 1"


def test_entries_without_a_group_name_next_to_a_damaged_entry_count_as_damaged(
    tmp_path: Path,
) -> None:
    nameless = {**entry(1, "all_reduce"), "process_group": None, "pg_id": None}
    data: dict[str, Any] = dump([nameless, entry(2, "all_reduce")])
    data["entries"].append("damaged")

    assert problem(tmp_path, pickle.dumps(data, 2)) == "damaged entries: 2"


def test_damaged_dumps_are_read_in_part_or_refused_and_blame_no_wrong_rank(
    tmp_path: Path,
) -> None:
    """Every value of an entry is replaced by something foolish, one at a time."""
    odd: list[Any] = [
        None,
        -1,
        2**70,
        "x",
        [],
        {},
        [[]],
        [["x"]],
        True,
        1.5,
        [{"line": "x"}],
        ("a",),
        "\x1b[31m",
    ]
    chance = random.Random(7)
    for key in entry(1, "all_reduce", 10):
        spoilt = entry(1, "all_reduce", 10) | {key: chance.choice(odd)}
        write(
            tmp_path,
            {
                0: dump([entry(1, "all_reduce")]) | {"entries": [spoilt]},
                1: dump([entry(1, "all_reduce")]),
            },
        )
        assert diagnose_hang(read_evidence([str(tmp_path)])).culprits == ()


def test_a_file_of_two_gigabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    """It has holes: whoever read it would have to read them."""
    for name in ("nccl_trace_rank_0", "job.log"):
        with open(tmp_path / name, "wb") as file:
            file.write(b"\x80\x02" if name.startswith("nccl") else b"text\n")
            file.truncate(2 << 30)

    files = read_evidence([str(tmp_path)]).files

    assert [
        f.problem.startswith(f"the file has 2048 MiB; the limit is {MAX_BYTES >> 20}")
        for f in files
    ] == [True, True]


def test_decompression_bombs_are_refused_by_their_expanded_size(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank_0.log", bytes(8 << 20))

    assert "unpacks to" in problem(tmp_path, gzip.compress(bytes(8 << 20)), "a.gz")
    assert "unpacks to 8 MiB" in problem(tmp_path, packed.getvalue(), "a.zip")


def test_json_with_too_many_parts_is_refused_before_parsing_and_a_json_like_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 MiB hold seven million damaged entries, or forty million empty ones."""
    monkeypatch.setattr(input_files, "_MAX_OBJECTS", 100)
    entries = ",".join(['{"x": 1}'] * 200)
    line = "[rank0]:[W1122 10:00:00 socket.cpp:1] [c10d] a warning\n"

    assert "the JSON has more than 100 objects" in problem(
        tmp_path, f'{{"version": "2.10", "entries": [{entries}]}}'.encode()
    )
    assert "JSON" not in problem(tmp_path, (line * 100).encode(), "rank_0.log")


def test_the_latest_entries_of_a_too_long_dump_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_MAX_ENTRIES", 3)
    write(tmp_path, {0: dump([entry(n, "all_reduce") for n in range(1, 9)])})

    evidence = read_evidence([str(tmp_path)])

    assert [f.problem for f in evidence.files] == ["only the latest 3 entries are read"]
    assert sorted(c.number for c in evidence.ranks[0].calls) == [6, 7, 8]


def test_a_zip_with_a_false_size_is_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rank_0.log", bytes(3 << 20))
    data = packed.getvalue().replace(struct.pack("<I", 3 << 20), struct.pack("<I", 1000))

    assert problem(tmp_path, data, "a.zip") != ""


def test_the_complete_part_of_a_truncated_gzip_is_read(tmp_path: Path) -> None:
    data = gzip.compress(("\n".join(watchdog()) + "\n").encode(), mtime=0)
    (tmp_path / "job.log.gz").write_bytes(data[:-12])

    evidence = read_evidence([str(tmp_path)])

    assert evidence.files[0].problem == ""
    assert sorted(evidence.ranks) == [0, 1, 2, 3]


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    assert problem(tmp_path, b"[" * 100_000 + b"]" * 100_000, "rank_0.json") != ""


def test_a_file_without_evidence_is_reported_as_such(tmp_path: Path) -> None:
    assert "JSON of an unknown kind" in problem(
        tmp_path, json.dumps({"a": 1}).encode(), "rank_0.json"
    )
    assert "neither text nor a pickle" in problem(tmp_path, bytes(range(256)) * 40, "rank_0")
    assert "no torch or NCCL line" in problem(tmp_path, b"hello\nworld\n", "rank_0.log")
    assert "the file name has none" in problem(tmp_path, pickle.dumps(dump([]), 2), "dump.pkl")


def test_control_characters_of_a_log_do_not_reach_the_report(tmp_path: Path) -> None:
    from distsim.common.file_io import escape_control_characters
    from distsim.output.text.diagnosis import doctor_text

    lines = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/job/\x1b]0;x\x07.py", line 1, in f',
        "[rank1]: ValueError: \x1b[2J\x9b31m",
    ]
    (tmp_path / "job.log").write_text("\n".join(lines))

    text = escape_control_characters(doctor_text(diagnose_hang(read_evidence([str(tmp_path)]))))

    assert "\x1b" not in text
    assert "\x9b" not in text
