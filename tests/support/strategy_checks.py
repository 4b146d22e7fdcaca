"""What the tests of training strategies share: programs as plain calls, traffic, lineage, and
programs with one call spoiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from distsim.backends import BACKEND_PROFILES
from distsim.common.expressions import parse_expression
from distsim.engine import run_program
from distsim.operations.core.algorithms import chunks_sent_and_received
from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.scenario import Scenario, loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.simulate_scenario import Simulation, cost_model, simulate
from tests.support.training_arithmetic import unrolled

ROOT = Path(__file__).resolve().parents[2]
#: Larger worlds are described, not played through, by these tests.
MOST_RANKS = 64


def _ranks(path: Path) -> int:
    world = yaml.safe_load(path.read_text(encoding="utf-8"))["world"]
    return world if isinstance(world, int) else int(world["nodes"]) * int(world["ranks_per_node"])


#: A model whose runs, of 64 ranks, take longest.
LARGE = "gpt3_175b"
STRATEGY_SCENARIOS = sorted(
    p for p in (ROOT / "scenarios" / "strategies").glob("*.yaml") if _ranks(p) <= MOST_RANKS
)
EACH_STRATEGY = pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[pytest.mark.slow] if p.stem == LARGE else [], id=p.stem)
        for p in STRATEGY_SCENARIOS
    ],
)

Calls = dict[int, list[tuple[Any, ...]]]


def calls_of(scenario: Scenario) -> Calls:
    """Rank -> its calls in order, each with everything that matters in it."""
    program = lower(scenario)
    return {
        rank: [call for _, call in program.calls_of(rank)] for rank in range(program.world_size)
    }


def meeting(scenario: Scenario, rank: int = 0) -> list[tuple[Any, ...]]:
    """The calls of a rank that meet others: (operation, ranks of the group, bytes, async)."""
    found = []
    for _, call in lower(scenario).calls_of(rank):
        for part in call.parts or (call,):
            if OPERATIONS[part.op].kind in ("p2p", "collective"):
                nbytes = max(
                    sum(b.nbytes for b in part.inputs), sum(b.nbytes for b in part.outputs)
                )
                found.append((part.op, part.group.ranks, nbytes, call.is_async))
    return found


def outcomes(scenario: Scenario) -> dict[str, str]:
    """What becomes of a program under gloo, and under nccl with communicators made lazily and
    eagerly.
    """
    found = {}
    for backend, init in (("gloo", "lazy"), ("nccl", "lazy"), ("nccl", "eager")):
        options = scenario.options.model_copy(update={"init": init})
        tried = scenario.model_copy(update={"backend": backend, "options": options})
        program = lower(tried)
        found[f"{backend} {init}"] = run_program(
            program, BACKEND_PROFILES[backend], cost_model(tried, program)
        ).outcome
    return found


def simulated(text: str, **options: Any) -> Simulation:
    return simulate(loads(text), with_values=True, **options)


def entries_of(
    data: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(path, entry) of every single operation in plain data of a program."""
    for k, entry in enumerate(data):
        here = (*path, k)
        if "steps" in entry:
            yield from entries_of(entry["steps"], (*here, "steps"))
        elif "repeat" in entry:
            yield from entries_of(entry["repeat"]["steps"], (*here, "repeat", "steps"))
        else:
            yield here, entry


def held_once(simulation: Simulation, label: str, ranks: Any, tensor: str = "") -> bool:
    """Do all ``ranks`` hold the same contributions to a buffer, of each of them, and none twice?
    ``tensor``: whose writes count.
    """
    values = simulation.values
    assert values is not None
    counts = [[s.counts for s in values.stretches(rank, label)] for rank in ranks]
    sources = [
        {c.rank for c in one if not tensor or c.tensor.startswith(tensor)} for one in counts[0]
    ]
    return all(one == counts[0] for one in counts) and all(
        set(found.values()) == {1} and who == set(ranks)
        for found, who in zip(counts[0], sources, strict=True)
    )


