"""Programs with agreed answers (tests/data/agreed/cases.txt; tests/data/README.md tells its words),
as lists of plain calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.engine import run_program
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.simulation.trace_replay import rebuild_program
from distsim.simulation.trace_replay.compact.call_forms import CallItemizer
from distsim.simulation.trace_replay.compact.group_names import name_groups
from distsim.simulation.trace_replay.compact.rank_alignment import AlignedEntry, AlignedStep
from distsim.simulation.trace_replay.compact.rank_expressions import RankVariables
from distsim.simulation.trace_replay.compact.scenario_writer import ScenarioWriter, yaml_flow

CASES = Path(__file__).resolve().parents[1] / "data" / "agreed" / "cases.txt"
Case = dict[str, Any]
Plain = dict[str, Any]

#: Word of a call -> its field and how it is read.
FIELDS: dict[str, tuple[str, Any]] = {
    "as": ("handle", str),
    "tag": ("tag", int),
    "in": ("group", str),
    "root": ("root", int),
    "by": ("reduce_op", str),
    "buf": ("buf", str),
    "from": ("assume_from", int),
    "ms": ("time_ns", lambda text: int(text) * 1_000_000),
    "in_splits": ("in_splits", lambda text: numbers(text)),
    "out_splits": ("out_splits", lambda text: numbers(text)),
}
FLAGS = ("async", "writes")
MESSAGES = ("send", "recv", "isend", "irecv")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def load_cases() -> list[Case]:
    """Each with ``id category world_size groups programs expect`` and, where something else judged
    it too, ``gloo`` and ``nccl``.
    """
    return [
        read_case(part) for part in CASES.read_text(encoding="utf-8").split("\n\n") if part.strip()
    ]


def read_case(text: str) -> Case:
    case: Case = {"groups": {}, "programs": {}, "gloo": {}, "nccl": {}}
    for line in text.strip().splitlines():
        word, rest = line.split(" ", 1)
        if word == "case":
            case["id"], case["category"], world = rest.split()
            case["world_size"] = int(world.removeprefix("world="))
        elif word == "group":
            name, ranks = rest.split()
            case["groups"][name] = numbers(ranks)
        elif word == "ranks":
            ranks, program = rest.split(":", 1)
            case["programs"].update({rank: read_program(program) for rank in numbers(ranks)})
        else:
            case[word] = json.loads(rest)
    return case


def read_program(text: str) -> list[Plain]:
    return [read_call(call) for call in text.split(" ; ") if call.strip()]


def read_call(text: str) -> Plain:
    """``isend 1 64:int32 tag=5 as=h`` and the like; a batch has its messages in parentheses."""
    if text.strip().startswith("batch"):
        head, _, parts = text.partition("(")
        return {
            **read_words(head.split()),
            "ops": [read_call(part) for part in parts.rstrip(" )").split(";")],
        }
    return read_words(text.split())


def read_words(words: list[str]) -> Plain:
    op, *rest = words
    call: Plain = {"op": op}
    if op == "wait":
        return {**call, "handle": rest[0]}
    if op == "new_group":
        return {**call, "name": rest[0], "ranks": numbers(rest[1])}
    if op in MESSAGES:
        peer = rest.pop(0)
        call["peer"] = None if peer == "any" else int(peer)
    for word in rest:
        name, is_field, value = word.partition("=")
        if is_field:
            field, read = FIELDS[name]
            call[field] = read(value)
        elif word in FLAGS:
            call[word] = True
        else:
            numel, _, dtype = word.partition(":")
            call.update(numel=int(numel), dtype=dtype or "float32")
    return call


def scenario_of(case: Case) -> str:
    """The program as a file, each rank with steps of its own."""
    program = build_program(
        case["world_size"], case["programs"], groups=case["groups"], name=case["id"]
    )
    cost = CostModel(
        default_cluster(program.backend),
        program.world_size,
        program.local_size,
        program.link_faults,
    )
    trace = run_program(program, BACKEND_PROFILES[program.backend], cost).trace
    rebuilt = rebuild_program(trace, backend=program.backend, resolve=False)
    families = name_groups(rebuilt.program, {})
    itemizer = CallItemizer(rebuilt, trace, families)
    bare = {
        r: [item._replace(form=item.form._replace(source="")) for item in itemizer.items(r)]
        for r in range(program.world_size)
    }
    entries: list[AlignedEntry] = [
        AlignedStep(item.form, {r: item.ints}, {r: item.times})
        for r, mine in bare.items()
        for item in mine
    ]
    head = {
        "name": case["id"],
        "world": program.world_size,
        "backend": program.backend,
        "groups": families.declared,
    }
    body = ScenarioWriter(
        families, RankVariables.of(program.world_size, families.mesh), True
    ).program(entries)
    return (
        "\n".join(
            [
                *(f"{key}: {yaml_flow(value)}" for key, value in head.items() if value),
                "program:",
                *body,
            ]
        )
        + "\n"
    )
