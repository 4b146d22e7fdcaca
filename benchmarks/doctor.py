"""How often `distsim doctor` finds the cause of real hangs, also with files missing.

    python benchmarks/doctor.py record DIR      # runs them (needs torch and py-spy): dumps, stacks, logs
    python benchmarks/doctor.py score DIR       # reads them, with 0, 25 and 50 % of the ranks' files missing

The hangs are those of benchmarks/doctor_hangs.py. Right: doctor names a faulty rank and a marked
line. Open: doctor blames no rank. Wrong: doctor blames a rank that is not at fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SHARES = (0.0, 0.25, 0.5)
DRAWS = 3


class Score(NamedTuple):
    """What a diagnosis is worth against the planted fault."""

    right: bool
    wrong: bool
    said: str


# --- recording ---


def record(folder: Path, only: str = "") -> None:
    """Run every hang and leave in ``folder/NAME`` what its ranks left."""
    importlib.import_module("torch._dynamo")  # the dump of a stack imports it, for seconds

    sys.path.insert(0, str(HERE))
    from doctor_hangs import FAULTS

    for program, (ranks, faulty) in FAULTS.items():
        if only and program.__name__ != only:
            continue
        here = folder / program.__name__
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        (here / "fault.json").write_text(
            json.dumps({"ranks": ranks, "faulty": sorted(faulty), "lines": _marked(program)})
        )
        _hang(program, ranks, here)
        print(f"recorded {program.__name__}", flush=True)


def _marked(program: object) -> list[int]:
    """The lines with the mark, of the program and of the helpers that it calls."""
    import doctor_hangs

    found = []
    for part in (
        program,
        *([doctor_hangs.load_batch] if "load_batch" in inspect.getsource(program) else []),
    ):
        lines, start = inspect.getsourcelines(part)
        found += [start + i for i, line in enumerate(lines) if "# HERE" in line]
    return found


def _hang(program: object, ranks: int, here: Path) -> None:
    pids = [_fork(program, rank, ranks, here) for rank in range(ranks)]
    try:
        time.sleep(3.5)
        (here / "now").touch()
        tool = shutil.which("py-spy") or os.environ.get("PY_SPY", "py-spy")
        for rank, pid in enumerate(pids):
            os.kill(pid, signal.SIGUSR1)
            with open(here / f"pyspy_rank_{rank}.txt", "w") as out:
                subprocess.run(
                    [tool, "dump", "--locals", "--pid", str(pid)],
                    stdout=out,
                    stderr=subprocess.DEVNULL,
                    check=False,
                    timeout=30,
                )
        until = time.monotonic() + 15
        while time.monotonic() < until and not all(
            (here / f"done_{r}").exists() for r in range(ranks)
        ):
            time.sleep(0.1)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for name in ("now", "store", *(f"done_{r}" for r in range(ranks))):
        (here / name).unlink(missing_ok=True)


def _fork(program: object, rank: int, ranks: int, here: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        _rank(program, rank, ranks, here)
    os._exit(0)


def _rank(program: object, rank: int, ranks: int, here: Path) -> None:
    import faulthandler
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.dup2(os.open(here / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.register(
        signal.SIGUSR1,
        file=os.open(here / f"stack_rank_{rank}.txt", os.O_WRONLY | os.O_CREAT),
        all_threads=True,
    )
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(ranks))
    threading.Thread(target=_dump, args=(rank, here), daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{here}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    try:
        program(rank, torch.ones(1000))
    except Exception:
        for line in traceback.format_exc().splitlines():
            print(f"[rank{rank}]: {line}", file=sys.stderr, flush=True)
    time.sleep(600)


def _dump(rank: int, here: Path) -> None:
    import torch

    while not (here / "now").exists():
        time.sleep(0.05)
    (here / f"nccl_trace_rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    (here / f"done_{rank}").touch()


# --- scoring ---


def score(folder: Path) -> int:
    """Print a table; return 1 if doctor blamed a wrong rank."""
    cases = sorted(p.parent for p in folder.glob("*/fault.json"))
    accused = 0
    for share in SHARES:
        rights = draws = wrongs = there = gone = said = 0
        for case in cases:
            faulty = set(json.loads((case / "fault.json").read_text())["faulty"])
            for left_out in _left_out(case, share):
                found = judge(case, left_out)
                rights, draws, wrongs = rights + found.right, draws + 1, wrongs + found.wrong
                there += bool(faulty - left_out)
                gone += not faulty - left_out
                said += not faulty - left_out and "no file was given for" in found.said
                if not found.right:
                    missing = f"without {sorted(left_out)}: " if left_out else ""
                    print(
                        f"{'WRONG' if found.wrong else 'open '} {case.name}: {missing}{found.said}"
                    )
        print(f"{share:.0%} of the ranks' files missing: right {rights} of {draws}, wrong {wrongs}")
        print(
            f"  with files of a faulty rank: {there}; without: {gone}, of which doctor names the missing ranks in {said}"
        )
        accused += wrongs
    return int(accused > 0)


def _left_out(case: Path, share: float) -> Iterator[set[int]]:
    ranks = json.loads((case / "fault.json").read_text())["ranks"]
    count = round(ranks * share)
    if count == 0:
        yield from [set()] if share == 0 else []
        return
    chance = random.Random(f"{case.name} {share}")
    for _ in range(DRAWS):
        yield set(chance.sample(range(ranks), count))


def judge(case: Path, left_out: set[int]) -> Score:
    """The diagnosis of a case without the files of some ranks."""
    from distsim.hang_doctor import diagnose_hang, read_evidence
    from distsim.hang_doctor.readers.file_names import rank_of_file_name

    fault = json.loads((case / "fault.json").read_text())
    paths = [
        str(p)
        for p in sorted(case.iterdir())
        if p.name != "fault.json" and p.stat().st_size and rank_of_file_name(p.name) not in left_out
    ]
    found = diagnose_hang(read_evidence(paths))
    main = found.main
    faulty = set(fault["faulty"])
    if main is None:
        return Score(False, False, "no cause")
    named = bool(faulty & set(main.culprits or main.ranks))
    line = any(frame is not None and frame.line in fault["lines"] for _, _, frame in main.lines)
    wrong = bool(set(found.culprits) - faulty)
    return Score(
        named and line and not wrong,
        wrong,
        f"{main.title} {main.culprits} {[f.place for _, _, f in main.lines if f]}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("record", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    if given.what == "record":
        record(given.folder, given.only)
        return 0
    return score(given.folder)


if __name__ == "__main__":
    raise SystemExit(main())
