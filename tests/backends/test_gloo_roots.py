"""Collectives on gloo whose members name different roots or bring tensors of different sizes: who
gets through, held to gloo itself.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.backends.gloo_rings import RING_STEPS, RingContribution, simulate_ring
from distsim.engine import run_program
from distsim.hardware.cost import CostModel
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.from_calls import build_program
from distsim.program.model import Program
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.transitions import TransitionRules
from tests.support.gloo_observed import coll, recv, send

GLOO = BACKEND_PROFILES["gloo"]
ROOTED = [
    name
    for name, row in OPERATIONS.items()
    if row.root_field is not None and row.kind == "collective"
]
Case = tuple[str, list[int], int | list[int], list[int]]


def program_of(
    case: Case,
    before: Mapping[int, list[dict[str, Any]]],
    after: Mapping[int, list[dict[str, Any]]],
) -> Program:
    op, members, numel, roots = case
    sizes = numel if isinstance(numel, list) else [numel] * len(members)
    rooted = OPERATIONS[op].root_field is not None
    ranks = {
        r: [coll(op, size, group="g", **({"root": root} if rooted else {}))]
        for r, size, root in zip(members, sizes, roots, strict=True)
    }
    return build_program(
        4,
        {r: [*before.get(r, ()), *ranks.get(r, ()), *after.get(r, ())] for r in range(4)},
        groups={"g": members},
        backend="gloo",
        options={"stays_connected": True},  # the processes of the real run serve all cases
    )


def through(case: Case) -> list[bool]:
    """Which members get through, by the rules stepped through and by the clock."""
    program = program_of(case, {}, {})
    rules = TransitionRules(program, GLOO)
    state = rules.initial()
    rules.settle(state)
    while choices := rules.enabled(state):
        rules.advance(state, choices[0])
        rules.settle(state)
    cost = CostModel(default_cluster("gloo"), program.world_size, program.local_size)
    timed = run_program(program, GLOO, cost).final_state
    found = blocked_state_at(rules, state)
    assert found.stuck == timed.stuck
    assert [b.needs for b in found.blocked] == [b.needs for b in timed.blocked]
    assert all(need.ranks for b in found.blocked for need in b.needs)
    return [rank not in found.stuck for rank in case[1]]


def drawn(count: int) -> list[Case]:
    """Cases of every rooted operation on two to four ranks, small tensors (the last ranks have no
    part of a sum) and larger ones.
    """
    draw = random.Random(5)
    found: list[Case] = []
    for k in range(count):
        members = sorted(draw.sample(range(4), 4 if k % 2 else draw.choice((2, 3))))
        found.append(
            (
                ROOTED[k % len(ROOTED)],
                members,
                draw.choice((1, 3, 5, 8, 64)),
                [draw.choice(members) for _ in members],
            )
        )
    return found


def unlike(count: int) -> list[Case]:
    """Rings to which not all bring equally much, and in which nobody aborts: that would end the
    process that the other cases share.
    """
    draw, found = random.Random(11), list[Case]()
    while len(found) < count:
        op, members = (
            draw.choice(sorted(RING_STEPS)),
            sorted(draw.sample(range(4), draw.choice((2, 3, 4, 4)))),
        )
        numel, root = draw.choice((1, 5, 64, 1 << 20)), draw.choice(members)
        sizes = [draw.choice((0, numel, numel, numel + 1, 2 * numel)) for _ in members]
        place = members.index(root) if op == "reduce" else -1
        if not simulate_ring(
            op,
            len(members),
            tuple((me, (RingContribution(4 * size, 4, place),)) for me, size in enumerate(sizes)),
        ).aborts:
            found.append((op, members, sizes, [root] * len(members)))
    return found


def test_different_roots_or_sizes_let_the_ranks_return_that_return_on_gloo() -> None:
    """80 cases at once, each on a group of its own. Who gets through does so in milliseconds; a
    busy machine has a second chance.
    """
    pytest.importorskip("torch.distributed", reason="torch is not installed")
    cases = [*drawn(48), *unlike(32)]
    script = Path(__file__).resolve().parents[1] / "support" / "gloo_roots.py"
    said = [through(case) for case in cases]
    assert any(map(all, said))
    assert not all(map(all, said))
    for patience_s in ("2", "30"):
        command, asked = [sys.executable, str(script), patience_s], json.dumps(cases)
        told = json.loads(
            subprocess.run(
                command, input=asked, capture_output=True, text=True, timeout=240, check=True
            ).stdout
        )
        if told == said:
            break
    assert list(zip(cases, said, strict=True)) == list(zip(cases, told, strict=True))


@pytest.mark.parametrize("op", ROOTED)
def test_with_one_root_the_routes_need_the_ranks_that_the_operation_declares(op: str) -> None:
    """For 2 to 17 members and every root: nobody waits in vain, and each needs whom `needs`
    names.
    """
    for n in (2, 3, 4, 7, 8, 17):
        group, x = (
            RankGroup(0, "world", tuple(range(n))),
            TensorBuffer("x", 0, (64 * n,), "float32"),
        )
        for root in range(n):
            calls = [
                ResolvedCall(op=op, rank=rank, group=group, root=root, inputs=(x,), outputs=(x,))
                for rank in range(n)
            ]
            for rank, awaited in GLOO.per_rank_needs(calls).items() if GLOO.per_rank_needs else ():
                needed = GLOO.needs(op, n, root, rank)
                assert awaited.ranks | {rank} == (
                    frozenset(range(n)) if needed is None else needed | {rank}
                ), (n, root, rank)
                assert not awaited.in_vain


def test_a_leaf_of_the_broadcast_tree_waits_for_the_root_through_its_parent() -> None:
    """Run: rank 3 gets from rank 1, which gets from rank 0, which waits for a message that rank 3
    sends afterwards: nobody goes on.
    """
    program = program_of(("broadcast", [0, 1, 2, 3], 4, [0] * 4), {0: [recv(3)]}, {3: [send(0)]})
    cost = CostModel(default_cluster("gloo"), 4, program.local_size)
    assert run_program(program, GLOO, cost).final_state.stuck == (0, 1, 2, 3)
    assert run_program(program, GLOO, cost, ordered=True).final_state.stuck == (0, 1, 2, 3)


def test_a_rank_that_returned_continues_and_a_late_member_blocks_the_whole_ring() -> None:
    """A leaf of a reduce with two roots is through once all have come, so a call of its own can let
    the last one come; not before.
    """
    case: Case = ("reduce", [0, 1, 2, 3], 64, [0, 1, 0, 0])
    assert through(case) == [False, False, True, True]
    program = program_of(case, {}, {2: [send(3)], 3: [recv(2)]})
    cost = CostModel(default_cluster("gloo"), 4, program.local_size)
    assert run_program(program, GLOO, cost).final_state.stuck == (0, 1)
    program = program_of(case, {3: [recv(2)]}, {2: [send(3)]})
    assert run_program(program, GLOO, cost).final_state.stuck == (0, 1, 2, 3)
