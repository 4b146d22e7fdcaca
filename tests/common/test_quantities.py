"""Expressions with units: what they come to, what is refused, and that they stand wherever a
duration or a size does.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.common.expressions import ExpressionError
from distsim.common.quantities import parse_quantity, read_quantity
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import load_cluster, simulate


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("(rank + 1) * 1 ms", "a duration", 3_000_000),
        ("3 ms + 2 us", "a duration", 3_002_000),
        ("10 ms // 4", "a duration", 2_500_000),
        ("1 s if rank == 0 else 0", "a duration", 0),
        ("max(3 ms, rank * 2 ms)", "a duration", 4_000_000),
        ("4 B * rank * rank", "a size", 16),
        ("2 * 25 GB/s", "a bandwidth", 50.0),
        ("3 ms // 1 ms", "a number or a quantity", 3),
    ],
)
def test_quantities_are_in_base_units(text: str, kind: str, value: float) -> None:
    found = parse_quantity(text, kind)
    found.check({})

    assert found.evaluate({"rank": 2}) == value
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301 - our own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 ms + 1", "a duration and a plain number cannot be added"),
        ("3 ms + 4 MiB", "a duration and a size cannot be added"),
        ("3 ms * 2 ms", "a duration times a duration is not a quantity"),
        ("4 B * 2", "expected a duration, such as `3 ms`, but 4 B * 2 is a size"),
        ("3 ms > 2", "cannot be compared"),
        ("3 // 1 ms", "divided by a duration"),
    ],
)
def test_wrong_units_are_refused(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message.replace("(", r"\(").replace("*", r"\*")):
        parse_quantity(text, "a duration").check({})


def test_an_error_in_a_quantity_points_into_the_text() -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_quantity("1 ms + 2 * (3 ms + 1)", "a duration")

    assert caught.value.offset == 12


def test_a_quantity_without_ranks_is_evaluated_at_once() -> None:
    assert read_quantity("2 * step", "a duration", {"step": 5}, {"step": "a duration"}) == 10
    with pytest.raises(ExpressionError, match="rank is not a number with one value for all ranks"):
        read_quantity("rank * 1 ms", "a duration", {}, {})


SCENARIO = """
world: 2
backend: gloo
vars: {step: 2 ms, base: step * 3, w: 10}
tensors: {x: {shape: [w]}}
options: {timeout: 1000 * step}
memory: {all: {parameters: 2 * w * 1 MiB}}
program:
  - compute: {time: (rank + 1) * 1 ms}
  - compute: {time: base if rank == 0 else step * rank}
  - sleep: {0: 3 ms, else: 2 * step}
  - monitored_barrier: {timeout: {0: 10 s, else: 2000 * step}}
