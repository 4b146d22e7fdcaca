"""Fuzz targets: functions that take bytes, give them to a reader, and fail only for a bug.

A target raises nothing for bad input, because `UserError` and `EnvironmentFault` are the right
answers to it. Everything else is a bug: another exception, no end, too much memory, a control
character in the answer. `tests.fuzz` runs the targets on mutants, `tests.fuzz.atheris_entry` under
Atheris, and `tests/fuzz/test_corpus.py` on the inputs that once failed.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import distsim
from distsim.common.errors import RESOURCE_ERRORS, EnvironmentFault, UserError
from distsim.common.file_io import escape_control_characters

ROOT = Path(__file__).resolve().parents[2]
#: A program with more calls is a large job, not a bug.
_MAX_CALLS: Final = 3000
_SMALL_SCENARIO = """\
world: 4
tensors: {x: {shape: [1024]}}
vars: {n: 2}
program:
  - repeat: {times: n, steps: [{compute: {time: 1 ms}}, {all_reduce: x}]}
"""
#: Commands that start processes, inspect live ones, or write files of fixed names.
_NOT_RUN: Final = frozenset(
    [
        "capture",
        "bench",
        "demo",
        "plan",
        "sweep",
        "calibrate",
        "--real",
        "--pid",
        "--live",
        "--torchrun",
        "--address",
    ]
)
_ANSWERS: Final = (UserError, EnvironmentFault, *RESOURCE_ERRORS)


class Target(NamedTuple):
    #: Raises for a bug.
    fuzz: Callable[[bytes], None]
    #: The kind of file, which decides how `tests.fuzz.mutations` damages it.
    suffix: str
    #: Valid inputs.
    seeds: Callable[[], list[bytes]]


@contextlib.contextmanager
def _file(data: bytes, name: str) -> Iterator[Path]:
    """A file with these bytes, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="distsim-fuzz-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def _check_text(text: str) -> None:
    assert escape_control_characters(text) == text, "a control character in the answer"


def _ask(question: Callable[[], Any]) -> Any:
    """The answer to a question, whose text is checked, or None if the input is refused.

    The text of an error is escaped when the command line prints it.
    """
    try:
        answer = question()
    except _ANSWERS:
        return None
    if hasattr(answer, "to_text"):
        _check_text(answer.to_text())
        json.dumps(answer.to_json())
    return answer


# --- targets ---


def fuzz_scenario(data: bytes) -> None:
    with _file(data, "case.yaml") as path:
        scenario = _ask(lambda: distsim.load(path))
        if scenario is None:
            return
        _ask(lambda: distsim.simulate(scenario, max_calls=_MAX_CALLS))
        _ask(lambda: distsim.check(scenario, max_calls=_MAX_CALLS))


def fuzz_trace(data: bytes) -> None:
    with _file(data, "case.jsonl") as path:
        for question in (distsim.replay, distsim.doctor, distsim.slow):
            _ask(lambda question=question: question(path))  # type: ignore[misc]
        _ask(lambda: distsim.compare(path, path))


def fuzz_dump(data: bytes) -> None:
    with _file(data, "trace_rank_0") as path:
        _ask_doctor(path)


def fuzz_log(data: bytes) -> None:
    with _file(data, "job.log") as path:
        _ask_doctor(path)


def fuzz_bundle(data: bytes) -> None:
    with _file(data, "job.zip") as path:
        _ask_doctor(path)


def _ask_doctor(path: Path) -> None:
    answer = _ask(lambda: distsim.doctor(path))
    if answer is not None:
        _ask(answer.minimal_scenario)


def fuzz_profile(data: bytes) -> None:
    with _file(data, "rank0.json") as path:
        _ask(lambda: distsim.slow(path, jobs=1))


def fuzz_table(data: bytes) -> None:
    with _file(data, "table.csv") as path:
        _ask(lambda: distsim.slow(path))


def fuzz_chakra(data: bytes) -> None:
    with _file(data, "job.0.et") as path:
        _ask(lambda: distsim.slow(path, jobs=1))
        _ask(lambda: distsim.replay(path))


