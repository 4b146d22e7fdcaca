"""One-sided operations of symmetric memory: whom a signal waits for, what a put and a get move, and
what nothing orders.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.scenario import Scenario, loads
from distsim.simulation.simulate_scenario import simulate
from tests.support.agreement import surprises

HEAD = (
    "name: t\nworld: {n}\nbackend: nccl\ncluster: dgx-h100\n"
    "tensors: {{x: {{shape: [4], value: rank + 1}}, y: {{shape: [4], value: 0}}}}\nprogram:\n"
)


def scenario(*steps: str, n: int = 2) -> Scenario:
    return loads(HEAD.format(n=n) + "".join(f"  - {step}\n" for step in steps))


def judge(*steps: str, n: int = 2) -> Verdict:
    return verdict_of(lower(scenario(*steps, n=n)))


def codes(*steps: str, n: int = 2) -> tuple[str, list[str]]:
    found = judge(*steps, n=n)
    return found.verdict, sorted({f.code for f in found.findings})


SIGNAL, WAIT = "{put_signal: {dst: 1}, ranks: 0}", "{wait_signal: {src: 0}, ranks: 1}"
BACK, WAIT_BACK = (
    "{put_signal: {dst: 0, channel: 3}, ranks: 1}",
    "{wait_signal: {src: 1, channel: 3}, ranks: 0}",
)
PUT, READ, GET = (
    "{put: {tensor: x, into: y, dst: 1}, ranks: 0}",
    "{compute: {time: 1 ms, reads: [y]}, ranks: 1}",
    "{get: {tensor: x, into: y, src: 0}, ranks: 1}",
)
WRITE = "{compute: {time: 1 ms, writes: [x]}, ranks: 0}"


def test_a_signal_runs_at_most_one_ahead_of_its_wait() -> None:
    """The cell holds one: the second of two waits for the first to be taken
    (CUDASymmetricMemoryOps.cu, compare-and-swap).
    """
    assert codes(SIGNAL, BACK, WAIT_BACK, WAIT) == ("ok", [])
    assert codes(SIGNAL, SIGNAL, BACK, WAIT_BACK, WAIT, WAIT) == ("ok", [])
    kind, found = codes(
        SIGNAL,
        SIGNAL,
        "{put_signal: {dst: 1, channel: 9}, ranks: 0}",
        "{wait_signal: {src: 0, channel: 9}, ranks: 1}",
        WAIT,
        WAIT,
    )
    assert (kind, found) == ("deadlock", ["DS301"])
    late = simulate(scenario(SIGNAL, SIGNAL, "{compute: {time: 5 ms}, ranks: 1}", WAIT, WAIT))
    assert [c.finished_ns >= 5_000_000 for c in late.run.trace.rows() if c.op == "put_signal"] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("steps", "kind", "found"),
    [
        ((WAIT,), "deadlock", ["DS304"]),
        (("{put_signal: {dst: 1, channel: 1}, ranks: 0}", WAIT), "deadlock", ["DS304"]),
        ((SIGNAL,), "leak", ["DS502"]),
        ((SIGNAL, SIGNAL), "deadlock", ["DS304"]),
        (("{put_signal: {dst: 0}, ranks: 0}",), "invalid", ["DS102"]),
        (("{put_signal: {dst: 1, channel: -1}, ranks: 0}",), "invalid", ["DS112"]),
        (("{put: {tensor: x, dst: 2}, ranks: 0}",), "invalid", ["DS101"]),
        (("{send: {tensor: x, dst: 1}, ranks: 0}", WAIT), "deadlock", ["DS304"]),
    ],
)
def test_mistakes_with_signals_are_reported(
    steps: tuple[str, ...], kind: str, found: list[str]
) -> None:
    """Nobody signals; another channel; nobody waits; itself; no such channel; a message is no
    signal.
    """
    assert codes(*steps) == (kind, found)


@pytest.mark.parametrize(
    ("steps", "races"),
    [
        ((PUT, READ), True),
        ((PUT, SIGNAL, WAIT, READ), False),
        ((SIGNAL, PUT, WAIT, READ), True),
        ((PUT, SIGNAL, READ, WAIT), True),
        ((PUT, "barrier", READ), False),
        ((PUT, "all_reduce: {tensor: x}", READ), False),
        (
            (
                PUT,
                "{send: {tensor: x, dst: 1}, ranks: 0}",
                "{recv: {tensor: x, src: 0}, ranks: 1}",
                READ,
            ),
            False,
        ),
        (
            (
                PUT,
                "{recv: {tensor: x, src: 1}, ranks: 0}",
                "{send: {tensor: x, dst: 0}, ranks: 1}",
                READ,
            ),
            True,
        ),
        ((WRITE, SIGNAL, WAIT, GET), False),
        ((WRITE, GET), True),
        ((GET,), False),
        ((GET, WRITE), True),
        ((GET, BACK, WAIT_BACK, WRITE), False),
        ((PUT, SIGNAL, WAIT, READ, PUT, SIGNAL, WAIT), True),
        ((PUT, SIGNAL, WAIT, READ, BACK, WAIT_BACK, PUT, SIGNAL, WAIT), False),
        ((PUT, SIGNAL, SIGNAL, WAIT, READ, WAIT), False),
    ],
)
def test_memory_of_another_rank_must_be_accessed_in_a_defined_order(
    steps: tuple[str, ...], races: bool
) -> None:
    """A signal after the one use and a wait before the other, or anything whose data goes that way;
    the other way does not do.
    """
    assert codes(*steps) == (("race", ["DS404"]) if races else ("ok", []))


def test_puts_of_two_ranks_into_the_same_place_are_a_race() -> None:
    assert codes("{put: {tensor: x, into: y, dst: 2}, ranks: [0, 1]}", n=3) == ("race", ["DS404"])
    assert codes(
        "{put: {tensor: x, into: y, dst: 2}, ranks: 0}",
        SIGNAL,
        WAIT,
        "{put: {tensor: x, into: y, dst: 2}, ranks: 1}",
        n=3,
    ) == ("ok", [])


def test_put_and_get_move_values_and_their_origins() -> None:
    done = simulate(
        scenario(
            PUT,
            SIGNAL,
            WAIT,
            "{assign: {tensor: x, value: 10 * y}, ranks: 1}",
            BACK,
            WAIT_BACK,
            "{get: {tensor: x, into: y, src: 1}, ranks: 0}",
        )
    )
    assert {
        key: list(map(float, set(done.values.array(*key).tolist())))
        for key in ((0, "y"), (1, "y"), (1, "x"))
    } == {
        (0, "y"): [10.0],
        (1, "y"): [1.0],
        (1, "x"): [10.0],
    }


def test_only_nccl_has_one_sided_operations() -> None:
    """Symmetric memory is on GPUs; torch's own words on a CPU."""
    for backend in ("gloo", "mpi"):
        mapping = scenario(PUT, SIGNAL, WAIT).model_copy(update={"backend": backend})
        done = simulate(mapping)
        assert done.outcome == "raises"
        assert "SymmetricMemory does not support device type cpu" in done.findings[0].message


