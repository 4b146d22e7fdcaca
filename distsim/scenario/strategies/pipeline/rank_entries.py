"""From a pipeline rank's calls to entries of a scenario: tensors and handles named, regular runs
written as `repeat`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.common import units
from distsim.common.records import dataclass
from distsim.scenario.strategies.base import CostOrEntries, Entry, step
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.loop_rerolling import (
    EntryTemplate,
    TemplateInstance,
    reroll_loops,
)
from distsim.scenario.strategies.pipeline.rank_calls import PipelineCall, StageMessage
from distsim.scenario.strategies.pipeline.stage_data_parallel import (
    GradientTargets,
    StageDataParallelWriter,
    last_backward_micro_batches,
)


# --- entries with their numbers taken out ---
@dataclass(frozen=True)
class _WaitTemplate(EntryTemplate):
    handles: tuple[str, ...]

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        handles = [f"{handle}@{n}" for handle, n in zip(self.handles, numbers, strict=True)]
        return [{"wait": handles if len(handles) > 1 else handles[0]}]


@dataclass(frozen=True)
class _MessageTemplate(EntryTemplate):
    """One message, with a handle unless it is part of a batch."""

    sends: bool
    tensor: str
    axis: str
    peer: int | str
    handle: str | None = None

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        row, side = ("isend", "group_dst") if self.sends else ("irecv", "group_src")
        handle = None if self.handle is None else f"{self.handle}@{numbers[0]}"
        return [
            step(
                row,
                tensor=f"{self.tensor}@{numbers[0]}",
                group=self.axis,
                **{side: self.peer},
                as_=handle,
            )
        ]


@dataclass(frozen=True)
class _BatchTemplate(EntryTemplate):
    messages: tuple[_MessageTemplate, ...]

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        ops = [
            entry
            for one, n in zip(self.messages, numbers, strict=True)
            for entry in one.entries([n])
        ]
        return [{"batch_isend_irecv": {"ops": ops}}]


@dataclass(frozen=True)
class _RawTemplate(EntryTemplate):
    """Entries as they are."""

    steps: list[Entry]

    def key(self) -> Hashable:
        return "raw", repr(self.steps)

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        return list(self.steps)


@dataclass(frozen=True)
class _AssignTemplate(EntryTemplate):
    tensor: str
    sign: str
    base: int

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        return [
            {
                "assign": {
                    "tensor": f"{self.tensor}@{numbers[0]}",
                    "value": f"{self.sign}({self.base} + {numbers[0]})",
                }
            }
        ]


@dataclass(frozen=True)
class ComputeTemplate(EntryTemplate):
    """``adds``: what gradients are added to; with ``fresh`` they start anew there."""

    name: str
    cost: CostOrEntries
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    adds: GradientTargets = ()
    fresh: bool = False

    def key(self) -> Hashable:
        """Costs are told apart as objects: those of a stage's actions of one kind are one."""
        return self.name, id(self.cost), self.reads, self.writes, self.adds, self.fresh

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        named = [
            f"{tensor}@{n}" for tensor, n in zip(self.reads + self.writes, numbers, strict=True)
        ]
        reads, writes = named[: len(self.reads)], named[len(self.reads) :]
        found: list[Entry] = [] if isinstance(self.cost, Mapping) else list(self.cost)
        fields = {
            "name": self.name,
            **(self.cost if isinstance(self.cost, Mapping) else {"time": "0 ns"}),
            "reads": reads,
        }
        for names, when in self.adds or (((), None),):
            given = {
                **fields,
                "writes": [*writes, *(names if self.fresh else ())],
                "adds": [] if self.fresh else list(names),
            }
            one: Entry = {"compute": {key: value for key, value in given.items() if value}}
            found.append(one if when is None else {**one, "ranks": when})
        return found


def _time_ns(cost: CostOrEntries) -> int:
    assert isinstance(cost, Mapping)
    return units.parse_duration_ns(cost["time"])


