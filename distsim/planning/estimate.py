"""A transformer's step in numbers: what a micro-batch takes on each stage, and the whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

from distsim.backends.nccl import SEND_BUFFER
from distsim.common import units
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.planning.pipeline_timer import (
    MicroBatchPass,
    PipelineRankClock,
    PipelineTimer,
    PipelineWork,
    calls_by_rank,
)
from distsim.planning.rank_timer import LAUNCH, MEMORY, EntryPrices, RankTimer
from distsim.scenario.strategies.base import Entry, ExpansionContext
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.rank_calls import PipelineCall
from distsim.scenario.strategies.training_step.layer_calls import ParameterCounts
from distsim.scenario.strategies.training_step.transformer import TransformerStepWriter
from distsim.scenario.strategies.training_step.transformer_fields import TransformerFields

#: What layouts share: passes of equal stages, schedules, by what they depend on.
EstimateCache = dict[object, object]
#: Micro-batches of a step without a pipeline that are run; those beyond take as long as the last
#: but one.
_SIMULATED_MICRO_BATCHES = 4
#: Times the ranks of a pipeline: so many micro-batches fill it, and those beyond take as long as
#: each other.
_ROUNDS_TO_FILL = 2
#: What a rank's time goes into beside its own work.
PIPELINE, DATA, NORM = "pipeline", "data", "norm"


class StepTime(NamedTuple):
    """A step of one layout. Times in ns. ``spent``: what a rank's time goes into, the mean over the
    ranks of the pipeline; `pipeline`: it waits for other stages and their messages."""

    makespan_ns: int
    spent: Counter[str]


class EntriesTime(NamedTuple):
    """Entries of one rank run alone: ns of the device, of the host that launches them, and what the
    device's go into.
    """

    device_ns: int
    host_ns: int
    spent: Counter[str]


class StepEstimator(TransformerStepWriter):
    """Times a step of a transformer on a mesh without laying out its calls rank by rank.

    ``cache`` is for layouts at the same prices, ``schedules`` for all. Simulated call by call the
    step takes exactly as long where no transfer shares a link and no kernel slows one down; those
    are priced alone here.
    """

    def __init__(
        self,
        train: TransformerFields,
        context: ExpansionContext,
        prices: EntryPrices,
        cache: EstimateCache,
        schedules: EstimateCache | None = None,
    ) -> None:
        super().__init__(train, context)
        self.prices, self.cache, self.schedules = (
            prices,
            cache,
            {} if schedules is None else schedules,
        )

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """That of so many micro-batches as fill the pipeline: ranks, stages, and what a rank holds
        at its peak are those of all.
        """
        return self._calls(min(self.train.micro_batches, self._most))[0]

    @property
    def _most(self) -> int:
        """Micro-batches beyond which nothing new happens; interleaved schedules deal them out in
        rounds of as many as there are ranks.
        """
        ranks, name = (
            self.context.mesh[str(self.train.axis("pipeline", self.context))],
            self.train.schedule,
        )
        steady = name == "1f1b" or (
            name == "interleaved_1f1b" and self.train.micro_batches % ranks == 0
        )
        return _ROUNDS_TO_FILL * ranks if steady else self.train.micro_batches

    def held(self) -> list[int]:
        """Bytes at the peak of each rank of the pipeline."""
        if self.stages == 1:
            return [
                self.footprint((0,), [PipelineAction(0, "F", 0), PipelineAction(0, "B", 0)]).total
            ]
        return [
            self.footprint(self.schedule.stages_of(r), row).total
            for r, row in enumerate(self.schedule.rows)
        ]

    def step(self) -> StepTime:
        """Raises `distsim.planning.pipeline_timer.PipelineHang` where the schedule hangs."""
        return self._piped() if self.stages > 1 else self._alone()

    # --- without a pipeline ---
    def _alone(self) -> StepTime:
        count = self.train.micro_batches
        if count <= _SIMULATED_MICRO_BATCHES:
            return self._run_alone(count)
        return _extrapolated(
            self._run_alone(_SIMULATED_MICRO_BATCHES - 1),
            self._run_alone(_SIMULATED_MICRO_BATCHES),
            count - _SIMULATED_MICRO_BATCHES + 1,
        )

    def _run_alone(self, count: int) -> StepTime:
        self.train = self.train.model_copy(update={"micro_batches": count})
        lane = RankTimer(self.prices).run(self.alone().steps)
        end = max([lane.host, lane.current, *lane.comms.values()])
        lane.spent[LAUNCH if end == lane.host else DATA] += end - lane.current
        return StepTime(end, lane.spent)

    # --- a pipeline ---
    def _piped(self) -> StepTime:
        count, few = self.train.micro_batches, self._most
        each = 1 if self.train.schedule == "1f1b" else self.schedule.ranks
        if count <= few + each:
            return self._run_piped(count)
        return _extrapolated(
            self._run_piped(few), self._run_piped(few + each), (count - few) // each
        )

    def _run_piped(self, count: int) -> StepTime:
        schedule, calls = self._calls(count)
        lanes = PipelineTimer(
            calls, schedule, self.work._replace(ahead=0)
        ).run()  # does it hang where nothing is buffered?
        if self.work.ahead:
            lanes = PipelineTimer(calls, schedule, self.work).run()
        spent: Counter[str] = Counter()
        for stage in range(self.stages):
            spent.update({kind: count * ns for kind, ns in self._spent(stage).items()})
        for rank in lanes.ranks:
            self._end(rank, schedule.stages_of(rank.number), spent)
        self._together(lanes.ranks, spent)
        for rank in lanes.ranks:
            spent[LAUNCH] += rank.launch_ns
            self._last(rank, schedule.stages_of(rank.number), spent)
        makespan = max(max(rank.host, rank.current) for rank in lanes.ranks)
        mean = Counter({kind: round(ns / schedule.ranks) for kind, ns in spent.items()})
        mean[PIPELINE] = makespan - mean.total()
        return StepTime(makespan, mean)

    def _calls(self, count: int) -> tuple[PipelineSchedule, list[list[PipelineCall]]]:
        axis = str(self.train.axis("pipeline", self.context))
        key = ("schedule", self.train.schedule, self.train.chunks, self.context.mesh[axis], count)
        if key not in self.schedules:
            made = (
                self.train.model_copy(update={"micro_batches": count})
                .pipeline_strategy(self.context)
                .build_schedule(self.context)
            )
            self.schedules[key] = (made, calls_by_rank(made))
        return cast("tuple[PipelineSchedule, list[list[PipelineCall]]]", self.schedules[key])

    @cached_property
    def work(self) -> PipelineWork:
        """What happens between the messages, and what they take."""
        stages = range(self.stages)
        early = self.train.overlap_grad_reduce and any(
            group is not None for group in (self.shared, self.apart)
        )
        last = {s: self._pieces(s) for s in stages} if early else None
        forward, backward = (
            {s: self._pass(word, s) for s in stages} for word in ("forward", "backward")
        )
        nbytes, ranks = (
            self.one.boundary_numel * DTYPE_BYTES[self.train.dtype],
            self.schedule.rank_of,
        )
        pairs = {pair for a, b in pairwise(ranks) for pair in ((a, b), (b, a)) if a != b}
        ahead = SEND_BUFFER.limit({}) // nbytes
        return PipelineWork(
            forward, backward, last, {(a, b): self._message(a, b, nbytes) for a, b in pairs}, ahead
        )

    def _message(self, a: int, b: int, nbytes: int) -> int:
        """From one rank of the pipeline to another: the same for all that stand for them, but for
        where machines end.
        """
        members = self.prices.members(self.train.axis("pipeline", self.context))
        return self.prices.message(members[a], members[b], nbytes)

    def takes(self, word: str) -> EntriesTime:
        """One layer's forward or backward pass; or the head's, or the embedding's."""
        key = (
            word,
            self.one,
            self.train.launch,
            self.train.attention_efficiency,
            self.train.dtype,
            self.products,
            self.train.loss_parallel,
            self.train.tensor_overlap,
            self.prices.inside((self.tensor_axis, self.cp, self.ep)),
        )
        if key not in self.cache:
            made = {
                "forward": self.layer_forward,
                "backward": self.layer_backward,
                "head forward": self.head_forward,
                "head backward": self.head_backward,
                "embedding forward": self.embedding_forward,
                "embedding backward": self.embedding_backward,
            }
            self.cache[key] = self.measured(made[word]())
        return cast("EntriesTime", self.cache[key])

    def measured(self, entries: Sequence[Entry]) -> EntriesTime:
        """Entries run alone. What the host takes is told apart: it runs ahead."""
        lane = RankTimer(self.prices).run(entry for entry in entries if not _is_host(entry))
        return EntriesTime(lane.current, sum(map(_host_ns, entries)), lane.spent)

    def _pass(self, word: str, stage: int) -> MicroBatchPass:
        """The embedding comes before the first stage's layers and the head after the last one's;
        the other way round on the way back.
        """
        layer = self.takes(word)
        first = self.takes(f"embedding {word}").device_ns if stage == 0 else 0
        head = self.takes(f"head {word}").device_ns if stage == self.stages - 1 else 0
        before, after = (first, head) if word == "forward" else (head, first)
        return MicroBatchPass(self.split[stage], layer.device_ns, layer.host_ns, before, after)

    def _spent(self, stage: int) -> Counter[str]:
        """What a micro-batch's passes on a stage go into."""
        found: Counter[str] = Counter()
        for word in ("forward", "backward"):
            parts = [(self.takes(word), self.split[stage])]
            parts += [(self.takes(f"head {word}"), 1)] if stage == self.stages - 1 else []
            parts += [(self.takes(f"embedding {word}"), 1)] if stage == 0 else []
            for part, times in parts:
                found.update({kind: times * ns for kind, ns in part.spent.items()})
        return found

    def _pieces(self, stage: int) -> list[MicroBatchPass]:
        """The last backward pass, layer by layer: gradients go out beside the next layer's."""
        whole = self._pass("backward", stage)
        if {self.shared, self.apart} & {self.cp, self.ep} - {None}:
            return self._on_one_communicator(stage, whole)
        layer = whole._replace(
            layers=1, before_ns=0, after_ns=0, sent=self.sent(self.layer_weights())
        )
        ends = MicroBatchPass(before_ns=whole.after_ns, sent=self.sent(self.ends_weights(stage)))
        return [MicroBatchPass(before_ns=whole.before_ns), *[layer] * whole.layers, ends]

    def _on_one_communicator(self, stage: int, whole: MicroBatchPass) -> list[MicroBatchPass]:
        """The same where gradients take turns with a layer's own messages: the ranks of a sequence
        are all replicas there are.
        """
        lane = RankTimer(self.prices, hosted=False).run(self.reducing_stage(stage))
        layers = max(whole.layers, 1)
        tail = max([lane.current, *lane.comms.values()]) - lane.current
        each = (lane.current - whole.before_ns) // layers
        rest = lane.current - whole.before_ns - each * layers
        return [
            whole._replace(layers=layers, layer_ns=each, after_ns=rest, sent=(("dense", tail),))
        ]

    def sent(self, weights: ParameterCounts) -> tuple[tuple[str, int], ...]:
        """Gradients on their way: (dense or expert, ns)."""
        words = [
            word for word, elements, group in self.kinds(weights) if elements and group is not None
        ]
        return tuple(
            (word, self.measured([entry]).device_ns)
            for word, entry in zip(words, self.reduce(weights), strict=True)
        )

    # --- after the last micro-batch ---
    def _end(self, rank: PipelineRankClock, stages: Sequence[int], spent: Counter[str]) -> None:
        """Gradients that are still on their way, or all of them."""
        before = rank.current
        rank.join()
        if self.work.last is None:
            rank.current += sum(ns for s in stages for _, ns in self.sent(self.stage_weights(s)))
        spent[DATA] += rank.current - before

    def _together(self, ranks: Sequence[PipelineRankClock], spent: Counter[str]) -> None:
        """Tied embeddings, and the norm: the ranks of the pipeline meet."""
        if self.tied:
            tied = next(entry for entry in self.embeddings((0,)) if "all_reduce" in entry)
            pair, members = (
                (ranks[0], ranks[-1]),
                self.prices.members(self.train.axis("pipeline", self.context)),
            )
            self._meet(
                pair,
                self.prices.met(
                    "all_reduce",
                    cast("dict[str, Any]", tied["all_reduce"]),
                    (members[0], members[-1]),
                ),
                spent,
            )
        for entry in self.norm():
            self._meet(ranks, self.measured([entry]).device_ns, spent)

    def _meet(self, ranks: Sequence[PipelineRankClock], ns: int, spent: Counter[str]) -> None:
        start = max(max(rank.current, rank.host) for rank in ranks)
        for rank in ranks:
            rank.current = start + ns
        spent[NORM] += ns * len(ranks)

    def _last(self, rank: PipelineRankClock, stages: Sequence[int], spent: Counter[str]) -> None:
        """The optimizer's update; with ZeRO the new parameters for all."""
        for entry in self.update(stages):
            if "all_reduce" not in entry:
                ns = self.measured([entry]).device_ns
                rank.work(MicroBatchPass(after_ns=ns))
                spent[MEMORY if "compute" in entry else DATA] += ns


def _extrapolated(few: StepTime, more: StepTime, rounds: int) -> StepTime:
    """So many further rounds, each as long as what ``more`` has beyond ``few``."""
    kinds = few.spent.keys() | more.spent.keys()
    spent = Counter(
        {
            kind: few.spent[kind] + rounds * (more.spent[kind] - few.spent[kind])
            for kind in sorted(kinds)
        }
    )
    return StepTime(few.makespan_ns + rounds * (more.makespan_ns - few.makespan_ns), spent)


def _is_host(entry: Entry) -> bool:
    fields = entry.get("compute")
    return isinstance(fields, dict) and fields.get("on") == "host"


def _host_ns(entry: Entry) -> int:
    return (
        units.parse_duration_ns(cast("dict[str, object]", entry["compute"])["time"])
        if _is_host(entry)
        else 0
    )


__all__ = ["DATA", "NORM", "PIPELINE", "EstimateCache", "StepTime", "StepEstimator"]