faults: [{rank: 1, kind: late, delay: step * 4}]
expect: {makespan: {at_most: 30 * step + 1 s}}
"""


def test_quantities_are_accepted_wherever_a_duration_or_size_is() -> None:
    scenario = loads(SCENARIO)
    ranks = simulate(scenario).timeline.ranks

    assert [r.compute_ns for r in ranks] == [7_000_000, 4_000_000]
    assert scenario.options.timeout_ns == 2_000_000_000
    assert scenario.memory["all"].parameters_nbytes == 20 * 2**20
    assert scenario.faults[0].delay_ns == 8_000_000
    assert loads(scenario.to_yaml()) == scenario


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "  - compute: {time: rank + 1}",
            "expected a duration, such as `3 ms`, but rank + 1 is a plain number",
        ),
        ("  - compute: {time: size * 2}", "is a size"),
        ("  - send: {tensor: x, dst: step}", "expected a number, but step is a duration"),
        ("  - barrier:\n    ranks: step > 1", "cannot be compared"),
        ("  - compute: {bytes: step * 2}", "expected a size, but step * 2 is a duration"),
    ],
)
def test_units_are_checked_through_vars(line: str, message: str) -> None:
    head = "world: 2\nvars: {step: 2 ms, size: 4 MiB}\ntensors: {x: {shape: [4]}}\nprogram:\n"
    with pytest.raises(ScenarioErrors) as caught:
        loads(head + line)

    assert message in caught.value.problems[0].message


def test_a_duration_that_evaluates_to_a_negative_number_is_refused() -> None:
    with pytest.raises(ScenarioErrors, match="expected a duration"):
        simulate(loads("world: 2\nprogram:\n  - compute: {time: (rank - 1) * 1 ms}\n"))


def test_vars_are_evaluated_in_linear_time() -> None:
    """Counted in evaluations, not in seconds: each var is evaluated a fixed number of times."""
    from distsim.common.expressions import Expression

    counts = []
    for n in (100, 200):
        text = (
            "world: 4\nvars:\n"
            + "".join(f"  v{k}: {f'v{k - 1} + 1' if k else 1}\n" for k in range(n))
            + "program: [barrier]\n"
        )
        calls = 0
        plain = Expression.evaluate

        def counted(self: Expression, env: object, plain: object = plain) -> object:
            nonlocal calls
            calls += 1
            return plain(self, env)  # type: ignore[operator]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Expression, "evaluate", counted)
            loads(text)
        counts.append(calls)

    assert counts[1] <= 2 * counts[0] + 10


# --- clusters and strategies ---
_LAYOUT = """
world: 4
mesh: {pp: 4}
vars: {lanes: 4, step: 3 ms, m: 2, work: 2 GFLOP}
cluster: {preset: dgx-a100, intra: {bandwidth: lanes * 25 GB/s, latency: step // 1000}}
tensors: {x: {shape: [1024]}}
program:
  - pipeline:
      schedule: 1f1b
      micro_batches: 2 * m
      forward: step
      backward: {0: m * 2 ms, else: {flops: 2 * work, bytes: m * 4 MiB}}
      activation: {shape: [4]}
  - all_gather_object: {0: m * 1 KiB, else: 64 B}
"""


def test_cluster_quantities_may_be_expressions_of_values_equal_on_all_ranks() -> None:
    scenario = loads(_LAYOUT)

    assert scenario.cluster == {
        "preset": "dgx-a100",
        "intra": {"bandwidth": "0.1 TB/s", "latency": "3 us"},
    }


def test_times_and_sizes_of_a_strategy_may_be_expressions() -> None:
    plain = (
        _LAYOUT.replace("forward: step", "forward: 3 ms")
        .replace("m * 2 ms", "4 ms")
        .replace("2 * work", "4 GFLOP")
    )
    plain = plain.replace("m * 4 MiB", "8 MiB").replace("m * 1 KiB", "2 KiB")

    assert loads(_LAYOUT).to_data() == loads(plain).to_data()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lanes * 25", "rank * 25", "rank is not a number with one value for all ranks"),
        ("step // 1000", "step // 1 GiB", "a duration divided by a size is not a quantity"),
        (
            "forward: step",
            "forward: step * rank",
            "rank is not a number with one value for all ranks",
        ),
        ("forward: step", "forward: step * step", "a duration times a duration is not a quantity"),
        ("m * 1 KiB", "m * 1 ms", "expected a size, such as `4 MiB`, but m * 1 ms is a duration"),
        ("micro_batches: 2 * m", "micro_batches: step", "step is not a number"),
    ],
)
def test_invalid_quantities_are_refused_at_their_place(old: str, new: str, message: str) -> None:
    text = _LAYOUT.replace(old, new)
    with pytest.raises(ScenarioErrors, match=re.escape(message)) as caught:
        loads(text)

    line = next(n for n, line in enumerate(text.splitlines(), 1) if new in line)
    assert [problem.line for problem in caught.value.problems] == [line]


def test_a_cluster_file_accepts_only_numbers(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("preset: dgx-a100\nintra: {bandwidth: 12 * 25 GB/s}\n", encoding="utf-8")
    assert load_cluster(file).intra.bytes_per_ns == 300.0

    file.write_text("preset: dgx-a100\nintra: {bandwidth: lanes * 25 GB/s}\n", encoding="utf-8")
    with pytest.raises(ScenarioErrors, match="known names: no names") as caught:
        load_cluster(file)
    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 20)
