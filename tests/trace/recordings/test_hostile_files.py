"""Damaged, misnamed and doubled files: each error names the file and the remedy."""

from __future__ import annotations

import gzip
import json
import os
import shutil

import pytest

from distsim.common import file_io
from distsim.common.errors import UsageError
from distsim.trace.recordings.read_recording import SAMPLE, read_recording
from distsim.trace.recordings.readers.kineto_file import read_profile


def sample_profile(rank: int) -> dict:
    content = next(SAMPLE.glob(f"*{rank}.json*")).read_bytes()
    is_gzip = content.startswith(b"\x1f\x8b")
    return json.loads(gzip.decompress(content) if is_gzip else content)


@pytest.mark.parametrize("name", ["rank0.json", "run.jsonl", "table.csv", "table.parquet"])
def test_a_pipe_without_a_writer_is_refused_with_a_reason(tmp_path, monkeypatch, name):
    monkeypatch.setattr(file_io, "READ_TIMEOUT_S", 0.1)
    os.mkfifo(tmp_path / name)

    with pytest.raises(UsageError, match=r"received no data for|cannot be read from a pipe"):
        read_recording([tmp_path / name])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 10**400, -1e18])
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_a_time_that_is_none_is_refused_with_the_name_of_the_file(tmp_path, key, value):
    profile = sample_profile(2)
    event = next(e for e in profile["traceEvents"] if str(e.get("name")).startswith("aten::"))
    event[key] = value
    file = tmp_path / "rank2.json"
    file.write_text(json.dumps(profile))

    with pytest.raises(UsageError, match=f"rank2.json: event 'aten::.*' has {key}="):
        read_profile(file)


def test_the_content_decides_whether_a_file_is_compressed(tmp_path):
    text = json.dumps(sample_profile(0)).encode()
    (tmp_path / "rank0.json.gz").write_bytes(text)
    (tmp_path / "rank1.json").write_bytes(gzip.compress(json.dumps(sample_profile(1)).encode()))

    assert read_profile(tmp_path / "rank0.json.gz").rank == 0
    assert read_profile(tmp_path / "rank1.json").rank == 1


def test_a_file_that_is_given_twice_is_read_once():
    assert len(read_recording([SAMPLE, *sorted(SAMPLE.glob("*.json*"))]).files) == 4


def test_a_profile_without_a_rank_keeps_its_remedy(tmp_path):
    profile = sample_profile(0)
    del profile["distributedInfo"]
    (tmp_path / "host.json").write_text(json.dumps(profile))

    with pytest.raises(UsageError) as caught:
        read_recording([tmp_path])

    assert "rank<N>.json" in caught.value.remedy


def test_a_rank_of_many_digits_in_a_file_name_is_no_rank(tmp_path):
    profile = sample_profile(0)
    del profile["distributedInfo"]
    file = tmp_path / f"rank{'9' * 200}.json"
    file.write_text(json.dumps(profile))

    with pytest.raises(UsageError, match="without a rank"):
        read_profile(file)


def test_a_stray_table_among_profiles_is_named(tmp_path):
    for file in SAMPLE.glob("*.json*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "stray.csv").write_text("a,b\n")

    with pytest.raises(UsageError, match=r"stray.csv is an operation table, but .* is a PyTorch"):
        read_recording([tmp_path])


def test_an_unreadable_subfolder_is_noted(tmp_path, monkeypatch):
    def walk(top, onerror):
        onerror(PermissionError(13, "Permission denied", f"{top}/secret"))
        yield str(top), [], [file.name for file in SAMPLE.glob("*.json*")]

    monkeypatch.setattr("distsim.trace.recordings.read_recording.os.walk", walk)

    recording = read_recording([SAMPLE])

    assert f"{SAMPLE}/secret cannot be read: Permission denied" in recording.notes
