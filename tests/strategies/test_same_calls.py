"""The strategies make the calls that PyTorch makes: recordings of real runs against expansions.

tests/support/torch_recorder.py made the recordings (tests/data/recorded_*.json say how). `EXPLAINED`
lists each known difference with its reason. A test fails if a difference is not listed, or if a
listed difference does not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.scenario import Scenario, loads

DATA = Path(__file__).resolve().parents[1] / "data"
_PRICE = {"forward": "1 ms", "backward": "2 ms"}


def layers(*shapes: tuple[int, int]) -> list[dict[str, Any]]:
    """`layers:` for Linears with bias, as (out, in)."""
    return [{"params": [[out, in_], [out]], **_PRICE} for out, in_ in shapes]


SMALL = layers((96, 64), (64, 96), (32, 64))
BIG = layers((1024, 512), (512, 1024), (256, 512))


class Twin(NamedTuple):
    """A scenario that should make the calls of a recording: its mesh, iterations, strategy."""

    mesh: dict[str, int]
    iterations: int
    program: list[dict[str, Any]]


def _ddp(**fields: Any) -> list[dict[str, Any]]:
    return [{"ddp": {"layers": SMALL, "bucket_cap_mb": 1 / 64, **fields}}]


def _fsdp(**fields: Any) -> list[dict[str, Any]]:
    return [{"fsdp": {"layers": SMALL, **fields}}]


_TP = {"layers": 2, "pairs": 1, "sequence": 4, "hidden": 16, "dtype": "float32", **_PRICE}


def _pipeline(ranks: int, schedule: str, chunks: int) -> Twin:
    fields = {
        "schedule": schedule,
        "chunks": chunks,
        "micro_batches": 4,
        "shapes_exchange": True,
        "activation": {"shape": [2, 16], "dtype": "float32"},
        **_PRICE,
    }
    return Twin({"pp": ranks}, 2, [{"pipeline": fields}])


def _data(schedule: str, chunks: int, style: str, iterations: int = 2, **fields: Any) -> Twin:
    data = {
        "style": style,
        "group": "dp",
        "params": [[16, 16], [16], [16, 16], [16]] if style == "ddp" else [272, 272],
        **fields,
    }
    program = _pipeline(2, schedule, chunks).program[0]["pipeline"]
    return Twin(
        {"pp": 2, "dp": 2},
        iterations,
        [{"pipeline": {**program, "shapes_exchange": "vote", "data_parallel": data}}],
    )


TWINS: dict[str, Twin] = {
    "ddp": Twin({}, 3, _ddp()),
    "ddp_default": Twin({}, 3, [{"ddp": {"layers": BIG}}]),
    "ddp_unused": Twin({}, 3, _ddp(find_unused_parameters=True)),
    "ddp_accumulate": Twin({}, 3, _ddp(accumulate=2)),
    "ddp_buffers": Twin({}, 3, _ddp(buffers=10)),
    "fsdp": Twin({"dp": 4}, 2, _fsdp()),
    "fsdp_kept": Twin({"dp": 2}, 2, _fsdp(zero=2)),
    "fsdp_mixed": Twin({"dp": 2}, 2, _fsdp(param_dtype="bfloat16", reduce_dtype="float32")),
    "tensor_parallel": Twin(
        {"dp": 1, "tp": 2}, 2, [{"tensor_parallel": {**_TP, "sequence_parallel": False}}]
    ),
    "tensor_sequence": Twin(
        {"dp": 1, "tp": 2},
        2,
        [{"tensor_parallel": {**_TP, "sequence": 8, "sequence_parallel": True}}],
    ),
    "pipeline_GPipe": _pipeline(4, "gpipe", 1),
    "pipeline_1F1B": _pipeline(4, "1f1b", 1),
    "pipeline_Interleaved1F1B": _pipeline(2, "interleaved_1f1b", 2),
    "pipeline_ddp_1F1B": _data("1f1b", 1, "ddp", 3, bucket_cap_mb=1 / 1024),
    "pipeline_ddp_Interleaved1F1B": _data("interleaved_1f1b", 2, "ddp", 3, bucket_cap_mb=1 / 1024),
    "pipeline_fsdp_1F1B": _data("1f1b", 1, "fsdp"),
    "pipeline_fsdp_Interleaved1F1B": _data("interleaved_1f1b", 2, "fsdp"),
    "pipeline_fsdp_zero": _data("zb1p", 2, "fsdp"),
    "fsdp_hybrid": Twin(
        {"dp_replicate": 2, "dp": 2}, 2, _fsdp(shard="dp", replicate="dp_replicate")
    ),
}


class Difference(NamedTuple):
    """One field of a call that differs; ``case`` is the beginning of a recording's name."""

    case: str
    op: str
    field: str
    recorded: Any
    expanded: Any


_FROM_CPP = "DDP's C++ leaves the flag at its default, true, and waits at once: to the program a call that returns when it is done"
_FUNCTIONAL = "DTensor's functional collectives start without waiting; the next operation on the result, which follows at once, waits"

EXPLAINED: dict[Difference, str] = {
    Difference("tensor", "all_reduce", "async", "True", "False"): _FUNCTIONAL,
    Difference("tensor", "all_gather_into_tensor", "async", "True", "False"): _FUNCTIONAL,
    Difference("tensor", "reduce_scatter_tensor", "async", "True", "False"): _FUNCTIONAL,
    Difference("ddp", "all_gather", "async", "True", "False"): _FROM_CPP,
    Difference("ddp", "broadcast", "async", "True", "False"): _FROM_CPP,
    Difference("pipeline", "all_gather", "async", "True", "False"): _FROM_CPP,
    Difference("pipeline", "broadcast", "async", "True", "False"): _FROM_CPP,
}


