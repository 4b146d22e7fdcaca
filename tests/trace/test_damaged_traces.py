"""Traces that somebody damaged: read or refused, replayed or refused, compared; never another
error.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from distsim.analysis.run_comparison import compare_runs
from distsim.common.errors import UsageError
from distsim.output.text.comparison import compare_text
from distsim.output.text.replay_report import replay_text
from distsim.simulation.trace_replay import prepare_real_replay, replay_trace
from distsim.trace.jsonl import parse_trace

ROOT = Path(__file__).resolve().parents[2]
LINES = (
    (ROOT / "traces" / "hybrid_gloo_4.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
)
COLLECTIVES = (
    (ROOT / "traces" / "collectives_gloo_2.jsonl")
    .read_text(encoding="utf-8")
    .splitlines(keepends=True)
)

IN_A_CALL: list[Any] = [
    -1,
    0,
    2,
    99,
    10**6,
    2**31 - 1,
    None,
    "",
    "send",
    "barrier",
    "wait",
    "recv",
    "int8",
    [],
    {"waits": [1]},
    {"waits": "x"},
    10**18,
    True,
    {"input_parts": [1, 2]},
    {"ranks": [0, 9]},
    {"timeout_ns": "x"},
    {"queue": 3},
]
IN_THE_HEADER: list[Any] = [
    None,
    0,
    1,
    -1,
    "x",
    [],
    {},
    {"1": {"timeout_ns": 5}},
    {"1": {"timeout_ns": "x"}},
    [["world", [0, 1]]],
    [["a", ["x"]]],
    [["world", [0, 0]]],
    [[0, "killed", 5]],
    [[9, "killed", 5]],
    [[1]],
    {"preset": "x"},
    "nccl",
    10**9,
    10**15,
]


def header(**changed: Any) -> list[str]:
    return [json.dumps({**json.loads(LINES[0]), **changed}) + "\n", *LINES[1:]]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("world_size", 10**9),
        ("nodes", "x"),
        ("options", 3),
        ("prices", [1]),
        ("cluster", {}),
        ("ends", [[0, "killed"]]),
        ("link_faults", [["nic", 2]]),
        ("group_options", {"1": {"timeout_ns": "x"}}),
        ("groups", [["world"]]),
        ("groups", [["world", [0, [1]]]]),
    ],
)
def test_an_inconsistent_header_is_refused_by_field(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=r"<trace>:1: .*" + ("ranks" if value == 10**9 else key)):
        parse_trace(header(**{key: value}))


def test_a_call_of_a_group_that_the_header_lacks_is_refused_with_its_line() -> None:
    lacking = {key: value for key, value in json.loads(LINES[0]).items() if key != "groups"}

    with pytest.raises(UsageError, match=r"<trace>:2: the header has no such `group`, found"):
        parse_trace([json.dumps(lacking) + "\n", *LINES[1:]])


@pytest.mark.parametrize(
    "changed", [{"ends": [[9, "killed", 5]]}, {"groups": [["world", [0, 1, 2, 7]]]}], ids=str
)
def test_a_header_that_names_a_rank_outside_the_world_describes_no_program(
    changed: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match=r"<trace>:1: .*outside its world of 4"):
        parse_trace(header(**changed))


def with_work(*entry: Any) -> list[str]:
    """A trace whose first call lists this work of kernels."""
    record = json.loads(LINES[1])
    record["args"] = {**(record.get("args") or {}), "work": [entry]}
    return [LINES[0], json.dumps(record) + "\n", *LINES[2:]]


@pytest.mark.parametrize(
    "entry", [(0, 0, 1, "float32"), (1.5, 8, 1, "bfloat16"), (2**80 - 1, 1, 2**80 - 1, "float32")]
)
def test_work_of_kernels_may_be_as_small_as_one_empty_kernel_and_just_below_the_limit(
    entry: tuple[Any, ...],
) -> None:
    assert len(parse_trace(with_work(*entry))) == len(LINES) - 1


@pytest.mark.parametrize(
    "entry",
    [
        (-1, 0, 1, "float32"),
        (0, -1, 1, "float32"),
        (2**80, 0, 1, "float32"),
        (0, 2.0**80, 1, "float32"),
        (True, 0, 1, "float32"),
        (0, "8", 1, "float32"),
        (0, 0, 0, "float32"),
        (0, 0, 1.0, "float32"),
        (0, 0, 2**80, "float32"),
        (0, 0, 1, "float33"),
        (0, 0, 1),
    ],
)
def test_impossible_work_of_kernels_is_refused_with_its_line(entry: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=r"<trace>:2: expected `work` in `args`"):
        parse_trace(with_work(*entry))


def damaged(lines: list[str], rnd: random.Random) -> list[str]:
    """One to three changes: of a key of the header or of a call, or of which calls there are."""
    lines = list(lines)
    for _ in range(rnd.randint(1, 3)):
        line = 0 if rnd.random() < 0.35 else rnd.randrange(1, len(lines))
        if line and rnd.random() < 0.2:
            other = rnd.randrange(1, len(lines))
            lines[line], lines[other] = rnd.choice(
                [(lines[other], lines[line]), (lines[other], lines[other])]
            )
            continue
        record = json.loads(lines[line])
        record[rnd.choice(sorted(record))] = rnd.choice(IN_A_CALL if line else IN_THE_HEADER)
        lines[line] = json.dumps(record) + "\n"
    return lines


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("lines", [LINES, COLLECTIVES], ids=["hybrid", "collectives"])
def test_an_altered_trace_is_read_or_refused_without_a_traceback(
    lines: list[str], seed: int
) -> None:
    rnd, whole = random.Random(seed), parse_trace(lines)
    for _ in range(15):
        try:
            trace = parse_trace(damaged(lines, rnd))
        except UsageError:
            continue
        assert compare_text(compare_runs(whole, trace), ("a", "b"))
        try:
            assert replay_text(replay_trace(trace), "a")
            assert (
                prepare_real_replay(trace, "a", backend="gloo").program.world_size
                == trace.world_size
            )
        except UsageError:
            continue


def test_a_typo_in_the_path_gets_a_suggestion(cli: Any) -> None:
    done = cli("compare", "traces/hybird_gloo_4.jsonl", "traces/ring_gloo_4.jsonl")

    assert done.returncode == 2
    assert "did you mean traces/hybrid_gloo_4.jsonl?" in done.stderr


def test_a_truncated_file_is_replayed_as_partial_and_not_run_for_real(
    cli: Any, tmp_path: Path
) -> None:
    """It is read without any option; only `--real` wants --force."""
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(LINES)[:3000], encoding="utf-8")

    done, real = cli("replay", cut), cli("replay", cut, "--real")

    assert done.returncode == 1
    assert "partial: the file is cut, 4 of 22 calls are there" in done.stdout
    assert "completes" not in done.stdout
    assert real.returncode == 2
    assert "--force" in real.stderr


def test_a_scenario_given_as_a_trace_is_answered_with_the_right_command(cli: Any) -> None:
    done = cli("replay", "scenarios/hybrid.yaml", "--real")

    assert done.returncode == 2
    assert "distsim run scenarios/hybrid.yaml --real" in done.stderr


@pytest.mark.parametrize("command", ["check", "simulate"])
def test_a_trace_truncated_before_its_first_call_gets_no_verdict(
    cli: Any, tmp_path: Path, command: str
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text(LINES[0], encoding="utf-8")

    done = cli(command, cut)

    assert done.returncode == 2
    assert "the trace ends before its first call" in done.stderr
    assert "replay" in done.stderr
    assert "Not covered" not in done.stdout
