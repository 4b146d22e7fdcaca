"""The calls that block the host under nccl, compared with NCCL on a shared H100 (N8, N9;
`tests/data/nccl_host_waits.json`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.scenario import loads
from distsim.semantics.form.nccl_connect import connection_mismatches
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.simulate_scenario import simulate

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "nccl_host_waits.json").read_text()
)
#: A late rank's steps as YAML, by the name in the recording; `other` is the group whose
#: communicator is looked at.
MESSAGE = (
    "{{ranks: [0, 1], steps: [{{isend: {{tensor: x, dst: {to}, group: other, as: h}}, ranks: {of}}}, \
{{irecv: {{tensor: x, src: {of}, group: other, as: h}}, ranks: {to}}}, {{wait: h}}]}}"
)
CALLS = {
    "isend": MESSAGE.format(of=0, to=1),
    "back": MESSAGE.format(of=1, to=0),
    "batch": "{ranks: [0, 1], steps: [{batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1 - rank, group: other}}, "
    "{irecv: {tensor: y, src: 1 - rank, group: other}}]}}]}",
    "all_reduce": "{all_reduce: {tensor: x, group: other}}",
    "all_reduce_big": "{all_reduce: {tensor: big, group: other}}",
    "broadcast": "{broadcast: {tensor: x, src: 0, group: other}}",
    "reduce": "{reduce: {tensor: x, dst: 0, group: other}}",
    "all_gather_into": "{all_gather_into_tensor: {output: wide, input: x, group: other}}",
    "reduce_scatter": "{reduce_scatter_tensor: {output: x, input: wide, group: other}}",
    "all_to_all": "{all_to_all_single: {output: wide, input: wide2, group: other}}",
    "gather": "{gather: {output: parts, input: x, dst: 0, group: other}}",
    "scatter": "{scatter: {output: x, input: parts, src: 0, group: other}}",
}
HEAD = """\
world: {ranks}
backend: nccl
options: {{init: {init}}}
groups: {{other: [{all}], sync: [{all}]}}
tensors: {{x: {{shape: [256]}}, y: {{shape: [256]}}, big: {{shape: [16777216]}}, wide: {{shape: [{wide}]}}, wide2: {{shape: [{wide}]}}, \
parts: {{shape: [{ranks}, 256]}}}}
program:
"""


def scenario_of(row: dict[str, Any]) -> str:
    """All ranks synchronise before each call; then one rank arrives 400 ms late."""
    n = row["ranks"]
    lines = [
        HEAD.format(ranks=n, init=row["init"], all=", ".join(map(str, range(n))), wide=256 * n)
    ]
    for call in row["calls"]:
        late = 1 if call in ("isend", "back", "batch") else n - 1
        lines += [
            "  - synchronize\n",
            "  - barrier: {group: sync}\n",
            f"  - {{sleep: 400 ms, ranks: {late}}}\n",
            f"  - {CALLS[call]}\n",
        ]
    return "".join(lines)


def host_waits(row: dict[str, Any]) -> list[bool]:
    """For each call of the row's rank: whether it blocked the host for more than 300 ms."""
    trace = simulate(loads(scenario_of(row))).run.trace
    mine = (
        (trace["rank"] == row["rank"])
        & ~trace.ops("barrier", "synchronize", "sleep", "wait")
        & (trace["part"] < 0)
    )
    return ((trace["returned_ns"] - trace["posted_ns"])[mine] > 300_000_000).tolist()


@pytest.mark.parametrize(
    ("version", "number"),
    [(version, k) for version, rows in RECORDED.items() for k in range(len(rows))],
    ids=str,
)
def test_a_call_blocks_the_host_if_it_connects_something_as_observed_on_nccl(
    version: str, number: int
):
    row = RECORDED[version][number]
    expected = list(row["waits"])
    if row["ranks"] > 2 and version.startswith(
        "2.28"
    ):  # a tree after a ring connects again: the algorithm of NCCL is not predicted here
        for k, call in enumerate(row["calls"]):
            if call == "all_reduce" and k:
                expected[k] = False
    assert host_waits(row) == expected, list(
        zip(row["calls"], expected, host_waits(row), strict=False)
    )


RING = """\
world: 3
backend: nccl
options: {init: eager}
tensors: {x: {shape: [4]}, z: {shape: [4]}}
program:
  - isend: {tensor: x, dst: (rank + 1) % 3, as: s}
  - irecv: {tensor: z, src: (rank - 1) % 3, as: r}
  - wait: all
"""


def test_a_call_that_returns_at_once_and_then_hangs_is_explained():
    """Both simulate and check explain it. They do not explain calls that block on every backend, or
    hangs on the device.
    """
    findings = [
        one
        for found in (simulate(loads(RING)).findings, check_scenario(loads(RING)).findings)
        for one in found
        if one.code == "DS301"
    ]
    reasons = [one.message.splitlines()[-1].partition(":")[0] for one in findings]
    assert reasons == ["  isend blocks the host here"] * 2
    assert all(
        "let at least one rank (better: every second one) receive before it sends" in one.help[0]
        for one in findings
    )

    plain = RING.replace("isend", "send").replace(", as: s", "")
    plain_findings = check_scenario(loads(plain)).findings
    assert not any("blocks the host here" in one.message for one in plain_findings)


