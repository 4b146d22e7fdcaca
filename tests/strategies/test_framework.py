"""An entry of a strategy is read as the plain steps behind it, in its own place."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors
from distsim.common.message_text import name_list
from distsim.program.lower import lower
from distsim.scenario import Scenario, load, loads
from distsim.scenario.strategies import STRATEGIES
from tests.support.harness import draws
from tests.support.strategy_checks import EACH_STRATEGY, ROOT, calls_of

DDP = "  - ddp: {layers: {params: 8, forward: 1 ms, backward: 2 ms, count: 2}}\n"


def problems(program: str, head: str = "world: 2\n") -> list[str]:
    with pytest.raises(ScenarioErrors) as caught:
        loads(f"{head}program:\n{program}", file="f.yaml")
    return [f"{p.line}:{p.column}: {p.message}" for p in caught.value.problems]


@EACH_STRATEGY
def test_printed_expansions_load_again_and_make_the_same_calls(path):
    scenario = load(str(path))

    again = loads(scenario.to_yaml(flat=True))

    assert calls_of(again) == calls_of(scenario)
    assert again.to_yaml(flat=True) == scenario.to_yaml(flat=True)


@settings(max_examples=draws(40), deadline=None)
@given(
    layers=st.integers(1, 4),
    params=st.lists(st.integers(1, 400_000), min_size=1, max_size=3),
    iterations=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_ddp_expands_to_a_scenario_that_loads_and_makes_the_same_calls(
    layers, params, iterations, accumulate, flags
):
    fields = {
        "layers": {"params": params, "forward": "1 ms", "backward": "2 ms", "count": layers},
        "accumulate": accumulate,
        "find_unused_parameters": flags[0],
        "no_sync": flags[1],
        "setup": flags[2],
        "bucket_cap_mb": 1,
    }
    scenario = Scenario(world=2, iterations=iterations, program=[{"ddp": fields}])

    assert calls_of(loads(scenario.to_yaml(flat=True))) == calls_of(scenario)
    assert loads(scenario.to_yaml()) == scenario


def test_expanded_steps_have_the_place_of_their_strategy():
    program = lower(loads(f"world: 2\nprogram:\n  - barrier\n{DDP}", file="f.yaml"))

    assert {(s.line, s.column) for s in program.sites if s.op != "barrier"} == {(4, 5)}


def test_a_strategy_may_be_in_blocks_and_repeats_and_select_ranks():
    once = calls_of(loads(f"world: 2\nprogram:\n{DDP}"))
    inside = loads(
        f"world: 2\nprogram:\n  - repeat:\n      times: 2\n      steps:\n        - ranks: rank < 2\n          steps:\n          {DDP}"
    )
    chosen = loads(f"world: 2\nprogram:\n{DDP}    ranks: 1\n")

    assert [c.op for c in calls_of(inside)[0]] == 2 * [c.op for c in once[0]]
    assert (calls_of(chosen)[0], len(calls_of(chosen)[1])) == ([], len(once[1]))


def test_names_in_an_expansion_avoid_those_of_the_file_and_of_other_strategies():
    scenario = loads(f"world: 2\ntensors: {{ddp_bucket: {{shape: [1]}}}}\nprogram:\n{DDP}{DDP}")

    assert {name.partition("_")[0] for name in scenario.tensors} == {"ddp", "ddp2", "ddp3"}


def test_numbers_may_be_expressions_of_values_equal_on_all_ranks():
    head = "world: 2\nmesh: {dp: 2}\nvars: {hidden: 4, size: hidden * hidden * dp_size}\n"
    scenario = loads(
        f"{head}program:\n  - ddp: {{layers: {{params: size, forward: 1 ms, backward: 1 ms}}}}\n"
    )

    assert [n.constant for n in scenario.tensors["ddp_bucket_0"].shape] == [32]


def test_set_can_override_fields_of_a_strategy():
    scenario = loads(f"world: 2\nprogram:\n{DDP}", sets=["program.0.ddp.layers.count=3"])

    assert [n.constant for n in scenario.tensors["ddp_initial_0"].shape] == [24]


def test_an_error_is_shown_at_its_place_with_a_suggestion():
    assert problems("  - ddp: {layer: {params: 8}}\n") == [
        "3:5: ddp needs `layers`",
        f"3:11: unknown key layer in ddp; expected {name_list(STRATEGIES['ddp'].model_fields, 16)}; did you mean layers?",
    ]
    assert problems("  - ddp: {layers: {params: 8, forward: 3, backward: 1 ms}}\n") == [
        "3:40: expected a duration such as 3 ms, or `{flops, bytes}`, found 3"
    ]
    assert problems("  - dpd: {}\n") == ["3:5: unknown step 'dpd'; did you mean ddp?"]
    assert problems("  - ddp: 3\n")[0] == "3:10: expected the fields of ddp as a mapping, found 3"
    assert problems(f"  - batch_isend_irecv:\n      ops:\n      {DDP}")[0].endswith(
        "a batch may contain only isend and irecv, found ddp"
    )
    assert problems("  - ddp: {layers: {params: rank, forward: 1 ms, backward: 1 ms}}\n") == [
        "3:28: rank is not a number with one value for all ranks; available names: world_size"
    ]


def test_a_second_operation_next_to_a_strategy_suggests_a_missing_dash():
    found = problems(DDP + "    barrier: {}\n")

    assert found == [
        "4:5: this entry has two operations, ddp and barrier: put a dash before barrier"
    ]


def test_an_invalid_world_is_the_only_problem_of_a_file_with_strategies():
    assert (
        problems(DDP, "world: 0\n")
        == ["1:8: the number of ranks, an integer from 1 to 1000000, found 0"]
        or len(problems(DDP, "world: 0\n")) == 1
    )


def test_iteration_is_a_reserved_name_that_counts_iterations():
    text = "world: 2\niterations: 3\nprogram:\n  - barrier: {}\n    ranks: iteration == 1\n  - broadcast: {tensor: x, src: iteration % 2}\n"
    scenario = loads(text + "tensors: {x: {shape: [1]}}\n")

    assert [c.op for c in calls_of(scenario)[0]] == [
        "broadcast",
        "barrier",
        "broadcast",
        "broadcast",
    ]
    assert [c.root for c in calls_of(scenario)[0] if c.op == "broadcast"] == [0, 1, 0]
    assert (
        "iteration is already a built-in name of expressions"
        in problems("  - barrier\n", "world: 2\nvars: {iteration: 1}\n")[0]
    )


def test_the_manual_names_every_strategy():
    """Their fields are on the pages that `distsim.cli.generate_docs` writes."""
    page = ROOT / "docs" / "reference" / "strategies.md"
    headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for heading in headings for name in heading.split(", ")}

    assert set(STRATEGIES) - named == set()


JUNK = [
    None,
    0,
    -1,
    3,
    2.5,
    True,
    "dp",
    "x",
    "3 ms",
    "4 MiB",
    "1//0",
    "rank",
    [],
    [[]],
    [[1, 2]],
    ["a"],
    {},
    {0: 1},
    {"else": 2},
    {0: [1]},
    {"a": 1},
    [{"all_reduce": {"tensor": "x"}}],
    {"params": 4, "forward": "1 ms", "backward": "1 ms"},
    {"flops": "1 GFLOP"},
    "plain",
    {"schedule": "plain"},
    {"sequence": 8, "hidden": 8, "forward": "1 ms"},
    "megatron",
    [{"compute": {"time": "1 ms"}}],
]
_LAYERS = {"layers": {"params": 4, "forward": "1 ms", "backward": "1 ms"}}
_SIZED = {"keys": [4], "sequence": 8, "hidden": 8, "experts": 4, "tokens": 8, "forward": "1 ms"}
#: Fields with which each strategy can be.
SOUND = {
    "ddp": _LAYERS,
    "fsdp": _LAYERS,
    "megatron_ddp": _LAYERS,
    "data_parallel": {**_LAYERS, "batch": [8], "output": [8]},
    "hybrid": {},
    "all_gather_object": {"object": "1 KiB"},
    "gather_object": {"object": "1 KiB"},
    "broadcast_object_list": {"objects": ["1 B"]},
    "scatter_object_list": {"objects": ["1 B"] * 4},
    "symm_mem_barrier": {},
    "coalescing_manager": {"ops": [{"all_reduce": {"tensor": "x"}}]},
    **{
        name: {key: value for key, value in _SIZED.items() if key in STRATEGIES[name].model_fields}
        | {"axis": "dp"}
        for name in ("tensor_parallel", "context_parallel", "expert_parallel")
    },
}


@settings(max_examples=draws(200), deadline=None)
@given(st.data())
def test_any_content_of_a_strategy_is_a_program_or_a_problem_of_the_file(data):
    name = data.draw(st.sampled_from(sorted(SOUND)))
    keys = data.draw(st.lists(st.sampled_from(sorted(STRATEGIES[name].model_fields)), max_size=3))
    fields = SOUND[name] | {key: data.draw(st.sampled_from(JUNK)) for key in keys}
    places = ["loaded"]
    try:
        lower(
            Scenario(
                world=4, mesh={"dp": 4}, tensors={"x": {"shape": [4]}}, program=[{name: fields}]
            )
        )
    except ScenarioErrors as errors:
        places = [problem.path for problem in errors.problems]

    assert all(places)
