"""From a pipeline rank's calls to entries of a scenario.

Each call becomes a template, which has no numbers of micro-batches, and the numbers that belong to
it. Templates of calls that differ only in these numbers are equal, so that regular runs can be
written as `repeat` (`distsim.scenario.strategies.pipeline.loop_rerolling`). A number selects a copy
of a tensor or handle: copy ``c * micro_batches + m`` is micro-batch m of the rank's chunk c.

Long pipelines have many calls, so templates are cached, and the code of each call is kept short.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.common import units
from distsim.common.records import dataclass
from distsim.scenario.strategies.base import ZERO_COST, CostOrEntries, Entry, step
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.loop_rerolling import (
    EntryTemplate,
    TemplateInstance,
    reroll_loops,
)
from distsim.scenario.strategies.pipeline.rank_calls import PipelineCall, StageMessage
from distsim.scenario.strategies.pipeline.stage_data_parallel import (
    ALL_ITERATIONS,
    GradientTarget,
    GradientTargets,
    StageDataParallelWriter,
    last_backward_micro_batches,
)


# --- templates ---
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
        operation, side = ("isend", "group_dst") if self.sends else ("irecv", "group_src")
        handle = None if self.handle is None else f"{self.handle}@{numbers[0]}"
        return [
            step(
                operation,
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
        ops: list[Entry] = []
        for message, number in zip(self.messages, numbers, strict=True):
            ops += message.entries([number])
        return [{"batch_isend_irecv": {"ops": ops}}]


@dataclass(frozen=True)
class _RawTemplate(EntryTemplate):
    """Entries without numbers."""

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
        assign = {
            "tensor": f"{self.tensor}@{numbers[0]}",
            "value": f"{self.sign}({self.base} + {numbers[0]})",
        }
        return [{"assign": assign}]


@dataclass(frozen=True)
class ComputeTemplate(EntryTemplate):
    """A computation; ``adds`` are the gradients, which it overwrites if ``fresh``, else adds to."""

    name: str
    cost: CostOrEntries
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    adds: GradientTargets = ()
    fresh: bool = False

    def key(self) -> Hashable:
        """Costs are compared as objects: a stage's actions of one kind share one."""
        return self.name, id(self.cost), self.reads, self.writes, self.adds, self.fresh

    def entries(self, numbers: Sequence[str]) -> list[Entry]:
        """A compute step for each condition of the gradients.

        Entries instead of a cost come first; the compute step then only marks reads and writes.
        """
        names = self.reads + self.writes
        numbered = [f"{tensor}@{n}" for tensor, n in zip(names, numbers, strict=True)]
        reads = numbered[: len(self.reads)]
        writes = numbered[len(self.reads) :]
        is_cost = isinstance(self.cost, Mapping)
        steps: list[Entry] = [] if is_cost else list(self.cost)  # type: ignore[arg-type]
        fields = {
            "name": self.name,
            **(self.cost if isinstance(self.cost, Mapping) else ZERO_COST),
            "reads": reads,
        }
        for gradients, condition in self.adds or (GradientTarget((), ALL_ITERATIONS),):
            overwritten = gradients if self.fresh else ()
            added = [] if self.fresh else list(gradients)
            given = {**fields, "writes": [*writes, *overwritten], "adds": added}
            entry: Entry = {"compute": {key: value for key, value in given.items() if value}}
            steps.append(entry if condition is None else {**entry, "ranks": condition})
        return steps


def _time_ns(cost: CostOrEntries) -> int:
    assert isinstance(cost, Mapping)
    return units.parse_duration_ns(cost["time"])


#: Whether it is sent, and its direction -> the tensor of a message. An activation is received into
#: `input` and sent from `output`, a gradient the other way round.
_MESSAGE_TENSORS = {
    (True, "F"): "output",
    (False, "F"): "input",
    (True, "B"): "input_grad",
    (False, "B"): "output_grad",
}
_ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}


#: (stage of the forward pass, stage of the backward pass) -> the entries of both.
PairEntries = Mapping[tuple[int, int], list[Entry]]


