"""From a pipeline rank's calls to entries of a scenario: tensors and handles named, regular runs written as `repeat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distsim.strategies.base import Entry
from distsim.strategies.pipeline_actions import Action, Schedule
from distsim.strategies.pipeline_calls import Call, Message
from distsim.strategies.pipeline_data import DataWriter, Sums, last_of

#: Repeats are looked for up to so many entries long.
_LONGEST_BODY = 24

#: What a forward or backward costs: fields of a compute step, or entries that stand in its place.
Cost = Mapping[str, Any] | Sequence[Entry]


class Costs(NamedTuple):
    """(kind, stage) -> what it costs. There is either B or both I and W. L, where there is one: a stage's last backward instead."""

    of: Mapping[tuple[str, int], Cost]

    def get(self, kind: str, stage: int) -> Cost | None:
        return self.of.get((kind, stage))


class Piece(NamedTuple):
    """An entry with its numbers taken out: ``kind`` and ``parts`` say what it is, ``numbers`` are the copies that it names."""

    kind: str
    parts: tuple[Any, ...]
    numbers: tuple[int, ...]


_WORDS = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}


class Writer:
    """Entries of one pipeline rank. ``prefix`` begins the names of tensors, handles and the loop's index."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        axis: str,
        prefix: str,
        costs: Costs,
        gradients: Sequence[str],
        numbered: bool = False,
        data: DataWriter | None = None,
    ) -> None:
        self.schedule, self.rank, self.axis, self.prefix, self.costs = schedule, rank, axis, prefix, costs
        self.gradients, self.numbered = gradients, numbered
        self.chunk = {stage: c for c, stage in enumerate(schedule.stages_of(rank))}
        self.prices: list[Cost] = []
        self.data: DataWriter | None = None  # not yet: the exchange of shapes comes before
        self._data = data
        self.last = {stage: last_of(schedule, rank, stage) for stage in self.chunk}
        self.begun: set[tuple[int, str]] = set()  # stages whose first forward (F) and first backward (B) are written
        self.coming: set[int] = set()  # stages whose parameters are on their way

    def entries(self, calls: Sequence[Call]) -> list[Entry]:
        self.data = self._data
        self.begun.clear()
        pieces = [piece for call in calls for piece in self.pieces(call)]
        return self.rolled(pieces)

    # --- names ---
    def copy(self, stage: int, m: int) -> int:
        return self.chunk[stage] * self.schedule.micro_batches + m

    def tensor(self, message: Message) -> str:
        """An activation comes into input and leaves from output, a gradient the other way round."""
        if message.way == "F":
            return f"{self.prefix}_{'output' if message.sends else 'input'}"
        return f"{self.prefix}_{'input' if message.sends else 'output'}_grad"

    def handle(self, message: Message) -> str:
        word = "sent" if message.sends else "got"
        return f"{self.prefix}_{word}_{self.tensor(message).removeprefix(self.prefix + '_')}"

    def peer(self, message: Message) -> int | str:
        peer = self.schedule.rank_of[message.peer_stage]
        return {1: f"{self.axis} + 1", -1: f"{self.axis} - 1"}.get(peer - self.rank, peer)

    # --- pieces ---
    def pieces(self, call: Call) -> list[Piece]:
        numbers = tuple(self.copy(m.stage, m.micro_batch) for m in call.messages)
        if call.what == "wait":
            return [Piece("wait", tuple(self.handle(m) for m in call.messages), numbers)]
        if call.what == "batch":
            return [Piece("batch", tuple((m.sends, self.tensor(m), self.peer(m)) for m in call.messages), numbers)]
        if call.what == "start":
            (m,) = call.messages
            return [Piece("start", (m.sends, self.tensor(m), self.peer(m), self.handle(m)), numbers)]
        if call.what == "silent":
            return self.silent(call.action) if call.action is not None and self.data is not None else []
        return self.computes(call.action) if call.action is not None else []

    def silent(self, action: Action) -> list[Piece]:
        """What sharded weights do at an action that others pass over."""
        data, chunk = self.data, self.chunk[action.stage]
        if data is None or not data.sharded or action.kind == "RESHARD":
            return []
        if action.kind == "REDUCE_GRAD":
            return [self.raw(data.reduce(chunk))]
        self.coming.add(action.stage)
        return [self.raw(data.unshard(chunk))]

    def raw(self, entries: list[Entry]) -> Piece:
        return Piece("raw", (self.price(entries),), ())

    def computes(self, action: Action) -> list[Piece]:
        """Stage 0 has no input whose gradient anybody wants: PyTorch does nothing at its I and all at its W (stage.py)."""
        if action.stage == 0 and action.kind in "IW":
            return [] if action.kind == "I" else self.computes(action._replace(kind="B"))
        halves = action.kind == "B" and self.costs.get("B", action.stage) is None
        found = (
            self.unsharded(action.stage)
            + self.rebuilt(action)
            + [self.piece(action._replace(kind=kind)) for kind in ("IW" if halves else action.kind)]
        )
        return found + (self.number(action) if self.numbered else [])

    def unsharded(self, stage: int) -> list[Piece]:
        """Parameters that were asked for are waited for before the stage computes."""
        if self.data is None or stage not in self.coming:
            return []
        self.coming.remove(stage)
        return [self.raw(self.data.unsharded(self.chunk[stage]))]

    def rebuilt(self, action: Action) -> list[Piece]:
        """What replicas agree on before a stage's first forward."""
        if self.data is None or action.kind != "F" or (action.stage, "F") in self.begun:
            return []
        entries = self.data.before_first_forward(self.chunk[action.stage])
        return [self.raw(entries)] if entries else []

    def cost(self, action: Action) -> tuple[Cost, Sums, bool]:
        """What an action costs, what it adds gradients to, and whether they start anew there."""
        stage, kind, m, _ = action
        usual = self.costs.of[kind, stage]
        if kind not in "BW":
            first = kind == "F" and (stage, "F") not in self.begun
            self.begun |= {(stage, "F")} if first else set()
            hooks = self.data is not None and self.data.sharded and self.schedule.issue != "runtime"
            return (self.data.first_forward(self.chunk[stage], usual) if self.data and first and hooks else usual), (), False
        last = self.last[stage] == m
        if self.data is None:
            return (self.costs.get("L", stage) if last else None) or usual, (((self.gradients[self.chunk[stage]],), None),), False
        fresh = (stage, "B") not in self.begun
        self.begun.add((stage, "B"))
        if last and not self.data.sharded:
            return self.data.last_backward(self.chunk[stage], usual, fresh), (), False
        return usual, self.data.gradients(self.chunk[stage]), fresh

    def number(self, action: Action) -> list[Piece]:
        """What the action wrote, filled with a number that says whose it is: 1000 * stage + micro-batch; a gradient's is negative."""
        base = 1000 * action.stage - self.chunk[action.stage] * self.schedule.micro_batches
        sign = "" if action.kind == "F" else "-"
        return [Piece("assign", (name, sign, base), (k,)) for name, k in self.writes(action)]

    def piece(self, action: Action) -> Piece:
        reads, writes = self.reads(action), self.writes(action)
        name = _WORDS[action.kind] + (f" of chunk {self.chunk[action.stage]}" if len(self.chunk) > 1 else "")
        cost, adds, fresh = self.cost(action)
        parts = (name, self.price(cost), adds, fresh, *(n for n, _ in reads), "->", *(n for n, _ in writes))
        return Piece("compute", parts, tuple(k for _, k in (*reads, *writes)))

    def price(self, cost: Cost) -> int:
        if cost not in self.prices:
            self.prices.append(cost)
        return self.prices.index(cost)

    def reads(self, action: Action) -> list[tuple[str, int]]:
        stage, kind, m, _ = action
        mine = self.copy(stage, m)
        local = stage > 0 and stage - 1 in self.chunk
        given = (f"{self.prefix}_output", self.copy(stage - 1, m)) if local else (f"{self.prefix}_input", mine)
        if kind == "F":
            return [given]
        if stage == self.schedule.stages - 1:
            wanted = (f"{self.prefix}_output", mine)
        elif stage + 1 in self.chunk:
            wanted = (f"{self.prefix}_input_grad", self.copy(stage + 1, m))
        else:
            wanted = (f"{self.prefix}_output_grad", mine)
        return [wanted] if kind == "I" else [wanted, given]

    def writes(self, action: Action) -> list[tuple[str, int]]:
        mine = self.copy(action.stage, action.micro_batch)
        if action.kind == "F":
            return [(f"{self.prefix}_output", mine)]
        return [(f"{self.prefix}_input_grad", mine)] if action.kind in "BI" and action.stage > 0 else []

    # --- entries ---
    def rolled(self, pieces: Sequence[Piece]) -> list[Entry]:
        found: list[Entry] = []
        index, k = f"{self.prefix}_i", 0
        while k < len(pieces):
            size, times = longest_run(pieces, k)
            if times == 1:
                found += self.render(pieces[k], [str(n) for n in pieces[k].numbers])
            else:
                bodies = zip(pieces[k : k + size], pieces[k + size : k + 2 * size], strict=True)
                steps = [e for one, two in bodies for e in self.render(one, _texts(one.numbers, two.numbers, index))]
                found.append({"repeat": {"times": times, "index": index, "steps": steps}})
            k += size * times
        return found

    def render(self, piece: Piece, numbers: Sequence[str]) -> list[Entry]:
        parts = piece.parts
        if piece.kind == "wait":
            handles = [f"{handle}@{n}" for handle, n in zip(parts, numbers, strict=True)]
            return [{"wait": handles if len(handles) > 1 else handles[0]}]
        if piece.kind == "start":
            sends, tensor, peer, handle = parts
            return [_message(sends, f"{tensor}@{numbers[0]}", self.axis, peer, {"as": f"{handle}@{numbers[0]}"})]
        if piece.kind == "raw":
            entries = self.prices[parts[0]]
            return list(entries) if not isinstance(entries, Mapping) else []
        if piece.kind == "batch":
            ops = [_message(s, f"{t}@{n}", self.axis, peer, {}) for (s, t, peer), n in zip(parts, numbers, strict=True)]
            return [{"batch_isend_irecv": {"ops": ops}}]
        if piece.kind == "assign":
            tensor, sign, base = parts
            return [{"assign": {"tensor": f"{tensor}@{numbers[0]}", "value": f"{sign}({base} + {numbers[0]})"}}]
        return self.compute(parts, numbers)

    def compute(self, parts: tuple[Any, ...], numbers: Sequence[str]) -> list[Entry]:
        name, price, adds, fresh, *tensors = parts
        border = tensors.index("->")
        named = [f"{t}@{n}" for t, n in zip(tensors[:border] + tensors[border + 1 :], numbers, strict=True)]
        cost = self.prices[price]
        body, fields = ([], dict(cost)) if isinstance(cost, Mapping) else (list(cost), {"time": "0 ns"})
        step = {"name": name, **fields, "reads": named[:border]}
        found = body
        for names, when in adds or (((), None),):
            given = {**step, "writes": [*named[border:], *(names if fresh else ())], "adds": [] if fresh else list(names)}
            one: Entry = {"compute": {key: value for key, value in given.items() if value or key == "reads"}}
            found.append(one if when is None else {**one, "ranks": when})
        return found


