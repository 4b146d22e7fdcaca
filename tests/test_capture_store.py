"""Keys of the store that nobody sets: the wait is named as the cause, one that is answered late is no hang. Calls that torch refuses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from distsim import testing
from distsim.capture.child import Target
from distsim.capture.judge import Judged, judge
from distsim.capture.launch import Wish, capture
from distsim.capture.sites import text_of
from distsim.capture.stall import is_known
from distsim.findings.codes import CODES

pytestmark = pytest.mark.skipif(not is_known(), reason="standstill is told from Linux's /proc")


def lines(judged: Judged, code: str) -> list[tuple[int | None, str]]:
    """Rank and source text at the places of a finding."""
    return [(p.rank, text_of(p.file, p.line)) for f in judged.simulation.findings if f.code == code for p in f.places]


def test_the_script_of_the_finding_s_page_has_the_finding_and_nothing_else(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(CODES["DS306"].example)

    judged = judge(capture(Wish(Target(str(script)), 2, keep_output=True)))

    assert CODES["DS306"].of_scripts
    assert [f.code for f in judged.simulation.findings] == ["DS306"]
    assert lines(judged, "DS306") == [(0, 'store.wait(["ready"])')]
    assert judged.simulation.verdict is not None
    assert (judged.outcome, judged.simulation.verdict.verdict) == ("hangs", "deadlock")
    assert (judged.simulation.verdict.core, judged.simulation.verdict.ranks) == ((0,), (0, 1))


def asks_in_a_loop() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        while not store.check(["ready"]):
            time.sleep(0.02)
    dist.barrier()


def asks_until_it_is_there() -> None:
    """For longer than after which a loop that asks in vain counts as a hang."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        time.sleep(1.5)
        store.set("ready", "yes")
    while not store.check(["ready"]):
        time.sleep(0.02)
    dist.barrier()


def test_a_loop_that_asks_for_a_key_that_nobody_sets_is_a_hang_and_one_that_is_answered_late_is_none():
    hangs, ends = testing.run(asks_in_a_loop, 2, check=False, timeout=None), testing.run(asks_until_it_is_there, 2, timeout=None)

    assert (hangs.outcome, hangs.captured.ended) == ("hangs", "stalled")
    assert lines(hangs, "DS306") == [(1, 'while not store.check(["ready"]):')]
    assert ends.outcome == "completes"


# --- calls that torch refuses ---
def to_itself() -> None:
    dist.send(torch.ones(1), dist.get_rank())


def root_of_another_group() -> None:
    high = dist.new_group([2, 3])
    if dist.get_rank() >= 2:
        dist.broadcast(torch.ones(1), 0, group=high)


def no_member() -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))


def its_own_mistake() -> None:
    if dist.get_rank() == 0:
        raise ValueError("Invalid rank 7")


@pytest.mark.parametrize(
    ("program", "ranks", "code", "who"),
    [(to_itself, 2, "DS102", (0, 1)), (root_of_another_group, 4, "DS103", (2, 3)), (no_member, 2, "DS104", (1,)),
     (its_own_mistake, 2, None, ())],
)  # fmt: skip
def test_a_call_that_torch_refuses_is_invalid_with_the_code_that_check_gives_it(program, ranks, code, who):
    """What the script itself raises is not."""
    judged = testing.run(program, ranks, check=False, timeout=None)
    found = [f for f in judged.simulation.findings if f.code.startswith("DS1")]

    assert [(f.code, f.ranks) for f in found] == ([(code, who)] if code else [])
    assert (judged.simulation.verdict is not None and judged.simulation.verdict.verdict == "invalid") == bool(code)
    assert {p.file for f in found for p in f.places} <= {os.path.relpath(__file__), __file__}


def names_an_object() -> None:
    apart = [bytearray(4096 * (dist.get_rank() + 1)) for _ in range(64)]
    raise ValueError(f"{object()} after {len(apart)}")


def test_ranks_that_raise_the_same_of_an_object_at_another_address_have_one_finding():
    judged = testing.run(names_an_object, 3, check=False, timeout=None)

    assert [f.ranks for f in judged.simulation.findings] == [(0, 1, 2)]
    assert "ValueError: <object object> after 64" in judged.simulation.findings[0].message