class PipelineLayout(NamedTuple):
    """What all ranks of a pipeline have in common.

    ``prefix`` begins the names of tensors, handles and the loop's index. ``costs`` are by (kind,
    stage): either B or both I and W exist; L, if it exists, replaces a stage's last backward.
    ``overlapped`` is the time in ns of a forward and a backward that overlap; None: their sum.
    ``pairs`` are the entries of both together, by their stages.
    """

    schedule: PipelineSchedule
    axis: str
    prefix: str
    costs: Mapping[tuple[str, int], CostOrEntries]
    gradients: Sequence[str]
    numbered: bool = False
    data: StageDataParallelWriter | None = None
    overlapped: int | None = None
    pairs: PairEntries | None = None


class _ActionCost(NamedTuple):
    """The cost of an action, the gradients it adds to, and whether it overwrites them."""

    cost: CostOrEntries
    adds: GradientTargets = ()
    fresh: bool = False


class _TensorCopy(NamedTuple):
    """A tensor and the number of its copy."""

    tensor: str
    copy: int


class PipelineRankWriter:
    """Entries of one pipeline rank.

    ``data`` is None until ``entries`` is called, because the exchange of shapes, which also uses
    the writer, runs before any parameter is gathered.
    """

    def __init__(self, layout: PipelineLayout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.schedule = layout.schedule
        self.axis = layout.axis
        self.prefix = layout.prefix
        self.chunk = {stage: c for c, stage in enumerate(self.schedule.stages_of(rank))}
        self.first_copy = {
            stage: c * self.schedule.micro_batches for stage, c in self.chunk.items()
        }
        self.data: StageDataParallelWriter | None = None
        self.last_backward = last_backward_micro_batches(self.schedule, rank)
        #: (stage, F or B): the stage's first forward, or first backward, is written.
        self.begun: set[tuple[int, str]] = set()
        #: Stages whose parameters were asked for, but not waited for.
        self.unsharding: set[int] = set()
        self.handles = {
            key: f"{self.prefix}_{'sent' if key[0] else 'got'}_{word}"
            for key, word in _MESSAGE_TENSORS.items()
        }
        # Caches, so that equal templates are one object.
        self.compute_templates: dict[
            tuple[Hashable, ...], tuple[ComputeTemplate, tuple[int, ...]]
        ] = {}
        self.message_templates: dict[tuple[bool, str, int, bool], _MessageTemplate] = {}
        self.wait_templates: dict[tuple[str, ...], _WaitTemplate] = {}

    def entries(self, calls: Sequence[PipelineCall]) -> list[Entry]:
        self.data = self.layout.data
        self.begun.clear()
        instances = [instance for call in calls for instance in self.instances(call)]
        return reroll_loops(instances, f"{self.prefix}_i", f"{self.prefix}_j")

    # --- names ---
    def copy(self, stage: int, m: int) -> int:
        return self.first_copy[stage] + m

    def tensor(self, message: StageMessage) -> str:
        return f"{self.prefix}_{_MESSAGE_TENSORS[message.sends, message.way]}"

    def handle(self, message: StageMessage) -> str:
        return self.handles[message.sends, message.way]

    def peer(self, message: StageMessage) -> int | str:
        """The peer's coordinate; of a neighbour as an expression, which is equal on all ranks."""
        peer = self.schedule.rank_of[message.peer_stage]
        return {1: f"{self.axis} + 1", -1: f"{self.axis} - 1"}.get(peer - self.rank, peer)

    # --- calls ---
    def instances(self, call: PipelineCall) -> list[TemplateInstance]:
        """The templates of a call with their numbers."""
        if call.what == "compute" and call.action is not None:
            return self.computes(call.action, call.beside)
        first_copy = self.first_copy
        numbers = tuple([first_copy[stage] + m for _, _, stage, m in call.messages])
        if call.what == "wait":
            named = self.handles
            handles = tuple([named[sends, way] for sends, way, _, _ in call.messages])
            wait = self.wait_templates.get(handles)
            if wait is None:
                wait = self.wait_templates[handles] = _WaitTemplate(handles)
            return [TemplateInstance(wait, numbers)]
        if call.what == "batch":
            messages = tuple(self.message(m) for m in call.messages)
            return [TemplateInstance(_BatchTemplate(messages), numbers)]
        if call.what == "start":
            (m,) = call.messages
            return [TemplateInstance(self.message(m, with_handle=True), numbers)]
        return [] if call.action is None else self.sharding_entries(call.action)

    def message(self, m: StageMessage, with_handle: bool = False) -> _MessageTemplate:
        """The template of a message; the same object for messages that differ only in their copy.

        Messages of several stages to the same rank also share it, under a key whose stage is
        negative.
        """
        key = m.sends, m.way, m.stage, with_handle
        known = self.message_templates.get(key)
        if known is None:
            key_of_rank = m.sends, m.way, -1 - self.schedule.rank_of[m.peer_stage], with_handle
            if key_of_rank not in self.message_templates:
                self.message_templates[key_of_rank] = _MessageTemplate(
                    m.sends,
                    self.tensor(m),
                    self.axis,
                    self.peer(m),
                    self.handle(m) if with_handle else None,
                )
            known = self.message_templates[key] = self.message_templates[key_of_rank]
        return known

    def sharding_entries(self, action: PipelineAction) -> list[TemplateInstance]:
        """UNSHARD and REDUCE_GRAD; without sharded weights they do nothing, and RESHARD never."""
        data = self.data
        if data is None or not data.sharded or action.kind == "RESHARD":
            return []
        chunk = self.chunk[action.stage]
        if action.kind == "REDUCE_GRAD":
            return [TemplateInstance(_RawTemplate(data.reduce(chunk)))]
        self.unsharding.add(action.stage)
        return [TemplateInstance(_RawTemplate(data.unshard(chunk)))]

    # --- computations ---
    def computes(
        self, action: PipelineAction, beside: PipelineAction | None = None
    ) -> list[TemplateInstance]:
        """The entries of a computation; ``beside`` is the action that overlaps it."""
        if action.kind == "F" and self.data is None and not self.layout.numbered:
            return [self.compute(action, beside)]
        if action.stage == 0 and action.kind in "IW" and self.schedule.issue != "batched":
            # No gradient of stage 0's input is needed: PyTorch does nothing at its I and the whole
            # backward at its W (stage.py).
            return [] if action.kind == "I" else self.computes(action._replace(kind="B"))
        has_whole_cost = ("B", action.stage) in self.layout.costs
        kinds = "IW" if action.kind == "B" and not has_whole_cost else (action.kind,)
        instances = self.wait_for_unshard(action.stage) + self.before_first_forward(action)
        instances += [self.compute(action._replace(kind=kind), beside) for kind in kinds]
        if self.layout.numbered:
            instances += self.number_results(action)
        return instances

    def wait_for_unshard(self, stage: int) -> list[TemplateInstance]:
        """Parameters that were asked for are waited for before the stage computes."""
        if self.data is None or stage not in self.unsharding:
            return []
        self.unsharding.remove(stage)
        return [TemplateInstance(_RawTemplate(self.data.wait_unshard(self.chunk[stage])))]

    def before_first_forward(self, action: PipelineAction) -> list[TemplateInstance]:
        """Calls of the replicas before a stage's first forward."""
        if self.data is None or action.kind != "F" or (action.stage, "F") in self.begun:
            return []
        entries = self.data.before_first_forward(self.chunk[action.stage])
        return [TemplateInstance(_RawTemplate(entries))] if entries else []

    def cost(self, action: PipelineAction) -> _ActionCost:
        """The cost of an action and its gradients; marks the stage as begun."""
        cost = self.layout.costs[action.kind, action.stage]
        if action.kind in "BW":
            return self.cost_with_gradients(action, cost)
        if action.kind != "F" or (action.stage, "F") in self.begun:
            return _ActionCost(cost)
        self.begun.add((action.stage, "F"))
        data = self.data
        # The runtime's rows have UNSHARD; other schedules leave gathering to the units' hooks.
        if data is None or not data.sharded or self.schedule.issue == "runtime":
            return _ActionCost(cost)
        return _ActionCost(data.first_forward(self.chunk[action.stage], cost))

    def cost_with_gradients(self, action: PipelineAction, cost: CostOrEntries) -> _ActionCost:
        """The same for an action that computes gradients of the weights."""
        stage = action.stage
        chunk = self.chunk[stage]
        is_last = self.last_backward.get(stage) == action.micro_batch
        if self.data is None:
            if is_last:
                cost = self.layout.costs.get(("L", stage), cost)
            target = GradientTarget((self.layout.gradients[chunk],), ALL_ITERATIONS)
            return _ActionCost(cost, (target,))
        fresh = (stage, "B") not in self.begun
        self.begun.add((stage, "B"))
        if is_last and not self.data.sharded:
            return _ActionCost(self.data.last_backward(chunk, cost, fresh))
        return _ActionCost(cost, self.data.gradients(chunk), fresh)

    def number_results(self, action: PipelineAction) -> list[TemplateInstance]:
        """Fill what the action wrote with 1000 * stage + micro-batch; a gradient's is negative."""
        direction, stage = divmod(action.stage, self.schedule.length)
        # Assignments add the copy's number, which also counts chunks: subtract those.
        base = 1000 * stage + (direction - self.chunk[action.stage]) * self.schedule.micro_batches
        sign = "" if action.kind == "F" else "-"
        return [
            TemplateInstance(_AssignTemplate(tensor, sign, base), (copy,))
            for tensor, copy in self.writes(action)
        ]

    def compute(
        self, action: PipelineAction, beside: PipelineAction | None = None
    ) -> TemplateInstance:
        """The template of a computation, cached where possible.

        Without data parallelism, a stage's actions of one kind differ only in their micro-batch.
        """
        stage, kind, m, _ = action
        if self.data is not None or ("L", stage) in self.layout.costs:
            return self.build_compute(action)
        key = stage, kind, beside and beside[:2]
        known = self.compute_templates.get(key)
        if known is None:
            first = self.build_compute(action)
            assert isinstance(first.what, ComputeTemplate)
            template = first.what
            if beside is not None:
                template = replace(template, cost=self.share_of_pair(action, beside))
            known = template, tuple([number - m for number in first.numbers])
            self.compute_templates[key] = known
        template, copies = known
        return TemplateInstance(template, tuple([copy + m for copy in copies]))

    def share_of_pair(self, action: PipelineAction, beside: PipelineAction) -> CostOrEntries:
        """The cost of an action in an overlapped pair.

        The pair's time is divided in proportion to the times of the two without overlap. Entries of
        a pair belong to its forward pass, which comes first.
        """
        pair_ns = self.layout.overlapped
        forward, backward = (action, beside) if action.kind == "F" else (beside, action)
        if self.layout.pairs is not None:
            stages = forward.stage % self.schedule.length, backward.stage % self.schedule.length
            return self.layout.pairs[stages] if action.kind == "F" else ZERO_COST
        if pair_ns is None:
            return self.cost(action).cost
        forward_ns = _time_ns(self.layout.costs[forward.kind, forward.stage])
        backward_ns = _time_ns(self.layout.costs[backward.kind, backward.stage])
        forward_share = pair_ns * forward_ns // max(1, forward_ns + backward_ns)
        share = forward_share if action.kind == "F" else pair_ns - forward_share
        return {"time": units.duration_text(share)}

    def build_compute(self, action: PipelineAction) -> TemplateInstance:
        reads = self.reads(action)
        writes = self.writes(action)
        name = _ACTION_NAMES[action.kind]
        if len(self.chunk) > 1:
            name += f" of chunk {self.chunk[action.stage]}"
        cost, adds, fresh = self.cost(action)
        template = ComputeTemplate(
            name,
            cost,
            tuple(tensor for tensor, _ in reads),
            tuple(tensor for tensor, _ in writes),
            adds,
            fresh,
        )
        return TemplateInstance(template, tuple(copy for _, copy in (*reads, *writes)))

    def reads(self, action: PipelineAction) -> list[_TensorCopy]:
        stage, kind, m, _ = action
        own_copy = self.copy(stage, m)
        if self.schedule.adjacent_stage(stage, -1) in self.chunk:
            activation = _TensorCopy(f"{self.prefix}_output", self.copy(stage - 1, m))
        else:
            activation = _TensorCopy(f"{self.prefix}_input", own_copy)
        if kind == "F":
            return [activation]
        if self.schedule.last(stage):
            gradient = _TensorCopy(f"{self.prefix}_output", own_copy)
        elif stage + 1 in self.chunk:
            gradient = _TensorCopy(f"{self.prefix}_input_grad", self.copy(stage + 1, m))
        else:
            gradient = _TensorCopy(f"{self.prefix}_output_grad", own_copy)
        # The gradient of the input does not depend on the input.
        return [gradient] if kind == "I" else [gradient, activation]

    def writes(self, action: PipelineAction) -> list[_TensorCopy]:
        own_copy = self.copy(action.stage, action.micro_batch)
        if action.kind == "F":
            return [_TensorCopy(f"{self.prefix}_output", own_copy)]
        if action.kind == "W" or self.schedule.first(action.stage):
            return []
        return [_TensorCopy(f"{self.prefix}_input_grad", own_copy)]