#: Whether it is sent, and on which way -> the tensor of a message.
_MESSAGE_TENSORS = {
    (True, "F"): "output",
    (False, "F"): "input",
    (True, "B"): "input_grad",
    (False, "B"): "output_grad",
}
_ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}


class PipelineLayout(NamedTuple):
    """What all ranks of a pipeline have in common.

    ``prefix`` begins the names of tensors, handles and the loop's index. ``costs``: (kind, stage)
    -> what it costs; there is either B or both I and W; L, where there is one: a stage's last
    backward instead. ``overlapped``: nanoseconds of a forward and a backward beside each other,
    where that is not their sum.
    """

    schedule: PipelineSchedule
    axis: str
    prefix: str
    costs: Mapping[tuple[str, int], CostOrEntries]
    gradients: Sequence[str]
    numbered: bool = False
    data: StageDataParallelWriter | None = None
    overlapped: int | None = None


class PipelineRankWriter:
    """Entries of one pipeline rank."""

    def __init__(self, layout: PipelineLayout, rank: int) -> None:
        self.layout, self.rank, self.schedule = layout, rank, layout.schedule
        self.axis, self.prefix = layout.axis, layout.prefix
        self.chunk = {stage: c for c, stage in enumerate(self.schedule.stages_of(rank))}
        self.first_copy = {
            stage: c * self.schedule.micro_batches for stage, c in self.chunk.items()
        }
        self.data: StageDataParallelWriter | None = (
            None  # not yet: the exchange of shapes comes before
        )
        self.last = last_backward_micro_batches(self.schedule, rank)
        self.begun: set[tuple[int, str]] = (
            set()
        )  # stages whose first forward (F) and first backward (B) are written
        self.coming: set[int] = set()  # stages whose parameters are on their way
        self.handles = {
            key: f"{self.prefix}_{'sent' if key[0] else 'got'}_{word}"
            for key, word in _MESSAGE_TENSORS.items()
        }
        self.plain: dict[tuple[Hashable, ...], tuple[ComputeTemplate, tuple[int, ...]]] = {}
        self.starts: dict[tuple[bool, str, int, bool], _MessageTemplate] = {}
        self.waits: dict[tuple[str, ...], _WaitTemplate] = {}

    def entries(self, calls: Sequence[PipelineCall]) -> list[Entry]:
        self.data = self.layout.data
        self.begun.clear()
        return reroll_loops(
            [piece for call in calls for piece in self.pieces(call)],
            f"{self.prefix}_i",
            f"{self.prefix}_j",
        )

    # --- names ---
    def copy(self, stage: int, m: int) -> int:
        return self.first_copy[stage] + m

    def tensor(self, message: StageMessage) -> str:
        """An activation comes into input and leaves from output, a gradient the other way round."""
        return f"{self.prefix}_{_MESSAGE_TENSORS[message.sends, message.way]}"

    def handle(self, message: StageMessage) -> str:
        return self.handles[message.sends, message.way]

    def peer(self, message: StageMessage) -> int | str:
        peer = self.schedule.rank_of[message.peer_stage]
        return {1: f"{self.axis} + 1", -1: f"{self.axis} - 1"}.get(peer - self.rank, peer)

    # --- pieces ---
    def pieces(self, call: PipelineCall) -> list[TemplateInstance]:
        if call.what == "compute" and call.action is not None:
            return self.computes(call.action, call.beside)
        first, named = self.first_copy, self.handles
        numbers = tuple([first[stage] + m for _, _, stage, m in call.messages])
        if call.what == "wait":
            handles = tuple([named[sends, way] for sends, way, _, _ in call.messages])
            wait = self.waits.get(handles)
            if wait is None:
                wait = self.waits[handles] = _WaitTemplate(handles)
            return [TemplateInstance(wait, numbers)]
        if call.what == "batch":
            return [
                TemplateInstance(
                    _BatchTemplate(tuple(self.message(m) for m in call.messages)), numbers
                )
            ]
        if call.what == "start":
            (m,) = call.messages
            return [TemplateInstance(self.message(m, handled=True), numbers)]
        return [] if call.action is None else self.silent(call.action)

    def message(self, m: StageMessage, handled: bool = False) -> _MessageTemplate:
        """The same object for messages that differ in their copies alone."""
        key = m.sends, m.way, m.stage, handled
        known = self.starts.get(key)
        if known is None:
            alike = (
                m.sends,
                m.way,
                -1 - self.schedule.rank_of[m.peer_stage],
                handled,
            )  # from another stage to the same rank
            if alike not in self.starts:
                self.starts[alike] = _MessageTemplate(
                    m.sends,
                    self.tensor(m),
                    self.axis,
                    self.peer(m),
                    self.handle(m) if handled else None,
                )
            known = self.starts[key] = self.starts[alike]
        return known

    def silent(self, action: PipelineAction) -> list[TemplateInstance]:
        """What sharded weights do at an action that others pass over."""
        data, chunk = self.data, self.chunk[action.stage]
        if data is None or not data.sharded or action.kind == "RESHARD":
            return []
        if action.kind == "REDUCE_GRAD":
            return [TemplateInstance(_RawTemplate(data.reduce(chunk)))]
        self.coming.add(action.stage)
        return [TemplateInstance(_RawTemplate(data.unshard(chunk)))]

    def computes(
        self, action: PipelineAction, beside: PipelineAction | None = None
    ) -> list[TemplateInstance]:
        """Stage 0 has no input whose gradient anybody wants: PyTorch does nothing at its I and all
        at its W (stage.py).
        """
        if action.kind == "F" and self.data is None and not self.layout.numbered:
            return [self.piece(action, beside)]
        if action.stage == 0 and action.kind in "IW" and self.schedule.issue != "batched":
            return [] if action.kind == "I" else self.computes(action._replace(kind="B"))
        halves = action.kind == "B" and ("B", action.stage) not in self.layout.costs
        found = (
            self.unsharded(action.stage)
            + self.rebuilt(action)
            + [
                self.piece(action._replace(kind=kind), beside)
                for kind in ("IW" if halves else action.kind)
            ]
        )
        return found + (self.number(action) if self.layout.numbered else [])

    def unsharded(self, stage: int) -> list[TemplateInstance]:
        """Parameters that were asked for are waited for before the stage computes."""
        if self.data is None or stage not in self.coming:
            return []
        self.coming.remove(stage)
        return [TemplateInstance(_RawTemplate(self.data.unsharded(self.chunk[stage])))]

    def rebuilt(self, action: PipelineAction) -> list[TemplateInstance]:
        """What replicas agree on before a stage's first forward."""
        if self.data is None or action.kind != "F" or (action.stage, "F") in self.begun:
            return []
        entries = self.data.before_first_forward(self.chunk[action.stage])
        return [TemplateInstance(_RawTemplate(entries))] if entries else []

    def cost(self, action: PipelineAction) -> tuple[CostOrEntries, GradientTargets, bool]:
        """What an action costs, what it adds gradients to, and whether they start anew there."""
        stage, kind, m, _ = action
        usual = self.layout.costs[kind, stage]
        if kind not in "BW":
            first = kind == "F" and (stage, "F") not in self.begun
            self.begun |= {(stage, "F")} if first else set()
            hooks = self.data is not None and self.data.sharded and self.schedule.issue != "runtime"
            return (
                (
                    self.data.first_forward(self.chunk[stage], usual)
                    if self.data and first and hooks
                    else usual
                ),
                (),
                False,
            )
        last = self.last.get(stage) == m
        if self.data is None:
            cost = self.layout.costs.get(("L", stage), usual) if last else usual
            return cost, (((self.layout.gradients[self.chunk[stage]],), None),), False
        fresh = (stage, "B") not in self.begun
        self.begun.add((stage, "B"))
        if last and not self.data.sharded:
            return self.data.last_backward(self.chunk[stage], usual, fresh), (), False
        return usual, self.data.gradients(self.chunk[stage]), fresh

    def number(self, action: PipelineAction) -> list[TemplateInstance]:
        """What the action wrote, filled with a number that says whose it is: 1000 * stage +
        micro-batch; a gradient's is negative.
        """
        direction, stage = divmod(action.stage, self.schedule.length)
        base = 1000 * stage + (direction - self.chunk[action.stage]) * self.schedule.micro_batches
        sign = "" if action.kind == "F" else "-"
        return [
            TemplateInstance(_AssignTemplate(name, sign, base), (k,))
            for name, k in self.writes(action)
        ]

    def piece(
        self, action: PipelineAction, beside: PipelineAction | None = None
    ) -> TemplateInstance:
        """Without replicas beside it a stage's actions of one kind differ in their micro-batch
        alone.
        """
        stage, kind, m, _ = action
        if self.data is not None or ("L", stage) in self.layout.costs:
            return self.made(action)
        key = stage, kind, beside and beside[:2]
        known = self.plain.get(key)
        if known is None:
            first = self.made(action)
            assert isinstance(first.what, ComputeTemplate)
            what = (
                first.what
                if beside is None
                else replace(first.what, cost=self.share(action, beside))
            )
            known = self.plain[key] = what, tuple([number - m for number in first.numbers])
        what, copies = known
        return TemplateInstance(what, tuple([copy + m for copy in copies]))

    def share(self, action: PipelineAction, beside: PipelineAction) -> CostOrEntries:
        """What an action costs in an overlapped pair: the pair's time, as the two would share it
        one after the other.
        """
        own, costs, whole = self.cost(action)[0], self.layout.costs, self.layout.overlapped
        if whole is None:
            return own
        forward, backward = (
            _time_ns(costs[kind, s])
            for s, kind, *_ in sorted((action, beside), key=lambda a: a.kind != "F")
        )
        first = whole * forward // max(1, forward + backward)
        return {"time": units.duration_text(first if action.kind == "F" else whole - first)}

    def made(self, action: PipelineAction) -> TemplateInstance:
        reads, writes = self.reads(action), self.writes(action)
        name = _ACTION_NAMES[action.kind] + (
            f" of chunk {self.chunk[action.stage]}" if len(self.chunk) > 1 else ""
        )
        tensors = tuple(n for n, _ in reads), tuple(n for n, _ in writes)
        cost, adds, fresh = self.cost(action)
        return TemplateInstance(
            ComputeTemplate(name, cost, *tensors, adds, fresh),
            tuple(k for _, k in (*reads, *writes)),
        )

    def reads(self, action: PipelineAction) -> list[tuple[str, int]]:
        stage, kind, m, _ = action
        mine = self.copy(stage, m)
        local = self.schedule.beside(stage, -1) in self.chunk
        given = (
            (f"{self.prefix}_output", self.copy(stage - 1, m))
            if local
            else (f"{self.prefix}_input", mine)
        )
        if kind == "F":
            return [given]
        if self.schedule.last(stage):
            wanted = (f"{self.prefix}_output", mine)
        elif stage + 1 in self.chunk:
            wanted = (f"{self.prefix}_input_grad", self.copy(stage + 1, m))
        else:
            wanted = (f"{self.prefix}_output_grad", mine)
        return [wanted] if kind == "I" else [wanted, given]

    def writes(self, action: PipelineAction) -> list[tuple[str, int]]:
        mine = self.copy(action.stage, action.micro_batch)
        if action.kind == "F":
            return [(f"{self.prefix}_output", mine)]
        return (
            [(f"{self.prefix}_input_grad", mine)]
            if action.kind in "BI" and not self.schedule.first(action.stage)
            else []
        )