def _message(sends: bool, tensor: str, axis: str, peer: int | str, more: Mapping[str, str]) -> Entry:
    side = "group_dst" if sends else "group_src"
    return {"isend" if sends else "irecv": {"tensor": tensor, "group": axis, side: peer, **more}}


def _texts(first: Sequence[int], second: Sequence[int], index: str) -> list[str]:
    """The numbers of a repeat's body as expressions over its index, from those of the first two rounds."""
    found = []
    for a, b in zip(first, second, strict=True):
        step = b - a
        if step == 0:
            found.append(str(a))
        elif step == 1:
            found.append(index if a == 0 else f"({index} + {a})")
        else:
            found.append(f"({a} - {index})" if step == -1 else f"({a} + {step} * {index})")
    return found


def longest_run(pieces: Sequence[Piece], start: int) -> tuple[int, int]:
    """(length of the body, rounds) of the repeat from ``start`` on that saves the most entries; (1, 1) where none does."""
    best, saved = (1, 1), 1
    for size in range(1, min(_LONGEST_BODY, (len(pieces) - start) // 2) + 1):
        times = _rounds(pieces, start, size)
        if (times - 1) * size > saved and times > 2:
            best, saved = (size, times), (times - 1) * size
    return best


def _rounds(pieces: Sequence[Piece], start: int, size: int) -> int:
    """How many blocks of a size follow each other with the same parts and numbers in equal steps."""
    times = 1
    while start + (times + 1) * size <= len(pieces):
        here = start + times * size
        for k in range(size):
            one, two = pieces[here - size + k], pieces[here + k]
            if one[:2] != two[:2] or (times > 1 and _step(one, two) != _step(pieces[start + k], pieces[start + size + k])):
                return times
        times += 1
    return times


def _step(one: Piece, two: Piece) -> list[int]:
    return [b - a for a, b in zip(one.numbers, two.numbers, strict=True)]
