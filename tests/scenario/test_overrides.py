"""`--set name=value`: a var, else a top-level key, else a dotted path; a wrong one is reported with the
nearest right one.
"""

from __future__ import annotations

from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors, UsageError
from distsim.scenario import Scenario, loads

TEXT = """\
name: t
world: 4
vars: {n: 3}
tensors: {x: {shape: [4]}}
program:
  - repeat: {times: n, steps: [{compute: {time: 3 ms}}, sleep: 1 ms]}
  - send: {tensor: x, dst: 1}
    ranks: 0
"""


def changed(*sets: str) -> Scenario:
    return loads(TEXT, "f.yaml", sets)


@pytest.mark.parametrize(
    ("text", "look", "expected"),
    [
        ("n=5", lambda s: s.vars["n"].constant, 5),
        ("n=world_size - 1", lambda s: s.vars["n"].text, "world_size - 1"),
        ("seed=7", lambda s: s.seed, 7),
        ("name=u", lambda s: s.name, "u"),
        ("world={nodes: 2, ranks_per_node: 4}", lambda s: s.world.size, 8),
        ("vars.m=4", lambda s: s.vars["m"].constant, 4),
        ("tensors.x.dtype=float16", lambda s: s.tensors["x"].dtype, "float16"),
        ("tensors.x.shape.0=9", lambda s: s.tensors["x"].shape[0].constant, 9),
        (
            "program.0.repeat.steps.0.compute.time=5 ms",
            lambda s: s.program[0].steps[0].op.time,
            5_000_000,
        ),
        ("program.0.repeat.steps.1.sleep=2 ms", lambda s: s.program[0].steps[1].op.time, 2_000_000),
        ("program.1.ranks=[0, 1]", lambda s: s.program[1].ranks, (0, 1)),
        ("options.init=eager", lambda s: s.options.init, "eager"),
        ("expect.verdict=deadlock", lambda s: s.expect.verdict, "deadlock"),
    ],
)
def test_a_value_is_replaced_before_the_file_is_parsed(
    text: str, look: Any, expected: object
) -> None:
    assert look(changed(text)) == expected


def test_a_var_takes_precedence_over_a_key_and_later_overrides_over_earlier_ones() -> None:
    assert changed("n=4", "n=5").vars["n"].constant == 5
    assert loads("vars: {seed: 1}\nworld: 1\nprogram: []\n", sets=["seed=2"]).seed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n", "expected name=value, found `n`"),
        ("=3", "expected name=value"),
        ("wrld=3", "did you mean world?"),
        ("tensors.xx.dtype=int8", "tensors has no key xx (has: x); did you mean x?"),
        ("program.9.ranks=3", "program is a list with items 0 to 1, found 9"),
        ("program.first.ranks=3", "found first"),
        (
            "program.0.repeat.steps.1.sleep.time=3 ms",
            ("program.0.repeat.steps.1.sleep is `1 ms` and has no keys"),
        ),
        ("options.a.b=1", "options has no key a"),
        ("optons.init=eager", "did you mean options?"),
    ],
)
def test_an_unknown_path_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(text)

    assert message in caught.value.message
    assert "--set" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("n=foo(", "--set:1:6", "is not an expression"),
        ("n=", "--set:1:3", "found nothing"),
        ("tensors.x.dtype=float23", "--set:1:17", "did you mean 'float32'?"),
        ("program.1.send.dst=q + 1", "--set:1:20", "unknown name q"),
        ("n=[", "--set:1:3", "broken YAML"),
        ("options.init=lzy", "--set:1:14", "did you mean 'lazy'?"),
        ("options.int=lazy", "--set:1:13", "did you mean init?"),
    ],
)
def test_a_wrong_value_is_shown_inside_the_option(text: str, place: str, message: str) -> None:
    with pytest.raises(ScenarioErrors) as caught:
        changed(text)
    (problem,) = caught.value.problems

    assert problem.place == place
    assert problem.source_line == text
    assert message in problem.message
