"""gloo's rings to which not all members bring equally much: who aborts, who gets through and who
waits.

tests/backends/test_gloo_roots.py holds drawn ones to gloo itself."""

from __future__ import annotations

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.backends.gloo_rings import RING_STEPS, RingContribution, simulate_ring
from distsim.backends.profile import MismatchedCalls, MismatchOutcome
from distsim.engine.backend_outcomes import backend_outcome
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.program.from_calls import build_program
from tests.support.gloo_observed import coll

MI = 1 << 20
#: float32 elements of each rank, as run on torch 2.13: who aborted, and who was through; the others
#: stood still or lost their peer.
RUN: dict[str, dict[tuple[int, ...], tuple[set[int], set[int]]]] = {
    "all_reduce": {
        (1, 2): (set(), set()),
        (1, 2, 3): (set(), {0}),
        (6, 5, 5): (set(), {1, 2}),
        (1, 2, 1, 1): (set(), {0, 2, 3}),
        (4, 4, 8, 4): (set(), {0, 1, 3}),
        (4, 4, 8): ({1}, set()),
        (4, 8, 4): ({0}, set()),
        (8, 4, 4): ({2}, set()),
        (8 * MI, 4 * MI): (set(), {1}),
        (4 * MI, 8 * MI): (set(), {0}),
        (2 * MI, 2 * MI + 5): ({1}, set()),
        (5 * MI, 3 * MI, 3 * MI): ({0}, set()),
        (3 * MI, 5 * MI, 3 * MI): ({1}, set()),
        (0, 4): (set(), {0}),
        (4, 0, 0): (set(), {1, 2}),
        (0, 4, 8): ({1}, {0}),
        (0, 8, 4): (set(), {0}),
        (4, 0, 8): (set(), {1}),
    },
    "all_gather": {
        (1, 2): ({0}, set()),
        (2, 1): ({1}, set()),
        (3, 4, 3): ({2}, set()),
        (4, 4, 8): ({0}, set()),
        (8, 4, 4): ({1}, set()),
        (4, 4, 8, 4): ({3}, set()),
        (4 * MI, 8 * MI): ({0}, set()),
        (5 * MI, 3 * MI, 3 * MI): ({1}, set()),
        (0, 4): (set(), {0}),
        (0, 4, 8): (set(), {0}),
        (0, 8, 4): ({2}, {0}),
    },
    "reduce": {
        (1, 2): (set(), {0}),
        (2, 1): (set(), {1}),
        (5, 6, 5): (set(), {0, 2}),
        (4, 4, 8, 4): (set(), {0, 1, 3}),
        (4 * MI, 8 * MI): (set(), {0}),
        (8 * MI, 4 * MI): ({0}, set()),
        (0, 4): (set(), {0}),
        (4, 0): (set(), {1}),
        (4, 0, 0): (set(), {1, 2}),
    },
}


@pytest.mark.parametrize(
    ("kind", "sizes"), [(kind, sizes) for kind, runs in RUN.items() for sizes in runs]
)
def test_a_ring_with_different_sizes_ends_as_observed(kind: str, sizes: tuple[int, ...]) -> None:
    root = 0 if kind == "reduce" else -1
    ends = simulate_ring(
        kind,
        len(sizes),
        tuple((rank, (RingContribution(4 * numel, 4, root),)) for rank, numel in enumerate(sizes)),
    )
    aborts, done = RUN[kind][sizes]
    assert ends.aborts == aborts
    assert (
        ends.through >= done if aborts else ends.through == done
    )  # who is done beside one that dies is a race


@pytest.mark.parametrize("kind", RING_STEPS)
def test_a_ring_with_equal_sizes_completes(kind: str) -> None:
    for n in (2, 3, 5, 8):
        for nbytes in (0, 1, 2, 7, 64, 999, 3 * MI + 1, 40 * MI):
            shares = tuple(
                (rank, (RingContribution(nbytes, 1, 1 if kind == "reduce" else -1),))
                for rank in range(n)
            )
            assert simulate_ring(kind, n, shares) == (frozenset(), frozenset(range(n)), {}), (
                n,
                nbytes,
            )


@pytest.mark.parametrize(
    ("op", "waits"),
    [
        ("all_reduce", False),
        ("reduce", False),
        ("all_gather", False),
        ("all_gather_into_tensor", False),
        ("reduce_scatter", False),
        ("reduce_scatter_tensor", False),
        ("broadcast", True),
        ("gather", True),
        ("scatter", True),
        ("all_to_all", True),
        ("all_to_all_single", True),
        ("barrier", True),
    ],
)
def test_empty_tensors_make_only_non_ring_collectives_wait(op: str, waits: bool) -> None:
    """Run, each with the two other ranks asleep."""
    root = {"root": 0} if op in ("reduce", "broadcast", "gather", "scatter") else {}
    stays = {"stays_connected": True}
    program = build_program(3, {0: [coll(op, 0, **root)], 1: [], 2: []}, options=stays)
    assert backend_outcome(program, BACKEND_PROFILES["gloo"]).outcome == (
        "hangs" if waits else "completes"
    )
    assert backend_outcome(program, BACKEND_PROFILES["nccl"]).outcome == "hangs"


def test_an_empty_collective_counts_in_the_sequence_of_its_group() -> None:
    """Run: one rank's all_reduce of nothing before that of all puts it one behind, and both stand
    still.
    """
    program = build_program(
        2, {0: [coll("all_reduce", 0), coll("all_reduce", 4)], 1: [coll("all_reduce", 4)]}
    )
    assert backend_outcome(program, BACKEND_PROFILES["gloo"]).outcome == "hangs"


def test_equal_bytes_with_larger_elements_form_different_segments() -> None:
    """Eight bytes of two ranks are four segments of two bytes, or one of eight: int8 beside float64
    aborts (run).
    """
    group = RankGroup(0, "world", (0, 1))
    inputs = (TensorBuffer("x", 0, (8,), "int8"), TensorBuffer("x", 0, (1,), "float64"))
    calls = tuple(
        ResolvedCall(op="all_reduce", rank=r, group=group, inputs=(x,), outputs=(x,))
        for r, x in enumerate(inputs)
    )
    assert BACKEND_PROFILES["gloo"].mismatch(
        MismatchedCalls(("numel", "dtype"), calls, (8, 8), False)
    ) == MismatchOutcome("crashes", (0,))