def spoiled(scenario: Scenario, number: int, rank: int, how: str) -> Scenario | None:
    """The scenario with its ``number``-th call that meets others dropped or doubled on one rank, or
    sent to another peer or root.

    ``rank`` counts among those that make the call. None where there is nothing to misdirect in
    it.
    """
    data = scenario.to_data()
    data.pop("expect", None)
    data["program"] = unrolled(data["program"])
    chosen = [path for path, entry in entries_of(data["program"]) if _meets(entry)]
    path = chosen[number % len(chosen)]
    makers = _makers(scenario, data["program"], path)
    rank = makers[rank % len(makers)]
    here: Any = data["program"]
    for part in path[:-1]:
        here = here[part]
    entry, others = here[path[-1]], f"rank != {rank}"
    wrong = _misdirected(entry, scenario.world.size) if how == "misdirected" else None
    if how == "misdirected" and wrong is None:
        return None
    instead = {"dropped": [], "doubled": [entry, entry], "misdirected": [wrong]}[how]
    here[path[-1]] = {
        "steps": [{"ranks": others, "steps": [entry]}, {"ranks": rank, "steps": instead}]
    }
    return loads(dump_yaml(data))


def _makers(scenario: Scenario, program: Any, path: tuple[Any, ...]) -> list[int]:
    """The ranks that in some iteration all selectors on the way to an entry admit."""
    names_of, here, selectors = lower(scenario).names_of, program, []
    for part in path:
        here = here[part]
        if isinstance(here, dict) and here.get("ranks") is not None:
            selectors.append(here["ranks"])
    rounds = range(scenario.iterations or 1)
    return [
        r
        for r in range(scenario.world.size)
        if any(
            all(_admits(one, r, {**names_of(r), "iteration": i}) for one in selectors)
            for i in rounds
        )
    ]


def _admits(selector: Any, rank: int, names: Mapping[str, Any]) -> bool:
    """A selector that asks for more than is known admits all."""
    if not isinstance(selector, str):
        return rank in ([selector] if isinstance(selector, int) else selector)
    found = parse_expression(selector)
    return not found.names <= names.keys() or bool(found.evaluate(names))


def _meets(entry: dict[str, Any]) -> bool:
    return any(
        key in OPERATIONS and OPERATIONS[key].kind in ("p2p", "collective", "batch")
        for key in entry
    )


def _misdirected(entry: dict[str, Any], size: int) -> dict[str, Any] | None:
    """The same call with another peer or root; of a batch, its first part."""
    name = next(key for key in entry if key != "ranks")
    fields = entry[name]
    if name == "batch_isend_irecv":
        wrong = _misdirected(fields["ops"][0], size)
        return (
            None
            if wrong is None
            else {**entry, name: {**fields, "ops": [wrong, *fields["ops"][1:]]}}
        )
    for key in ("group_dst", "group_src", "dst", "src"):
        if key in fields:
            words = "group_size" if "group" in key and fields.get("group") else str(size)
            return {**entry, name: {**fields, key: f"({fields[key]} + 1) % {words}"}}
    return None


def noticed(scenario: Scenario, labels: list[str], ranks: Any, sources: str = "") -> bool:
    """Does the verdict, the outcome or the lineage of the buffers in ``labels`` tell that a program
    is spoiled?
    """
    found = simulate(scenario, with_values=True)
    assert found.verdict is not None
    if found.verdict.verdict != "ok" or found.outcome != "completes":
        return True
    return not all(held_once(found, label, ranks, sources) for label in labels)


def sent_nbytes(scenario: Scenario) -> int:
    """Bytes that all ranks send together, each collective by its ring schedule."""
    program, total = lower(scenario), 0
    for rank in range(program.world_size):
        for _, call in program.calls_of(rank):
            for part in call.parts or (call,):
                row = OPERATIONS[part.op]
                if row.kind == "collective":
                    n = part.group.size
                    sent, _ = chunks_sent_and_received(row.schedule(n, part.root or 0), n)
                    total += sent[part.group_rank] * row.chunk_nbytes(n, row.nbytes(part))
                elif row.kind == "p2p" and part.op in ("send", "isend"):
                    total += sum(buffer.nbytes for buffer in part.inputs)
    return total
