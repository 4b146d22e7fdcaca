"""Phrases of a hang report, live processes, and files that say nothing about a hang."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from distsim.hang_doctor.analysis.live_states import _is_hung_worker, _state_text, movement_text
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import (
    EvidenceCall,
    ProcessState,
    RankEvidence,
    StackFrame,
    ThreadStack,
)
from distsim.hang_doctor.model.phrases import (
    call_text,
    may_hide_a_wait,
    process_state_text,
    ranks_text,
    short_file,
    signal_name,
    source_line,
    verb_form,
)
from distsim.hang_doctor.readers.kineto import is_kineto, read_kineto
from distsim.hang_doctor.readers.unrelated_files import (
    NOTHING_ABOUT_HANGS,
    unrelated_bytes,
    unrelated_json,
    unrelated_text,
)


# --- ranks and calls ---
def test_the_ranges_of_a_text_are_the_ranks_it_was_made_from() -> None:
    """Two neighbours are listed as two numbers, more as a range, and no two ranges touch."""
    for seed in range(60):
        draw = Random(seed)
        ranks = draw.sample(range(14), draw.randint(2, 10))
        text = ranks_text(ranks * 2)
        ranges = [tuple(map(int, part.split("-"))) for part in re.findall(r"\d+(?:-\d+)?", text)]
        if text.endswith("in all"):
            assert int(text.split()[-3]) == len(ranks)
            assert len(ranges[:-1]) == 6
            continue
        spans = [range(part[0], part[-1] + 1) for part in ranges]
        assert text.startswith("ranks ")
        assert text.count(" and ") == (len(ranges) > 1)
        assert [rank for span in spans for rank in span] == sorted(ranks)
        assert all(len(span) != 2 for span in spans)
        wide = [span for span in spans if len(span) > 1]
        assert not {span[-1] + 1 for span in wide} & set(ranks)


def test_few_ranks_are_written_as_words() -> None:
    assert [ranks_text(ranks) for ranks in ((), (3,), (3, 3), (0, 1), (5, 0, 1, 2))] == [
        "no rank",
        "rank 3",
        "rank 3",
        "ranks 0 and 1",
        "ranks 0-2 and 5",
    ]
    assert ranks_text(range(0, 14, 2)) == "ranks 0, 2, 4, 6, 8, 10 and others, 7 in all"
    assert ranks_text(range(0, 12, 2)) == "ranks 0, 2, 4, 6, 8 and 10"
    assert [verb_form(ranks, "waits", "wait") for ranks in ((1,), (1, 1), (1, 2))] == [
        "waits",
        "waits",
        "wait",
    ]


def test_a_call_is_named_with_its_group_and_number_or_its_peer() -> None:
    evidence = Evidence()
    group = evidence.add_group("0", "default_pg")
    collective = EvidenceCall(0, group, 7, "all_reduce", "issued")
    message = EvidenceCall(0, group, 3, "recv", "issued", p2p=True, peer=3)

    assert call_text(evidence, collective) == "all_reduce (default group, call 7)"
    assert call_text(evidence, collective._replace(number=0)).endswith("call 0)")
    assert call_text(evidence, collective._replace(number=-1)) == "all_reduce"
    assert call_text(evidence, collective._replace(op="", number=-1)) == "a call"
    assert call_text(evidence, message) == "recv from rank 3"
    assert call_text(evidence, message._replace(op="send", peer=0)) == "send to rank 0"
    assert call_text(evidence, message._replace(peer=None)) == "recv from an unknown rank"
    assert call_text(evidence, message._replace(tag=0)) == "recv from rank 3"
    assert call_text(evidence, message._replace(tag=5)) == "recv from rank 3, tag 5"


def test_a_source_line_is_read_only_where_the_file_is(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import x\n\n  work.wait()   # why\ncompute( 1 )\n", encoding="utf-8")
    frames = {line: StackFrame("main", str(file), line) for line in (0, 1, 2, 3, 4, 5)}

    assert {line: source_line(frame) for line, frame in frames.items()} == {
        0: "",
        1: "import x",
        2: "",
        3: "work.wait()",
        4: "compute( 1 )",
        5: "",
    }
    assert source_line(None) == source_line(frames[1]._replace(file="absent.py")) == ""
    assert source_line(StackFrame("main", str(tmp_path / "README"), 1)) == ""
    assert [may_hide_a_wait(frames[line]) for line in (1, 2, 3, 4)] == [False, True, True, False]
    assert may_hide_a_wait(None)


def test_a_file_is_shortened_to_its_last_two_parts() -> None:
    assert [short_file(file) for file in ("a.py", "x/a.py", "/x/a.py", "/w/x/a.py")] == [
        "a.py",
        "x/a.py",
        "x/a.py",
        "x/a.py",
    ]
    assert [signal_name(number) for number in (9, 11, 77)] == ["SIGKILL", "SIGSEGV", "signal 77"]


# --- processes ---
FETCHES = (StackFrame("fetch", "fetch.py", 5), StackFrame("main", "worker.py", 9))
IDLE = (StackFrame("get", "queues.py", 5),)
SLEEPS = ProcessState(
    7,
    "h",
    True,
    "python",
    "S",
    "futex_wait",
    False,
    0.0,
    (),
    (ThreadStack("m", True, FETCHES, "f"),),
)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("R", "runs in futex_wait, uses 40% of a CPU"),
        ("S", "sleeps in futex_wait, uses 40% of a CPU"),
        ("D", "is in an uninterruptible wait in futex_wait, uses 40% of a CPU"),
        ("T", "is stopped in futex_wait, uses 40% of a CPU"),
        ("t", "is stopped by a debugger in futex_wait, uses 40% of a CPU"),
        ("Z", "has exited"),
        ("X", "has exited"),
        ("gone", "has exited"),
        ("K", "is in state K in futex_wait, uses 40% of a CPU"),
        ("", "is in state unknown in futex_wait, uses 40% of a CPU"),
    ],
)
def test_the_state_of_a_process_is_a_phrase(state: str, text: str) -> None:
    process = replace(SLEEPS, state=state, cpu_share=0.4)

    assert process_state_text(process) == text
    assert process_state_text(replace(process, wait_channel="")) == text.replace(
        " in futex_wait", ""
    )


@pytest.mark.parametrize(
    ("changes", "is_hung", "text"),
    [
        ({}, True, "blocked in futex_wait"),
        ({"wait_channel": ""}, True, "blocked"),
        ({"moved": True}, False, "blocked in futex_wait"),
        ({"cpu_share": 1.0}, False, "blocked in futex_wait"),
        ({"stacks": (ThreadStack("m", True, IDLE, "f"),)}, False, "blocked in futex_wait"),
        ({"stacks": (ThreadStack("m", False, FETCHES, "f"),)}, False, "blocked in futex_wait"),
        ({"state": "T", "moved": True}, True, "stopped"),
        ({"state": "t", "stacks": ()}, True, "stopped"),
        ({"state": "D", "moved": True}, True, "in an uninterruptible wait in futex_wait"),
    ],
)
def test_a_worker_is_hung_if_it_is_stopped_or_does_not_move_while_it_loads(
    changes: dict[str, object], is_hung: bool, text: str
) -> None:
    worker = replace(SLEEPS, **changes)  # type: ignore[arg-type]

    assert (_is_hung_worker(worker), _state_text(worker)) == (is_hung, text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "did not move"),
        ({"native": ("poll", "main")}, "did not move, in poll"),
        ({"cpu_share": 0.97}, "does not leave this line, uses 97% of a CPU"),
        ({"moved": True, "cpu_share": 0.97}, "its stack moves"),
        ({"moved": True, "state": "T"}, "stopped"),
        ({"stacks": ()}, ""),
        ({"is_child": True}, ""),
    ],
)
def test_the_movement_of_a_rank_is_that_of_its_own_process(
    changes: dict[str, object], text: str
) -> None:
    records = RankEvidence(0)
    records.processes.append(replace(SLEEPS, **{"is_child": False, **changes}))  # type: ignore[arg-type]

    assert movement_text(records) == text


# --- files ---
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("# nThread 1 nGpus 8\n", "nccl-tests results"),
        ("x\n# nccl-tests version 2\n", "nccl-tests results"),
        ('<algo name="a" coll="allreduce">', "MSCCL algorithm"),
        ("HYBRID model_parallel_NPU_group: 8 ep: 1\n", "SimAI workload"),
        ("npus_count: [8]\ntopology: [Ring]\n", "ASTRA-sim network file"),
        ("topology: [Ring]\n\nnpus_count: [8]\n", "ASTRA-sim network file"),
        ("world: 2\nprogram: []\n", "distsim scenario"),
        ("0F0,0F1,,0B0,0B1\n", "pipeline schedule"),
        ("world: 2\n", ""),
        ("topology: [Ring]\n", ""),
        ("x" * 5000 + "\n# nccl-tests version 2\n", ""),
        ("NCCL WARN # nccl-tests\n", ""),
    ],
)
def test_known_texts_without_information_are_recognised(text: str, kind: str) -> None:
    assert unrelated_text(text) == (f"{kind}{NOTHING_ABOUT_HANGS}" if kind else "")


@pytest.mark.parametrize(
    ("parsed", "kind"),
    [
        ({"schema": "1.1", "nodes": []}, f"PyTorch execution trace{NOTHING_ABOUT_HANGS}"),
        ({"schema": "1.1", "nodes": {}}, ""),
        ({"nodes": []}, ""),
        (
            {"scheduling-policy": "LIFO", "all-reduce-implementation": ["ring"]},
            f"ASTRA-sim system file{NOTHING_ABOUT_HANGS}",
        ),
        ({"scheduling-policy": "LIFO"}, ""),
        ({"a": 1, "pytorch.wait_counter.x": 2}, "torch wait counters (they name no calls)"),
        ({"a": 1}, ""),
        ({}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_known_json_without_information_is_recognised(parsed: object, kind: str) -> None:
    assert unrelated_json(parsed) == kind


def test_a_chakra_trace_is_recognised_by_its_first_bytes() -> None:
    kind = f"Chakra execution trace{NOTHING_ABOUT_HANGS}"

    assert unrelated_bytes(b"\x07\x0a\x050.0.4") == kind
    assert unrelated_bytes(b"\x90\x10\x12\x1e\x0a\x06schema\x2a") == kind
    assert unrelated_bytes(b"") == unrelated_bytes(b"PK\x03\x04") == ""


def test_a_profile_gives_the_finished_collectives_of_its_rank() -> None:
    def event(name: str, number: int, **more: object) -> dict[str, object]:
        args = {"Collective name": name, "Seq": number, "Process Group Name": "0", **more}
        return {"name": "record_param_comms", "args": args}

    events = [
        event("allreduce", 1, **{"In msg nelems": 4, "Out msg nelems": 5, "dtype": "Float"}),
        event("wait", 2),
        {"name": "aten::add", "args": {"Collective name": "allreduce"}},
        {"name": "record_param_comms"},
        event("recv", 3),
    ]
    info = {"rank": 2, "world_size": 4}
    evidence, by_name = Evidence(), Evidence()

    assert [is_kineto(data) for data in ({"traceEvents": []}, {"traceEvents": {}}, [])] == [
        True,
        False,
        False,
    ]
    assert read_kineto(evidence, {"traceEvents": events, "distributedInfo": info}, 7, "f") == 2
    assert evidence.world == 4
    assert [
        (c.op, c.number, c.state, c.p2p, c.elements_in, c.elements_out, c.dtype, c.order)
        for c in evidence.ranks[2].calls
    ] == [
        ("all_reduce", 1, "done", False, 4, 5, "Float", 0),
        ("recv", 3, "done", True, -1, -1, "", 1),
    ]
    assert read_kineto(by_name, {"traceEvents": events[:1]}, 7, "f") == 7
    assert list(by_name.ranks) == [7]
    assert read_kineto(Evidence(), {"traceEvents": events}, None, "f") is None
