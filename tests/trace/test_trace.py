"""Traces as files, and as Chrome traces."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.findings.finding_types import SourceLocation
from distsim.output.json.chrome_trace import chrome_trace_lines
from distsim.trace.jsonl import parse_trace, read_trace, same_trace, trace_lines, write_trace
from distsim.trace.model import COLUMN_TYPES, NEVER, NO_LOCATION, TEXT_COLUMNS, Trace
from distsim.trace.run_end import is_partial
from tests.support.harness import draws

PLACE = SourceLocation("ring.yaml", 9, 5, "send")
DEFAULTS: dict[str, Any] = {
    "rank": 0,
    "op": "send",
    "group": 0,
    "peer": -1,
    "tag": 0,
    "nbytes": 4096,
    "dtype": "float32",
    "reduce_op": "",
    "handle": -1,
    "place": PLACE,
    "iteration": 0,
    "queue": "comm",
    "match": -1,
    "posted_ns": 0,
    "returned_ns": 0,
    "started_ns": NEVER,
    "finished_ns": NEVER,
    "waited_ns": NEVER,
    "position": 0,
    "part": -1,
    "name": "",
    "ended_by": NEVER,
    "args": "",
}


def make(rows: list[dict[str, Any]], groups: Any = (("world", (0, 1)),), **header: Any) -> Trace:
    """A trace from rows that differ from `DEFAULTS`; ``group`` is an id."""
    tables: dict[str, list[Any]] = {name: [] for name in TEXT_COLUMNS}
    tables["group"] = [name for name, _ in groups]
    columns: dict[str, list[int]] = {name: [] for name in COLUMN_TYPES}
    for row in rows:
        for name, value in {**DEFAULTS, **row}.items():
            if name in TEXT_COLUMNS and name != "group":
                if value not in tables[name]:
                    tables[name].append(value)
                value = tables[name].index(value)
            columns[name].append(value)
    arrays = {name: np.array(values, dtype=COLUMN_TYPES[name]) for name, values in columns.items()}
    facts = {
        "schema_version": 1,
        "world_size": 2,
        "local_size": 2,
        "backend": "gloo",
        "groups": [[n, list(r)] for n, r in groups],
    }
    return Trace({**facts, **header}, tables, arrays)


MESSAGE = make(
    [
        {
            "op": "compute",
            "queue": "compute",
            "name": "forward",
            "returned_ns": 2000,
            "started_ns": 0,
            "finished_ns": 2000,
        },
        {
            "peer": 1,
            "match": 1,
            "posted_ns": 2000,
            "returned_ns": 5000,
            "started_ns": 3000,
            "finished_ns": 5000,
            "position": 1,
        },
        {"rank": 1, "op": "sleep", "returned_ns": 3000, "queue": "host"},
        {
            "rank": 1,
            "op": "recv",
            "peer": 0,
            "match": 1,
            "posted_ns": 3000,
            "returned_ns": 5000,
            "started_ns": 3000,
            "finished_ns": 5000,
            "position": 1,
        },
    ],
    makespan_ns=5000,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
places = st.builds(
    SourceLocation,
    texts,
    st.integers(0, 99),
    st.integers(0, 99),
    texts,
    st.none() | st.integers(0, 9),
)
small = {
    name: st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for name, dtype in COLUMN_TYPES.items()
}
calls = st.fixed_dictionaries(
    small
    | dict.fromkeys(("op", "dtype", "reduce_op", "queue", "name"), texts)
    | {"args": st.sampled_from(["", '{"ranks": [0, 1], "message": "ä\\n"}'])}
    | {"rank": st.integers(0, 2), "group": st.integers(0, 1), "place": places}
    | {"nbytes": st.integers(0, 2**62), "peer": st.integers(-1, 9)}
)


@given(st.lists(calls, max_size=8), texts, texts)
@settings(max_examples=draws(60), deadline=None)
def test_a_written_trace_is_read_back(rows: list[dict[str, Any]], one: str, other: str) -> None:
    """Calls stand rank by rank, and in a rank by position and part."""
    ordered = {(row["rank"], row["position"], row["part"]): row for row in rows}
    rows = [ordered[key] for key in sorted(ordered)]
    trace = make(
        rows,
        [(one, (0, 1, 2)), (other + one + "'", (0, 1, 2))],
        name=other,
        mesh={"dp": 2},
        world_size=10,
    )
    text = "".join(trace_lines(trace))

    back = (
        parse_trace(text.splitlines(keepends=True))
        if text.isascii()
        else parse_trace([f"{line}\n" for line in text[:-1].split("\n")])
    )

    assert same_trace(trace, back)
    assert list(back.rows()) == list(trace.rows()) == [trace.row(i) for i in range(len(trace))]
    assert "".join(trace_lines(back)) == text


def test_groups_with_the_same_name_are_kept_apart() -> None:
    """A group declared with `by` has one name and several ids; a member tells which."""
    trace = make(
        [{"rank": 0, "group": 0}, {"rank": 1, "group": 1}, {"rank": 1, "group": 2, "position": 1}],
        [("half", (0,)), ("half", (1,)), ("all", (0, 1))],
    )

    back = parse_trace("".join(trace_lines(trace)).splitlines(keepends=True))

    assert back["group"].tolist() == [0, 1, 2]


def test_absent_text_is_written_as_null() -> None:
    trace = make([{}])
    for name in ("place", "name", "op"):
        trace[name][0] = -1

    call = next(parse_trace("".join(trace_lines(trace)).splitlines(keepends=True)).rows())

    assert (call.place, call.name, call.op) == (NO_LOCATION, "", "")


def test_different_traces_are_not_equal() -> None:
    trace = make([{}, {"rank": 1}])

    assert same_trace(trace, make([{}, {"rank": 1}]))
    assert not same_trace(trace, make([{}]))
    assert not same_trace(trace, make([{}, {"rank": 1, "op": "recv"}]))
    assert not same_trace(trace, make([{}, {"rank": 1, "finished_ns": 3}]))
    assert not same_trace(trace, make([{}, {"rank": 1}], backend="mpi"))


def test_a_file_is_replaced_atomically_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "run.jsonl"
    target.write_text("old")

    write_trace(MESSAGE, target)

    assert same_trace(read_trace(target), MESSAGE)
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_a_missing_directory_is_an_environment_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        write_trace(MESSAGE, tmp_path / "absent" / "run.jsonl")


def _damaged(line: int, change: Any) -> list[str]:
    lines = "".join(trace_lines(MESSAGE)).splitlines(keepends=True)
    lines[line] = change(lines[line])
    return lines


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"t:1: expected the header of a trace, found nothing"),
        (["not json\n"], r"t:1: expected the header of a trace, found not json"),
        (['{"format": "distsim-trace"}\n'], r"t:1: the header has no schema_version"),
        (
            _damaged(0, lambda s: s.replace('"schema_version": 1', '"schema_version": 7')),
            r"t:1: .*schema version 7, .*reads up to 1",
        ),
        (_damaged(0, lambda s: s.replace('[["world", [0, 1]]]', "3")), r"t:1: expected `groups`"),
        (
            _damaged(0, lambda s: s.replace('"makespan_ns": 5000', '"makespan_ns": "5 us"')),
            r"t:1: expected world_size",
        ),
        (_damaged(2, lambda s: s[:40]), r"t:3: "),
        (_damaged(0, lambda s: s[:60])[:1], r"t:1: the file ends inside its header"),
        (
            _damaged(3, lambda s: s.replace('"rank": 1', '"rank": 77', 1)),
            r"t:4: `rank` 77 is outside the world of 2",
        ),
        (
            _damaged(2, lambda s: s.replace('"peer": 1', '"peer": 2')),
            r"t:3: `peer` 2 is outside the world of 2",
        ),
        (
            _damaged(0, lambda s: s.replace("[0, 1]", "[0, 5]")),
            r"t:1: the header names rank 5, outside its world of 2",
        ),
        (
            _damaged(3, lambda s: s.replace('"rank": 1', '"rank": 0', 1)),
            r"t:4: the calls are not in order: rank 0, position 0",
        ),
        (
            _damaged(4, lambda s: s.replace('"position": 1', '"position": 0')),
            r"t:5: the calls are not in order",
        ),
        (_damaged(3, lambda s: "3\n"), r"t:4: expected a call as a JSON object, found 3"),
        (_damaged(3, lambda s: s.replace('"tag": 0', '"tga": 0')), r"t:4: the call has no `tag`"),
        (
            _damaged(3, lambda s: s.replace('"tag": 0', '"tag": 0.5')),
            r"t:4: expected `tag` as a whole number, found 0.5",
        ),
        (
            _damaged(3, lambda s: s.replace('"tag": 0', f'"tag": {10**30}')),
            r"t:4: `tag` is too large",
        ),
        (
            _damaged(3, lambda s: s.replace('"rank": 1', '"rank": -1', 1)),
            r"t:4: expected `rank` of zero or more",
        ),
        (
            _damaged(3, lambda s: s.replace('"op": "sleep"', '"op": ["sleep"]')),
            r"t:4: expected `op` as a text",
        ),
        (
            _damaged(3, lambda s: s.replace('"group": "world"', '"group": []')),
            r"t:4: `group` is of a wrong type",
        ),
        (
            _damaged(3, lambda s: s.replace('"file": "ring.yaml"', '"file": []')),
            r"t:4: `place` is of a wrong type",
        ),
        (_damaged(3, lambda s: s[:-1] + "," + s), r"t:4: expected a call as a JSON object"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(lines: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_trace(lines, "t")


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_truncated_file_is_read_up_to_its_last_complete_line(tmp_path: Path, name: str) -> None:
    """And says that it is partial, even when what was read is written again."""
    whole, cut = tmp_path / name, tmp_path / f"cut_{name}"
    write_trace(make([{"position": i, "name": "ä€" * i} for i in range(12)]), whole)
    data = whole.read_bytes()
    lines = [] if name.endswith(".gz") else [len(line) + 1 for line in data.split(b"\n")]
    found = set()
    for size in range(len(data) - 1, 0, -13):
        cut.write_bytes(data[:size])
        try:
            trace = read_trace(cut)
        except UsageError:
            assert size < (lines[0] if lines else len(data))
            continue
        found.add(len(trace))
        if len(trace) == 12:
            continue  # all but the end of the last line, or of gzip's own
        if lines:
            assert len(trace) in (
                sum(sum(lines[: i + 2]) <= size for i in range(12)),
                sum(sum(lines[: i + 2]) - 1 <= size for i in range(12)),
            )
        assert trace.header["cut"] == {"calls": 12, "read": len(trace)}
        assert is_partial(trace)
        write_trace(trace, cut)
        assert is_partial(read_trace(cut))
    assert len(found) > 1 or name.endswith(".gz")


def test_a_gzip_file_has_the_same_content_and_reproducible_bytes(tmp_path: Path) -> None:
    plain, small = tmp_path / "run.jsonl", tmp_path / "run.jsonl.gz"
    write_trace(MESSAGE, plain)
    write_trace(MESSAGE, small)

    assert gzip.decompress(small.read_bytes()) == plain.read_bytes()
    assert same_trace(read_trace(small), MESSAGE)
    first = small.read_bytes()
    write_trace(MESSAGE, small)
    assert small.read_bytes() == first


@given(st.data())
@settings(max_examples=draws(150), deadline=None)
def test_no_damage_ends_in_a_traceback(data: st.DataObject) -> None:
    text = "".join(trace_lines(MESSAGE))
    cut = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(
        st.sampled_from(["", "\n", "{", '"', "-", "9" * 40, "null", "[", "\x00", "e5"])
    )
    broken = text[:cut] + other + text[cut + data.draw(st.integers(0, 5)) :]

    fault = None
    try:
        parse_trace(broken.splitlines(keepends=True))
    except UsageError as raised:
        fault = str(raised)

    assert fault is None or fault.startswith("<trace>:")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b""])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(UsageError):
        read_trace(tmp_path / "x")
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path)


# --- Chrome ---


def _events(trace: Trace) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads("".join(chrome_trace_lines(trace)))["traceEvents"]
    return events


COLLECTIVE = make(
    [
        {
            "rank": r,
            "op": "all_reduce",
            "match": 0,
            "posted_ns": r * 100,
            "returned_ns": 900,
            "started_ns": 300,
            "finished_ns": 900,
        }
        for r in range(4)
    ],
    [("world", (0, 1, 2, 3))],
    world_size=4,
    local_size=2,
)
OVERLAP = make(
    [
        {
            "op": op,
            "peer": 1,
            "match": i,
            "position": i,
            "started_ns": a,
            "finished_ns": b,
            "posted_ns": a,
            "returned_ns": a,
        }
        for i, (op, a, b) in enumerate(
            [("isend", 0, 50), ("irecv", 10, 60), ("isend", 20, 30), ("irecv", 50, 70)]
        )
    ]
)


def test_each_node_is_a_process_and_each_rank_has_its_own_threads() -> None:
    names = {
        e["pid"]: e["args"]["name"] for e in _events(COLLECTIVE) if e["name"] == "process_name"
    }
    threads = {
        e["args"]["name"]: (e["pid"], e["tid"])
        for e in _events(COLLECTIVE)
        if e["name"] == "thread_name"
    }

    assert names == {0: "node 0 (ranks 0, 1)", 1: "node 1 (ranks 2, 3)"}
    assert [threads[f"rank {r} host"][0] for r in range(4)] == [0, 0, 1, 1]
    assert len({tid for _, tid in threads.values()}) == len(threads)


def test_a_counter_shows_the_bytes_in_flight_of_each_node() -> None:
    """From 300 to 900 ns two ranks of each machine hold their buffer in the all_reduce; then
    nothing is under way.
    """
    counts = [
        (e["pid"], e["ts"], e["args"]["bytes"]) for e in _events(COLLECTIVE) if e["ph"] == "C"
    ]
    nbytes = int(COLLECTIVE["nbytes"][0])

    assert nbytes > 0
    assert counts == [(0, 0.3, 2 * nbytes), (1, 0.3, 2 * nbytes), (0, 0.9, 0), (1, 0.9, 0)]


def test_an_arrow_runs_from_send_to_receive() -> None:
    events = _events(MESSAGE)
    start, end = (e for e in events if e["ph"] in "sf")
    threads = {
        e["tid"]: e["args"]["name"].partition(" ")[2][0]
        for e in events
        if e["name"] == "thread_name"
    }

    assert (start["ph"], threads[start["tid"]], end["ph"], threads[end["tid"]]) == (
        "s",
        "0",
        "f",
        "1",
    )
    assert start["id"] == end["id"] == 1


@pytest.mark.parametrize("trace", [MESSAGE, COLLECTIVE, OVERLAP])
def test_arrows_are_paired_and_start_inside_a_slice(trace: Trace) -> None:
    events = _events(trace)
    chains = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            chains[e["cat"], e["id"]].append(e)
            assert any(
                s["ph"] == "X"
                and (s["pid"], s["tid"]) == (e["pid"], e["tid"])
                and s["ts"] <= e["ts"] <= s["ts"] + s["dur"]
                for s in events
            )
    for chain in chains.values():
        phases = [e["ph"] for e in sorted(chain, key=lambda e: (e["ts"], "stf".index(e["ph"])))]
        assert phases == ["s", *["t"] * (len(chain) - 2), "f"]


@pytest.mark.parametrize("trace", [MESSAGE, COLLECTIVE, OVERLAP])
def test_slices_of_a_thread_are_nested_and_times_increase(trace: Trace) -> None:
    events = [e for e in _events(trace) if e["ph"] != "M"]
    threads = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))

    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    for spans in threads.values():
        for a, (start, end) in enumerate(spans):
            assert all(
                s >= end or t <= start or (s >= start and t <= end) for s, t in spans[a + 1 :]
            )


def test_waiting_is_its_own_slice_and_a_call_that_never_returns_stays_open_and_red() -> None:
    """It is begun and never ended; where the recording ends, an event across all ranks tells
    how.
    """
    stuck = make(
        [
            {
                "peer": 1,
                "posted_ns": 100,
                "returned_ns": NEVER,
                "started_ns": NEVER,
                "finished_ns": NEVER,
            }
        ],
        makespan_ns=700,
        until_ns=2000,
        outcome="hangs",
    )
    (call, wait, end) = (e for e in _events(stuck) if e["ph"] != "M")

    assert (call["ph"], call["name"], call["ts"], call["cname"]) == (
        "B",
        "send (never returns)",
        0.1,
        "terrible",
    )
    assert (wait["ph"], wait["name"], wait["cat"], wait["cname"]) == (
        "B",
        "waits for rank 1",
        "wait",
        "terrible",
    )
    assert (end["ph"], end["s"], end["ts"], end["name"]) == ("i", "g", 2.0, "partial: it hung")


def test_slices_carry_bytes_group_match_and_bandwidth() -> None:
    args = next(
        e["args"] for e in _events(COLLECTIVE) if e["ph"] == "X" and e["cat"] == "collective"
    )

    assert (args["bytes"], args["group"], args["match"]) == (4096, "world", 0)
    assert args["busbw GB/s"] == pytest.approx(1.5 * args["algbw GB/s"], rel=1e-3)


def test_a_trace_without_calls_is_an_empty_picture() -> None:
    assert [e["ph"] for e in _events(make([], world_size=0))] == []


@given(
    st.lists(st.sampled_from(("send", "recv", "compute", "barrier")), max_size=12),
    st.sets(st.sampled_from(("send", "wait", "barrier"))),
)
def test_selecting_operations_keeps_exactly_their_rows(made: list[str], asked: set[str]) -> None:
    trace = make([{"op": op} for op in made])
    assert trace.ops(*asked).tolist() == [op in asked for op in made]
    assert trace.rows_with_text("op", frozenset(asked)).tolist() == [op in asked for op in made]
