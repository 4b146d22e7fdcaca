"""Keys of the store that no rank sets: the wait is reported as the cause. A wait that is answered
late is no hang. Calls that torch refuses.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from distsim import testing
from distsim.findings.codes import CODES
from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.launch.preload import preload
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.evaluation import CaptureResult, evaluate_capture

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")


def lines(judged: CaptureResult, code: str) -> list[tuple[int | None, str]]:
    """Rank and source text at the places of a finding."""
    return [
        (p.rank, source_text(p.file, p.line))
        for f in judged.simulation.findings
        if f.code == code
        for p in f.places
    ]


def test_the_script_on_the_finding_page_has_exactly_that_finding(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(CODES["DS306"].example)

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), 2, keep_output=True))
    )

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


def test_polling_a_key_that_is_never_set_is_a_hang_and_a_late_answer_is_not():
    hangs, ends = (
        testing.run(asks_in_a_loop, 2, check=False, timeout=None),
        testing.run(asks_until_it_is_there, 2, timeout=None),
    )

    assert (hangs.outcome, hangs.captured.ended) == ("hangs", "stalled")
    assert lines(hangs, "DS306") == [(1, 'while not store.check(["ready"]):')]
    assert ends.outcome == "completes"


def test_a_rank_in_the_url_needs_no_environment_variable(tmp_path: Path):
    """As in torch, the URL comes before the environment."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "rank, size = os.environ.pop('RANK'), os.environ.pop('WORLD_SIZE')\n"
        "url = f'tcp://127.0.0.1:29500?rank={rank}&world_size={size}'\n"
        "dist.init_process_group('gloo', init_method=url)\n"
        "assert (dist.get_rank(), dist.get_world_size()) == (int(rank), int(size))\n"
        "dist.barrier()\n"
    )

    options = CaptureRunOptions(CaptureTarget(str(script)), 2, keep_output=True)
    judged = evaluate_capture(run_capture(options))

    assert (judged.outcome, judged.captured.world) == ("completes", 2)


# --- calls that torch refuses ---
def to_itself() -> None:
    dist.send(torch.ones(1), dist.get_rank())


def root_of_another_group() -> None:
    high = dist.new_group([2, 3])
    if dist.get_rank() >= 2:
        dist.broadcast(torch.ones(1), 0, group=high)


def no_member() -> None:
    dist.all_reduce(torch.ones(1), group=dist.new_group([0]))


def input_that_does_not_divide() -> None:
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5))


def its_own_mistake() -> None:
    if dist.get_rank() == 0:
        raise ValueError("Invalid rank 7")


@pytest.mark.parametrize(
    ("program", "ranks", "code", "who"),
    [
        (to_itself, 2, "DS102", (0, 1)),
        (root_of_another_group, 4, "DS103", (2, 3)),
        (no_member, 2, "DS104", (1,)),
        (input_that_does_not_divide, 3, "DS110", (0, 1, 2)),
        (its_own_mistake, 2, None, ()),
    ],
)
def test_a_call_refused_by_torch_is_invalid_with_the_code_of_check(program, ranks, code, who):
    """What the script itself raises is not."""
    judged = testing.run(program, ranks, check=False, timeout=None)
    found = [f for f in judged.simulation.findings if f.code.startswith("DS1")]

    assert [(f.code, f.ranks) for f in found] == ([(code, who)] if code else [])
    assert (
        judged.simulation.verdict is not None and judged.simulation.verdict.verdict == "invalid"
    ) == bool(code)
    assert {p.file for f in found for p in f.places} <= {os.path.relpath(__file__), __file__}


def names_an_object() -> None:
    apart = [bytearray(4096 * (dist.get_rank() + 1)) for _ in range(64)]
    raise ValueError(f"{object()} after {len(apart)}")


def test_equal_errors_that_show_different_addresses_are_one_finding():
    judged = testing.run(names_an_object, 3, check=False, timeout=None)

    assert [f.ranks for f in judged.simulation.findings] == [(0, 1, 2)]
    assert "ValueError: <object object> after 64" in judged.simulation.findings[0].message


