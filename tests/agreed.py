"""Programs with agreed answers (tests/data/agreed/cases.txt; tests/data/README.md tells its words), as lists of plain calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distsim.compact.align import Entry, Step
from distsim.compact.fit import Names
from distsim.compact.groups import families_of
from distsim.compact.items import Itemizer
from distsim.compact.write import Writer, text
from distsim.cost import CostModel
from distsim.engine import run
from distsim.profiles import PROFILES, default_cluster
from distsim.program.build import build_program
from distsim.replay import program_of

CASES = Path(__file__).parent / "data" / "agreed" / "cases.txt"
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
    """Each with ``id category world_size groups programs expect`` and, where something else judged it too, ``gloo`` and ``nccl``."""
    return [read_case(part) for part in CASES.read_text(encoding="utf-8").split("\n\n") if part.strip()]


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
        return {**read_words(head.split()), "ops": [read_call(part) for part in parts.rstrip(" )").split(";")]}
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
    program = build_program(case["world_size"], case["programs"], groups=case["groups"], name=case["id"])
    cost = CostModel(default_cluster(program.backend), program.world_size, program.local_size, program.link_faults)
    trace = run(program, PROFILES[program.backend], cost).trace
    rebuilt = program_of(trace, backend=program.backend, resolve=False)
    families = families_of(rebuilt.program, {})
    itemizer = Itemizer(rebuilt, trace, families)
    bare = {
        r: [item._replace(form=item.form._replace(source="")) for item in itemizer.items(r)] for r in range(program.world_size)
    }
    entries: list[Entry] = [Step(item.form, {r: item.ints}, {r: item.times}) for r, mine in bare.items() for item in mine]
    head = {"name": case["id"], "world": program.world_size, "backend": program.backend, "groups": families.declared}
    body = Writer(families, Names.of(program.world_size, families.mesh), True).program(entries)
    return "\n".join([*(f"{key}: {text(value)}" for key, value in head.items() if value), "program:", *body]) + "\n"
