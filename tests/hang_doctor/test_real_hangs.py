"""`distsim doctor` on 24 real hangs of Gloo: their dumps, stacks and logs as the real tools wrote
them (benchmarks/doctor.py).
"""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from distsim.hang_doctor import Diagnosis, diagnose_hang, read_evidence
from distsim.hang_doctor.readers.file_names import rank_of_file_name

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT.parent / "shared" / "samples"
HANGS = sorted((ROOT / "tests" / "data" / "doctor" / "hangs").glob("*.zip"))


@pytest.fixture(autouse=True)
def _beside_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded paths are relative to the project, so that the lines of the programs are
    found.
    """
    monkeypatch.chdir(ROOT)


@cache
def _content(hang: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(hang) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def fault(hang: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(_content(hang)["fault.json"])
    return known


def diagnosed(
    hang: Path,
    folder: Path,
    left_out: set[int],
    kinds: tuple[str, ...] = ("nccl_trace", "pyspy", "stack", "rank"),
) -> Diagnosis:
    """What is said without the files of some ranks, or of other tools than ``kinds``."""
    for name, data in _content(hang).items():
        if (
            name != "fault.json"
            and rank_of_file_name(name) not in left_out
            and name.startswith(kinds)
        ):
            (folder / name).write_bytes(data)
    return diagnose_hang(read_evidence([str(folder)]))


def without(hang: Path) -> Iterator[set[int]]:
    """One rank missing each time, then half of them, drawn by a fixed number."""
    ranks = fault(hang)["ranks"]
    yield from ({rank} for rank in range(ranks))
    chance = random.Random(hang.name)
    for _ in range(3):
        yield set(chance.sample(range(ranks), ranks // 2))


def test_there_are_24_hangs() -> None:
    assert len(HANGS) == 24


@pytest.mark.parametrize("hang", HANGS, ids=lambda p: p.stem)
def test_all_files_together_name_the_cause_and_its_line_and_blame_no_other_rank(
    hang: Path, tmp_path: Path
) -> None:
    found, known = diagnosed(hang, tmp_path, set()), fault(hang)
    main = found.main

    assert main is not None
    assert set(main.culprits or main.ranks) & set(known["faulty"])
    assert {f.line for _, _, f in main.lines if f is not None} & set(known["lines"])
    assert set(found.culprits) <= set(known["faulty"])


@pytest.mark.parametrize("hang", HANGS, ids=lambda p: p.stem)
def test_without_the_files_of_some_ranks_no_innocent_rank_is_blamed(
    hang: Path, tmp_path: Path
) -> None:
    known = set(fault(hang)["faulty"])
    wrong = []
    for number, left_out in enumerate(without(hang)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = diagnosed(hang, folder, left_out)
        if not set(found.culprits) <= known:
            wrong.append((left_out, found.culprits, found.main and found.main.title))

    assert wrong == []


@pytest.mark.parametrize(
    "kinds", [("nccl_trace",), ("pyspy",), ("stack",), ("rank",), ("stack", "rank")], ids="+".join
)
def test_the_files_of_one_tool_blame_no_innocent_rank(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    wrong = []
    for hang in HANGS:
        folder = tmp_path / hang.stem
        folder.mkdir()
        if not any(name.startswith(kinds) for name in _content(hang)):
            continue
        found = diagnosed(hang, folder, set(), kinds)
        if not set(found.culprits) <= set(fault(hang)["faulty"]):
            wrong.append((hang.stem, found.culprits, found.main and found.main.title))

    assert wrong == []


def test_an_archive_is_read_like_the_files_in_it(tmp_path: Path) -> None:
    hang = next(h for h in HANGS if h.stem == "skipped_all_reduce")

    packed, unpacked = diagnose_hang(read_evidence([str(hang)])), diagnosed(hang, tmp_path, set())

    assert packed.main is not None
    assert unpacked.main is not None
    assert packed.main.title == unpacked.main.title


@pytest.mark.skipif(
    not SAMPLES.is_dir(),
    reason="the samples of other tools' files lie beside the project, and not here",
)
@pytest.mark.parametrize(
    "part",
    [
        "flight-recorder",
        "kineto",
        "nccl-tests",
        "pytorch-et",
        "chakra-et",
        "simai",
        "astra-network",
        "pp-schedules",
    ],
)
def test_every_sample_of_another_tool_is_read_or_known_to_contain_no_evidence(part: str) -> None:
    files = read_evidence(
        [str(p) for p in sorted((SAMPLES / part).rglob("*")) if p.is_file()]
    ).files

    assert files
    assert [(file.path, file.problem) for file in files if file.problem] == []


@pytest.mark.skipif(
    not SAMPLES.is_dir(),
    reason="the samples of other tools' files lie beside the project, and not here",
)
def test_the_sample_dumps_name_the_rank_that_is_behind_and_leave_the_others_undecided() -> None:
    def told(name: str) -> Diagnosis:
        return diagnose_hang(
            read_evidence([str(SAMPLES / "flight-recorder" / f"gloo-torch2.13-{name}")])
        )

    missing = told("missing").main
    assert missing is not None
    assert missing.title.startswith(
        "rank 3 is behind (at call 1): ranks 0-2 wait for it in all_reduce (default group, call 2)"
    )
    # Gloo records no messages, so neither set shows whether its job hangs.
    for name in ("ok", "ring_recv_first"):
        main = told(name).main
        assert main is not None
        assert (main.kind, main.grade, main.culprits) == ("undecided", "unknown", ())