# --- stores that scripts make ---
def passes_work_through_a_queue() -> None:
    rank = dist.get_rank()
    base = dist.TCPStore("127.0.0.1", 29871, 2, rank == 0)
    jobs = dist.PrefixStore("jobs", base)
    assert (base.host, base.port, isinstance(base, dist.TCPStore)) == ("127.0.0.1", 29871, True)
    if rank == 0:
        dist.barrier()
        jobs.queue_push("todo", "é")
        jobs.queue_push("todo", b"\xff")
        assert jobs.list_keys() == []
        return
    with pytest.raises(dist.QueueEmptyError):
        jobs.queue_pop("todo", block=False)
    assert not jobs.check(["todo"])
    dist.barrier()
    assert (jobs.queue_pop("todo"), jobs.queue_pop("todo"), jobs.queue_len("todo")) == (
        "é".encode(),
        b"\xff",
        0,
    )


def has_a_store_and_no_world() -> None:
    """Keys and values as in torch 2.13, also before there are ranks, and a time-out that the script
    sets.
    """
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", 29872, 2, rank == 0)
    store.set(f"é{rank}", "é")
    store.wait(["é0", "é1"])
    assert store.get("é1") == "é".encode()
    if rank == 0:
        store.set("word", "abc")
        with pytest.raises(TypeError):
            store.set("number", 5)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="word is not a number"):
            store.add("word", 1)
        store.set_timeout(timedelta(hours=1))
        with pytest.raises(
            dist.DistStoreError, match="wait timeout after 3600000ms, keys: nothing"
        ):
            store.get("nothing")


@pytest.mark.parametrize(
    ("program", "init"), [(passes_work_through_a_queue, True), (has_a_store_and_no_world, False)]
)
def test_the_emulated_store_behaves_like_a_tcp_store(program, init):
    assert testing.run(program, 2, init=init, timeout=20).outcome == "completes"


def pops_once_too_often() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.queue_push("jobs", "one")
    else:
        store.queue_pop("jobs")
        store.queue_pop("jobs")
    dist.barrier()


def one_does_not_come_to_the_store() -> None:
    rank = int(os.environ["RANK"])
    if rank != 2:
        dist.TCPStore("127.0.0.1", 29873, 3, is_master=rank == 0)


def no_store_is_the_server() -> None:
    dist.TCPStore("127.0.0.1", 29874, 2, is_master=False)


@pytest.mark.parametrize(
    ("program", "ranks", "init", "words", "line"),
    [
        (pops_once_too_often, 2, True, "jobs, which no rank sets", 'store.queue_pop("jobs")'),
        (
            one_does_not_come_to_the_store,
            3,
            False,
            "all 3 workers of 127.0.0.1:29873",
            'dist.TCPStore("127.0.0.1", 29873, 3, is_master=rank == 0)',
        ),
        (
            no_store_is_the_server,
            2,
            False,
            "ranks 0, 1 wait for the server of 127.0.0.1:29874, which no rank starts",
            'dist.TCPStore("127.0.0.1", 29874, 2, is_master=False)',
        ),
    ],
)
def test_a_store_whose_peer_never_arrives_is_a_hang_with_its_line(
    program, ranks, init, words, line
):
    judged = testing.run(program, ranks, init=init, check=False, timeout=20)

    found = [f for f in judged.simulation.findings if f.code == "DS306"]
    assert judged.outcome == "hangs"
    assert words in found[0].message
    assert {text for _, text in lines(judged, "DS306")} == {line}


def test_a_function_that_an_installed_package_imported_by_name_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A package is imported before the ranks part; torch's own TCPStore would open a socket."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "took_by_name.py").write_text(
        "from torch.distributed import TCPStore, init_process_group\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport took_by_name\nimport torch.distributed as dist\n"
        "assert took_by_name.TCPStore is dist.TCPStore\nassert took_by_name.init_process_group is dist.init_process_group\n"
        "took_by_name.TCPStore('127.0.0.1', 29875, 2, os.environ['RANK'] == '0')\ntook_by_name.init_process_group('gloo')\n"
        "dist.barrier()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    preload(str(script))

    judged = evaluate_capture(
        run_capture(CaptureRunOptions(CaptureTarget(str(script)), 2, keep_output=True))
    )

    assert judged.outcome == "completes", judged.captured.outputs
