"""What may be written, and what it is read as: the sixteen rules of the scenario file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.operations.core.field_types import InlineTensor, NameReference, PerRank, to_plain_data
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario import (
    Scenario,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
    load,
    loads,
    starter,
)

HYBRID = Path(__file__).resolve().parents[2] / "scenarios" / "hybrid.yaml"
HEAD = "world: 4\nmesh: {dp: 2, pp: 2}\ntensors: {x: {shape: [4], copies: 4}, y: {shape: [4, 4]}}\nprogram:\n"


def steps(text: str) -> tuple[Any, ...]:
    return loads(HEAD + text).program


def step(text: str) -> ScenarioStep:
    (entry,) = steps(text)
    assert isinstance(entry, ScenarioStep)
    return entry


def field(text: str, name: str) -> Any:
    return getattr(step(text).op, name)


def test_hybrid_is_parsed_with_the_places_of_its_steps() -> None:
    scenario = load(HYBRID)
    first, second, reduce, optimizer = scenario.program

    assert scenario.world.size == 4
    assert scenario.mesh == {"replica": 2, "stage": 2}
    assert isinstance(first, ScenarioBlock)
    assert isinstance(second, ScenarioBlock)
    assert [type(s.op).op for s in first.steps if isinstance(s, ScenarioStep)] == [
        "compute",
        "send",
        "recv",
        "compute",
    ]
    assert isinstance(reduce, ScenarioStep)
    assert (reduce.line, reduce.column) == (24, 5)
    assert isinstance(optimizer, ScenarioStep)
    assert getattr(optimizer.op, "time", None) == 1_000_000
    assert scenario.expect is not None
    assert scenario.expect.makespan is not None
    assert scenario.expect.makespan.at_most_ns == 20_000_000


def test_a_bare_word_is_a_step_without_fields() -> None:
    assert step("  - barrier\n") == step("  - barrier: {}\n") == step("  - barrier:\n")


def test_a_single_value_is_the_first_field() -> None:
    assert field("  - sleep: 3 ms\n", "time") == 3_000_000
    assert field("  - exit: 3\n", "code").constant == 3
    assert field("  - fail: out of memory\n", "message") == "out of memory"
    assert field("  - recv: x\n", "tensor") == NameReference("x")
    assert field("  - sleep: {0: 1 ms, else: 2 ms}\n", "time") == PerRank(
        ((0, 1_000_000),), 2_000_000
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ("0", (0,)),
        ("[0, 2]", (0, 2)),
        ("stage_0", None),
        ("rank == 0", "rank == 0"),
        ("'pp == 0 and rank > 1'", ""),
    ],
)
def test_selectors_name_ranks_or_state_a_condition(ranks: str, expected: Any) -> None:
    if expected is None:
        with pytest.raises(ScenarioErrors, match="unknown name stage_0"):
            step(f"  - barrier:\n    ranks: {ranks}\n")
        return
    found = step(f"  - barrier:\n    ranks: {ranks}\n").ranks

    assert found == expected if isinstance(expected, tuple) else str(found) == ranks.strip("'")


def test_blocks_and_repeats_nest() -> None:
    (block,) = steps(
        "  - ranks: dp == 0\n    steps:\n      - repeat: {times: 3, index: i, steps: [{steps: [{wait: all}]}]}\n"
    )

    assert isinstance(block, ScenarioBlock)
    (repeat,) = block.steps
    assert isinstance(repeat, ScenarioRepeat)
    assert (repeat.times, repeat.index) == (
        Scenario(world=1, vars={"n": 3}, program=[]).vars["n"],
        "i",
    )
    (inner,) = repeat.steps
    assert isinstance(inner, ScenarioBlock)
    assert inner.ranks is None


def test_a_name_may_have_an_index() -> None:
    text = "  - repeat: {times: 2, index: m, steps: [{send: {tensor: x@(m + 1), dst: 1}}]}\n"
    (repeat,) = steps(text)
    reference = repeat.steps[0].op.tensor

    assert (reference.name, str(reference.index)) == ("x", "(m + 1)")


def test_per_rank_values_keep_their_ranks() -> None:
    splits = field(
        "  - all_to_all_single: {input: x@0, output: x@1, input_splits: {0: [1, 3], else: [2, rank]}}\n",
        "input_splits",
    )

    assert to_plain_data(splits) == {0: [1, 3], "else": [2, "rank"]}


def test_an_inline_tensor_has_its_own_buffer() -> None:
    assert isinstance(
        field("  - send: {tensor: {shape: [2 * dp_size], dtype: int32}, dst: 1}\n", "tensor"),
        InlineTensor,
    )


def test_a_batch_contains_steps_with_their_own_selectors() -> None:
    text = "  - batch_isend_irecv:\n      ops:\n        - isend: {tensor: x, dst: 1}\n          ranks: 0\n"
    text += "        - irecv: {tensor: y, src: 0}\n      as: h\n"
    ops = field(text, "ops")

    assert [(type(s.op).op, s.ranks) for s in ops] == [("isend", (0,)), ("irecv", None)]
    assert ops[0].line == 7


def test_groups_are_axes_meshes_or_declared_groups() -> None:
    scenario = loads(
        "groups:\n  pair: [0, 2]\n  slow: {ranks: [1, 3], timeout: 30 s}\n  all_axes: {axes: [dp, pp]}\n  odd: {by: rank % 2}\n"
        + HEAD
        + "".join(
            f"  - barrier: {{group: {g}}}\n"
            for g in ("pair", "slow", "all_axes", "odd", "dp", "[dp, pp]", "world")
        )
    )

    assert scenario.groups["pair"].ranks == (0, 2)
    assert scenario.groups["slow"].timeout_ns == 30 * 10**9
    assert scenario.groups["all_axes"].axes == ("dp", "pp")
    assert str(scenario.groups["odd"].by) == "rank % 2"
    steps = [step for step in scenario.program if isinstance(step, ScenarioStep)]
    groups = [getattr(step.op, "group", None) for step in steps]
    assert groups[-2:] == [("dp", "pp"), "world"]


def test_like_copies_shape_dtype_and_copies_but_never_the_value() -> None:
    scenario = loads(
        "world: 2\ntensors: {a: {shape: [2], dtype: int8, copies: 3, value: 1}, b: {like: a}, c: {like: b, dtype: int32}}\nprogram: []\n"
    )
    a, b, c = scenario.tensors.values()

    assert (b.shape, b.dtype, b.copies, b.value) == (a.shape, "int8", a.copies, None)
    assert (c.shape, c.dtype) == (a.shape, "int32")


def test_a_list_of_values_has_a_shape() -> None:
    tensor = loads("world: 2\ntensors: {a: {value: [[1, 2], [3, rank]]}}\nprogram: []\n").tensors[
        "a"
    ]

    assert to_plain_data(tensor.shape) == [2, 2]
    assert to_plain_data(tensor.value) == [[1, 2], [3, "rank"]]


def test_scalars_have_the_type_that_they_look_like() -> None:
    """YAML 1.2 core: 1.1 would read these as true, false, a sexagesimal and an octal number."""
    scenario = loads(
        "name: no\nabout: 12:30\nworld: 010\nprogram: []\nvars: {a: 0o10, b: 1e1, c: 0x10}\nseed: 1e3\n"
    )

    assert (scenario.name, scenario.about, scenario.world.size, scenario.seed) == (
        "no",
        "12:30",
        10,
        1000,
    )
    assert [v.constant for v in scenario.vars.values()] == [8, 10.0, 16]


def test_vars_may_use_ranks_axes_and_earlier_vars() -> None:
    scenario = loads(
        "vars: {a: pp_size - 1, b: 'min(a, pp)', c: b == rank}\n" + HEAD + "  - barrier\n"
    )

    assert [sorted(v.names) for v in scenario.vars.values()] == [
        ["pp_size"],
        ["a", "pp"],
        ["b", "rank"],
    ]


def test_fields_next_to_a_group_know_the_group_rank() -> None:
    text = "  - send: {tensor: x, group: pp, group_dst: (group_rank + 1) % group_size}\n"

    assert field(text, "group_dst").names == {"group_rank", "group_size"}


def test_a_value_can_use_index_and_copy_and_assign_can_use_tensors() -> None:
    scenario = loads(
        HEAD.replace("copies: 4}", "copies: 4, value: copy + index}")
        + "  - assign: {tensor: y, value: 2 * x + index}\n"
    )

    assert scenario.tensors["x"].value.names == {"copy", "index"}


def test_faults_are_parsed() -> None:
    text = "  - barrier\nfaults:\n  - {rank: 2, iteration: 3, kind: kill}\n  - {ranks: node == 1, kind: slow, factor: 1.3}\n"
    text += "  - {link: nic, nodes: [0], kind: slow, factor: 2}\n  - {rank: 0, kind: exit, before_call: 7, code: 3}\n"
    text += "  - {rank: 1, kind: raise, at: 5 ms}\n  - {rank: 1, kind: late, delay: 5 ms}\n  - {rank: 3, kind: absent}\n"
    faults = loads(HEAD + text).faults

    assert [f.kind for f in faults] == ["kill", "slow", "slow", "exit", "raise", "late", "absent"]
    assert (faults[0].rank, faults[0].iteration, faults[2].nodes, faults[3].before_call) == (
        2,
        3,
        (0,),
        7,
    )
    assert (faults[4].at_ns, faults[5].delay_ns, faults[1].factor) == (5_000_000, 5_000_000, 1.3)


def test_options_and_launch_are_parsed() -> None:
    scenario = loads(
        HEAD
        + "  - barrier\noptions: {init: eager, buffsize: 1 MiB, timeout: 30 s}\nlaunch: {master_port: 1234}\n"
    )

    assert (scenario.options.init, scenario.options.buffsize, scenario.options.timeout_ns) == (
        "eager",
        1 << 20,
        30 * 10**9,
    )
    assert scenario.launch.master_port == 1234


def test_expectations_are_parsed() -> None:
    text = "expect: {verdict: deadlock, depends_on: null, outcome: {gloo: hangs}, ranks: [0, 1], core: [0], findings: [DS301],\n"
    text += "  values: {x: {0: [1, 2], other_ranks: '?'}, x@1: 3}, iteration: {at_least: 1 ms}}\n"
    expect = loads(HEAD + "  - barrier\n" + text).expect

    assert expect is not None
    assert (expect.verdict, expect.outcome, expect.findings) == (
        "deadlock",
        {"gloo": "hangs"},
        ("DS301",),
    )
    assert "depends_on" in expect.model_fields_set
    assert expect.values == {"x": PerRank(((0, (1, 2)),), "?"), "x@1": 3}


def test_a_missing_name_defaults_to_the_file_name() -> None:
    assert loads("world: 1\nprogram: []\n", "some/ring.yaml").name == "ring"


@pytest.mark.parametrize("alias", sorted(OPERATION_ALIASES))
def test_an_alias_is_the_operation_itself(alias: str) -> None:
    fields = ", ".join(
        f"{name}: x"
        for name, info in OPERATIONS[OPERATION_ALIASES[alias]].model_fields.items()
        if info.is_required()
    )

    assert type(step(f"  - {alias}: {{{fields}}}\n").op) is OPERATIONS[OPERATION_ALIASES[alias]]


@pytest.mark.parametrize("kind", ["plain", "ring", "ddp", "pipeline"])
def test_a_starter_is_a_scenario_without_problems(kind: str) -> None:
    assert loads(starter(kind), f"{kind}.yaml").name == kind


def test_aliases_within_the_limits_are_accepted() -> None:
    assert (
        len(loads("world: 2\nprogram:\n  - &b {barrier: {}}\n" + "  - *b\n" * 100).program) == 101
    )


def test_a_scenario_can_be_built_in_python() -> None:
    built = Scenario(
        name="sum",
        world=4,
        tensors={"x": {"shape": [1], "value": "rank"}},
        program=[{"all_reduce": {"tensor": "x"}}, "barrier"],
    )
    read = loads(
        "name: sum\nworld: 4\ntensors: {x: {shape: [1], value: rank}}\nprogram:\n  - all_reduce: {tensor: x}\n  - barrier\n"
    )

    assert built == read
    assert built.file == "<python>"


def test_the_scenario_can_locate_a_step_later() -> None:
    scenario = loads(HEAD + "  - send: {tensor: x, dst: 1 // rank}\n", "f.yaml")
    entry = scenario.program[0]
    problem = scenario.problem((*entry.path, "send", "dst"), "division by zero", 2)

    assert problem.render().splitlines()[0] == "f.yaml:5:30: division by zero"


def test_a_large_file_is_loaded_with_every_place() -> None:
    text = HEAD + "".join(
        f"  - send: {{tensor: x@{k}, group: pp, group_dst: pp + 1, tag: {k}}}\n"
        for k in range(2000)
    )
    program = loads(text).program

    assert [entry.line for entry in program] == list(range(5, 2005))


def test_the_pure_python_loader_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libyaml: the same scenario and the same place of a problem."""
    from distsim.scenario.format.source import yaml_nodes

    fast = load(HYBRID)
    monkeypatch.setattr(yaml_nodes, "_loader_class", lambda: yaml_nodes._PureYamlLoader)

    assert load(HYBRID) == fast
    with pytest.raises(ScenarioErrors) as caught:
        loads(HEAD + "  - send: {tensor: z, dst: min(1, 2)}\n  - barrier: [", "f.yaml")
    assert caught.value.problems[0].line >= 6
    with pytest.raises(ScenarioErrors, match="deeper than 100"):
        loads("a: " + "[" * 300)
