"""Random scenarios with every feature that a file may have, drawn from a seed: whole mappings, as a
YAML file would say them.

    mapping = scenario(seed)                                  # every feature, any back end
    mapping = scenario(seed, FEATURES - {"any_source"}, "nccl")  # the domain of one driver
    program = program_of(mapping)

Events are laid down in one global order, so that a program is right as drawn; then, about every
second time, something is spoilt: a call is lost, moved or changed, a rank fails, a timeout is
short. Every feature has a name in `FEATURES` and can be left out.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any

from hypothesis import strategies as st

from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import Scenario
from tests.support.generated_parts import Calls

Mapping = dict[str, Any]

BACKENDS = ("gloo", "nccl", "mpi")
#: What may be drawn. Blocking messages and collectives of all ranks are always there.
CORRECT = frozenset(
    {
        "async_messages",
        "batches",
        "tags",
        "any_source",
        "rooted",
        "coalesced",
        "uneven",
        "async_collectives",
        "groups",
        "new_group",
        "local_sync",
        "destroy",
        "work",
        "streams",
        "repeat",
        "guards",
        "rings",
        "options",
        "edges",
        "links",
        "nodes",
        "tensors",
        "slow",
        "late",
    }
)
#: What mostly makes a program wrong.
WRONG = frozenset(
    {
        "dropped",
        "overwritten",
        "waited_twice",
        "unlike_groups",
        "timeouts",
        "faults",
        "timed_faults",
        "absent",
        "leaves",
        "mismatches",
        "invalid",
        "lost",
        "moved",
        "unwaited",
        "monitored",
    }
)
FEATURES = CORRECT | WRONG
#: Drawn less often: the fast drivers leave programs with these to others.
_SELDOM = ("any_source", "new_group", "async_collectives", "guards", "streams", "late")


def scenario(
    seed: int, features: Collection[str] = FEATURES, backend: str | None = None
) -> Mapping:
    """The scenario of a seed. The same seed, features and back end give the same one."""
    return _Maker(Random(seed), frozenset(features), backend).make()


def program_of(mapping: Mapping) -> Program:
    """The mapping lowered, as `distsim simulate` would."""
    return lower(Scenario(**mapping))


def scenarios(
    features: Collection[str] = FEATURES, backend: str | None = None
) -> st.SearchStrategy[Mapping]:
    """The same for hypothesis, which looks for a small seed where something fails
    (`tests.support.shrinking` makes the program small).
    """
    return st.integers(0, 2**32).map(lambda seed: scenario(seed, features, backend))


class _Maker:
    def __init__(self, random: Random, features: frozenset[str], backend: str | None) -> None:
        self.random = random
        # Few features at a time: a program with all of them seldom completes, and shows less.
        chances = {
            **dict.fromkeys(CORRECT, 0.6),
            **dict.fromkeys(_SELDOM, 0.25),
            **dict.fromkeys(WRONG, 0.08),
        }
        self.on = frozenset(name for name in sorted(features) if random.random() < chances[name])
        self.backend = backend or random.choice(BACKENDS)

    def make(self) -> Mapping:
        made: Mapping = {"name": "drawn", "world": self._world(), "backend": self.backend}
        options = self._options()
        calls = Calls(self.random, self.on, self.backend, self._size(made["world"]), options)
        made["program"] = calls.make()
        made |= {
            key: value
            for key, value in (
                ("options", options),
                ("cluster", self._cluster()),
                ("groups", calls.groups),
                ("tensors", calls.tensors),
                ("faults", self._faults(calls)),
            )
            if value
        }
        return made

    @staticmethod
    def _size(world: int | dict[str, int]) -> int:
        return world if isinstance(world, int) else world["nodes"] * world["ranks_per_node"]

    def _world(self) -> int | dict[str, int]:
        if "nodes" in self.on and self.random.random() < 0.4:
            nodes, each = self.random.choice(((2, 1), (2, 2), (3, 1), (5, 1)))
            return {"nodes": nodes, "ranks_per_node": each}
        return self.random.choice((2, 2, 3, 3, 3, 4, 5))

    def _options(self) -> Mapping:
        random, options = self.random, dict[str, Any]()
        if "options" in self.on:
            if self.backend == "nccl":
                options |= {"init": "eager"} if random.random() < 0.4 else {}
                options |= {
                    name: True
                    for name in ("blocking_wait", "launch_order_implicit")
                    if random.random() < 0.12
                }
                options |= (
                    {"buffsize": f"{random.choice((0, 350, 2500))} B"}
                    if random.random() < 0.5
                    else {}
                )
            if self.backend == "mpi" and random.random() < 0.5:
                options["eager_limit"] = f"{random.choice((0, 300, 2048))} B"
        if "timeouts" in self.on and random.random() < 0.7:
            options["timeout"] = random.choice(("50 us", "1 ms", "4 ms", "30 ms"))
        return options

    def _cluster(self) -> Any:
        if "links" not in self.on or self.random.random() < 0.5:
            return None
        preset = "dgx-a100" if self.backend == "nccl" else "cpu-10gbe"
        return self.random.choice((preset, {"preset": preset, "shared_links": False}))

    def _faults(self, calls: Calls) -> list[Mapping]:
        random, found = self.random, list[Mapping]()
        rank = random.randrange(calls.world)
        if "faults" in self.on:
            place = {"before_call": random.randrange(0, 8)}
            found.append({"rank": rank, "kind": random.choice(("kill", "raise", "exit")), **place})
        if "timed_faults" in self.on:
            at = random.choice(("1 ns", "20 us", "300 us", "3 ms"))
            found.append({"rank": rank, "kind": random.choice(("kill", "raise", "exit")), "at": at})
        if "absent" in self.on and random.random() < 0.5:
            found.append({"rank": rank, "kind": "absent"})
        if "slow" in self.on and random.random() < 0.2:
            found.append(
                {
                    "rank": random.randrange(calls.world),
                    "kind": "slow",
                    "factor": random.choice((1.5, 3.0)),
                }
            )
        if "late" in self.on and random.random() < 0.2:
            found.append(
                {
                    "rank": random.randrange(calls.world),
                    "kind": "late",
                    "delay": random.choice(("10 us", "2 ms")),
                }
            )
        return found
