"""`pipeline:` in a scenario: times, partners of messages, values of gradients, and refused
layouts.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.scenario import Scenario, load
from distsim.scenario.strategies.pipeline.actions import PipelineAction
from distsim.scenario.strategies.pipeline.builtin_schedules import SCHEDULE_BUILDERS
from distsim.scenario.strategies.pipeline.send_recv import with_send_recv
from distsim.simulation.simulate_scenario import simulate
from distsim.values import compute_values
from tests.support.harness import draws
from tests.support.strategy_checks import noticed as told
from tests.support.strategy_checks import spoiled

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted((ROOT / "scenarios" / "strategies").glob("pipeline_*.yaml"))
SAMPLES = ROOT / "tests" / "data" / "pp-schedules"

#: No message costs anything, no call either.
FREE = "1000000 TB/s"
IDEAL = {
    "name": "ideal",
    "device": {
        "name": "ideal",
        "peak": {"float32": "1 TFLOP/s"},
        "memory_bandwidth": FREE,
        "memory_size": "1 TB",
    },
    "intra": {"kind": "nvlink", "latency": "0 ns", "bandwidth": FREE},
    "nics": {"bandwidth": FREE},
    "network": {"latency": "0 ns"},
}
#: (schedule, ranks, micro-batches, chunks)
LAYOUTS = [
    ("gpipe", 4, 6, 1),
    ("1f1b", 4, 6, 1),
    ("1f1b", 3, 3, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("interleaved_1f1b", 2, 4, 3),
    ("looped_bfs", 2, 3, 2),
    ("zb1p", 4, 8, 1),
    ("zb1p", 2, 4, 2),
    ("zbv", 3, 6, 2),
    ("dualpipe_v", 2, 5, 2),
    ("dualpipe_v", 4, 8, 2),
    ("dualpipe", 2, 4, 2),
    ("dualpipe", 4, 10, 2),
    ("dualpipe", 6, 12, 2),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(map(str, x)))


def scenario(
    schedule: Any, ranks: int, batches: int | None = None, chunks: int | None = None, **more: Any
) -> Scenario:
    top = {
        key: more.pop(key)
        for key in ("backend", "cluster", "options", "iterations", "tensors")
        if key in more
    }
    fields = {
        "schedule": schedule,
        "forward": "5 ms",
        "backward": "10 ms",
        "activation": {"shape": [4, 8]},
        **more,
    }
    fields |= {
        key: value
        for key, value in (("micro_batches", batches), ("chunks", chunks))
        if value is not None
    }
    return Scenario(world=ranks, mesh={"pp": ranks}, **top, program=[{"pipeline": fields}])


def problems(**fields: Any) -> list[str]:
    with pytest.raises(ScenarioErrors) as caught:
        scenario(**fields)
    return [p.message for p in caught.value.problems]


# --- it runs ---
@each_layout
@pytest.mark.parametrize("nbytes", ["small", "large"])
@pytest.mark.parametrize(
    ("backend", "init"), [("gloo", "lazy"), ("nccl", "lazy"), ("nccl", "eager")]
)
def test_every_schedule_is_ok_and_completes(layout, nbytes, backend, init):
    """Large: above what nccl buffers, so that a send waits for its receive."""
    shape = [4, 8] if nbytes == "small" else [4096, 8192]
    told = {} if layout[0] == "dualpipe" else {"shapes_exchange": True}
    made = scenario(
        *layout, backend=backend, options={"init": init}, activation={"shape": shape}, **told
    )
    found = simulate(made, with_values=False)

    assert (found.outcome, found.verdict.verdict, found.findings) == ("completes", "ok", ())


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("*.csv")), ids=lambda p: p.stem)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_third_party_schedule_files_are_ok_and_complete(file, backend):
    ranks = len(file.read_text(encoding="utf-8").split())
    found = simulate(
        scenario(str(file), ranks, backend=backend, activation={"shape": [4096, 8192]}),
        with_values=False,
    )

    assert (found.outcome, found.verdict.verdict, found.findings) == ("completes", "ok", ())


def test_the_pipelines_by_hand_and_by_strategy_take_the_same_time():
    """By hand: scenarios/pipeline_1f1b.yaml; its sends of the warm-up block, PyTorch's do not,
    which costs launches alone.
    """
    by_hand, by_strategy = (
        simulate(load(str(ROOT / "scenarios" / f"{name}.yaml")))
        for name in ("pipeline_1f1b", "strategies/pipeline_1f1b")
    )

    assert by_strategy.makespan_ns == pytest.approx(by_hand.makespan_ns, rel=0.001)


def test_shapes_are_exchanged_only_in_the_first_iteration():
    program = lower(scenario("1f1b", 2, 2, iterations=3, shapes_exchange=True))
    told = [position for position, call in program.calls_of(0) if call.op in ("send", "recv")]

    assert len(told) == 2
    assert max(told) < program.codes[program.code_of[0]].iterations[1]


# --- textbook figures ---
def makespan(
    name: str,
    p: int,
    m: int,
    v: int,
    forward: int,
    backward: int,
    backend: str = "gloo",
    **more: Any,
) -> float:
    """In ms; ``forward`` and ``backward`` are a whole rank's, in ms."""
    made = scenario(
        name,
        p,
        m,
        v,
        backend=backend,
        cluster=IDEAL,
        forward=f"{forward * 1000 // v} us",
        backward=f"{backward * 1000 // v} us",
        **more,
    )
    return simulate(made, with_values=False, with_verdict=False).makespan_ns / 1e6


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 10), (8, 16)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m_plus_p_minus_1(name, p, m, backend):
    """Huang et al. 2019, section 2; Narayanan et al. 2021, section 2.2."""
    total = makespan(name, p, m, 1, 6, 12, backend)

    assert (total - m * 18) / total == pytest.approx((p - 1) / (m + p - 1), abs=1e-5)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaving_divides_the_bubble_by_the_chunks(p, m, v, backend):
    """Narayanan et al. 2021, section 2.2: (p - 1) / (v * m) of the ideal time."""
    ideal = m * 18

    assert (makespan("interleaved_1f1b", p, m, v, 6, 12, backend) - ideal) / ideal == pytest.approx(
        (p - 1) / (v * m), abs=1e-5
    )


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_the_bubble_of_zb1p_is_p_minus_1_times_forward_plus_input_minus_weight(p, m):
    """Qi et al. 2023, table 2 (ZB-H1); with equal parts a third of 1F1B's."""
    equal = makespan("zb1p", p, m, 1, 6, 12) - m * 18
    plain = makespan("1f1b", p, m, 1, 6, 12) - m * 18

    assert equal == pytest.approx((p - 1) * 6, abs=1e-3)
    assert equal == pytest.approx(plain / 3, abs=1e-3)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_v_schedules_idle_less_than_1f1b(p, m):
    plain = makespan("1f1b", p, m, 1, 6, 12)

    assert makespan("zbv", p, m, 2, 6, 12) < makespan("zb1p", p, m, 1, 6, 12) < plain
    assert makespan("dualpipe_v", p, m, 2, 6, 12) < plain


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("p", "m"), [(2, 4), (4, 8), (4, 14), pytest.param(8, 20, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("forward", "whole", "weight", "pair"), [(6, 12, 6, 18), (6, 12, 6, 14), (10, 18, 8, 26)]
)
def test_the_bubble_of_dualpipe_is_the_published_one(p, m, forward, whole, weight, pair, backend):
    """(PP/2 - 1)(F&B + B - 3W), the table of github deepseek-ai/DualPipe: what a rank does not
    compute.

    From 6 ranks on ranks overlap unequal numbers of pairs: where that saves time, some pause longer
    than others."""
    halves = {
        "backward_input": f"{whole - weight} ms",
        "backward_weight": f"{weight} ms",
        "overlapped": f"{pair} ms",
    }
    made = scenario(
        "dualpipe",
        p,
        m,
        backend=backend,
        cluster=IDEAL,
        forward=f"{forward} ms",
        backward=f"{whole} ms",
        **halves,
    )
    found = simulate(made, with_values=False, with_verdict=False)
    busy = [
        sum(call.time_ns for _, call in lower(made).calls_of(rank) if call.op == "compute")
        for rank in range(p)
    ]

    pauses = [(found.makespan_ns - one) / 1e6 for one in busy]
    published = (p // 2 - 1) * (pair + whole - 3 * weight)

    assert min(pauses) - 1e-2 <= published <= max(pauses) + 1e-2
    if p < 6 or pair == forward + whole:
        assert pauses == pytest.approx([published] * p, abs=1e-2)


# --- whose numbers ---
def passed_on(made: Scenario, ordered: bool = False) -> list[Counter[tuple[int, int]]]:
    """For each rank and chunk: the micro-batches that its gradient holds, found by going back from
    addition to addition's inputs.

    An entry is (micro-batch by the gradient that came in, micro-batch by the activation that was
    kept).
    """
    found = simulate(made, with_verdict=False, with_values=False, ordered=ordered)
    values = compute_values(found.program, found.run.trace, at_calls=True)
    rank_of, position_of = (found.run.trace[name].tolist() for name in ("rank", "position"))
    batches = next(iter(made.tensors.values())).copies.constant // chunks_of(made)
    starts = (0, found.program.world_size - 1) if "pipeline_copies" in made.groups else (0,)

    def inputs(row: int) -> list[int]:
        return [c[0].node for c in values.seen[rank_of[row], position_of[row], -1, "in"].contents]

    def source(node: int) -> int:
        """The micro-batch at the start of stage 0 that a node goes back to, along gradients and
        then along activations.

        Those of a second direction are numbered after those of the first."""
        for _ in range(200):
            row, own = values.graph.nodes[node].row, values.graph.nodes[node].own
            if row < 0:
                assert own is not None
                assert own.tensor.partition("@")[0] == "pipeline_input"
                return int(own.tensor.partition("@")[2] or 0) % batches + batches * starts.index(
                    own.rank
                )
            node = inputs(row)[0]
        raise AssertionError("a circle")

    def leaves(node: int) -> list[int]:
        parents = values.graph.nodes[node].parents
        return [leaf for parent, _ in parents for leaf in leaves(parent)] if parents else [node]

    totals = []
    for rank in range(found.program.world_size):
        for chunk in range(chunks_of(made)):
            label = "pipeline_weight_grad" + (f"@{chunk}" if chunk else "")
            nodes = [
                leaf for piece in values.state(rank, label).content for leaf in leaves(piece.node)
            ]
            totals.append(
                Counter(
                    tuple(source(n) for n in inputs(values.graph.nodes[node].row)[:2])
                    for node in nodes
                )
            )
    return totals


def chunks_of(made: Scenario) -> int:
    return int(made.tensors["pipeline_weight_grad"].copies.constant)


@each_layout
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_gradient_of_every_stage_has_each_micro_batch_exactly_once(layout, backend):
    """And each backward has the activation of the micro-batch whose gradient it got."""
    made = scenario(*layout, backend=backend)
    wanted = Counter({(m, m): 1 for m in range(layout[2])})

    assert passed_on(made) == [wanted] * (layout[1] * layout[3])


@settings(max_examples=draws(25), deadline=None)
@given(
    st.sampled_from(
        [
            ("interleaved_1f1b", 2, 4, 2),
            ("zb1p", 2, 4, 2),
            ("dualpipe_v", 2, 4, 2),
            ("zbv", 3, 5, 2),
        ]
    ),
    st.data(),
)
def test_two_receives_from_one_peer_in_the_wrong_order_are_always_detected(layout, data):
    """The reader refuses them, the program hangs, or the gradients have wrong values."""
    schedule = with_send_recv(SCHEDULE_BUILDERS[layout[0]](*layout[1:]))
    rank = data.draw(st.integers(0, layout[1] - 1))
    row = list(schedule.rows[rank])

    def peer(action: PipelineAction) -> int:
        return schedule.rank_of[action.stage + (-1 if action.kind == "RECV_F" else 1)]

    places = [k for k, action in enumerate(row) if action.kind.startswith("RECV")]
    pairs = [(a, b) for a in places for b in places if a < b and peer(row[a]) == peer(row[b])]
    a, b = data.draw(st.sampled_from(pairs))
    row[a], row[b] = row[b], row[a]
    lines = [
        ",".join(map(str, row if r == rank else other)) for r, other in enumerate(schedule.rows)
    ]

    assert noticed(lines, layout)


def noticed(lines: list[str], layout: tuple[str, int, int, int]) -> bool:
    try:
        made = scenario(lines, layout[1])
    except ScenarioErrors as error:
        return "computes before it receives its input" in error.problems[0].message
    found = simulate(made, with_values=False)
    if found.outcome != "completes" or found.verdict.verdict != "ok":
        return True
    return passed_on(made) != [Counter({(m, m): 1 for m in range(layout[2])})] * (
        layout[1] * layout[3]
    )


def test_numbered_activations_identify_their_micro_batch():
    found = simulate(scenario("interleaved_1f1b", 2, 2, 2, numbered=True), with_values=True).values

    assert [found.agrees(1, "pipeline_input", 0), found.agrees(1, "pipeline_input@1", 1)] == [
        True,
        True,
    ]
    assert [
        found.agrees(0, "pipeline_input@2", 1000),
        found.agrees(1, "pipeline_input@3", 2001),
    ] == [True, True]
    assert [
        found.agrees(0, "pipeline_output_grad", -1000),
        found.agrees(0, "pipeline_output_grad@3", -3001),
    ] == [True, True]


# --- fields ---
def compute_times(made: Scenario, rank: int) -> Counter[tuple[str, int]]:
    program = lower(made)
    return Counter(
        (call.name, call.time_ns) for _, call in program.calls_of(rank) if call.op == "compute"
    )


def test_costs_may_differ_by_stage():
    made = scenario(
        "1f1b", 2, 2, forward={0: "1 ms", "else": "2 ms"}, backward={0: "3 ms", "else": "4 ms"}
    )

    assert compute_times(made, 0) == {("forward", 1_000_000): 2, ("backward", 3_000_000): 2}
    assert compute_times(made, 1) == {("forward", 2_000_000): 2, ("backward", 4_000_000): 2}


def test_a_backward_in_halves_runs_consecutively_if_the_schedule_does_not_split_it():
    made = scenario("gpipe", 2, 2, backward=None, backward_input="3 ms", backward_weight="4 ms")

    assert compute_times(made, 1) == {
        ("forward", 5_000_000): 2,
        ("backward input", 3_000_000): 2,
        ("backward weight", 4_000_000): 2,
    }


def test_the_first_stage_does_the_whole_split_backward_at_its_weight_step():
    """It has no input whose gradient anybody wants (torch stage.py, `backward_one_chunk`)."""
    made = scenario("zb1p", 2, 2)

    assert compute_times(made, 0) == {("forward", 5_000_000): 2, ("backward", 10_000_000): 2}
    assert compute_times(made, 1) == {
        ("forward", 5_000_000): 2,
        ("backward input", 5_000_000): 2,
        ("backward weight", 5_000_000): 2,
    }


def test_entries_may_replace_a_forward():
    body = [
        {"all_reduce": {"tensor": "x", "group": "pp"}},
        {"compute": {"name": "layer", "time": "2 ms"}},
    ]
    program = lower(scenario("gpipe", 2, 3, forward=body, tensors={"x": {"shape": [4]}}))

    assert Counter(call.op for _, call in program.calls_of(0))["all_reduce"] == 3


def test_gradients_may_be_a_declared_tensor_with_one_copy_per_chunk():
    made = scenario(
        "interleaved_1f1b", 2, 2, 2, gradient="grad", tensors={"grad": {"shape": [4], "copies": 2}}
    )
    added = Counter(b.label for _, call in lower(made).calls_of(1) for b in call.adds)

    assert added == {"grad": 2, "grad@1": 2}


@pytest.mark.parametrize(
    "name",
    [
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
        "GPipe",
        "1F1B",
        "LoopedBFS",
    ],
)
def test_pytorch_class_names_are_accepted(name):
    assert simulate(scenario(name, 2, 4), with_values=False).outcome == "completes"


def test_a_schedule_file_is_found_next_to_the_scenario(tmp_path, monkeypatch):
    (tmp_path / "own.csv").write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    fields = {
        "schedule": "own.csv",
        "forward": "1 ms",
        "backward": "1 ms",
        "activation": {"shape": [1]},
    }
    file = tmp_path / "own.yaml"
    file.write_text(
        json.dumps({"world": 2, "mesh": {"pp": 2}, "program": [{"pipeline": fields}]}),
        encoding="utf-8",
    )
    monkeypatch.chdir(ROOT)

    assert simulate(load(str(file))).outcome == "completes"


# --- what is refused ---
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"schedule": "1f1b", "ranks": 4, "batches": 3},
            "1f1b needs at least as many micro-batches as stages, found 3 for 4 stages",
        ),
        ({"schedule": "dualpipe_v", "ranks": 2, "batches": 3}, "found 3 for 4 stages"),
        (
            {"schedule": "dualpipe", "ranks": 3, "batches": 6},
            "needs an even number of ranks, found 3",
        ),
        ({"schedule": "dualpipe", "ranks": 2, "batches": 5}, "5 is odd; use 4 or 6"),
        (
            {"schedule": "dualpipe", "ranks": 4, "batches": 6},
            "twice as many micro-batches as ranks, found 6 for 4 ranks",
        ),
        (
            {"schedule": "dualpipe", "ranks": 2, "batches": 4, "chunks": 1},
            "dualpipe has two stages per rank, found chunks: 1",
        ),
        (
            {"schedule": "dualpipe", "ranks": 2, "batches": 4, "defer_pp_recv": True},
            "dualpipe has no defer_pp_recv",
        ),
        (
            {"schedule": "dualpipe", "ranks": 2, "batches": 4, "shapes_exchange": True},
            "dualpipe has no shapes_exchange",
        ),
        (
            {
                "schedule": "dualpipe",
                "ranks": 2,
                "batches": 4,
                "forward": {2: "1 ms", "else": "2 ms"},
            },
            "the stages are 0 to 1",
        ),
        (
            {
                "schedule": "dualpipe",
                "ranks": 2,
                "batches": 4,
                "tensors": {"g": {"shape": [1]}},
                "gradient": "g",
            },
            "add `copies: 2`",
        ),
        (
            {"schedule": "1f1b", "ranks": 2, "batches": 4, "overlapped": "5 ms"},
            "does not overlap forward and backward",
        ),
        (
            {
                "schedule": "dualpipe",
                "ranks": 2,
                "batches": 4,
                "overlapped": "5 ms",
                "forward": {"flops": "1 TFLOP"},
            },
            "needs times",
        ),
        (
            {"schedule": "interleaved_1f1b", "ranks": 4, "batches": 9},
            "in 2 rounds of 4 or more, and 9 is not divisible by 2",
        ),
        ({"schedule": "zb1p", "ranks": 2, "batches": 5}, "5 is not divisible by 2"),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "chunks": 2},
            "gpipe has one stage per rank",
        ),
        ({"schedule": "zbv", "ranks": 2, "batches": 2, "chunks": 3}, "zbv has two stages per rank"),
        ({"schedule": "gpype", "ranks": 2, "batches": 2}, "unknown schedule gpype"),
        ({"schedule": "gpipe", "ranks": 2}, "micro_batches"),
        ({"schedule": "missing.csv", "ranks": 2}, "cannot read missing.csv"),
        (
            {"schedule": ["0F0,0B0", "1F0,1B0"], "ranks": 3},
            "the schedule is for 2 ranks, but the axis pp has 3",
        ),
        ({"schedule": ["0F0,0B0", "1F0,1B0"], "ranks": 2, "batches": 2}, "has 1 micro-batches"),
        ({"schedule": ["0F0,0B0", "1F0,1B0"], "ranks": 2, "chunks": 2}, "remove `chunks`"),
        (
            {"schedule": ["0F0,0SEND_F0,0B0", "1F0,1B0"], "ranks": 2},
            "0B0 computes before it receives its input",
        ),
        ({"schedule": ["0F0", "1FF0"], "ranks": 2}, "rank 1: expected an action"),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "axis": "tp"},
            "the mesh has no axis tp",
        ),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "gradient": "grad"},
            "unknown tensor grad",
        ),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "backward": None},
            "expected `backward`, or both",
        ),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "forward": {5: "1 ms", "else": "1 ms"}},
            "there is no stage 5",
        ),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "forward": {0: "1 ms", 7: "1 ms"}},
            "there is no stage 7",
        ),
        (
            {"schedule": "gpipe", "ranks": 2, "batches": 2, "defer_pp_recv": True},
            "no receives to defer",
        ),
        (
            {"schedule": "zb1p", "ranks": 2, "batches": 2, "backward": {"flops": "1 TFLOP"}},
            "the schedule splits the backward",
        ),
    ],
)
def test_impossible_layouts_are_refused(fields, said):
    found = problems(**fields)

    assert any(said in message for message in found), found