def recorded(case: str) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = json.loads((DATA / f"recorded_{case}.json").read_text())[
        "calls"
    ]
    return found


def expanded(twin: Twin, size: int) -> list[list[dict[str, Any]]]:
    """The communication calls of each rank, in the form of a recording."""
    mesh = {"mesh": twin.mesh} if twin.mesh else {}
    return calls_of(
        Scenario(name="twin", world=size, program=twin.program, iterations=twin.iterations, **mesh)
    )


def calls_of(scenario: Scenario) -> list[list[dict[str, Any]]]:
    program, size = lower(scenario), scenario.world.size
    return [list(_records(call for _, call in program.calls_of(rank))) for rank in range(size)]


def _records(calls: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Collectives and messages; those of a batch with its number. A group sees isend as send."""
    batches = count(1)
    for call in calls:
        if OPERATIONS[call.op].kind == "batch":
            number = next(batches)
            yield from (_record(part) | {"batch": number} for part in call.parts)
        elif OPERATIONS[call.op].kind in ("collective", "p2p"):
            yield _record(call)


def _record(call: Any) -> dict[str, Any]:
    buffers = call.outputs if call.op == "scatter" else call.inputs or call.outputs
    p2p = OPERATIONS[call.op].kind == "p2p"
    found = {"op": call.op.removeprefix("i") if p2p else call.op, "ranks": list(call.group.ranks)}
    found |= {"numel": sum(b.numel for b in buffers), "async": call.is_async}
    found |= {"peer": call.peer, "async": True} if p2p else {}
    found |= {"dtype": buffers[0].dtype} if buffers else {}
    found |= {"reduce_op": call.reduce_op} if call.reduce_op else {}
    return found | ({"root": call.root} if call.root is not None else {})


def differences(
    case: str, real: list[dict[str, Any]], made: list[dict[str, Any]]
) -> set[Difference]:
    """What differs between two lists of calls; raises AssertionError where they are of other
    operations or another length.
    """
    assert [(c["op"], c["numel"], c.get("peer")) for c in made] == [
        (c["op"], c["numel"], c.get("peer")) for c in real
    ]
    found = set()
    for one, other in zip(real, made, strict=True):
        for field in one.keys() | other.keys():
            if one.get(field) != other.get(field):
                found.add(
                    Difference(case, one["op"], field, str(one.get(field)), str(other.get(field)))
                )
    return found


@pytest.mark.parametrize("case", TWINS)
def test_a_strategy_makes_the_same_calls_as_pytorch(case: str) -> None:
    real = recorded(case)
    made = expanded(TWINS[case], len(real))
    found = set().union(
        *(differences(case.partition("_")[0], *pair) for pair in zip(real, made, strict=True))
    )
    listed = {d for d in EXPLAINED if d.case == case.partition("_")[0]}
    assert found <= listed, found - listed


def test_fully_shard_over_tensor_parallel_blocks_makes_the_same_calls_as_pytorch() -> None:
    """`fsdp` over dp, each of its compute steps with the all_reduce that `tensor_parallel` puts
    after it over tp.
    """
    block = {"params": [[32, 16], [16, 32]], **_PRICE}
    fsdp = Scenario(
        name="twin",
        world=4,
        mesh={"dp": 2, "tp": 2},
        iterations=2,
        program=[{"fsdp": {"shard": "dp", "layers": [block] * 2}}],
    )
    pair = Scenario(
        name="pair",
        world=4,
        mesh={"dp": 2, "tp": 2},
        program=[{"tensor_parallel": {**_TP, "layers": 1}}],
    )
    data, reduced = (yaml.safe_load(one.to_yaml()) for one in (fsdp, pair))
    inner = _found(reduced["program"], "all_reduce")
    data["tensors"] |= reduced["tensors"]
    data["program"] = [
        e
        for entry in _flat(data["program"])
        for e in ([entry, inner] if "compute" in entry else [entry])
    ]
    real, made = recorded("fsdp_tp"), calls_of(loads(yaml.safe_dump(data, sort_keys=False)))
    found = set().union(*(differences("tensor", *both) for both in zip(real, made, strict=True)))
    assert found <= EXPLAINED.keys()


def _flat(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        yield from _flat(entry["steps"]) if "steps" in entry else [entry]


def _found(entries: list[dict[str, Any]], op: str) -> dict[str, Any]:
    """The first step of an operation, at any depth."""
    inner = [e["repeat"]["steps"] if "repeat" in e else [e] for e in _flat(entries)]
    return next(e for steps in inner for e in steps if op in e)


def test_every_listed_difference_exists() -> None:
    found: set[Difference] = set()
    for case, twin in TWINS.items():
        real = recorded(case)
        for pair in zip(real, expanded(twin, len(real)), strict=True):
            found |= differences(case.partition("_")[0], *pair)
    assert set(EXPLAINED) == found
    assert all(reason.strip() for reason in EXPLAINED.values())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_recordings_match_the_installed_pytorch() -> None:
    """Every case is run again; the recordings stay as they are."""
    pytest.importorskip("torch")
    found = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).resolve().parents[1] / "support" / "torch_recorder.py"),
            "--check",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