def test_a_larger_put_takes_longer_and_a_signal_takes_the_latency_of_the_link() -> None:
    """Latency and bandwidth of the link, and nothing of NCCL's protocols."""

    def took(numel: int) -> dict[str, int]:
        made = loads(
            HEAD.format(n=2).replace("[4]", f"[{numel}]")
            + "".join(f"  - {step}\n" for step in (PUT, SIGNAL, WAIT))
        )
        return {c.op: c.finished_ns - c.started_ns for c in simulate(made).run.trace.rows()}

    small, large = took(4), took(1 << 24)
    assert (
        small["wait_signal"] == large["wait_signal"]
        or small["put_signal"] == large["put_signal"] == 0
    )
    assert small["put"] < 1_000 < 100_000 < large["put"] < 1_000_000  # 64 MiB at 371 GB/s


def drawn(seed: int) -> dict[str, Any]:
    """Random signals, messages and collectives among a few ranks; about half of the programs come
    to their end.
    """
    draw, n = Random(seed), Random(seed).randint(2, 4)
    program: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    for _ in range(draw.randint(3, 12)):
        one, other, channel = draw.randrange(n), draw.randrange(n - 1), draw.randrange(2)
        other += other >= one
        kind = draw.random()
        if kind < 0.6:
            program.append({"put_signal": {"dst": other, "channel": channel}, "ranks": one})
            waits.append({"wait_signal": {"src": one, "channel": channel}, "ranks": other})
        elif kind < 0.75:
            program.append({"compute": {"time": f"{draw.randint(1, 9)} us"}, "ranks": one})
        elif kind < 0.9:
            program.append({"send": {"tensor": "x", "dst": other}, "ranks": one})
            waits.append({"recv": {"tensor": "x", "src": one}, "ranks": other})
        else:
            program.append({"all_reduce": {"tensor": "x"}})
        while waits and draw.random() < 0.6:
            program.append(waits.pop(draw.randrange(len(waits))))
    program += [one for one in waits if draw.random() < 0.9]
    return {
        "name": f"seed {seed}",
        "world": n,
        "backend": "nccl",
        "tensors": {"x": {"shape": [4]}},
        "program": program,
    }


def test_all_ways_to_run_a_program_agree_on_signals() -> None:
    """Local clocks, classes, the order of time, every reading and the steps from outside
    (`tests.support.agreement`).
    """
    assert [found for seed in range(40) if (found := surprises(drawn(seed)))] == []


def test_an_impossible_rank_or_channel_is_reported_with_its_side() -> None:
    words = [f.message for f in judge("{put: {tensor: x, dst: -1}, ranks: 0}").findings]
    assert words == ["put to rank -1, but the world has ranks 0 to 1"]
    with pytest.raises(ScenarioErrors, match="channel: expected a 32-bit integer"):
        judge("{put_signal: {dst: 1, channel: 2147483648}, ranks: 0}")


BARRIER = "{symm_mem_barrier: {}}"


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((SIGNAL, BARRIER, WAIT), ["DS611"]),
        (
            (WAIT.replace("ranks: 1", "ranks: 0").replace("src: 0", "src: 1"), BARRIER),
            ["DS304", "DS611"],
        ),
        ((SIGNAL, WAIT, BARRIER, BARRIER), []),
        ((SIGNAL, "{symm_mem_barrier: {channel: 1}}", WAIT), []),
    ],
    ids=[
        "the barrier consumes a signal",
        "a wait takes the barrier's",
        "each its own",
        "a channel of its own",
    ],
)
def test_a_signal_that_crosses_a_barrier_is_reported(
    steps: tuple[str, ...], found: list[str]
) -> None:
    assert codes(*steps)[1] == found
