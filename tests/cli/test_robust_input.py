"""Input that is endless, silent, out of all bounds or plainly wrong is refused, with its place and
what to do.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distsim.common import file_io
from distsim.common.errors import ScenarioErrors, UsageError
from distsim.program.lower import lower
from distsim.program.size_limits import DEFAULT_MAX_CALLS, DEFAULT_MAX_RANKS, is_within_size_limit
from distsim.scenario import load, loads
from distsim.simulation.check_scenario import check_file, check_scenario
from distsim.simulation.expectations import check_expectations as held_to_expect
from distsim.simulation.simulate_scenario import simulate
from distsim.trace.jsonl import read_trace
from tests.support.harness import ROOT, work

BASE = "world: 4\ntensors: {x: {shape: [4]}, y: {shape: [4]}}\n"


def refusal(text: str) -> str:
    """The first problem of a scenario that is refused, which has a line."""
    with pytest.raises(ScenarioErrors) as error:
        lower(loads(text))
    first = error.value.problems[0]

    assert first.line
    return first.message


# --- out of bounds ---
@pytest.mark.parametrize("peer", ["-1", "'-1 if rank == 0 else 1'"])
def test_a_message_to_rank_minus_one_is_an_invalid_call_that_shows_the_written_value(peer: str):
    found = lower(
        loads(f"{BASE}program:\n  - send: {{tensor: x, dst: {peer}}}\n    ranks: 0\n")
    ).findings

    assert [(f.code, f.message.splitlines()[0]) for f in found] == [
        ("DS101", "send to rank -1, but the world has ranks 0 to 3")
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "world: 2\ntensors: {x: {shape: [2147483648, 2147483648]}}\nprogram: [{all_reduce: x}]",
            "tensor x has 1.84e+19 bytes",
        ),
        (
            "world: 2\nprogram:\n  - all_reduce: {tensor: {shape: [4294967296, 4294967296]}}",
            "the tensor has 7.38e+19 bytes",
        ),
        ("world: 2\ntensors: {x: {shape: [1.0e30]}}\nprogram: []", "a size must be an integer"),
        (
            BASE + "program: [{broadcast: {tensor: x, src: 9007199254740991}}]",
            "src: expected a 32-bit integer",
        ),
        (
            BASE + "program: [{broadcast: {tensor: x, src: 1e30}}]",
            "src: expected a 32-bit integer",
        ),
        (
            BASE + "program: [{isend: {tensor: x, dst: (rank + 1) % 4, tag: 2147483648, as: h}}]",
            "tag: expected a 32-bit integer",
        ),
        (
            BASE + "program: [{barrier: {}}]\nexpect: {makespan: {at_least: 3 s, at_most: 1 s}}",
            "`at_least` (3 s) is greater than `at_most` (1",
        ),
        (BASE + "program: []\noptions: {timeout: 0 s}", "a timeout above zero"),
        (BASE + "program: []\ngroups: {g: {ranks: [0], timeout: 0 ms}}", "a timeout above zero"),
        (BASE + "program: [{monitored_barrier: {timeout: 0 s}}]", "a timeout above zero"),
        (BASE + "program: [{new_group: {name: g, timeout: 0 s}}]", "a timeout above zero"),
    ],
)
def test_values_that_torch_cannot_count_or_wait_for_are_refused(text: str, said: str):
    assert said in refusal(text)


def test_splits_and_copies_beyond_32_bits_are_handled():
    text = (
        "world: 2\ntensors: {x: {shape: [6000000000], copies: 9000000000}, y: {like: x}}\nprogram:\n  - all_to_all_single: "
        "{input: x@3000000000, output: y, input_splits: [3000000000, 3000000000], output_splits: [3000000000, 3000000000]}"
    )

    assert simulate(loads(text)).outcome == "completes"


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("broadcast: {tensor: x, src: true}", "expected a rank, an integer, found true"),
        (
            "broadcast: {tensor: x, src: {0: true, else: 1}}",
            "expected a rank, an integer, found true",
        ),
        ("all_reduce: x@false", "x@false: expected an integer, found False"),
        (
            "all_reduce: {tensor: x, async: true, as: h@true}",
            "h@true: expected an integer, found True",
        ),
        ("exit: true", "code: expected an integer, found True"),
        ("compute: {flops: rank == 0}", "flops: expected a count of zero or more, found False"),
        (
            "assign: {tensor: x, value: true}",
            "value: x contains numbers; expected numbers, found true or false",
        ),
        (
            "all_to_all_single: {input: x, output: y, input_splits: {0: [true, 1, 1, 1], else: [1, 1, 1, 1]}}",
            "expected rows, an integer, found true",
        ),
        ("new_group: {name: g, ranks: [false, true]}", "ranks: expected an integer, found False"),
        (
            "isend: {tensor: x, dst: (rank + 1) % 4, tag: true, as: h}",
            "expected a tag, an integer, found true",
        ),
    ],
)
def test_true_is_refused_as_a_number_in_a_step(step: str, said: str):
    assert refusal(f"{BASE}program:\n  - {step}\n") == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "world: 2\ntensors: {x: {shape: [1], value: true}}\nprogram: []",
            "tensor x is float32; expected numbers as its value, found true or false",
        ),
        (
            "world: 2\ntensors: {x: {shape: [{0: true, 1: 1}]}}\nprogram: []",
            "a per-rank mapping contains both numbers and true or false; use one kind for all ranks",
        ),
        (
            BASE + "program: []\nexpect: {values: {x: true}}",
            "x contains numbers; expected numbers, found true or false",
        ),
        (
            BASE + "program: []\nfaults: [{kind: slow, rank: 0, factor: true}]",
            "expected a factor above 0, such as 1.3, found true",
        ),
        (
            BASE + "program: []\ncluster: {preset: cpu-10gbe, nics: {count: true}}",
            "expected a number, found true",
        ),
        (
            "world: true\nprogram: []",
            "expected the number of ranks, an integer from 1 to 1000000, found true",
        ),
    ],
)
def test_true_is_refused_as_a_number_in_a_declaration(text: str, said: str):
    assert refusal(text) == said


def test_a_tensor_larger_than_its_device_is_a_finding():
    found = check_scenario(
        loads(
            "world: 2\ntensors: {x: {shape: [67108864, 67108864], dtype: float64}}\nprogram: [{all_reduce: x}]"
        )
    )

    assert [
        (f.code, f.message) for f in found.findings if f.code != "DS804"
    ] == [  # nor does it arrive in time
        ("DS806", "tensor x needs 32770 TiB on ranks 0 and 1, but one CPU socket has 238.4 GiB")
    ]


def test_times_beyond_64_bits_are_refused_for_their_file_only(tmp_path: Path):
    file = tmp_path / "long.yaml"
    file.write_text(
        BASE + "program: [{repeat: {times: 3, steps: [{compute: {time: 1281023 h}}]}}]\n",
        encoding="utf-8",
    )
    found = held_to_expect(file)

    assert found.status == "unreadable"
    assert str(found.error).startswith(f"{file}: times or sizes add up to more than 64 bits")


# --- how large ---
def test_too_many_ranks_are_estimated_and_refused_before_the_program_is_built():
    scenario = loads(f"world: {DEFAULT_MAX_RANKS + 1}\nprogram: [barrier]")
    for act in (simulate, check_scenario):
        with pytest.raises(
            UsageError, match=r"131,073 ranks: about .* MiB of memory and \d+ s"
        ) as error:
            act(scenario)

        assert f"--max-calls {DEFAULT_MAX_RANKS + 1}" in error.value.remedy


def test_too_many_calls_are_refused_unless_allowed_explicitly():
    rounds = DEFAULT_MAX_CALLS // 10 + 1
    text = f"world: 2\nprogram:\n  - repeat: {{times: {rounds}, steps: [{', '.join(['{sleep: 1 ns}'] * 5)}]}}\n"
    with pytest.raises(UsageError, match="5,000,010 calls on 2 ranks: about"):
        simulate(loads(text), fold=False)
    with pytest.raises(UsageError, match=r"4 calls on 2 ranks: .* the limit is 3 calls"):
        simulate(loads("world: 2\nprogram: [barrier, barrier]"), max_calls=3)

    assert (
        simulate(loads("world: 2\nprogram: [barrier, barrier]"), max_calls=4).outcome == "completes"
    )


def test_too_many_different_calls_are_refused_by_their_memory():
    """Few ranks with millions of calls each take more than as many calls of many ranks, which are
    compiled once for all.
    """
    text = "world: 2\nprogram:\n  - repeat: {times: 1000000, steps: [barrier, barrier]}\n"
    for act in (simulate, check_scenario):
        with pytest.raises(
            UsageError,
            match=r"2,000,000 calls on 1 ranks: about 2\.98 GiB .* the limit is 2\.328 GiB",
        ) as error:
            act(loads(text))
        assert "--max-calls 2000000" in error.value.remedy
    wide = lower(
        loads("world: 1000\nprogram:\n  - repeat: {times: 2400, steps: [barrier, barrier]}\n")
    )

    assert not is_within_size_limit(lower(loads(text)), None)
    assert is_within_size_limit(lower(loads(text)), 4_000_000)
    assert is_within_size_limit(wide, None)
    assert not is_within_size_limit(wide, 4_799_999)


def test_a_chain_of_vars_takes_linear_time():
    """Four times the vars: about four times the calls of functions, where the square would be
    sixteen.
    """

    def chain(n: int) -> str:
        rest = "".join(f"  v{i}: v{i - 1} + 1\n" for i in range(1, n))
        return f"world: 2\nvars:\n  v0: 1\n{rest}program: [{{compute: {{time: 1 ms}}}}]\n"

    few, many = (work(lambda n=n: lower(loads(chain(n)))) for n in (200, 800))

    assert many < 6 * few
    start = time.process_time()
    loads(chain(4000))
    assert time.process_time() - start < 20  # the cube takes minutes


def test_an_incomplete_search_with_known_failures_is_no_success(tmp_path: Path):
    file = tmp_path / "any.yaml"
    file.write_text(ANY_SOURCE, encoding="utf-8")
    bound, whole = check_file(file, max_states=30), check_file(file)

    assert bound.verdict is not None
    assert (
        bound.verdict.complete,
        bound.verdict.verdict,
        bound.profiles["gloo"].possible,
    ) == (False, "ok", ("raises",))
    assert (bound.status(), whole.status()) == (1, 1)


ANY_SOURCE = """
world: 9
tensors: {x: {shape: [4]}, y: {shape: [4]}}
program:
  - ranks: rank > 0
    steps:
      - repeat: {times: 3, index: i, steps: [{send: {tensor: x, dst: 0, tag: i}}, {recv: {tensor: y, src: 0, tag: i}}]}
  - ranks: 0
    steps:
      - repeat:
          times: 3
          index: i
          steps:
            - repeat: {times: 8, index: j, steps: [{recv: {tensor: y, tag: i}}]}
            - repeat: {times: 8, index: j, steps: [{send: {tensor: x, dst: j + 1, tag: i}}]}
      - recv: {tensor: y, src: 5, tag: 9}
  - {send: {tensor: x, dst: 0, tag: 9}, ranks: rank > 4}
