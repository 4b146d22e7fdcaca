"""Twenty-two mistakes that people make with PyTorch: each is told with its own cause, in words that
need no knowledge of distsim.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.scenario import Scenario, load, loads
from distsim.simulation.check_scenario import check_scenario

STRATEGIES = Path(__file__).resolve().parents[2] / "scenarios" / "strategies"
BARRIER_IN_THE_IF = """
world: 4
iterations: 2
tensors: {grad: {shape: [1000]}}
program:
  - all_reduce: {tensor: grad}
  - ranks: 0
    steps: [{compute: {name: save, time: 1 s, on: host}}, barrier]
"""
NO_SYNC_FORGOTTEN = """
world: 4
tensors: {grad: {shape: [1000]}, loss: {shape: [1]}}
program:
  - {all_reduce: {tensor: grad}, ranks: 1}
  - all_reduce: {tensor: grad}
  - all_reduce: {tensor: loss}
"""
BUCKETS_IN_ANOTHER_ORDER = """
world: 2
tensors: {a: {shape: [1000]}, b: {shape: [1000]}}
program:
  - {ranks: 0, steps: [{all_reduce: {tensor: a}}, {all_reduce: {tensor: b}}]}
  - {ranks: 1, steps: [{all_reduce: {tensor: b}}, {all_reduce: {tensor: a}}]}
"""
OTHER_GROUP = """
world: 4
mesh: {dp: 2, tp: 2}
tensors: {grad: {shape: [1000]}}
program:
  - {all_reduce: {tensor: grad, group: dp}, ranks: rank != 2}
  - {all_reduce: {tensor: grad, group: tp}, ranks: 2}
"""
LOSS_ON_RANK_0 = """
world: 4
iterations: 3
tensors: {loss: {shape: [1]}}
program:
  - ddp: {layers: {params: [[64, 64]], forward: 1 ms, backward: 2 ms, count: 4}}
  - {all_reduce: {tensor: loss}, ranks: 0}
"""
NEW_GROUP_OF_MEMBERS = """
world: 4
backend: mpi
tensors: {g: {shape: [1000]}}
program:
  - {ranks: rank < 2, steps: [{new_group: {name: a, ranks: [0, 1]}}, {all_reduce: {tensor: g, group: a}}]}
  - all_reduce: {tensor: g}
"""
ANOTHER_MODEL = """
world: 2
iterations: 2
program:
  - {ddp: {layers: {params: [[16, 16]], forward: 1 ms, backward: 2 ms, count: 3}}, ranks: 0}
  - {ddp: {layers: {params: [[16, 16]], forward: 1 ms, backward: 2 ms, count: 2}}, ranks: 1}
"""
_RULE = "out of the branch"
#: What is wrong -> the program (a text, or a scenario's name), the first finding, words that it
#: says.
MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a barrier inside `if rank == 0`": (
        BARRIER_IN_THE_IF,
        "DS201",
        ("move the 2 extra calls (first: barrier()", _RULE),
    ),
    "no_sync forgotten on a rank": (
        NO_SYNC_FORGOTTEN,
        "DS202",
        ("move the extra call all_reduce(grad", "out of the branch"),
    ),
    "no_sync forgotten on a rank, under DDP": (
        "ddp_no_sync_on_one_rank",
        "DS302",
        ("rank 1 makes more calls than the others", "no_sync() on some ranks only"),
    ),
    "buckets in another order": (
        BUCKETS_IN_ANOTHER_ORDER,
        "DS601",
        ("in different orders on world, so the results are wrong", "in the same order on"),
    ),
    "the tp group where dp was meant": (
        OTHER_GROUP,
        "DS302",
        ("rank 2 calls all_reduce on tp", "call all_reduce on dp instead"),
    ),
    "a loss reduced on rank 0 alone": (
        LOSS_ON_RANK_0,
        "DS201",
        ("move the 3 extra calls (first: all_reduce(loss", _RULE),
    ),
    "new_group called by its members alone": (
        NEW_GROUP_OF_MEMBERS,
        "DS301",
        ("all ranks of the world must call it, members",),
    ),
    "another model on a rank": (
        ANOTHER_MODEL,
        "DS802",
        ("DDP expects same model across all ranks, but Rank 0 has", "build the same model on all"),
    ),
    "a layer frozen on a rank": (
        "ddp_frozen_on_one_rank",
        "DS802",
        ("Rank 0 has 6 params, while rank 1 has inconsistent 4", "with the same parameters frozen"),
    ),
    "a batch more on a rank": (
        "ddp_uneven",
        "DS302",
        ("rank 0 makes more calls than the others",),
    ),
    "parameters without a gradient": (
        "ddp_unused_parameters",
        "DS303",
        ("Expected to have finished reduction in the prior", "or pass find_unused_parameters=True"),
    ),
    "a backward pass left out": (
        "fsdp_skipped_backward",
        "DS201",
        ("rank 2 skips 6 calls that the other ranks make", "a pass"),
    ),
    "nothing learns on a rank (LoRA)": (
        "fsdp_lora_on_some_ranks",
        "DS201",
        ("rank 2 skips 8 calls that the other ranks make",),
    ),
    "shards gathered under `if rank == 0`": (
        "fsdp_save_on_rank_0",
        "DS201",
        ("move the 2 extra calls (first: all_gather_into_ten",),
    ),
    "an object gathered under `if rank == 0`": (
        "save_on_rank_0",
        "DS201",
        ("move the 2 extra calls (first: all_gather",),
    ),
    "dcp.save under `if rank == 0`": (
        "dcp_save_on_rank_0",
        "DS201",
        ("move the 9 extra calls", "out of the branch"),
    ),
    "full_tensor under `if rank == 0`": (
        "weight_sync_on_rank_0",
        "DS302",
        ("rank 1 makes none", "out of the branch that only rank 0 takes"),
    ),
    "a rank without tokens": (
        "expert_without_tokens",
        "DS301",
        ("call all_to_all_single on ep on rank 3 too", "no tokens"),
    ),
    "splits that are not transposed": (
        "expert_splits_not_transposed",
        "DS207",
        ("24 elements to rank 1, which expects 16", "transpose"),
    ),
    "both stages send first": (
        "pipeline_both_send_first",
        "DS301",
        ("let rank 1 receive before it sends",),
    ),
    "chunks received in another order": (
        "pipeline_chunks_swapped",
        "DS610",
        ("arrives in pipeline_input@3 of rank 0",),
    ),
    "no dummy batch": (
        "inference_without_dummy_batch",
        "DS302",
        ("waits for rank 1, which has already ended", "uneven batches"),
    ),
}


def scenario_of(text: str) -> Scenario:
    return loads(text) if "\n" in text else load(str(STRATEGIES / f"{text}.yaml"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_own_cause(mistake):
    text, code, words = MISTAKES[mistake]
    first = check_scenario(scenario_of(text)).findings[0]
    said = " ".join((first.message, *first.help))

    assert first.code == code
    assert [word for word in words if word.strip() not in said] == []
