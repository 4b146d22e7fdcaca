"""What assignments, local work and accumulation leave behind, element by element, numbers and
history, as worked out by hand.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from distsim.program.lower import lower
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from distsim.values import BufferValues, compute_values
from distsim.values.lineage import ContentPiece, TensorContribution, align_contents, slice_content

TWO = """
world: 2
tensors:
  s: {shape: [2], dtype: int64, value: 10 * rank + index}
  a: {shape: [4], dtype: int64}
  b: {shape: [4], dtype: int64, value: 100}
  c: {shape: [4], dtype: int64, value: 0, copies: 2}
  u: {shape: [1], dtype: int64, value: 5}
program:
  - all_gather_into_tensor: {input: s, output: a}
"""


def values_of(text: str) -> BufferValues:
    done = simulate(loads(text))
    return compute_values(done.program, done.run.trace, at_calls=True)


def origin(rank: int, name: str, version: int, element: int) -> tuple[TensorContribution, int]:
    return TensorContribution(rank, name, version), element


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ("a + b", {0: [100, 101, 110, 111], 1: [100, 101, 110, 111]}),
        ("{0: a, else: b - 1}", {0: [0, 1, 10, 11], 1: [99] * 4}),
        ("[a + 1, b, 3, rank]", {0: [1, 100, 3, 0], 1: [1, 100, 3, 1]}),
        ("b * 2", {0: [200] * 4, 1: [200] * 4}),
        ("index + world_size", {0: [2, 3, 4, 5], 1: [2, 3, 4, 5]}),
        ("u + a", {0: [5, 6, 15, 16], 1: [5, 6, 15, 16]}),
    ],
)
def test_an_assignment_computes_with_current_tensor_contents(
    value: str, held: dict[int, list[int]]
) -> None:
    values = values_of(
        f"{TWO}  - assign: {{tensor: c, value: '{value}'}}\n"
        if value[0] not in "[{"
        else f"{TWO}  - assign: {{tensor: c, value: {value}}}\n"
    )

    for rank, numbers in held.items():
        found = values.array(rank, "c")
        assert found is not None
        assert found.tolist() == numbers
        assert values.at_call[rank, 1, "out"] == str(numbers)


def test_an_assignment_from_gathered_elements_has_one_number_for_each() -> None:
    text = "world: 2\ntensors: {s: {shape: [1], dtype: int64, value: 10 * rank}, a: {shape: [2], dtype: int64}, b: {like: a}}\nprogram:\n"
    values = values_of(
        text
        + "  - all_gather_into_tensor: {input: s, output: a}\n  - assign: {tensor: b, value: a + 1}\n"
    )

    assert values.text(1, "b") == "[1, 11]"


def test_an_assignment_has_the_history_of_its_sources_at_each_element() -> None:
    values = values_of(f"{TWO}  - assign: {{tensor: c, value: a + b}}\n")

    assert values.origins(1, "c", 1) == Counter([origin(0, "s", 0, 1), origin(1, "b", 0, 1)])
    assert values.origins(1, "c", 2) == Counter([origin(1, "s", 0, 0), origin(1, "b", 0, 2)])
    assert values.at_call[0, 1, "in"] == "[0, 1, 10, 11], [100, 100, 100, 100]"


@pytest.mark.parametrize(
    ("value", "names"), [("{0: a, else: b}", "a"), ("[a, b, 1, 2]", "ab"), ("[[a], 1, 2, 3]", "a")]
)
def test_per_rank_values_and_lists_name_their_sources(value: str, names: str) -> None:
    values = values_of(f"{TWO}  - assign: {{tensor: c, value: {value}}}\n")
    first = {"a": origin(0, "s", 0, 0), "b": origin(0, "b", 0, 0)}

    assert values.origins(0, "c", 0) == Counter(first[name] for name in names)


def test_sources_of_another_size_start_a_new_history() -> None:
    """Which element went where is not known."""
    values = values_of(f"{TWO}  - assign: {{tensor: c, value: a + u}}\n")

    assert values.origins(0, "c", 3) == Counter([origin(0, "c", 1, 3)])


@pytest.mark.parametrize("unknown", ["a", "u", "b"])
def test_results_computed_from_unknown_values_are_unknown(unknown: str) -> None:
    values = values_of(
        f"{TWO}  - compute: {{time: 1 ms, writes: [{unknown}]}}\n  - assign: {{tensor: c, value: a + b + u}}\n"
    )

    assert [values.text(rank, "c") for rank in (0, 1)] == ["?", "?"]


def test_local_work_reads_its_inputs_and_leaves_unknown_numbers() -> None:
    values = values_of(f"{TWO}  - compute: {{time: 1 ms, reads: [a, u], writes: [b]}}\n")

    assert values.at_call[0, 1, "in"] == "[0, 1, 10, 11], [5]"
    assert values.at_call[0, 1, "out"] == "?"
    assert values.origins(1, "b", 3) == Counter([origin(1, "b", 1, 3)])


def test_accumulation_adds_each_element_to_its_previous_value() -> None:
    values = values_of(
        f"{TWO}  - compute: {{time: 1 ms, adds: [b, g]}}\n".replace(
            "tensors:", "tensors:\n  g: {shape: [3]}"
        )
    )

    assert values.origins(0, "b", 2) == Counter([origin(0, "b", 0, 2), origin(0, "b", 1, 2)])
    assert values.origins(0, "g", 2) == Counter([origin(0, "g", 1, 2)])


def test_undeclared_buffers_of_calls_behave_like_declared_ones() -> None:
    values = values_of(
        f"{TWO}  - broadcast: {{tensor: {{shape: [2]}}, src: 0}}\n  - all_reduce: b\n"
    )

    assert values.text(0, "b") == "[200, 200, 200, 200]"
    assert set(values.buffers) == {(rank, name) for rank in (0, 1) for name in "sab"}


def test_there_is_no_memory_beyond_the_last_rank_copy_and_element() -> None:
    values = values_of(TWO)

    assert values.text(1, "c@1") == "[0, 0, 0, 0]"
    for rank, label in ((2, "u"), (-1, "u"), (0, "c@2"), (0, "nothing"), (0, "u@1")):
        with pytest.raises(KeyError):
            values.text(rank, label)
    with pytest.raises(IndexError):
        values.origins(0, "a", 4)


def test_initial_contents_come_from_no_call() -> None:
    values = values_of(TWO)
    pieces = values.state(0, "b").content

    assert [values.graph.nodes[piece.node].row for piece in pieces] == [-1]
    assert values.state(0, "b").row == -1
    assert values.state(0, "b").version == 0
    assert values.state(0, "a").row >= 0


@pytest.mark.parametrize(
    ("program", "there"),
    [
        ("tensors: {x: {shape: [1]}, y: {shape: [1], value: 1}}\nprogram: [all_reduce: x]", True),
        (
            "tensors: {x: {shape: [1]}}\nprogram:\n  - {assign: {tensor: x, value: 3}, ranks: 1}\n  - all_reduce: x",
            True,
        ),
        ("tensors: {x: {shape: [1]}}\nprogram: [all_reduce: x]", False),
    ],
)
def test_one_value_or_one_assignment_of_one_rank_introduces_numbers(
    program: str, there: bool
) -> None:
    assert ("numbers" in lower(loads(f"world: 2\n{program}\n")).features) == there


def test_two_elements_split_in_half_keep_their_own_number() -> None:
    content = (ContentPiece(2, 0, 0, np.array([3, 4])),)

    assert [
        [
            piece.numbers.tolist()
            for piece in slice_content(content, at, at + 1)
            if piece.numbers is not None
        ]
        for at in (0, 1)
    ] == [
        [[3]],
        [[4]],
    ]


def test_contents_of_several_pieces_are_aligned_up_to_the_last() -> None:
    one = (ContentPiece(2, 0, 0, None), ContentPiece(3, 1, 0, None))
    other = (ContentPiece(2, 2, 0, None), ContentPiece(3, 3, 0, None))

    assert [[(p.node, p.numel) for p in column] for column in align_contents([one, other])] == [
        [(0, 2), (2, 2)],
        [(1, 3), (3, 3)],
    ]
    assert [
        [(p.node, p.numel, p.start) for p in column]
        for column in align_contents([one[:1], (ContentPiece(5, 2, 0, None),)])
    ] == [[(0, 2, 0), (2, 2, 0)]]