# --- reach ---
def test_a_pipeline_of_128_ranks_and_128_stages_expands_to_few_entries():
    """Llama 3 405B's schedule (arXiv:2407.21783, section 3.3.2): 16 ranks, 8 chunks each; regular
    runs are repeats.
    """
    made = scenario("interleaved_1f1b", 16, 16, 8)
    program = lower(made)

    assert program.call_count > 15_000
    assert sum(len(block.steps) for block in made.program) < program.call_count / 4


# --- data parallelism of the stages ---
SHARED = {"group": "dp", "params": [[64, 64], [64, 64], [64, 64]], "bucket_cap_mb": 1 / 128}


def data_parallel(
    schedule: str, style: str, ranks: int = 2, batches: int = 4, chunks: int = 1, **more: Any
) -> Scenario:
    top = {key: more.pop(key) for key in ("backend", "cluster", "iterations") if key in more}
    fields = {
        "schedule": schedule,
        "micro_batches": batches,
        "chunks": chunks,
        "forward": "5 ms",
        "backward": "10 ms",
        "activation": {"shape": [4, 8]},
        "data_parallel": {"style": style, **SHARED, **more},
    }
    return Scenario(
        world=2 * ranks, mesh={"pp": ranks, "dp": 2}, program=[{"pipeline": fields}], **top
    )


