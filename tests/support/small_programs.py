"""Small random programs with open receives, tags, requests, batches and collectives, for the
brute-force explorer. Seeded.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

Plain = dict[str, Any]
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "all_reduce_coalesced",
)


class Small(NamedTuple):
    """World size, calls by rank, groups."""

    world: int
    programs: dict[int, list[Plain]]
    groups: dict[str, list[int]]


def small_program(seed: int) -> Small:
    """A program whose calls follow one order of events, then changed in a few places: often stuck,
    sometimes unfit.
    """
    return _Maker(Random(seed)).make()


class _Maker:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.world = random.choice((2, 3, 3, 3, 4, 4, 5))
        self.groups: dict[str, list[int]] = {}
        if self.world > 2 and random.random() < 0.3:
            self.groups["g"] = sorted(
                random.sample(range(self.world), random.randint(2, self.world - 1))
            )
        self.programs: dict[int, list[Plain]] = {rank: [] for rank in range(self.world)}
        self.open: dict[int, list[str]] = {rank: [] for rank in range(self.world)}
        self.made = 0

    def make(self) -> Small:
        hub = self.random.randrange(self.world)
        for _ in range(self.random.randint(2, 5 if self.world > 3 else 6)):
            roll = self.random.random()
            if roll < 0.55:
                self._message(hub if self.random.random() < 0.7 else None)
            elif roll < 0.65:
                self._exchange()
            elif roll < 0.82:
                self._collective()
            else:
                self._wait(self.random.randrange(self.world))
        for rank, handles in self.open.items():
            if handles and self.random.random() < 0.85:
                self.programs[rank].append({"op": "wait", "handles": list(handles)})
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            self._change()
        return Small(self.world, self.programs, self.groups)

    def _handle(self, rank: int, keep: bool) -> dict[str, Any]:
        self.made += 1
        if not keep:
            return {}
        self.open[rank].append(f"h{self.made}")
        return {"handle": f"h{self.made}"}

    def _message(self, to: int | None) -> None:
        pair = self.random.sample(range(self.world), 2)
        src, dst = pair if to is None else (next(r for r in pair if r != to), to)
        group = (
            "g"
            if "g" in self.groups
            and {src, dst} <= set(self.groups["g"])
            and self.random.random() < 0.3
            else "world"
        )
        common = {
            "numel": 4,
            "dtype": "float32",
            "tag": int(self.random.random() < 0.2),
            "group": group,
        }
        source = None if self.random.random() < 0.55 else src
        relied_on = {"assume_from": src} if source is None and self.random.random() < 0.1 else {}
        for rank, op, more in (
            (src, "send", {"peer": dst}),
            (dst, "recv", {"peer": source, **relied_on}),
        ):
            call = {"op": op, **common, **more}
            if self.random.random() < 0.3:
                call |= {"op": f"i{op}", **self._handle(rank, self.random.random() < 0.95)}
            self.programs[rank].append(call)

    def _exchange(self) -> None:
        """Two ranks, a message each way, as batches."""
        a, b = self.random.sample(range(self.world), 2)
        common = {"numel": 4, "dtype": "float32", "tag": 0, "group": "world"}
        for me, other in ((a, b), (b, a)):
            source = None if self.random.random() < 0.3 else other
            ops = [
                {"op": "isend", "peer": other, **common},
                {"op": "irecv", "peer": source, **common},
            ]
            self.random.shuffle(ops)
            more = self._handle(me, True) if self.random.random() < 0.3 else {}
            self.programs[me].append({"op": "batch", "ops": ops, **more})

    def _collective(self) -> None:
        group = self.random.choice(("world", *self.groups))
        members = self.groups.get(group, list(range(self.world)))
        call = {
            "op": self.random.choice(COLLECTIVES),
            "group": group,
            "numel": 60,
            "dtype": "float32",
            "reduce_op": "sum",
            "root": self.random.choice(members),
        }
        if self.random.random() < 0.1:
            call = {
                "op": "new_group",
                "name": f"n{self.made}",
                "ranks": sorted(self.random.sample(range(self.world), 2)),
            }
            members, self.made = list(range(self.world)), self.made + 1
        for rank in members:
            mine = dict(call)
            if self.random.random() < 0.2 and call["op"] != "new_group":
                mine |= {"async": True, **self._handle(rank, True)}
            self.programs[rank].append(mine)

    def _wait(self, rank: int) -> None:
        if self.open[rank]:
            handle = self.open[rank].pop(self.random.randrange(len(self.open[rank])))
            self.programs[rank].append({"op": "wait", "handles": [handle]})

    def _change(self) -> None:
        rank = self.random.randrange(self.world)
        calls = self.programs[rank]
        places = [
            i for i, call in enumerate(calls) if call["op"] != "wait" and "handle" not in call
        ]
        if not places:
            return
        place, roll = self.random.choice(places), self.random.random()
        call = calls[place]
        if roll < 0.3:
            del calls[place]
        elif roll < 0.65:
            calls.pop(place)
            calls.insert(self.random.randint(0, len(calls)), call)
        elif roll < 0.72 and "numel" in call:
            call["numel"] *= 2
        elif roll < 0.76 and "dtype" in call:
            call["dtype"] = "int64"
        elif roll < 0.82 and "tag" in call:
            call["tag"] = 1 - call["tag"]
        elif call["op"] in ("recv", "irecv"):
            call["peer"] = None
        elif call["op"] in ("broadcast", "reduce", "gather", "scatter"):
            call["root"] = self.random.choice(
                self.groups.get(call["group"], list(range(self.world)))
            )