ASYMMETRIC = """\
world: 2
backend: nccl
options: {init: eager}
tensors: {x: {shape: [4]}, z: {shape: [4]}}
program:
  - {batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1}}, {irecv: {tensor: z, src: 1}}], as: h}, ranks: 0}
  - {irecv: {tensor: z, src: 0, as: h}, ranks: 1}
  - {isend: {tensor: x, dst: 0, as: k}, ranks: 1}
  - wait: all
"""


def test_launches_that_connect_different_directions_are_reported_with_both_calls():
    (finding,) = (one for one in check_scenario(loads(ASYMMETRIC)).findings if one.code == "DS705")

    assert [place.line for place in finding.places] == [6, 7]
    assert "creates send and receive connections" in finding.message
    assert "which creates only a receive connection\n" in finding.message
    assert check_scenario(loads(ASYMMETRIC)).profiles["nccl"].possible == (
        "raises",
        "undefined",
        "hangs",
        "completes",
    )


LATE = "  - {sleep: 400 ms, ranks: 1}\n  - {all_reduce: {tensor: x, GROUP async: true, as: h}}\n  - wait: h\n"
ANEW = {
    "the world": "  - init_process_group\n"
    + LATE.replace("GROUP", "")
    + "  - destroy_process_group\n"
    "  - init_process_group\n" + LATE.replace("GROUP", "") * 2 + "  - destroy_process_group\n",
    "a group": 2
    * ("  - new_group: {name: g, ranks: [0, 1]}\n" + LATE.replace("GROUP", "group: g,"))
    + LATE.replace("GROUP", "group: g,"),
    "an unused group": LATE.replace("GROUP", "")
    + "  - new_group: {name: g, ranks: [0, 1]}\n"
    + LATE.replace("GROUP", "") * 2,
}


@pytest.mark.parametrize("init", ["lazy", "eager"])
@pytest.mark.parametrize(
    ("what", "waits"),
    [
        ("the world", [True, True, False]),
        ("a group", [True, True, False]),
        ("an unused group", [True, False, False]),
    ],
)
def test_only_recreated_communicators_connect_again(what: str, waits: list[bool], init: str):
    text = f"world: 2\nbackend: nccl\noptions: {{init: {init}}}\ntensors: {{x: {{shape: [4]}}}}\nprogram:\n{ANEW[what]}"
    found = simulate(loads(text))
    trace = found.run.trace
    mine = (trace["rank"] == 0) & trace.ops("all_reduce")

    assert found.outcome == "completes"
    assert ((trace["returned_ns"] - trace["posted_ns"])[mine] > 300_000_000).tolist() == waits


def positions_of_mismatches(
    *ranks: list[dict[str, Any]], init: str = "lazy"
) -> list[tuple[int, int]]:
    """The positions of each two launches that meet and connect different directions."""
    program = build_program(
        len(ranks), dict(enumerate(ranks)), backend="nccl", options={"init": init}
    )
    return [
        (one.position, other.position)
        for one, other in (
            found.launches for found in connection_mismatches(program, BACKEND_PROFILES["nccl"])
        )
    ]


@pytest.mark.parametrize(
    ("init", "together", "sends", "after"),
    [("lazy", [], [(0, 0)], [(1, 1)]), ("eager", [(0, 0)], [(0, 0)], [])],
)
def test_a_batch_uses_the_communicator_of_its_group_and_a_single_message_only_if_eager(
    init: str,
    together: list[tuple[int, int]],
    sends: list[tuple[int, int]],
    after: list[tuple[int, int]],
):
    """So a batch of both directions meets a receive alone there, and what an all_to_all has
    connected before is connected for both.
    """
    one, other = (
        [
            {"op": "isend", "peer": peer, "numel": 4, "handle": "s"},
            {"op": "irecv", "peer": peer, "numel": 4, "handle": "r"},
        ]
        for peer in (1, 0)
    )
    wait, parts = {"op": "wait", "handles": "all"}, {"op": "all_to_all_single", "numel": 4}
    batch = {
        "op": "batch_isend_irecv",
        "ops": [{k: v for k, v in call.items() if k != "handle"} for call in one],
        "handle": "b",
    }

    assert positions_of_mismatches([batch, wait], [*reversed(other), wait], init=init) == together
    assert positions_of_mismatches([*one, wait], [*other, wait], init=init) == sends
    assert positions_of_mismatches([parts, *one, wait], [parts, *other, wait], init=init) == after
    assert (
        positions_of_mismatches([parts, batch, wait], [parts, *reversed(other), wait], init=init)
        == []
    )


def test_a_rank_that_skips_a_round_connects_in_the_rounds_that_it_makes():
    """Two pairs, all of which send first: one in both rounds, the other only in the second."""
    pair = "rank + 1 - 2 * (rank % 2)"
    text = "name: t\nworld: 4\nbackend: nccl\ntensors: {x: {shape: [4]}}\nprogram:\n  - repeat: {times: 2, index: i, steps: [\n"
    text += f"      {{isend: {{tensor: x, dst: {pair}, as: s}}, ranks: rank < 2 or i > 0}},\n"
    text += f"      {{irecv: {{tensor: x, src: {pair}, as: r}}, ranks: rank < 2 or i > 0}}]}}\n  - wait: all\n"
    program = lower(loads(text))
    found = connection_mismatches(program, BACKEND_PROFILES["nccl"])

    assert [clash.pair for clash in found] == [(0, 1), (2, 3)]
    assert {call.ways for clash in found for call in clash.launches} == {frozenset({"send"})}