WHOLE = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2)]
SPLIT = [("zb1p", 2), ("zbv", 2), ("dualpipe_v", 2)]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("style", "layout"), [("ddp", x) for x in WHOLE] + [("fsdp", x) for x in WHOLE + SPLIT]
)
def test_every_gradient_of_a_stage_is_reduced_exactly_once_per_iteration(
    style: str, layout: tuple[str, int], backend: str
) -> None:
    schedule, chunks = layout
    for iterations in (1, 2):
        made = data_parallel(
            schedule, style, chunks=chunks, backend=backend, iterations=iterations, setup=False
        )
        done = simulate(made, with_values=True)
        assert done.verdict is not None
        assert done.values is not None
        assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
        word = "pipeline_grad_" if style == "ddp" else "pipeline_shard_grad_"
        labels = [name for name in done.scenario.tensors if name.startswith(word)]
        assert len(labels) == 3 * chunks
        for label in labels:
            for rank in range(4):
                (found,) = {
                    tuple(sorted(s.counts.items())) for s in done.values.stretches(rank, label)
                }
                assert {count for _, count in found} == {1}
                assert {c.rank for c, _ in found} == {rank // 2 * 2, rank // 2 * 2 + 1}
                assert len(found) == 2 * 4  # of four micro-batches on two ranks


@pytest.mark.parametrize("layout", WHOLE)
def test_ddp_in_a_pipeline_has_one_bucket_and_rebuilds_before_the_second_forward(
    layout: tuple[str, int],
) -> None:
    """Each stage once: construction, a single bucket, rank 0's order and sizes, then the buckets;
    gradients are whole each time.
    """
    schedule, chunks = layout
    made = data_parallel(schedule, "ddp", chunks=chunks, iterations=2)
    done = simulate(made, with_values=True)
    calls = [
        call
        for _, call in lower(made).calls_of(3)
        if call.op in ("all_gather", "broadcast", "all_reduce")
    ]
    built, first, second = (
        ["all_gather", "broadcast", "broadcast"],
        ["all_reduce"],
        ["broadcast"] * 2 + ["all_reduce"] * 3,
    )

    assert done.outcome == "completes"
    assert [c.op for c in calls[: 4 * chunks]] == built * chunks + first * chunks
    assert Counter(c.op for c in calls[4 * chunks :]) == Counter(second * chunks)
    assert {sum(b.numel for b in c.inputs) for c in calls[3 * chunks : 4 * chunks]} == {3 * 64 * 64}
    assert done.values is not None
    for label in (
        name
        for name in done.scenario.tensors
        if name.startswith(("pipeline_initial_", "pipeline_grad_"))
    ):
        for rank in range(4):
            (found,) = {tuple(sorted(s.counts.items())) for s in done.values.stretches(rank, label)}
            assert len(found) == 2 * 4
            assert {count for _, count in found} == {1}


def test_ddp_reduces_during_the_last_backward_of_a_stage_and_fully_shard_after_it() -> None:
    """backward_maybe_with_nosync, perform_reduce_grad: buckets go out while the last backward runs,
    units once it is over.
    """
    ends = {}
    for style, op in (("ddp", "all_reduce"), ("fsdp", "reduce_scatter_tensor")):
        trace = simulate(data_parallel("1f1b", style, backend="nccl", setup=False)).run.trace
        calls = [call for call in trace.rows() if call.rank == 0]
        last = max(
            c.finished_ns
            for c in calls
            if c.name.startswith("backward") and c.finished_ns > c.started_ns
        )
        ends[style] = [c.started_ns < last for c in calls if c.op == op]

    assert ends == {"ddp": [True, True, False], "fsdp": [False, False, False]}


def test_parameters_of_a_sharded_stage_are_gathered_once_for_all_micro_batches() -> None:
    for schedule, chunks in (*WHOLE, *SPLIT):
        program = lower(data_parallel(schedule, "fsdp", chunks=chunks, batches=8))
        counted = Counter(call.op for _, call in program.calls_of(0))

        assert counted["all_gather_into_tensor"] == counted["reduce_scatter_tensor"] == 3 * chunks


@settings(max_examples=draws(20), deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 1),
    st.sampled_from(["dropped", "doubled"]),
    st.sampled_from(["ddp", "fsdp"]),
)
def test_a_reduction_dropped_or_doubled_by_one_rank_is_detected(
    number: int, rank: int, how: str, style: str
) -> None:
    wrong = spoiled(data_parallel("1f1b", style, backend="nccl", setup=False), number, rank, how)

    assert wrong is not None
    word = "pipeline_grad_0" if style == "ddp" else "pipeline_shard_grad_0"
    assert told(wrong, [f"{word}_{k}" for k in range(3)], range(2))


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"schedule": "zb1p", "style": "ddp"}, "data_parallel.style", "use fsdp"),
        (
            {"schedule": "1f1b", "style": "ddp", "group": "dpp"},
            "data_parallel.group",
            "unknown axis dpp",
        ),
        ({"schedule": "1f1b", "style": "zero"}, "data_parallel.style", "ddp"),
    ],
)
def test_impossible_data_parallelism_is_refused_at_its_place(
    fields: dict[str, Any], path: str, words: str
) -> None:
    with pytest.raises(ScenarioErrors) as caught:
        data_parallel(**fields)

    assert [p.path for p in caught.value.problems] == [f"program[0].pipeline.{path}"]
    assert words in caught.value.problems[0].message


