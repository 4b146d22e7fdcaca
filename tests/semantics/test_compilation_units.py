"""Ranks that are compiled as one come to the form that each of them has by itself, and a code's
durations are those of its ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS, BackendProfile
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import Scenario, loads
from distsim.semantics.form import compilation_units
from distsim.semantics.form.instructions import AwaitRendezvous, CompilationUnit, PostLaunch
from distsim.semantics.form.work_durations import durations_ns
from tests.support.spmd import program as spmd

SEEDS, CHUNK = 120, 40
RULES = [*BACKEND_PROFILES.values(), *CONTRACT_READINGS.values()]


def forms(found: list[CompilationUnit]) -> dict[int, list[Any]]:
    return {rank: plain(unit) for unit in found for rank in unit.ranks}


def plain(unit: CompilationUnit) -> list[Any]:
    """A unit's instructions. The names of its first rank's groups say nothing: queues count in the
    order in which they come.
    """
    names, found = dict[object, int](), list[Any]()
    for one in unit.instructions:
        if isinstance(one, PostLaunch) and (queue := one.launch.queue) is not None:
            number = names.setdefault(queue.key, len(names))
            found.append(
                one._replace(
                    launch=one.launch._replace(
                        queue=queue._replace(key=number, group=-1, endpoint=-1)
                    )
                )
            )
        elif isinstance(
            one, AwaitRendezvous
        ):  # the time-out of a group's own id is asked of groups that are gathered, by no unit of several ranks
            found.append(one if one.keyed else one._replace(of_group=0))
        else:
            found.append(one)
    return found


def each_alone(
    program: Program, profile: BackendProfile, monkeypatch: pytest.MonkeyPatch
) -> list[CompilationUnit]:
    with monkeypatch.context() as patched:
        patched.setattr(
            compilation_units,
            "_alone",
            lambda code, struck: np.ones(len(code.ranks), dtype=np.bool_),
        )
        return compilation_units.compile_units(program, profile)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_unit_has_the_instructions_of_each_of_its_ranks(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random programs of many ranks, most of which share a unit with another."""
    ranks = several = 0
    for seed in range(first, first + CHUNK):
        program, profile = lower(Scenario(**spmd(seed))), RULES[seed % len(RULES)]
        together, alone = (
            compilation_units.compile_units(program, profile),
            each_alone(program, profile, monkeypatch),
        )

        assert all(len(unit.ranks) == 1 for unit in alone)
        assert forms(together) == forms(alone), seed
        ranks, several = (
            ranks + program.world_size,
            several + sum(len(u.ranks) for u in together if len(u.ranks) > 1),
        )

    assert several > ranks / 2


ROOTS = """
world: 8
backend: BACKEND
program:
  - {send: {tensor: {shape: [4]}, dst: rank + 4}, ranks: rank < 4}
  - {recv: {tensor: {shape: [4]}, src: rank - 4}, ranks: rank > 3}
  - broadcast: {tensor: {shape: [4]}, src: FIRST, group: half}
  - broadcast: {tensor: {shape: [4]}, src: SECOND, group: half}
  - gather: {input: {shape: [4]}, dst: 0}
mesh: {two: 2, half: 4}
"""


@pytest.mark.parametrize("backend", list(BACKEND_PROFILES))
@pytest.mark.parametrize(
    ("first", "second"),
    [("4 * two", "4 * two + 1"), ("4 * two", "4 * two + rank // 4"), ("0", "3")],
)
def test_ranks_share_a_unit_if_their_roots_and_partners_coincide_equally(
    backend: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a root is that of an earlier call, the rank itself or whom it talked to decides what
    is connected already.
    """
    text = ROOTS.replace("BACKEND", backend).replace("FIRST", first).replace("SECOND", second)
    if first == "0":  # one root for all ranks
        text = text.replace(", group: half", "")
    program = lower(loads(text))

    assert forms(compilation_units.compile_units(program, BACKEND_PROFILES[backend])) == forms(
        each_alone(program, BACKEND_PROFILES[backend], monkeypatch)
    )


# --- durations ---
@pytest.mark.parametrize("op", ["put", "get"])
def test_a_one_sided_transfer_takes_the_time_of_its_link_for_any_ends(op: str) -> None:
    """The first and the last rank are ends as any other."""
    where = "dst" if op == "put" else "src"
    text = "world: {nodes: 2, ranks_per_node: 2}\nbackend: nccl\ncluster: dgx-a100\nprogram:\n"
    text += f"  - {op}: {{tensor: {{shape: ['1000 * (rank + 1)']}}, {where}: (rank + 1) % 4}}\n"
    text += f"  - {op}: {{tensor: {{shape: [1000]}}, {where}: 0}}\n"
    program, cost = lower(loads(text)), CostModel(cluster_from("dgx-a100"), 4, 2)
    (code,) = program.codes
    found = [
        np.broadcast_to(durations_ns(program, cost, code, position), 4).tolist()
        for position in range(2)
    ]

    def ns(rank: int, peer: int, nbytes: int) -> int:
        src, dst = (rank, peer) if op == "put" else (peer, rank)
        return cost.one_sided_ns(src, dst, nbytes)

    assert found[0] == [ns(rank, (rank + 1) % 4, 4000 * (rank + 1)) for rank in range(4)]
    assert found[1] == [ns(rank, 0, 4000) for rank in range(4)]
    assert min(found[0]) > 0


def test_work_that_differs_by_rank_takes_its_own_time_and_jitter_adds_at_most_its_share() -> None:
    """Where only one of time, operations and bytes differs, the others are those of all."""
    text = "world: 8\nbackend: nccl\ncluster: dgx-a100\nJITTERprogram:\n  - compute: {flops: 1 GFLOP * (rank + 1), bytes: 1 MiB}\n"
    plain, shaken = (lower(loads(text.replace("JITTER", given))) for given in ("", "jitter: 0.1\n"))
    cost = CostModel(cluster_from("dgx-a100"), 8, 8)
    base, longer = (
        np.broadcast_to(durations_ns(of, cost, of.codes[0], 0), 8).tolist()
        for of in (plain, shaken)
    )
    shares = [more / ns - 1 for more, ns in zip(longer, base, strict=True)]

    assert base == [cost.compute_ns(0, 1e9 * (rank + 1), 1 << 20) for rank in range(8)]
    assert 0 <= min(shares) < max(shares) <= 0.1001
    assert len({round(share, 4) for share in shares}) > 4