"""


# --- endless and silent ---
@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="devices as Linux has them")
def test_an_endless_file_is_read_up_to_a_limit():
    with pytest.raises(ScenarioErrors, match="/dev/zero: cannot be read: larger than 16 MiB"):
        load("/dev/zero")
    with pytest.raises(UsageError, match="/dev/zero:1: a line of more than 67,108,864 characters"):
        read_trace("/dev/zero")


@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
def test_a_pipe_without_a_writer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_io, "READ_TIMEOUT_S", 0.2)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ScenarioErrors, match="cannot be read: received no data for"):
        load(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match="cannot be read: received no data for"):
        read_trace(tmp_path / "pipe.yaml")


# --- Ctrl-C ---
@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize("after_s", [0.3, 1.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_simulation_at_any_moment_without_a_traceback(after_s: float, tmp_path: Path):
    """Within a second of processor time; how long the machine makes it wait for that is not its
    matter.
    """
    file = tmp_path / "big.yaml"
    ring = (ROOT / "benchmarks" / "ring.yaml").read_text(encoding="utf-8")
    file.write_text(
        ring.replace("src: (rank - 1) % world_size, ", "").replace("rounds: 100", "rounds: 500"),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "distsim", "simulate", str(file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        wait_until_it_is_ours(process.pid, after_s)
        before = cpu_s(process.pid)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert cpu_s(process.pid) - before < 1.5
            time.sleep(0.02)
        said = process.communicate()

    assert process.returncode in (
        130,
        -signal.SIGINT,
    )  # a shell says 130 of both; the second while the interpreter itself starts
    assert said == ("", "interrupted\n" if process.returncode == 130 else "")


def wait_until_it_is_ours(pid: int, cpu: float) -> None:
    """Until the process has used so much processor time, which starts with Python's own."""
    while cpu_s(pid) < cpu:
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z", (
            "it ended before"
        )
        time.sleep(0.01)


def cpu_s(pid: int) -> float:
    """Processor time of a process, of its children and of those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return own + sum(map(cpu_s, map(int, children)))


@pytest.mark.slow
def test_two_thousand_commands_on_damaged_files_keep_their_promises():
    from tests.support.fuzz import run

    assert run(2000, random.SystemRandom().randrange(10**9)) == []