def fuzz_nsight(data: bytes) -> None:
    with _file(data, "rank0.sqlite") as path:
        _ask(lambda: distsim.slow(path, jobs=1))
        _ask_doctor(path)


def fuzz_cluster(data: bytes) -> None:
    with _file(data, "case.yaml") as path:
        scenario = distsim.load(_SMALL_SCENARIO)
        _ask(lambda: distsim.simulate(scenario, cluster=str(path)))


def fuzz_overrides(data: bytes) -> None:
    """Each line is an argument of ``--set``."""
    sets = data.decode("utf-8", "replace").split("\n")
    scenario = _ask(lambda: distsim.load(_SMALL_SCENARIO, sets=sets))
    if scenario is not None:
        _ask(lambda: distsim.simulate(scenario, max_calls=_MAX_CALLS))


def fuzz_command_line(data: bytes) -> None:
    """Each line is a word. SCENARIO and TRACE are files; nothing is written outside a folder."""
    words = data.decode("utf-8", "replace").replace("\0", "").split("\n")[:12]
    if not _NOT_RUN.isdisjoint(word.partition("=")[0] for word in words):
        return
    with _file(_SMALL_SCENARIO.encode(), "case.yaml") as path, contextlib.chdir(path.parent):
        Path("case.jsonl").write_bytes((ROOT / "traces" / "collectives_gloo_2.jsonl").read_bytes())
        places = {"SCENARIO": "case.yaml", "TRACE": "case.jsonl"}
        # Without slashes and dots, all names are in this folder.
        safe = [places.get(word, re.sub(r"[/~]|\.\.", "_", word)) for word in words]
        _run_command(safe)


def _run_command(words: list[str]) -> None:
    from distsim.cli.process import _run_command as run_command

    output, errors = _text_stream(), _text_stream()
    earlier = sys.argv, sys.stdin
    sys.argv, sys.stdin = ["distsim", *words], _text_stream()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = run_command()
    finally:
        sys.argv, sys.stdin = earlier
    assert status in (None, 0, 1, 2), f"exit status {status}: {_written(errors)[-800:]}"
    # Typer prints words of the command line as they are: the user has just typed them.
    if "Usage:" not in _written(errors):
        _check_text(_written(output) + _written(errors))


def _text_stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("utf-8", "replace")


# --- seeds ---


def _small_files(pattern: str) -> list[bytes]:
    paths = sorted(ROOT.glob(pattern))
    return [path.read_bytes() for path in paths if path.stat().st_size < 60_000]


def _members_of_bundles(suffixes: tuple[str, ...]) -> list[bytes]:
    members = []
    for path in sorted((ROOT / "tests" / "data" / "doctor" / "hangs").glob("*.zip"))[:8]:
        with zipfile.ZipFile(path) as bundle:
            names = [name for name in bundle.namelist() if name.endswith(suffixes)]
            members += [bundle.read(name)[:60_000] for name in names[:3]]
    return members


def _dumps() -> list[bytes]:
    from tests.support.doctor_dumps import dump, entry

    calls = [entry(number, "all_reduce", line=7) for number in range(1, 5)]
    calls += [entry(1, "send 0->1", state="started")]
    data = dump(calls, {"0": ("default_pg", [0, 1])})
    return [json.dumps(data).encode(), pickle.dumps(data), pickle.dumps(data, protocol=2)]


def _logs() -> list[bytes]:
    from tests.hang_doctor.test_logs import watchdog

    stacks = _small_files("tests/data/doctor/threads/*.txt")
    return ["\n".join(watchdog()).encode(), *_members_of_bundles((".log", ".txt")), *stacks]


def _profiles() -> list[bytes]:
    from distsim.trace.recordings.read_recording import SAMPLE

    sample = gzip.decompress((SAMPLE / "rank0.json.gz").read_bytes())
    event = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    names = ("ProfilerStep#0", "aten::mm", "c10d::allreduce_", "gloo:all_reduce")
    events = [
        {**event, "name": name, "ts": 10.0 * place, "dur": 5.0}
        for place, name in enumerate(names * 3)
    ]
    info = {"rank": 0, "world_size": 2, "backend": "gloo"}
    return [json.dumps({"traceEvents": events, "distributedInfo": info}).encode(), sample]


