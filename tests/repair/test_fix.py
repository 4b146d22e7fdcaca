"""`distsim check --diff`: what it proposes checks ok, and its patch changes nothing else of the
file.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from distsim.repair.search import find_repairs
from distsim.repair.text_patch import patched_text
from distsim.scenario import loads
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.simulation.check_scenario import check_scenario
from tests.support.agreed import load_cases, scenario_of

#: Faulty scenarios and the words that the first repair must hold.
_REPAIRED = {
    "z02_both_send_first": "batch_isend_irecv",
    "z01_ring_recv_first": "batch_isend_irecv",
    "z08_roots_differ": "use one root on all ranks",
    "f15_buckets_in_another_order": "all_reduce",
    "f12_save_on_rank_0": "on all ranks",
    "z03_tag_mismatch": "use the tag of the other side",
    "z10_sizes_differ": "the same shape on all ranks",
    "z19_fewer_micro_batches_than_stages": "set the var ahead to micro_batches",
    "z21_splits_not_transposed": "the transpose of the input splits",
    "f19_root_by_index": "group_src, which counts inside the group",
    "f19_indivisible_all_to_all": "pad to rows that 2 ranks can share",
}


@pytest.mark.parametrize("name", _REPAIRED)
def test_the_first_repair_checks_ok_under_every_reading_and_completes_on_every_back_end(
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
def test_requests_that_meet_head_to_head_on_nccl_become_a_batch_and_no_tensor_changes_its_size(
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
    "dl0012": "use the tensor of the other side",
    "dl0026": "use the tag of the other side",
    "dl0037": "ranks 1 and 3: make the collectives that",
    "dl0134": "add the send on rank 0",
    "dl0136": "rank 0: make the collectives that",
    "dl0016": "scatter after gather",
}


@pytest.mark.parametrize("name", _CASES)
def test_agreed_faults_are_repaired_by_what_was_left_out_or_said_wrongly(name: str) -> None:
    case = next(case for case in load_cases() if case["id"] == name)

    best = find_repairs(scenario_of(case), f"{name}.yaml")[0]

    result = check_scenario(loads(best.text))
    assert _CASES[name] in best.words[0]
    assert result.verdict is not None
    assert (result.verdict.verdict, result.status()) == ("ok", 0)


def test_nothing_is_proposed_for_what_is_right_and_no_repair_empties_a_program(root: Path) -> None:
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


def test_the_patch_that_is_printed_applies(cli: Any, root: Path, tmp_path: Path) -> None:
    """`patch -p1` makes a file of it that checks ok."""
    text = (root / "scenarios/zoo/z02_both_send_first.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text)

    found = cli("check", "a.yaml", "--diff", cwd=tmp_path)

    assert found.returncode == 1
    assert "batch_isend_irecv" in found.stdout
    (tmp_path / "a.patch").write_text("--- a/" + found.stdout.partition("--- a/")[2])
    subprocess.run(["git", "apply", "a.patch"], cwd=tmp_path, check=True)
    assert cli("check", "a.yaml", cwd=tmp_path).returncode == 0
