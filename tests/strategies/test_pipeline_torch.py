"""`pipeline:` makes the calls that torch.distributed.pipelining makes: kinds, peers, bytes, dtypes,
batches, waits, all in order.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distsim.program.lower import lower
from distsim.scenario import loads
from tests.support.pipeline_recorder import CASES, SHAPE, Case

HERE = Path(__file__).resolve().parents[1]
RECORDED = json.loads((HERE / "data" / "recorded_pipeline.json").read_text(encoding="utf-8"))

each_case = pytest.mark.parametrize("name", CASES)


def program_of(case: Case) -> Any:
    fields = {
        "schedule": case.schedule,
        "micro_batches": case.micro_batches,
        "chunks": case.chunks,
        "forward": "1 ms",
        "backward": "2 ms",
        "activation": {"shape": list(SHAPE)},
        "shapes_exchange": "vote" if case.static else True,
        "defer_pp_recv": case.defer,
    }
    return lower(
        loads(
            json.dumps(
                {"world": case.ranks, "mesh": {"pp": case.ranks}, "program": [{"pipeline": fields}]}
            )
        )
    )


def message(call: Any) -> list[Any]:
    buffer = (call.inputs or call.outputs)[0]
    return [call.op, call.peer, buffer.nbytes, buffer.dtype]


def expanded(case: Case) -> list[list[list[Any]]]:
    """The events of the expansion as the recorder writes them; computations by their words and
    micro-batch.
    """
    program = program_of(case)
    found = []
    for rank in range(case.ranks):
        events: list[list[Any]] = []
        number: dict[int, int] = {}  # position of a call -> number of its event
        code = program.codes[program.code_of[rank]]
        for position, code_call in enumerate(code.calls):
            call = program.call(rank, position)
            if call.op == "compute" and call.name.startswith("shapes"):
                continue
            number[position] = len(events)
            if call.op == "batch_isend_irecv":
                events.append(["batch", [message(part) for part in call.parts]])
            elif call.op == "wait":
                events.append(
                    ["wait", [number[position - distance] for distance in code_call.waits]]
                )
            elif call.op == "compute":
                words, _, chunk = call.name.partition(" of chunk ")
                events.append(
                    ["compute", words, stage_of(case, rank, int(chunk or 0)), call.reads[-1].index]
                )
            else:
                events.append(message(call))
        found.append(events)
    return found


def stage_of(case: Case, rank: int, chunk: int) -> int:
    if case.schedule in ("zbv", "dualpipe_v"):
        return rank if chunk == 0 else 2 * case.ranks - 1 - rank
    return rank + chunk * case.ranks


def without_copies(events: list[list[Any]], case: Case) -> list[list[Any]]:
    """Our copies are numbered chunk after chunk; torch numbers micro-batches per stage."""
    return [[*e[:3], e[3] % case.micro_batches] if e[0] == "compute" else e for e in events]


@each_case
def test_the_expansion_makes_the_calls_recorded_from_torch(name):
    case = CASES[name]
    ours = [without_copies(events, case) for events in expanded(case)]

    assert Case(**RECORDED[name]["case"]) == case
    for rank in range(case.ranks):
        assert ours[rank] == RECORDED[name]["ranks"][rank], f"rank {rank}"


@pytest.mark.slow
def test_torch_makes_the_recorded_calls(tmp_path):
    """The recording is of torch 2.13; a later torch may part from it, and then says where."""
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13"):
        pytest.skip(f"the recording is of torch 2.13, this is {torch.__version__}")
    out = tmp_path / "calls.json"
    subprocess.run(
        [sys.executable, str(HERE / "support" / "pipeline_recorder.py"), str(out)],
        check=True,
        timeout=120,
        cwd=HERE,
    )

    found = json.loads(out.read_text(encoding="utf-8"))
    assert {name: found[name] == RECORDED[name] for name in CASES} == dict.fromkeys(CASES, True)