def test_a_strategy_in_the_entries_of_a_stage_expands_there() -> None:
    """`tensor_parallel` as a stage's forward and backward makes the calls of the hybrid that says
    the same.
    """
    layer = {"layers": 2, "sequence": 32, "hidden": 64}
    pipe = {
        "schedule": "1f1b",
        "micro_batches": 4,
        "activation": {"shape": [32, 64], "dtype": "bfloat16"},
    }
    nested = {
        **pipe,
        "forward": [{"tensor_parallel": {**layer, "forward": "1 ms"}}],
        "backward": [{"tensor_parallel": {**layer, "backward": "2 ms"}}],
    }
    hybrid = {"pipeline": pipe, "tensor": {**layer, "forward": "1 ms", "backward": "2 ms"}}
    made = [
        lower(Scenario(world=4, mesh={"pp": 2, "tp": 2}, program=[entry]))
        for entry in ({"pipeline": nested}, {"hybrid": hybrid})
    ]

    for rank in range(4):
        one, other = (
            [(c.op, c.peer, c.group.ranks, c.input_nbytes, c.time_ns) for _, c in p.calls_of(rank)]
            for p in made
        )
        assert one == other


def test_an_error_in_a_nested_strategy_is_shown_at_its_place() -> None:
    inner = {"tensor_parallel": {"sequence": 32, "hidden": 63, "forward": "1 ms"}}
    with pytest.raises(ScenarioErrors) as caught:
        scenario("1f1b", 2, 4, forward=[inner])

    assert [p.path for p in caught.value.problems] == [
        "program[0].pipeline.forward[0].tensor_parallel.axis"
    ]
