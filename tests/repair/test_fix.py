"""`distsim check --diff`: what it proposes checks ok, and its patch changes nothing else of the
file.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distsim.checker.verdict import verdict_of
from distsim.program.lower import lower
from distsim.repair.exchanged_data import (
    ExchangedData,
    completed_contributions,
    outlier_ranks,
)
from distsim.repair.search import find_repairs
from distsim.repair.text_patch import patched_text
from distsim.scenario import loads
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.expectations import check_expectations
from tests.support.agreed import load_cases, scenario_of

#: Faulty scenarios and the words that the first repair must hold.
_REPAIRED = {
    "z02_both_send_first": "batch_isend_irecv",
    "z01_ring_recv_first": "batch_isend_irecv",
    "z08_roots_differ": "use one root on all ranks",
    "f15_buckets_in_another_order": "all_reduce",
    "f12_save_on_rank_0": "on all ranks",
    "z03_tag_mismatch": "recv: set tag to",
    "z10_sizes_differ": "the same shape on all ranks",
    "z19_fewer_micro_batches_than_stages": "set the var ahead to micro_batches",
    "z21_splits_not_transposed": "set output_splits to the rows that the other ranks send",
    "f19_root_by_index": "group_src, which counts inside the group",
    "f19_indivisible_all_to_all": "pad to rows that 2 ranks can share",
}


#: Training steps with a setting that differs by rank, and the words of the first repair.
_REPAIRED_SETTINGS = {
    "ddp_no_sync_on_one_rank": "ddp: set no_sync to true on all ranks",
    "ddp_frozen_on_one_rank": "ddp: remove frozen, which only some ranks have",
    "ddp_uneven": "ddp: set inputs to 2 on all ranks",
}


@pytest.mark.parametrize("name", _REPAIRED_SETTINGS)
def test_a_setting_of_a_training_step_gets_the_value_of_most_ranks(name: str, root: Path) -> None:
    text = (root / f"scenarios/strategies/{name}.yaml").read_text()

    best = find_repairs(text, f"{name}.yaml")[0]

    assert check_scenario(loads(best.text)).status() == 0
    assert best.words[0].endswith(_REPAIRED_SETTINGS[name])


@pytest.mark.parametrize("name", _REPAIRED)
def test_the_first_repair_is_ok_under_every_variant_and_completes_on_every_backend(
    name: str, root: Path
) -> None:
    text = (root / f"scenarios/zoo/{name}.yaml").read_text()

    best = find_repairs(text, f"{name}.yaml")[0]

    result = check_scenario(loads(best.text))
    assert result.verdict is not None
    assert (result.verdict.verdict, result.status()) == ("ok", 0)
    assert best.completes == ("gloo", "nccl", "mpi")
    assert best.makespan_ns > 0
    assert _REPAIRED[name] in best.words[0]


@pytest.mark.parametrize("name", ["f01_isend_then_recv", "z17_pair_communicators"])
def test_head_to_head_requests_on_nccl_become_a_batch_and_no_tensor_changes_its_size(
    name: str, root: Path
) -> None:
    """A buffer that holds the message would hide the fault, and not mend it."""
    text = (root / f"scenarios/zoo/{name}.yaml").read_text()

    found = find_repairs(text, f"{name}.yaml", backend="nccl")

    assert "batch_isend_irecv" in found[0].words[0]
    assert found[0].completes == ("gloo", "nccl", "mpi")
    assert not [
        line
        for fix in found
        for line in fix.patch.splitlines()
        if line[:1] in "+-" and "shape" in line
    ]


#: Agreed cases (tests/data/agreed) and what the first repair must say. `benchmarks/repairs.py`
#: tries all of them.
_CASES = {
    "dl0012": "set tensor to",
    "dl0026": "set tag to",
    "dl0037": "call the remaining collectives of the other ranks on ranks 1 and 3 too",
    "dl0134": "add send(",
    "dl0136": "call the remaining collectives of the other ranks on rank 0 too",
    "dl0016": "scatter after the gather",
}


@pytest.mark.parametrize("name", _CASES)
def test_agreed_faults_are_repaired_by_restoring_the_correct_call(name: str) -> None:
    case = next(case for case in load_cases() if case["id"] == name)

    best = find_repairs(scenario_of(case), f"{name}.yaml")[0]

    result = check_scenario(loads(best.text))
    assert _CASES[name] in best.words[0]
    assert result.verdict is not None
    assert (result.verdict.verdict, result.status()) == ("ok", 0)


def test_no_repair_is_proposed_for_a_correct_program_and_none_empties_a_program(root: Path) -> None:
    assert find_repairs((root / "scenarios/zoo/z02_repaired.yaml").read_text(), "x.yaml") == ()
    assert (
        find_repairs(
            "world: 2\ntensors: {x: {shape: [1]}}\nprogram:\n  - recv: {tensor: x, src: 1 - rank}\n",
            "x.yaml",
        )
        == ()
    )


def test_a_patch_keeps_every_other_line_with_its_comment() -> None:
    text = (
        "world: 2 # two\nprogram: # all\n  # first\n  - barrier # a\n  - ranks: 0 # b\n"
        "    steps:\n      - compute: 1 ms # c\n      - barrier\n# end\n"
    )
    document = YamlDocument("x.yaml", text)
    document.node = compose(document)
    document.root = construct(document, document.node, ProblemCollector(document))

    changed = patched_text(
        document,
        {
            "world": 2,
            "program": [
                "barrier",
                {"ranks": 0, "steps": [{"compute": "1 ms"}, "barrier", "barrier"]},
            ],
        },
    )

    assert changed == text.replace("      - barrier\n", "      - barrier\n      - barrier\n")


def test_the_printed_patch_applies(cli: Any, root: Path, tmp_path: Path) -> None:
    """`patch -p1` makes a file of it that checks ok."""
    text = (root / "scenarios/zoo/z02_both_send_first.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text)

    found = cli("check", "a.yaml", "--diff", cwd=tmp_path)

    assert found.returncode == 1
    assert "batch_isend_irecv" in found.stdout
    (tmp_path / "a.patch").write_text("--- a/" + found.stdout.partition("--- a/")[2])
    subprocess.run(["git", "apply", "a.patch"], cwd=tmp_path, check=True)
    assert cli("check", "a.yaml", cwd=tmp_path).returncode == 0


_OBSERVED: dict[str, tuple[str, str]] = {
    # The rank that passes an empty tensor adapts to the majority.
    "a07": (
        "world: 3\nbackend: gloo\ntensors: {x: {shape: [4], value: rank + 1}, e: {shape: [0]}}\n"
        "program:\n  - {all_reduce: {tensor: x}, ranks: [0, 2]}\n"
        "  - {all_reduce: {tensor: e}, ranks: 1}\n  - barrier\n",
        "line 6, rank 1, all_reduce: set tensor to x, like all_reduce (line 5)",
    ),
    "a13": (
        "world: 3\nbackend: gloo\ntensors: {x: {shape: [4]}}\nprogram:\n"
        "  - {all_reduce: {tensor: x}, ranks: 2}\n"
        "  - repeat: {times: 3, steps: [{all_reduce: {tensor: x}}]}\n",
        "line 5, rank 2: remove all_reduce",
    ),
    "b03": (
        "world: 2\nbackend: gloo\n"
        "tensors: {x: {shape: [4], value: 1}, y: {shape: [4]}, z: {shape: [4]}}\nprogram:\n"
        "  - ranks: 0\n    steps:\n      - isend: {tensor: x, dst: 1, as: h}\n"
        "      - assign: {tensor: x, value: 100}\n      - isend: {tensor: x, dst: 1, as: k}\n"
        "      - wait: h\n      - wait: k\n"
        "  - ranks: 1\n    steps:\n      - recv: {tensor: y, src: 0}\n"
        "      - recv: {tensor: z, src: 0}\n",
        "wait for h before assign uses x",
    ),
    "c04": (
        "world: 3\nbackend: gloo\nprogram:\n"
        "  - ranks: 0\n    steps:\n"
        "      - new_group: {name: ab, ranks: [0, 1], use_local_synchronization: true}\n"
        "      - new_group: {name: ca, ranks: [0, 2], use_local_synchronization: true}\n"
        "  - ranks: 1\n    steps:\n"
        "      - new_group: {name: bc, ranks: [1, 2], use_local_synchronization: true}\n"
        "      - new_group: {name: ab, ranks: [0, 1], use_local_synchronization: true}\n"
        "  - ranks: 2\n    steps:\n"
        "      - new_group: {name: ca, ranks: [0, 2], use_local_synchronization: true}\n"
        "      - new_group: {name: bc, ranks: [1, 2], use_local_synchronization: true}\n",
        "call new_group on all ranks, in the same order",
    ),
    "c06": (
        "world: 2\nbackend: gloo\ngroups: {g: [0, 1]}\ntensors: {x: {shape: [4]}}\nprogram:\n"
        "  - all_reduce: {tensor: x, group: g}\n"
        "  - {destroy_process_group: {group: g}, ranks: 1}\n"
        "  - {all_reduce: {tensor: x, group: g}, ranks: 0}\n  - barrier\n",
        "move destroy_process_group after the last call",
    ),
    "c08": (
        "world: 2\nbackend: gloo\ntensors: {x: {shape: [4]}}\nprogram:\n"
        "  - new_group: {name: g, ranks: [0, 0, 1]}\n  - all_reduce: {tensor: x, group: g}\n",
        "list each rank once: [0, 1]",
    ),
    "c09": (
        "world: 3\nbackend: gloo\ngroups: {g: [0, 1]}\ntensors: {x: {shape: [4]}}\nprogram:\n"
        "  - all_reduce: {tensor: x, group: g}\n  - barrier\n",
        "call all_reduce on the members of the group only",
    ),
    "f06": (
        "world: 3\nbackend: gloo\nprogram:\n"
        "  - {broadcast_object_list: {objects: [40 B], src: 0}, ranks: [0, 2]}\n"
        "  - {broadcast_object_list: {objects: [40 B, 40 B], src: 0}, ranks: 1}\n  - barrier\n",
        "use the same arguments as the other call",
    ),
    "n4": (
        "world: 3\nbackend: nccl\ntensors: {x: {shape: [4]}, y: {shape: [4]}}\nprogram:\n"
        "  - ranks: [0, 1]\n    steps:\n    - batch_isend_irecv:\n        ops:\n"
        "        - isend: {tensor: x, dst: 1 - rank}\n        - irecv: {tensor: y, src: 1 - rank}\n",
        "set `init: eager`",
    ),
}


@pytest.mark.parametrize("name", _OBSERVED)
def test_the_first_repair_keeps_data_and_follows_the_majority(name: str) -> None:
    text, words = _OBSERVED[name]

    best = find_repairs(text, "x.yaml")[0]

    assert best.loss.lost == 0
    assert words in best.words[0]
    assert check_scenario(loads(best.text)).status() == 0


_UNEVEN_BATCHES = (
    "world: 4\nbackend: nccl\nvars: {batches: '6 if rank != 2 else 5'}\n"
    "tensors: {x: {shape: [4]}}\nprogram:\n  - repeat:\n      times: batches\n      steps:\n"
    "      - compute: {name: fwd, time: 1 ms}\n      - all_reduce: {tensor: x}\n  - synchronize\n"
)


def test_uneven_batches_become_equal_and_no_gradient_reduction_is_deleted() -> None:
    repairs = find_repairs(_UNEVEN_BATCHES, "x.yaml")

    assert "set `times: 6` on all ranks" in repairs[0].words[0]
    assert "set `times: 5` on all ranks" in repairs[1].words[0]
    for repair in repairs:
        assert "all_reduce" in repair.text


def test_a_repair_updates_the_expectations_that_it_makes_false_and_says_so(tmp_path: Path) -> None:
    text = (
        "world: 2\nbackend: gloo\ntensors: {x: {shape: [4]}, z: {shape: [4]}}\nprogram:\n"
        "  - send: {tensor: x, dst: 1 - rank}\n  - recv: {tensor: z, src: 1 - rank}\n"
        "expect:\n  verdict: deadlock\n  findings: [DS301]\n  outcome: {gloo: hangs}\n"
    )

    best = find_repairs(text, "x.yaml")[0]

    (tmp_path / "x.yaml").write_text(best.text)
    assert check_expectations(tmp_path / "x.yaml").status == "passed"
    expect = loads(best.text).expect
    assert expect is not None
    assert (expect.verdict, expect.findings) == ("ok", None)
    assert (
        "the patch also updates these keys of `expect`: verdict, findings, outcome"
        in best.words[-1]
    )
    assert "-  verdict: deadlock" in best.patch


def test_expectations_that_stay_true_are_kept() -> None:
    text = (
        "world: 2\nbackend: gloo\ntensors: {x: {shape: [4]}, z: {shape: [4]}}\nprogram:\n"
        "  - send: {tensor: x, dst: 1 - rank}\n  - recv: {tensor: z, src: 1 - rank}\n"
        "expect:\n  outcome: hangs\n  makespan: {at_most: 1 s} # generous\n"
    )

    best = find_repairs(text, "x.yaml")[0]

    assert "at_most: 1 s" in best.text
    assert "outcome: completes" in best.text


def test_messages_in_the_wrong_order_all_keep_a_buffer_of_their_own(root: Path) -> None:
    text = (root / "scenarios/findings/ds610_messages_swapped.yaml").read_text()

    for repair in find_repairs(text, "x.yaml"):
        assert sorted(re.findall(r"recv: .*(input@\d)", repair.text)) == [
            f"input@{copy}" for copy in range(4)
        ]
        assert repair.flow.overwritten == 0


def test_every_step_of_a_repair_names_lines_of_the_user_s_file(root: Path) -> None:
    """The first step changes the send in line 8; the second adds a receive behind it."""
    text = (root / "scenarios/findings/ds112_negative_tag.yaml").read_text()

    best = find_repairs(text, "x.yaml")[0]

    assert best.words[:2] == (
        "line 8, rank 0, send: remove tag -1",
        "line 8: after this line, add recv(x, src=0) on rank 1",
    )


def test_a_receive_from_any_source_names_the_sender_that_it_relies_on(root: Path) -> None:
    text = (root / "scenarios/findings/ds401_wrong_sender.yaml").read_text()

    assert "set src to 1" in find_repairs(text, "x.yaml")[0].words[0]


def test_a_backward_loop_in_the_wrong_order_is_turned_round(root: Path) -> None:
    text = (root / "scenarios/pipeline_wrong_order.yaml").read_text()

    best = find_repairs(text, "x.yaml")[0]

    assert "rank 2: use r in place of micro_batches - 1 - r in this loop" in best.words[0]
    assert best.loss.lost == 0


@pytest.mark.parametrize(
    "name", ["startup/no_port", "findings/ds124_rank_twice", "findings/ds303_raised"]
)
def test_a_repair_never_hides_a_failure_by_removing_work_or_the_start(
    name: str, root: Path
) -> None:
    text = (root / f"scenarios/{name}.yaml").read_text()

    assert find_repairs(text, "x.yaml") == ()


def test_without_a_repair_the_remedy_of_the_finding_is_printed(cli: Any, root: Path) -> None:
    found = cli("check", str(root / "scenarios/startup/no_port.yaml"), "--diff")

    end = found.stdout[found.stdout.index("no repair found") :]
    assert "help: write tcp://127.0.0.1:29500, or any other free port" in end


#: Calls without arguments, tensors and groups written inline: no kind of change may fail on them.
_SPELLINGS = (
    "world: 2\nbackend: gloo\nprogram:\n  - init_process_group\n"
    "  - ranks: 0\n    steps: [barrier, destroy_process_group]\n"
    "  - ranks: rank == 1\n    steps: [destroy_process_group, barrier]\n",
    "world: 4\nbackend: gloo\nmesh: {dp: 2, tp: 2}\nprogram:\n"
    "  - {barrier: {group: [dp, tp]}, ranks: rank < 2}\n"
    "  - all_gather_into_tensor: {input: {shape: [4]}, output: {shape: [16]}, group: [dp, tp]}\n",
)


@pytest.mark.parametrize("text", _SPELLINGS)
def test_calls_may_be_written_in_every_way(text: str) -> None:
    assert find_repairs(text, "x.yaml")


def _faulty_scenarios() -> list[Path]:
    root = Path(__file__).resolve().parents[2] / "scenarios"
    files = [*sorted((root / "findings").glob("*.yaml")), *sorted((root / "zoo").glob("*.yaml"))]
    return [file for file in files if "repaired" not in file.name]


@pytest.mark.slow
@pytest.mark.parametrize("file", _faulty_scenarios(), ids=lambda file: file.stem)
def test_no_repair_removes_data_that_correct_ranks_exchange(file: Path) -> None:
    """The first repair loses least, and none loses a reduction or an exchange that took place."""
    text = file.read_text()

    repairs = find_repairs(text, file.name, most=300)

    if not repairs:
        return
    before = lower(loads(text, file.name))
    data, outliers = ExchangedData(before), outlier_ranks(before)
    losses = [repair.loss.lost for repair in repairs]
    assert losses == sorted(losses)
    state = verdict_of(before).final_state
    ends = {} if state is None else {end.rank: end.position for end in state.ends}
    hangs = verdict_of(before).verdict == "deadlock"
    for repair in repairs:
        after = ExchangedData(lower(loads(repair.text, file.name)))
        assert not data.drops_reduction(after)
        if hangs:
            completed = completed_contributions(before, ends)
            assert data.lost_exchanges(after, completed, outliers) == 0
