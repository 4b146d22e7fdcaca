"""Random programs of many ranks that run one text: meshes, shifts, pipelines, groups, and now and
then something that breaks symmetry.
"""

from __future__ import annotations

from random import Random
from typing import Any

Entry = dict[str, Any]
AXES = ("a", "b", "c")
SHAPES = (
    (2,),
    (4,),
    (6,),
    (8,),
    (2, 2),
    (2, 4),
    (4, 2),
    (3, 4),
    (2, 2, 2),
    (2, 2, 4),
    (2, 3, 2),
    (4, 4),
    (3, 3),
    (4, 2, 2),
)
TIMES = ("0 ns", "3 us", "40 us", "1 ms")
COLLECTIVES = (
    "all_reduce",
    "all_reduce",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
)


def program(seed: int) -> Entry:
    """The scenario of a seed, as a file would say it."""
    return _Maker(Random(seed)).make()


class _Maker:
    def __init__(self, random: Random) -> None:
        self.random = random
        shape = random.choice(SHAPES)
        self.mesh = dict(zip(AXES, shape, strict=False))
        self.size = 1
        for n in shape:
            self.size *= n
        self.handles = 0

    def make(self) -> Entry:
        r = self.random
        per_node = r.choice([n for n in range(1, self.size + 1) if self.size % n == 0])
        made: Entry = {
            "name": "spmd",
            "world": {"nodes": self.size // per_node, "ranks_per_node": per_node},
            "mesh": self.mesh,
            "backend": r.choice(("gloo", "nccl", "nccl", "mpi")),
            "program": [self._entry() for _ in range(r.randint(1, 7))],
        }
        if r.random() < 0.3:
            made["program"] = [
                {"repeat": {"times": r.randint(2, 3), "index": "i", "steps": made["program"]}}
            ]
        if r.random() < 0.3:
            made["iterations"] = 2
        faults = [self._fault() for _ in range(r.choice((0, 0, 0, 1, 1, 2)))]
        if faults:
            made["faults"] = faults
        if made["backend"] == "nccl" and r.random() < 0.4:
            made["options"] = {"init": "eager"}
        if r.random() < 0.25:
            made["groups"] = {"odd": {"by": "rank % 2"}}
            made["program"].append(
                self._of_all({"all_reduce": {"tensor": self._tensor(), "group": "odd"}})
            )
        if r.random() < 0.5:
            made["program"].append({"wait": "all"})
        return made

    def _fault(self) -> Entry:
        r = self.random
        if r.random() < 0.15:
            return {"kind": "slow", "link": "nic", "factor": 3, "nodes": [0]}
        rank = r.randrange(self.size)
        return (
            {"kind": "late", "ranks": rank, "delay": "2 ms"}
            if r.random() < 0.3
            else {"kind": "slow", "ranks": rank, "factor": 2}
        )

    def _tensor(self) -> Entry:
        r = self.random
        size: Any = r.choice((64, 4096, 720720))
        if r.random() < 0.1:
            size = f"720 * (1 + {self._axis()})"
        return {"shape": [size], "dtype": r.choice(("float32", "uint8"))}

    def _axis(self) -> str:
        return self.random.choice(list(self.mesh))

    def _of_all(self, entry: Entry) -> Entry:
        """With a selector now and then."""
        r = self.random
        if r.random() < 0.1:
            axis = self._axis()
            entry["ranks"] = r.choice(
                (f"{axis} == 0", f"{axis} > 0", "not (a == 1)", f"rank % 2 == {r.randrange(2)}")
            )
        return entry

    def _entry(self) -> Entry:
        kind = self.random.choice(
            (
                self._work,
                self._shift,
                self._shift,
                self._open,
                self._exchange,
                self._collective,
                self._collective,
            )
        )
        return kind()

    def _work(self) -> Entry:
        time: Any = self.random.choice(TIMES)
        if self.random.random() < 0.3:
            time = f"2 us * ({self._axis()} + 1)"
        return self._of_all({"compute": {"time": time, "name": "work"}})

    def _collective(self) -> Entry:
        r = self.random
        op = r.choice(COLLECTIVES)
        group: Any = r.choice(("world", self._axis(), self._axis(), [*self.mesh][:2]))
        group = group[0] if isinstance(group, list) and len(group) == 1 else group
        told: Entry = {} if group == "world" else {"group": group}
        if op in ("broadcast", "reduce", "gather", "scatter"):
            told["group_src" if op in ("broadcast", "scatter") else "group_dst"] = r.choice(
                (0, 0, 1)
            )
        if op in ("gather", "scatter"):
            n = self._size_of(group)
            one, rows = {"shape": [24]}, {"shape": [n, 24]}
            told["input"], told["output"] = (one, rows) if op == "gather" else (rows, one)
        elif op in ("all_gather", "reduce_scatter", "all_to_all"):
            op = {
                "all_gather": "all_gather_into_tensor",
                "reduce_scatter": "reduce_scatter_tensor",
                "all_to_all": "all_to_all_single",
            }[op]
            n = self._size_of(group)
            one, many = {"shape": [24]}, {"shape": [f"24 * {n}"]}
            told["input"], told["output"] = {"a": (many, many)}.get(
                op[4], (one, many) if op.startswith("all_g") else (many, one)
            )
            if op == "all_to_all_single":
                told["input"] = told["output"] = many
        elif op != "barrier":
            told["tensor"] = self._tensor()
        if r.random() < 0.25 and op != "barrier":
            told |= {"async": True, "as": self._handle()}
        return self._of_all({op: told})

    @staticmethod
    def _size_of(group: Any) -> str:
        return (
            "world_size"
            if group == "world"
            else " * ".join(f"{a}_size" for a in ([group] if isinstance(group, str) else group))
        )

    def _handle(self) -> str:
        self.handles += 1
        return f"h{self.handles}"

    def _peers(self) -> tuple[str, str]:
        """(whom to send to, whom to receive from)."""
        r = self.random
        axis, wide = self._axis(), 1
        for name in reversed(self.mesh):
            if name == axis:
                break
            wide *= self.mesh[name]
        n, by = self.mesh[axis], r.choice((1, 1, 1, 2, -1))
        choice = r.random()
        if choice < 0.65:
            return tuple(
                f"rank + (({axis} + {n} + {k}) % {n} - {axis}) * {wide}" for k in (by, -by)
            )  # type: ignore[return-value]
        if choice < 0.8:
            return f"(rank + {by}) % world_size", f"(rank + world_size - {by}) % world_size"
        mirror = (
            "world_size - 1 - rank" if choice < 0.9 else f"rank + ({n} - 1 - 2 * {axis}) * {wide}"
        )
        return mirror, mirror

    def _shift(self) -> Entry:
        r = self.random
        to, from_ = self._peers()
        tensor, tag = self._tensor(), r.choice(({}, {}, {"tag": 3}, {"tag": "rank % 2"}))
        back = {} if isinstance(tag.get("tag"), str) and r.random() < 0.9 else tag
        tag = back if tag != back else tag
        how = r.random()
        send, receive = (
            {"tensor": tensor, "dst": to, **tag},
            {"tensor": tensor, "src": from_, **tag},
        )
        if how < 0.45:
            one, two = self._handle(), self._handle()
            steps = [{"isend": {**send, "as": one}}, {"irecv": {**receive, "as": two}}]
            r.shuffle(steps)
            return {"steps": [*steps, {"wait": r.choice(([one, two], [two, one]))}]}
        if how < 0.65:
            return {
                "steps": [
                    {
                        "batch_isend_irecv": {
                            "ops": [{"isend": send}, {"irecv": receive}],
                            "as": self._handle(),
                        }
                    },
                    {"wait": "all"},
                ]
            }
        if how < 0.9:
            axis = self._axis()
            return {
                "steps": [
                    {"ranks": f"{axis} % 2 == 0", "steps": [{"send": send}, {"recv": receive}]},
                    {"ranks": f"{axis} % 2 == 1", "steps": [{"recv": receive}, {"send": send}]},
                ]
            }
        return {"steps": [{"send": send}, {"recv": receive}]}

    def _open(self) -> Entry:
        """Down an axis and, now and then, up again."""
        axis, tensor = self._axis(), self._tensor()
        n = self.mesh[axis]
        steps: list[Entry] = [
            {
                "recv": {"tensor": tensor, "group": axis, "group_src": f"{axis} - 1"},
                "ranks": f"{axis} > 0",
            },
            {"compute": {"time": "20 us", "name": "forward"}},
            {
                "send": {"tensor": tensor, "group": axis, "group_dst": f"{axis} + 1"},
                "ranks": f"{axis} < {n - 1}",
            },
        ]
        return {"steps": steps}

    def _exchange(self) -> Entry:
        """Two sends to two peers, received in some order."""
        pairs = [self._peers(), self._peers()]
        tensor, names = self._tensor(), [self._handle() for _ in range(4)]
        steps: list[Entry] = [
            {"isend": {"tensor": tensor, "dst": to, "as": name}}
            for (to, _), name in zip(pairs, names, strict=False)
        ]
        steps += [
            {"irecv": {"tensor": tensor, "src": of, "as": name}}
            for (_, of), name in zip(pairs, names[2:], strict=True)
        ]
        if self.random.random() < 0.4:
            ops = [
                {op: {k: v for k, v in fields.items() if k != "as"}}
                for step in steps
                for op, fields in step.items()
            ]
            return {
                "steps": [{"batch_isend_irecv": {"ops": ops, "as": names[0]}}, {"wait": [names[0]]}]
            }
        return {"steps": [*steps, {"wait": names}]}