def _tables() -> list[bytes]:
    from distsim.trace.recordings.readers.operation_table import COLUMNS

    rows = [",".join(COLUMNS)]
    for rank in (0, 1):
        for place, name in enumerate(("forward-compute", "backward-compute", "optimizer")):
            rows.append(f"{rank},0,{rank},0,{name},{0.1 * place},0.05,0,0")
    return ["\n".join(rows).encode()]


def _chakra_traces() -> list[bytes]:
    from tests.support.chakra_traces import COLLECTIVE, COMPUTE, Node, chakra_file, linked_rank

    call = {"comm_type": 0, "comm_size": 64}
    alone = [Node(1, "mm", COMPUTE, (), 9, 5), Node(2, "ar", COLLECTIVE, (1,), 5, 20, call)]
    return [chakra_file(alone), chakra_file(linked_rank(1.0, 1.5, steps=2))]


def _nsight_exports() -> list[bytes]:
    from tests.support.nsight_exports import write_job

    with tempfile.TemporaryDirectory() as folder:
        write_job(Path(folder), (1.0,))
        return [(Path(folder) / "report.0.sqlite").read_bytes()]


def _clusters() -> list[bytes]:
    from distsim.hardware.cluster import preset

    names = ("dgx-a100", "cpu-10gbe", "gb200-nvl72")
    return [json.dumps(preset(name).to_mapping(), default=str).encode() for name in names]


def _overrides() -> list[bytes]:
    return [
        b"n=3",
        b"world=8\nvars.n=world_size",
        b"tensors.x.shape=[4, 4]",
        b"program[0].repeat.times=5\nseed=7",
        b"cluster=dgx-h100\nbackend=nccl\noptions.timeout=3 s",
    ]


def _command_lines() -> list[bytes]:
    lines = (
        "simulate SCENARIO --backend nccl --what-if",
        "simulate SCENARIO --set n=3 --format json --seeds 2",
        "check SCENARIO --format sarif --max-states 50",
        "render SCENARIO --view timeline -o a.svg --ranks 0-3",
        "render SCENARIO --view dataflow --format dot",
        "replay TRACE --scale compute=0.5 --trace b.jsonl",
        "compare TRACE TRACE --tolerance 5% --format json",
        "doctor TRACE -o c.yaml --view wait-for",
        "slow TRACE --steps 0-1 --fail-above 10%",
        "report SCENARIO -o d.html",
        "explain all_reduce --cluster dgx-a100 --size 4KiB",
        "expand SCENARIO",
        "schema --format json",
        "clusters",
        "learn ranks",
        "new e.yaml --kind ring",
        "test SCENARIO --format junit",
        "shrink SCENARIO -o f.yaml",
        "run SCENARIO",
    )
    return [line.replace(" ", "\n").encode() for line in lines]


TARGETS: Final[dict[str, Target]] = {
    "scenario": Target(fuzz_scenario, ".yaml", lambda: _small_files("scenarios/**/*.yaml")),
    "trace": Target(fuzz_trace, ".jsonl", lambda: _small_files("traces/*.jsonl")),
    "dump": Target(fuzz_dump, ".json", _dumps),
    "log": Target(fuzz_log, ".log", _logs),
    "bundle": Target(fuzz_bundle, ".zip", lambda: _small_files("tests/data/doctor/hangs/*.zip")),
    "profile": Target(fuzz_profile, ".json", _profiles),
    "table": Target(fuzz_table, ".txt", _tables),
    "chakra": Target(fuzz_chakra, ".bin", _chakra_traces),
    "nsight": Target(fuzz_nsight, ".bin", _nsight_exports),
    "cluster": Target(fuzz_cluster, ".yaml", _clusters),
    "overrides": Target(fuzz_overrides, ".txt", _overrides),
    "command_line": Target(fuzz_command_line, ".txt", _command_lines),
}
