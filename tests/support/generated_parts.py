"""The calls of a random scenario (`tests.support.generator`), event by event, and what is spoilt of
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from tests.support.gloo_support import REDUCING
from tests.support.spoilt_parts import COALESCED, PLAIN, ROOTED, Entry, Spoilt, buffer

TIMES = ("0 ns", "1 us", "40 us", "700 us", "5 ms")
STREAMS = ("current", "copy", "side")
#: Default buffers of the back ends, and what a message may weigh around them.
LIMITS = {"gloo": 4096, "mpi": 4096, "nccl": 4 << 20}


class Calls(Spoilt):
    """Entries of a program. ``open``: handles that a rank may wait for. ``tensors``, ``groups``:
    what the file declares.
    """

    def __init__(
        self, random: Random, on: frozenset[str], backend: str, world: int, options: Entry
    ) -> None:
        self.random, self.on, self.backend, self.world, self.options = (
            random,
            on,
            backend,
            world,
            options,
        )
        self.entries: list[Entry] = []
        self.open: dict[int, list[str]] = {rank: [] for rank in range(world)}
        self.spent: dict[int, list[str]] = {rank: [] for rank in range(world)}
        self.members: dict[str, list[int]] = {"world": list(range(world))}
        self.groups: Entry = {}
        self.tensors: Entry = {}
        self.number = 0
        self.guard = ""
        self.between = [0]  # places between two events

    def make(self) -> list[Entry]:
        self._declare()
        for _ in range(self.random.randint(1, 9)):
            self._event()
            self.between.append(len(self.entries))
        if "repeat" in self.on and self.random.random() < 0.5:
            self._repeat()
        self._close()
        if "destroy" in self.on and self.random.random() < 0.4:
            self.entries.append({"destroy_process_group": {}})
        self._spoil()
        return self.entries

    # --- what the file declares ---
    def _declare(self) -> None:
        for i in range(
            self.random.choice((0, 1, 1, 2)) if "groups" in self.on and self.world > 2 else 0
        ):
            ranks = sorted(
                self.random.sample(range(self.world), self.random.randint(2, self.world))
            )
            self.members[f"g{i}"] = ranks
            self.groups[f"g{i}"] = {"ranks": ranks, **self._timeout(0.3)}
        if len(self.groups) == 1 and self.random.random() < 0.3:  # another of the same ranks
            self.members["g1"], self.groups["g1"] = (
                self.members["g0"],
                {"ranks": self.members["g0"]},
            )
        if "tensors" in self.on:
            self.tensors = {name: {"shape": [300], "dtype": "uint8"} for name in ("x", "y")}

    def _timeout(self, chance: float) -> Entry:
        short = "timeouts" in self.on and self.random.random() < chance
        return {"timeout": self.random.choice(("30 us", "2 ms", "20 ms"))} if short else {}

    # --- small things ---
    def has(self, feature: str, chance: float = 0.5) -> bool:
        return feature in self.on and self.random.random() < chance

    def pair(self) -> list[int]:
        return self.random.sample(range(self.world), 2)

    def add(self, ranks: int | Iterable[int], op: str, fields: Entry) -> Entry:
        """An entry for some ranks; inside a repeat with a guard only in some rounds."""
        who: Any = ranks if isinstance(ranks, int) else sorted(ranks)
        if isinstance(who, list) and len(who) == 1:
            who = who[0]
        entry = {op: fields, "ranks": who}
        if who == self.members["world"]:
            del entry["ranks"]
        if self.guard:
            named = [who] if isinstance(who, int) else who
            entry["ranks"] = f"({' or '.join(f'rank == {r}' for r in named)}) and {self.guard}"
        self.entries.append(entry)
        return entry

    def request(self, rank: int, kept: bool = True) -> Entry:
        """``as:`` of a new request, or nothing where it is dropped."""
        self.number += 1
        if not kept or self.has("dropped", 0.4):
            return {}
        if self.open[rank] and self.has("overwritten", 0.4):
            return {"as": self.random.choice(self.open[rank])}
        self.open[rank].append(f"h{self.number}")
        return {"as": f"h{self.number}"}

    def nbytes(self) -> int:
        """Bytes of a message: any, or just about what a buffer holds."""
        option = self.options.get("buffsize" if self.backend == "nccl" else "eager_limit")
        limit = int(str(option).split()[0]) if option is not None else LIMITS[self.backend]
        if self.has("edges", 0.7) and limit:
            return max(
                1,
                self.random.choice(
                    (
                        limit - 1,
                        limit,
                        limit + 1,
                        limit // 2,
                        limit // 2 + 1,
                        limit // 3,
                        limit // 3 + 1,
                    )
                ),
            )
        return self.random.choice((1, 1, 300, 2048, 100_000, 5_000_000))

    def on_stream(self) -> Entry:
        return {"on": self.random.choice(STREAMS)} if self.has("streams", 0.35) else {}

    def tensor(self, numel: int) -> Any:
        return (
            self.random.choice(sorted(self.tensors))
            if self.tensors and self.random.random() < 0.1
            else buffer(numel)
        )

    # --- events, in one global order ---
    def _event(self) -> None:
        kinds = {
            "message": 5,
            "exchange": 2 * ("batches" in self.on),
            "fan": "batches" in self.on,
            "ring": "rings" in self.on,
            "collective": 5,
            "work": 1,
            "wait": 2,
            "streams": "streams" in self.on,
            "new_group": 2 * ("new_group" in self.on),
            "window": 2 * ("edges" in self.on),
            "monitored": 3 * ("monitored" in self.on),
        }
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        getattr(self, f"_{kind}")()

    def _message(self) -> None:
        src, dst = self.pair()
        if self.has("any_source", 0.7):
            dst = 0 if src else dst  # several senders to one receiver
        group = self._group_of(src, dst)
        tensor = self.tensor(self.nbytes())
        common = {"group": group} if group != "world" else {}
        if self.has("tags", 0.4):
            common["tag"] = 1
        named = (
            {}
            if self.has("any_source", 0.6)
            and (self.backend != "nccl" or self.random.random() < 0.05)
            else {"src": src}
        )
        if not named and self.random.random() < 0.1:
            named = {"assume_src": src}
        for rank, way, where in ((src, "send", {"dst": dst}), (dst, "recv", named)):
            fields = {"tensor": tensor, **where, **common, **self.on_stream()}
            if self.has("batches", 0.2):
                if way == "recv" and "src" not in named:  # a batch knows no receive from any source
                    fields = {**{k: v for k, v in fields.items() if k != "assume_src"}, "src": src}
                self.add(
                    rank,
                    "batch_isend_irecv",
                    {
                        "ops": [{f"i{way}": {k: v for k, v in fields.items() if k != "on"}}],
                        **(self.request(rank) if self.random.random() < 0.5 else {}),
                    },
                )
            elif self.has("async_messages", 0.5):
                self.add(rank, f"i{way}", {**fields, **self.request(rank)})
            else:
                self.add(rank, way, fields)

    def _group_of(self, *ranks: int) -> str:
        fits = [name for name, members in self.members.items() if set(ranks) <= set(members)]
        return self.random.choice(fits) if self.random.random() < 0.4 else "world"

    def _exchange(self) -> None:
        """Two ranks, several messages each way, as batches."""
        a, b = self.pair()
        there, back = (
            [self.nbytes() for _ in range(self.random.choice((1, 1, 2, 3)))] for _ in range(2)
        )
        group = self._group_of(a, b)
        more = {"group": group} if group != "world" else {}
        for rank, peer, out, into in ((a, b, there, back), (b, a, back, there)):
            sends = [{"isend": {"tensor": buffer(n), "dst": peer, **more}} for n in out]
            receives = [{"irecv": {"tensor": buffer(n), "src": peer, **more}} for n in into]
            ops = [*sends, *receives] if self.random.random() < 0.5 else [*receives, *sends]
            request = self.request(rank) if self.random.random() < 0.4 else {}
            self.add(rank, "batch_isend_irecv", {"ops": ops, **request, **self.on_stream()})

    def _fan(self) -> None:
        """One rank and all others of a group, each way or one, in a batch of its own; the others
        batch theirs.
        """
        group = self.random.choice(list(self.members))
        hub, *others = self.random.sample(self.members[group], len(self.members[group]))
        more = {"group": group} if group != "world" else {}
        ways, tensor = (
            self.random.choice((("isend", "irecv"), ("isend",), ("irecv",))),
            buffer(self.nbytes()),
        )
        where, mirrored = {"isend": "dst", "irecv": "src"}, {"isend": "irecv", "irecv": "isend"}
        own = [
            {way: {"tensor": tensor, where[way]: peer, **more}} for way in ways for peer in others
        ]
        self.add(
            hub,
            "batch_isend_irecv",
            {"ops": own, **(self.request(hub) if self.random.random() < 0.4 else {})},
        )
        for peer in others:
            ops = [
                {way: {"tensor": tensor, where[way]: hub, **more}}
                for way in map(mirrored.__getitem__, ways)
            ]
            self.add(peer, "batch_isend_irecv", {"ops": ops})

    def _window(self) -> None:
        """Several messages that together weigh about what a buffer holds, received one by one: the
        last ones have to wait.
        """
        src, dst = self.pair()
        sizes = [self.nbytes() for _ in range(self.random.choice((2, 3, 4)))]
        if self.has("batches"):
            self.add(
                src,
                "batch_isend_irecv",
                {
                    "ops": [{"isend": {"tensor": buffer(n), "dst": dst}} for n in sizes],
                    **self.request(src),
                },
            )
        else:
            for n in sizes:
                self.add(src, "isend", {"tensor": buffer(n), "dst": dst, **self.request(src)})
        for n in sizes:
            if self.random.random() < 0.3:
                self.add(dst, "sleep", {"time": "40 us"})
            one = {"tensor": buffer(n), "src": src}
            batched = self.backend == "nccl" and self.has("batches", 0.8)
            self.add(
                dst,
                *(("batch_isend_irecv", {"ops": [{"irecv": one}]}) if batched else ("recv", one)),
            )

    def _ring(self) -> None:
        """Every rank to its neighbour, with one code for all."""
        to, off = buffer(self.nbytes()), {"dst": "(rank + 1) % world_size"}
        ops = [
            {"isend": {"tensor": to, **off}},
            {"irecv": {"tensor": to, "src": "(rank - 1) % world_size"}},
        ]
        if "batches" in self.on:
            self.add(self.members["world"], "batch_isend_irecv", {"ops": ops})
        else:
            self.number += 1
            handles = (f"s{self.number}", f"r{self.number}")
            for step, handle in zip(ops, handles, strict=True):
                (op, fields), *_ = step.items()
                self.add(self.members["world"], op, {**fields, "as": handle})
            self.add(self.members["world"], "wait", {"handles": list(handles)})

    def _collective(self) -> None:
        name = self.random.choice(list(self.members))
        members = self.members[name]
        ops = PLAIN + ROOTED * ("rooted" in self.on)
        op = (
            self.random.choice(COALESCED)
            if self.has("coalesced", 0.25) and self.backend != "mpi"
            else self.random.choice(ops)
        )
        by_rank = self._arguments(op, members)
        common = {"group": name} if name != "world" else {}
        for rank in (
            members if len(by_rank) > 1 or self.on & {"async_collectives", "streams"} else [None]
        ):
            fields = {**by_rank[rank if rank in by_rank else None], **common, **self.on_stream()}
            if rank is not None and self.has("async_collectives", 0.4):
                fields |= {"async": True, **self.request(rank)}
            self.add(members if rank is None else rank, op, fields)

    def _arguments(self, op: str, members: list[int]) -> dict[int | None, Entry]:
        """The fields of a collective, by rank where they differ, else under None."""
        n, share = len(members), self.random.choice((1, 4, 300, 70_000))
        one, all_of = buffer(share, "float32"), buffer(n * share, "float32")
        rows = {"shape": [n, share], "dtype": "float32"}
        root, reduce_op = (
            self.random.choice(members),
            {"op": self.random.choice(("sum", "max"))} if op in REDUCING else {},
        )
        if op == "all_to_all_single" and self.has("uneven"):
            return self._uneven(members)
        parts = self.random.randint(1, 3)
        fields: dict[str, Entry] = {
            "all_reduce": {"tensor": one},
            "barrier": {},
            "broadcast": {"tensor": one, "src": root},
            "reduce": {"tensor": one, "dst": root},
            "all_gather": {"input": one, "output": rows},
            "all_gather_into_tensor": {"input": one, "output": all_of},
            "gather": {"input": one, "output": rows, "dst": root},
            "scatter": {"input": rows, "output": one, "src": root},
            "reduce_scatter": {"input": rows, "output": one},
            "reduce_scatter_tensor": {"input": all_of, "output": one},
            "all_to_all": {"input": rows, "output": rows},
            "all_to_all_single": {"input": all_of, "output": all_of},
            "all_reduce_coalesced": {"tensor": [one] * parts},
            "all_gather_into_tensor_coalesced": {
                "input": [one] * parts,
                "output": [all_of] * parts,
            },
            "reduce_scatter_tensor_coalesced": {"input": [all_of] * parts, "output": [one] * parts},
        }
        return {None: {**fields[op], **reduce_op}}

    def _uneven(self, members: list[int]) -> dict[int | None, Entry]:
        table = {a: [self.random.randint(0, 3) for _ in members] for a in members}
        found: dict[int | None, Entry] = {}
        for i, rank in enumerate(members):
            out, into = table[rank], [table[b][i] for b in members]
            found[rank] = {
                "input": buffer(sum(out), "float32"),
                "output": buffer(sum(into), "float32"),
                "input_splits": out,
                "output_splits": into,
            }
        return found

    def _monitored(self) -> None:
        if self.backend == "gloo":
            self.add(
                self.members["world"],
                "monitored_barrier",
                {"timeout": self.random.choice(("100 us", "10 s"))},
            )

    def _work(self) -> None:
        rank = self.random.randrange(self.world)
        time = {"time": self.random.choice(TIMES)}
        if self.random.random() < 0.4:
            self.add(rank, "sleep", time)
        else:
            self.add(
                rank,
                "compute",
                {
                    "name": "work",
                    **time,
                    **({"on": "host"} if self.random.random() < 0.2 else self.on_stream()),
                },
            )

    def _streams(self) -> None:
        rank = self.random.randrange(self.world)
        if self.random.random() < 0.3:
            self.add(rank, "synchronize", {})
        else:
            waiting, other = self.random.sample(STREAMS, 2)
            self.add(rank, "wait_stream", {"stream": other, "on": waiting})

    def _wait(self, rank: int | None = None) -> None:
        rank = self.random.randrange(self.world) if rank is None else rank
        if self.open[rank]:
            handle = self.open[rank].pop(self.random.randrange(len(self.open[rank])))
            self.spent[rank].append(handle)
            self.add(rank, "wait", {"handles": [handle], **self.on_stream()})
        if self.spent[rank] and self.has("waited_twice", 0.5):
            self.add(rank, "wait", {"handles": [self.random.choice(self.spent[rank])]})

    def _new_group(self) -> None:
        """All make it; or the members alone, or in another order, where that is asked for."""
        self.number += 1
        name, ranks = (
            f"n{self.number}",
            sorted(self.random.sample(range(self.world), self.random.randint(1, self.world))),
        )
        fields = {"name": name, "ranks": ranks, **self._timeout(0.5)}
        who = self.members["world"]
        if self.has("local_sync", 0.4):
            fields["use_local_synchronization"], who = True, ranks
        elif self.has("unlike_groups", 0.5):
            who = ranks
        entry = self.add(who, "new_group", fields)
        if self.has("unlike_groups", 0.4) and "ranks" not in entry:
            self._other_order(entry)
        if len(ranks) > 1:
            self.members[name] = ranks

    def _other_order(self, entry: Entry) -> None:
        """A second new_group, which one rank makes before the first."""
        self.number += 1
        second = {
            "name": f"n{self.number}",
            "ranks": sorted(self.random.sample(range(self.world), 2)),
        }
        rank = self.random.randrange(self.world)
        self.entries.remove(entry)
        self.add(rank, "new_group", second)
        self.add(self.members["world"], "new_group", entry["new_group"])
        self.add([r for r in range(self.world) if r != rank], "new_group", second)

    def _repeat(self) -> None:
        """Rounds of events that keep no request open; in a guarded one a call is made in some
        rounds only.
        """
        outer, opened = self.entries, self.open
        self.entries, self.open = [], {rank: [] for rank in range(self.world)}
        guarded = self.has("guards", 0.6)
        for _ in range(self.random.randint(1, 3)):
            self.guard = self.random.choice(("i == 0", "i >= 1", "")) if guarded else ""
            made = dict(self.members)
            self._event()
            self.members = made  # a group that is made in here is not used outside
            for rank in range(self.world):
                while self.open[rank]:
                    self._wait(rank)
        self.guard = ""
        inner, self.entries, self.open = self.entries, outer, opened
        inner = [entry for entry in inner if "new_group" not in entry] or [{"barrier": {}}]
        self.entries.insert(
            self.random.choice(self.between),
            {"repeat": {"times": self.random.choice((1, 2, 3)), "index": "i", "steps": inner}},
        )

    def _close(self) -> None:
        for rank, handles in self.open.items():
            self.random.shuffle(handles)
            if handles and not self.has("unwaited", 0.7):
                self.add(
                    rank,
                    "wait",
                    {"handles": "all"}
                    if self.random.random() < 0.3
                    else {"handles": list(handles)},
                )
