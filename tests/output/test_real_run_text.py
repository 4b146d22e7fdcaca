"""The report of a real run, made from records that no process had to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distsim.findings.final_state import FinalState, RankEnd
from distsim.output.text.real_run import real_run_json, real_run_text
from distsim.real.results.posted_calls import DivergingReceive, PostedRequest
from distsim.real.results.real_run import RealRun
from distsim.real.results.value_check import BufferCheck
from distsim.simulation.simulate_scenario import simulate
from distsim.trace.model import Trace
from tests.support.real_runs import scenario

ENDED = FinalState((RankEnd(0, "ended", 1), RankEnd(1, "ended", 1)), ())


def run_of(name: str, **changed: Any) -> RealRun:
    simulation = simulate(scenario(name), backend="gloo")
    recorded = simulation.run.trace
    header = {**recorded.header, "compute": "asleep", "complete": True}
    run = RealRun(
        simulation,
        "gloo",
        "fork",
        "completes",
        "done",
        ENDED,
        findings=(),
        culprits=(),
        differences=(),
        trace=Trace(header, recorded.tables, recorded.columns),
        makespans_ns=(50_000,),
        values=(),
        overhead_ns=350,
        timeout_ns=2_000_000_000,
    )
    return replace(run, **changed)


def lines(run: RealRun) -> list[str]:
    return real_run_text(run).splitlines()


def test_a_run_that_completes_is_compared_with_its_simulation() -> None:
    values = [
        BufferCheck(0, "x", "equal"),
        BufferCheck(0, "y", "close"),
        BufferCheck(1, "x", "differs", "element 1 is 2, simulated 1; 1 of 3 differ"),
        BufferCheck(1, "y", "unknown"),
    ]
    once = lines(run_of("send_one", values=tuple(values), clock_error_ns=2_000))
    often = lines(run_of("send_one", makespans_ns=(50_000, 90_000, 60_000), notes=("a note",)))

    assert once == [
        "send_one: completes in 50 us; simulated 35.01 us on cpu-10gbe",
        "2 ranks on torch.distributed with gloo, started by fork, compute: asleep",
        "the run ended as predicted",
        "",
        "Values: 1 of 4 buffers bitwise equal to the simulation; 1 equal within rounding",
        "  (the backend adds more than two terms in its own order); 1 not compared (the",
        "  simulation does not know their values)",
        "  rank 1, x: element 1 is 2, simulated 1; 1 of 3 differ",
        "",
        "Trace: 2 calls; recording overhead 350 ns per call; clocks agree within 2 us.",
    ]
    assert "completes in 60 us (median of 3, 50 us to 90 us); simulated" in often[0]
    assert "a note" in often
    assert (
        often[-1] == "Trace: 2 calls; recording overhead 350 ns per call; one clock for all ranks."
    )


def test_times_of_a_device_state_their_error_and_a_partial_recording_that_it_is_one() -> None:
    run = run_of("send_one", overhead_ns=0)
    header = {
        **run.trace.header,
        "complete": False,
        "times": "device",
        "device_clock_error_ns": 1500,
    }
    changed = replace(run, trace=Trace(header, run.trace.tables, run.trace.columns))

    assert " ".join(real_run_text(changed).split()).endswith(
        "Trace: 2 calls, incomplete; one clock for all ranks; GPU times agree with the clocks "
        "within 1.5 us."
    )


HUNG = FinalState(
    (RankEnd(0, "blocked", 0), RankEnd(1, "raised", 0, message="raised ValueError: x")), ()
)


def test_a_run_that_hangs_names_cause_calls_stacks_and_last_output() -> None:
    stacks = {
        0: '  File "a.py", line 3, in recv\n    x\n  File "b.py", line 9, in main\n',
        1: '  File "a.py", line 3, in recv\n',
    }
    run = run_of(
        "head_to_head_sends",
        outcome="hangs",
        reason="standstill",
        final_state=HUNG,
        culprits=(1,),
        differences=("rank 1: raised an error of its own, simulated: blocked",),
        stacks=stacks,
        outputs={1: "one\ntwo\n"},
    )

    text = lines(run)
    words = " ".join(real_run_text(run).split())

    assert text[0] == "head_to_head_sends: hangs; the simulation predicts: hangs"
    assert "NOT as predicted: rank 1: raised an error of its own, simulated: blocked" in words
    assert "Cause: rank 1: raised ValueError: x. No rank made progress after that." in words
    assert "0 blocked send line" in words
    assert "1 raised send line" in words
    assert text[text.index("Python stacks, innermost frame first") :][1:5] == [
        "  rank 0",
        '    "a.py", line 3, in recv',
        '    "b.py", line 9, in main',
        "  rank 1",
    ]
    assert text[text.index("Last output of ranks that failed") :][1:4] == [
        "  rank 1",
        "    one",
        "    two",
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"culprits": (0,)}, "Cause: rank 0. No rank made progress for 2 s."),
        (
            {"reason": "interrupted", "ended_by": "SIGINT", "outcome": ""},
            "ended by SIGINT; the recording up to then is kept",
        ),
        ({"reason": "interrupted", "outcome": ""}, "ended from outside; the recording"),
        ({"reason": "interrupted", "outcome": ""}, "0 running send"),
        (
            {"final_state": FinalState((RankEnd(0, "absent", 0), RankEnd(1, "blocked", 0)), ())},
            "0 never started",
        ),
        (
            {"final_state": FinalState((RankEnd(0, "ended", 0, 0, "exit 3"), HUNG.ends[0]), ())},
            "0 exited send",
        ),
        ({"agreement": "as predicted, except for a race"}, "the run ended as predicted, except"),
        (
            {"taken": (DivergingReceive(PostedRequest(0, 0, -1), 1, 2),)},
            "received from rank 1, in the simulation from rank 2",
        ),
        (
            {"taken": (DivergingReceive(PostedRequest(0, 0, -1), 1, 2),) * 9},
            "… and 1 more",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_a_report_says_how_the_run_ended(changed: dict[str, Any], words: str) -> None:
    state = FinalState((RankEnd(0, "blocked", 0), RankEnd(1, "blocked", 0)), ())
    run = run_of(
        "head_to_head_sends",
        **{"outcome": "hangs", "reason": "standstill", "final_state": state, **changed},
    )

    assert words in " ".join(real_run_text(run).split())


def test_an_interrupted_run_neither_agrees_nor_differs_in_its_json() -> None:
    done = real_run_json(run_of("send_one"))
    interrupted = real_run_json(run_of("send_one", outcome="", reason="interrupted"))

    assert (done["outcome"], done["agrees"], done["makespans_ns"]) == ("completes", True, [50_000])
    assert (interrupted["outcome"], interrupted["agrees"]) == (None, None)
