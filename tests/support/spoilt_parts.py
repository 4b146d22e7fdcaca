"""What is spoilt of a random scenario's calls (`tests.support.generated_parts`): lost, moved,
changed, left early, or never allowed.
"""

from __future__ import annotations

from random import Random
from typing import Any

Entry = dict[str, Any]

PLAIN = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
COALESCED = (
    "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)


def buffer(numel: int, dtype: str = "uint8") -> Entry:
    """A tensor of a call's own."""
    return {"shape": [numel], "dtype": dtype}


class Spoilt:
    """Changes to ``entries`` that were right."""

    random: Random
    on: frozenset[str]
    world: int
    entries: list[Entry]
    members: dict[str, list[int]]
    groups: Entry

    # --- what is spoilt ---
    def _spoil(self) -> None:
        changes = {
            "lost": self._lose,
            "moved": self._move,
            "mismatches": self._change,
            "leaves": self._leave,
            "invalid": self._break,
        }
        for name, change in changes.items():
            for _ in range(self.random.choice((1, 1, 2)) if name in self.on else 0):
                change()

    def _plain(self, ops: tuple[str, ...] = ()) -> list[int]:
        """Places of calls that bind no handle."""
        return [
            k
            for k, entry in enumerate(self.entries)
            if not {"repeat", "wait"} & set(entry)
            and (not ops or set(ops) & set(entry))
            and "as" not in next(iter(entry.values()))
        ]

    def _take_out(self) -> Entry | None:
        """One rank's share of an entry, taken out of the program."""
        places = self._plain()
        if not places:
            return None
        place = self.random.choice(places)
        entry = self.entries[place]
        ranks = entry.get("ranks", self.members["world"])
        if isinstance(ranks, int):
            return self.entries.pop(place)
        rank = self.random.choice(ranks)
        left = [r for r in ranks if r != rank]
        self.entries[place : place + 1] = [{**entry, "ranks": left}] if left else []
        return {**entry, "ranks": rank}

    def _lose(self) -> None:
        """A call less; but not the only one that names a group, as a file that uses it could not be
        read.
        """
        before = list(self.entries)
        taken = self._take_out()
        if taken is not None and "new_group" in taken:
            name = taken["new_group"]["name"]
            if not any(entry.get("new_group", {}).get("name") == name for entry in self.entries):
                self.entries[:] = before

    def _move(self) -> None:
        entry = self._take_out()
        if entry is not None:
            self.entries.insert(self.random.randint(0, len(self.entries)), entry)

    def _change(self) -> None:
        """One rank says something else than the others: another size, dtype, root, reduce op,
        splits or kind.
        """
        places = self._plain(("send", "recv", *PLAIN, *ROOTED))
        if not places:
            return
        place = self.random.choice(places)
        entry = self.entries[place]
        op, fields = next(iter(entry.items()))
        ranks = entry.get("ranks", self.members["world"])
        rank = ranks if isinstance(ranks, int) else self.random.choice(ranks)
        left = [r for r in ([ranks] if isinstance(ranks, int) else ranks) if r != rank]
        other = {**self._other(op, dict(fields)), "ranks": rank}
        self.entries[place : place + 1] = [*([{**entry, "ranks": left}] if left else []), other]

    def _other(self, op: str, fields: Entry) -> Entry:
        roll = self.random.random()
        root = next((name for name in ("src", "dst") if name in fields and op in ROOTED), None)
        members = self.members[fields.get("group", "world")]
        if root is not None and roll < 0.4:
            fields[root] = self.random.choice(members)
        elif "op" in fields and roll < 0.4:
            fields["op"] = "max" if fields["op"] == "sum" else "sum"
        elif "tensor" in fields and isinstance(fields["tensor"], dict):
            tensor = fields["tensor"]
            larger = {**tensor, "shape": [tensor["shape"][0] * 2]}
            fields["tensor"] = (
                larger
                if self.random.random() < 0.6
                else {**tensor, "dtype": "int8" if op in ("send", "recv") else "int32"}
            )
        elif op in PLAIN:
            only = {"group": fields["group"]} if "group" in fields else {}
            return (
                {"all_reduce": {"tensor": buffer(4, "float32"), **only}}
                if op != "all_reduce"
                else {"barrier": only}
            )
        return {op: fields}

    def _leave(self) -> None:
        rank = self.random.randrange(self.world)
        op, fields = self.random.choice(
            (("exit", {"code": 0}), ("exit", {"code": 1}), ("fail", {"message": "lost"}))
        )
        self.entries.insert(self.random.randint(0, len(self.entries)), {op: fields, "ranks": rank})

    def _break(self) -> None:
        """A call that no program may make."""
        rank = self.random.randrange(self.world)
        group = next(
            (
                name
                for name, ranks in self.members.items()
                if rank not in ranks and name in self.groups
            ),
            None,
        )
        one = {"tensor": buffer(4)}
        wrong = [
            ("send", {**one, "dst": self.world + 1}),
            ("isend", {**one, "dst": rank}),
            ("recv", {**one, "src": rank}),
        ]
        wrong += (
            [
                ("all_reduce", {**one, "group": group}),
                ("send", {**one, "dst": rank, "group": group}),
            ]
            if group
            else []
        )
        op, fields = self.random.choice(wrong)
        self.entries.insert(self.random.randint(0, len(self.entries)), {op: fields, "ranks": rank})
