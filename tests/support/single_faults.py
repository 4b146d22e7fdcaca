"""Random correct programs, each with one fault that a person might make.

    for right, faulty in faulty_programs(seed):
        …

A fault is put into one collective, message or rank of the program; everything else stays right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from distsim.operations.registry import OPERATIONS
from distsim.repair.scenario_data import fields_of, make_step, op_of, ranks_of
from distsim.scenario import Scenario
from tests.support.generator import CORRECT, scenario

_Program = dict[str, Any]
#: Puts one fault into a program; False if it has no place for it.
_Fault = Callable[[Random, list[Any], int], bool]


def _own_calls(random: Random, steps: list[Any], world: int) -> tuple[int, int] | None:
    """A step that several ranks make, and one of these ranks."""
    shared = [k for k, step in enumerate(steps) if op_of(step) and _ranks(step, world)]
    collectives = [k for k in shared if OPERATIONS[op_of(steps[k])].kind == "collective"]
    if not collectives:
        return None
    k = random.choice(collectives)
    return k, random.choice(_ranks(steps[k], world))


def _ranks(step: Any, world: int) -> list[int]:
    chosen = ranks_of(step)
    if chosen is None:
        return list(range(world))
    if isinstance(chosen, int):
        return [chosen]
    return list(chosen) if isinstance(chosen, list) else []


def _without(step: Any, rank: int, world: int) -> list[Any]:
    """The step on the other ranks."""
    rest = [other for other in _ranks(step, world) if other != rank]
    return [make_step(op_of(step), fields_of(step), rest)] if rest else []


def _skip(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    steps[k : k + 1] = _without(steps[k], rank, world)
    return True


def _repeat(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    fields = {
        key: value for key, value in fields_of(steps[k]).items() if key not in ("as", "async")
    }
    steps.insert(k, make_step(op_of(steps[k]), fields, rank))
    return True


def _other_operation(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    group = {key: value for key, value in fields_of(steps[k]).items() if key == "group"}
    other = make_step("barrier", group, rank)
    steps[k : k + 1] = [*_without(steps[k], rank, world), other]
    return True


def _later(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    own = make_step(op_of(steps[k]), fields_of(steps[k]), rank)
    place = random.randint(k + 1, len(steps))
    steps.insert(place, own)
    steps[k : k + 1] = _without(steps[k], rank, world)
    return True


def _fail(random: Random, steps: list[Any], world: int) -> bool:
    steps.insert(
        random.randint(0, len(steps)),
        make_step("fail", {"message": "bug"}, random.randrange(world)),
    )
    return True


def _exit(random: Random, steps: list[Any], world: int) -> bool:
    steps.insert(
        random.randint(0, len(steps)),
        make_step("exit", {"code": random.randrange(2)}, random.randrange(world)),
    )
    return True


def _lost_message(random: Random, steps: list[Any], world: int) -> bool:
    messages = [k for k, step in enumerate(steps) if op_of(step) in ("send", "recv")]
    if not messages:
        return False
    del steps[random.choice(messages)]
    return True


def _other_peer(random: Random, steps: list[Any], world: int) -> bool:
    messages = [
        k
        for k, step in enumerate(steps)
        if op_of(step) == "send" and isinstance(ranks_of(step), int)
    ]
    if not messages:
        return False
    k = random.choice(messages)
    fields = fields_of(steps[k])
    key = "dst" if "dst" in fields else "group_dst"
    steps[k] = make_step("send", {**fields, key: random.randrange(world + 1)}, ranks_of(steps[k]))
    return True


FAULTS: tuple[_Fault, ...] = (
    _skip,
    _repeat,
    _other_operation,
    _later,
    _fail,
    _exit,
    _lost_message,
    _other_peer,
)


def faulty_programs(seed: int) -> Iterator[tuple[_Program, _Program]]:
    """A correct program, and the same program with each fault."""
    right = scenario(seed, CORRECT - {"any_source"})
    size = Scenario(**right).world.size
    for number, put in enumerate(FAULTS):
        faulty = copy.deepcopy(right)
        if put(Random(f"{seed} {number}"), faulty["program"], size):
            yield right, faulty
