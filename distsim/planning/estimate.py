"""Estimates the time of a transformer's step, without building its program.

A micro-batch is timed once per stage by running its entries on a single rank; the whole step
follows from these times, with the pipeline's schedule. Equal stages and schedules are shared by
layouts through caches, because a plan evaluates hundreds of layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

from distsim.backends.nccl import SEND_BUFFER
from distsim.common import units
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.planning.pipeline_timer import (
    ExecutedPass,
    MicroBatchPass,
    PipelineRankClock,
    PipelineTimer,
    PipelineWork,
    calls_by_rank,
    executed_passes,
)
from distsim.planning.rank_timer import (
    LAUNCH,
    MATRIX_PRODUCTS,
    MEMORY,
    EntryCosts,
    RankTimer,
)
from distsim.scenario.strategies.base import Entry, ExpansionContext
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.rank_calls import PipelineCall
from distsim.scenario.strategies.training_step.layer_calls import ParameterCounts
from distsim.scenario.strategies.training_step.transformer import TransformerStepWriter
from distsim.scenario.strategies.training_step.transformer_fields import TransformerFields

#: What layouts share: the passes of equal stages and schedules, by the properties that matter.
EstimateCache = dict[object, object]
#: How many micro-batches of a step without a pipeline are timed; each further one takes as long as
#: the last but one.
_SIMULATED_MICRO_BATCHES = 4
#: This number times the ranks of a pipeline is the number of micro-batches that fill it; all
#: further ones take the same time.
_ROUNDS_TO_FILL = 2
#: How many micro-batches are added at a time once the pipeline is full. The interleaved schedule
#: adds as many as there are ranks. DualPipe adds one in each direction.
_MICRO_BATCHES_OF_ROUND = {"1f1b": 1, "zbv": 1, "dualpipe_v": 1, "dualpipe": 2}
#: Categories of a rank's time besides its own work.
PIPELINE, DATA, NORM = "pipeline", "data", "norm"


class StepTime(NamedTuple):
    """The time of a step.

    ``spent``: ns by category, means over the ranks of the pipeline; `pipeline`: waiting for other
    stages and their messages.
    """

    makespan_ns: int
    spent: Counter[str]


class EntriesTime(NamedTuple):
    """The time of entries on one rank: of the device, of the host, and by category."""

    device_ns: int
    host_ns: int
    spent: Counter[str]


class StepEstimator(TransformerStepWriter):
    """Times a step of a transformer on a mesh without expanding its calls rank by rank.

    ``cache`` is shared by layouts with the same costs, ``schedules`` by all. A simulation yields
    exactly the same time if no transfers share a link and no kernel slows a transfer down; here
    each of them is timed alone.
    """

    def __init__(
        self,
        train: TransformerFields,
        context: ExpansionContext,
        entry_costs: EntryCosts,
        cache: EstimateCache,
        schedules: EstimateCache | None = None,
    ) -> None:
        super().__init__(train, context)
        self.entry_costs = entry_costs
        self.cache = cache
        self.schedules = {} if schedules is None else schedules

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The schedule for the micro-batches that fill the pipeline.

        Its ranks, stages, and the memory peak of each rank are those of all micro-batches.
        """
        return self._calls(min(self.train.micro_batches, self._filling_count))[0]

    @property
    def _filling_count(self) -> int:
        """The number of micro-batches after which every further one takes the same time.

        Interleaved schedules distribute micro-batches in rounds of as many as there are ranks, so
        this holds only if the rounds are complete.
        """
        ranks = self.context.mesh[str(self.train.axis("pipeline", self.context))]
        schedule = self.train.schedule
        count = self.train.micro_batches
        if schedule in _MICRO_BATCHES_OF_ROUND:
            return _ROUNDS_TO_FILL * ranks + count % _MICRO_BATCHES_OF_ROUND[schedule]
        if schedule == "interleaved_1f1b" and count % ranks == 0:
            return _ROUNDS_TO_FILL * ranks
        return count

    def peak_bytes(self) -> list[int]:
        """The peak memory of each rank of the pipeline."""
        if self.stages == 1:
            actions = [PipelineAction(0, "F", 0), PipelineAction(0, "B", 0)]
            return [self.footprint((0,), actions).total]
        return [
            self.footprint(self.schedule.stages_of(rank), actions).total
            for rank, actions in enumerate(self.schedule.rows)
        ]

    def least_step_ns(self) -> int:
        """A time that no step can be shorter than: a rank's own work in the layers.

        Messages, embedding and head are not included, so that this takes no schedule.
        """
        per_micro_batch = 0
        for stage in self.schedule.stages_of(self.schedule.ranks // 2) if self.stages > 1 else (0,):
            layers = self.layers_of_stage[self.model_stage(stage)]
            if self.stages > 1 and self.overlaps_pairs:
                per_micro_batch += layers * self._pass_time("pair").device_ns
            else:
                words = ("forward", "backward")
                per_micro_batch += layers * sum(self._pass_time(w).device_ns for w in words)
        if self.has_copies:
            # A rank runs half of the micro-batches on each of its two stages.
            per_micro_batch //= 2
        return self.train.micro_batches * per_micro_batch

    def step(self) -> StepTime:
        """The time of a step. Raises PipelineHang if the schedule hangs."""
        return self._time_with_pipeline() if self.stages > 1 else self._time_without_pipeline()

    # --- without a pipeline ---
    def _time_without_pipeline(self) -> StepTime:
        count = self.train.micro_batches
        if count <= _SIMULATED_MICRO_BATCHES:
            return self._run_without_pipeline(count)
        return _extrapolated(
            self._run_without_pipeline(_SIMULATED_MICRO_BATCHES - 1),
            self._run_without_pipeline(_SIMULATED_MICRO_BATCHES),
            count - _SIMULATED_MICRO_BATCHES + 1,
        )

    def _run_without_pipeline(self, micro_batches: int) -> StepTime:
        self.train = self.train.model_copy(update={"micro_batches": micro_batches})
        timer = RankTimer(self.entry_costs).run(self.step_without_pipeline().steps)
        end_ns = max([timer.host, timer.current, *timer.communicators.values()])
        # What comes after the current stream is either the host or communication.
        last_category = LAUNCH if end_ns == timer.host else DATA
        timer.spent[last_category] += end_ns - timer.current
        return StepTime(end_ns, timer.spent)

    # --- with a pipeline ---
    def _time_with_pipeline(self) -> StepTime:
        count, filling = self.train.micro_batches, self._filling_count
        round_size = _MICRO_BATCHES_OF_ROUND.get(self.train.schedule, self.schedule.ranks)
        if count <= filling + round_size:
            return self._run_pipeline(count)
        return _extrapolated(
            self._run_pipeline(filling),
            self._run_pipeline(filling + round_size),
            (count - filling) // round_size,
        )

    def _run_pipeline(self, micro_batches: int) -> StepTime:
        schedule, calls = self._calls(micro_batches)
        # First without buffers, to find out whether the schedule hangs then.
        clocks = PipelineTimer(calls, schedule, self.work._replace(ahead=0)).run()
        if self.work.ahead:
            clocks = PipelineTimer(calls, schedule, self.work).run()
        spent: Counter[str] = Counter()
        for done, times in self._executed(schedule, calls, micro_batches).items():
            per_pass = self._spent(done)
            spent.update({kind: times * ns for kind, ns in per_pass.items()})
        for rank in clocks.ranks:
            self._finish_gradients(rank, schedule.stages_of(rank.number), spent)
        self._sum_copies(clocks.ranks, spent)
        self._synchronize_ranks(clocks.ranks, spent)
        for rank in clocks.ranks:
            spent[LAUNCH] += rank.launch_ns
            self._update_parameters(rank, schedule.stages_of(rank.number), spent)
        makespan_ns = max(max(rank.host, rank.current) for rank in clocks.ranks)
        mean = Counter({kind: round(ns / schedule.ranks) for kind, ns in spent.items()})
        mean[PIPELINE] = makespan_ns - mean.total()
        return StepTime(makespan_ns, mean)

    def _calls(self, micro_batches: int) -> tuple[PipelineSchedule, list[list[PipelineCall]]]:
        """The schedule for a number of micro-batches, and the calls of each rank."""
        ranks = self.context.mesh[str(self.train.axis("pipeline", self.context))]
        overlaps = self.overlaps_pairs
        key = ("schedule", self.train.schedule, self.train.chunks, ranks, micro_batches, overlaps)
        if key not in self.schedules:
            train = self.train.model_copy(update={"micro_batches": micro_batches})
            schedule = train.pipeline_strategy(self.context).build_schedule(self.context)
            self.schedules[key] = (schedule, calls_by_rank(schedule, overlaps))
        return cast("tuple[PipelineSchedule, list[list[PipelineCall]]]", self.schedules[key])

    @cached_property
    def work(self) -> PipelineWork:
        """The work between the messages, and the durations of the messages."""
        stages = range(self.stages)
        last = None
        if self.reduces_in_last_backward:
            last = {stage: self._last_backward_pieces(stage) for stage in stages}
        nbytes = self.cost.boundary_numel * DTYPE_BYTES[self.train.dtype]
        messages: dict[tuple[int, int], int] = {}
        for a, b in pairwise(self.schedule.rank_of):
            if a != b:
                messages[a, b] = self._message(a, b, nbytes)
                messages[b, a] = self._message(b, a, nbytes)
        return PipelineWork(
            {stage: self._pass("forward", stage) for stage in stages},
            {stage: self._pass("backward", stage) for stage in stages},
            last,
            messages,
            SEND_BUFFER.limit({}) // nbytes,
            self._halves(),
            self._pairs(),
        )

    def _halves(self) -> dict[int, dict[str, MicroBatchPass]]:
        """Both halves of each stage's backward pass, if the schedule has them."""
        if not self.splits_backward:
            return {}
        return {
            stage: {"I": self._pass("backward input", stage), "W": self._weight_pass(stage)}
            for stage in range(self.stages)
        }

    def _weight_pass(self, stage: int) -> MicroBatchPass:
        layer = self._pass_time("backward weight")
        return MicroBatchPass(self.layers_of_stage[stage], layer.device_ns, layer.host_ns)

    def _pairs(self) -> dict[tuple[int, int], MicroBatchPass] | None:
        """The pairs of passes that overlap, by their stages; None if none do."""
        if not self.overlaps_pairs:
            return None
        pairs: dict[tuple[int, int], MicroBatchPass] = {}
        for stages in self.overlapped_stage_pairs():
            parts = self._pair_parts(*stages)
            count = sum(times for _, times in parts)
            device_ns = sum(part.device_ns * times for part, times in parts)
            host_ns = sum(part.host_ns * times for part, times in parts)
            # All parts count as equal layers: the host launches them one after the other.
            pairs[stages] = MicroBatchPass(1, device_ns, host_ns) if count else MicroBatchPass()
        return pairs

    def _pair_parts(self, forward: int, backward: int) -> list[tuple[EntriesTime, int]]:
        """The parts of a pair, each with the number of its repetitions, as they are simulated."""
        layers = self.layers_of_stage[forward], self.layers_of_stage[backward]
        pairs, last = min(layers), self.stages - 1
        parts = [
            ("embedding forward", int(forward == 0)),
            ("head backward", int(backward == last)),
            ("pair", pairs),
            ("forward", layers[0] - pairs),
            ("backward", layers[1] - pairs),
            ("head forward", int(forward == last)),
            ("embedding backward", int(backward == 0)),
        ]
        return [(self._pass_time(word), times) for word, times in parts if times]

    def _message(self, a: int, b: int, nbytes: int) -> int:
        """The time of a message between two ranks of the pipeline.

        It is taken as equal for all ranks that they represent, although machines may end between
        some of these.
        """
        members = self.entry_costs.members(self.train.axis("pipeline", self.context))
        return self.entry_costs.message(members[a], members[b], nbytes)

    def _pass_time(self, word: str) -> EntriesTime:
        """The forward or backward pass of one layer, of the head, or of the embedding."""
        key = (
            word,
            self.cost,
            self.train.launch,
            self.train.attention_efficiency,
            self.train.dtype,
            self.product_dtype,
            self.train.loss_parallel,
            self.train.tensor_overlap,
            self.train.expert_dispatch,
            self.entry_costs.inside((self.tensor_axis, self.context_axis, self.expert_axis)),
        )
        if key not in self.cache:
            entries_of = {
                "forward": self.layer_forward,
                "backward": self.layer_backward,
                "backward input": self.layer_backward_input,
                "backward weight": self.layer_backward_weight,
                "pair": self.overlapped_layers,
                "head forward": self.head_forward,
                "head backward": self.head_backward,
                "embedding forward": self.embedding_forward,
                "embedding backward": self.embedding_backward,
            }
            entries = entries_of[word]()
            time = self._time_of(entries)
            self.cache[key] = self._slowed_by_overlap(time, entries) if word == "pair" else time
        return cast("EntriesTime", self.cache[key])

    def _slowed_by_overlap(self, time: EntriesTime, entries: Sequence[Entry]) -> EntriesTime:
        """The time of a pair of passes whose computations run at the same time as exchanges.

        Unlike gradients, which overlap with the last micro-batch only, these exchanges overlap in
        every micro-batch, so the slowdown of kernels by communication matters.
        """
        exchanges_ns = 0
        for entry in entries:
            fields = entry.get("all_to_all_single")
            if isinstance(fields, dict) and "as" in fields:
                exchanges_ns += self.entry_costs.collective("all_to_all_single", fields).ns
        hidden_ns = max(exchanges_ns - time.spent[str(self.expert_axis)], 0)
        extra_ns = round(hidden_ns * (1 - 1 / self.entry_costs.cost.cluster.device.overlap_compute))
        spent = time.spent + Counter({MATRIX_PRODUCTS: extra_ns})
        return EntriesTime(time.device_ns + extra_ns, time.host_ns, spent)

    def _time_of(self, entries: Sequence[Entry]) -> EntriesTime:
        """The time of entries alone. The host's time is separate, because the host runs ahead."""
        timer = RankTimer(self.entry_costs).run(entry for entry in entries if not _is_host(entry))
        return EntriesTime(timer.current, sum(map(_host_ns, entries)), timer.spent)

    def _pass(self, word: str, stage: int) -> MicroBatchPass:
        """The pass of a micro-batch on a stage.

        The embedding precedes the layers of the first stage, and the head follows those of the last
        stage; in the backward pass it is the other way round.
        """
        layer = self._pass_time(word)
        direction = word.split()[0]
        embedding, head = 0, 0
        if stage == 0:
            embedding = self._pass_time(f"embedding {direction}").device_ns
        if stage == self.stages - 1:
            head = self._pass_time(f"head {direction}").device_ns
        before, after = (embedding, head) if word == "forward" else (head, embedding)
        return MicroBatchPass(
            self.layers_of_stage[stage], layer.device_ns, layer.host_ns, before, after
        )

    def _executed(
        self,
        schedule: PipelineSchedule,
        calls: Sequence[Sequence[PipelineCall]],
        micro_batches: int,
    ) -> Mapping[ExecutedPass, int]:
        """How often each pass runs."""
        if self.splits_backward:
            return executed_passes(calls, schedule, self.overlaps_pairs)
        return {(kind, s): micro_batches for kind in "FB" for s in range(self.stages)}

    def _spent(self, done: ExecutedPass) -> Counter[str]:
        """The categories of time of a pass."""
        kind, stage, *others = done
        if kind == "pair":
            parts = self._pair_parts(stage, others[0])
        elif kind == "W":
            parts = [(self._pass_time("backward weight"), self.layers_of_stage[stage])]
        else:
            word = {"F": "forward", "B": "backward", "I": "backward input"}[kind]
            direction = word.split()[0]
            parts = [(self._pass_time(word), self.layers_of_stage[stage])]
            if stage == self.stages - 1:
                parts.append((self._pass_time(f"head {direction}"), 1))
            if stage == 0:
                parts.append((self._pass_time(f"embedding {direction}"), 1))
        spent: Counter[str] = Counter()
        for part, times in parts:
            spent.update({kind: times * ns for kind, ns in part.spent.items()})
        return spent

    def _last_backward_pieces(self, stage: int) -> list[MicroBatchPass]:
        """The last backward pass, layer by layer: gradients overlap with the next layer."""
        whole = self._pass("backward", stage)
        if {self.dense_group, self.expert_group} & {self.context_axis, self.expert_axis} - {None}:
            return self._on_one_communicator(stage, whole)
        layer_gradients = self._gradient_transfers(self.layer_parameters())
        layer = whole._replace(layers=1, before_ns=0, after_ns=0, sent=layer_gradients)
        end_gradients = self._gradient_transfers(self.end_parameters(stage))
        end = MicroBatchPass(before_ns=whole.after_ns, sent=end_gradients)
        return [MicroBatchPass(before_ns=whole.before_ns), *[layer] * whole.layers, end]

    def _on_one_communicator(self, stage: int, whole: MicroBatchPass) -> list[MicroBatchPass]:
        """The last backward pass if gradients and a layer's messages share a communicator.

        This is so if the ranks of a sequence are the only replicas; then both take turns.
        """
        timer = RankTimer(self.entry_costs, with_host=False).run(
            self.reducing_backward_of_stage(stage)
        )
        layers = max(whole.layers, 1)
        tail_ns = max([timer.current, *timer.communicators.values()]) - timer.current
        layer_ns, rest_ns = divmod(timer.current - whole.before_ns, layers)
        piece = whole._replace(
            layers=layers, layer_ns=layer_ns, after_ns=rest_ns, sent=(("dense", tail_ns),)
        )
        return [piece]

    def _gradient_transfers(self, weights: ParameterCounts) -> tuple[tuple[str, int], ...]:
        """The transfers of gradients: (dense or expert, ns)."""
        kinds = self.replicated_kinds(weights)
        return tuple(
            (kind.name, self._time_of([entry]).device_ns)
            for kind, entry in zip(kinds, self.reduce_gradients(weights), strict=True)
        )

    # --- after the last micro-batch ---
    def _finish_gradients(
        self, rank: PipelineRankClock, stages: Sequence[int], spent: Counter[str]
    ) -> None:
        """Wait for the gradients that are in flight, or transfer all of them."""
        before_ns = rank.current
        rank.join()
        if self.work.last is None:
            for stage in stages:
                transfers = self._gradient_transfers(self.stage_parameters(stage))
                rank.current += sum(ns for _, ns in transfers)
        spent[DATA] += rank.current - before_ns

    def _sum_copies(self, ranks: Sequence[PipelineRankClock], spent: Counter[str]) -> None:
        """DualPipe: both ranks of a stage sum the shards of their gradients."""
        members = self.entry_costs.members(self.train.axis("pipeline", self.context))
        for first, second in zip(ranks[: len(ranks) // 2], reversed(ranks), strict=False):
            pair = (members[first.number], members[second.number])
            for entry in self.sum_copies(self.schedule.stages_of(first.number)):
                fields = cast("dict[str, Any]", entry["all_reduce"])
                ns = self.entry_costs.collective_ns("all_reduce", fields, pair)
                self._meet((first, second), ns, spent)

    def _synchronize_ranks(self, ranks: Sequence[PipelineRankClock], spent: Counter[str]) -> None:
        """Collectives among ranks of the pipeline: tied embeddings, and the norm."""
        if self.has_tied_embedding_copies:
            members = self.entry_costs.members(self.train.axis("pipeline", self.context))
            first_and_last = (members[0], members[-1])
            entry = next(
                entry for entry in self.reduce_tied_embeddings((0,)) if "all_reduce" in entry
            )
            fields = cast("dict[str, Any]", entry["all_reduce"])
            ns = self.entry_costs.collective_ns("all_reduce", fields, first_and_last)
            self._meet((ranks[0], ranks[-1]), ns, spent)
        for entry in self.reduce_gradient_norm():
            self._meet(ranks, self._time_of([entry]).device_ns, spent)

    def _meet(self, ranks: Sequence[PipelineRankClock], ns: int, spent: Counter[str]) -> None:
        """A collective that starts when the last rank has arrived."""
        start_ns = max(max(rank.current, rank.host) for rank in ranks)
        for rank in ranks:
            rank.current = start_ns + ns
        spent[NORM] += ns * len(ranks)

    def _update_parameters(
        self, rank: PipelineRankClock, stages: Sequence[int], spent: Counter[str]
    ) -> None:
        """The optimizer's update; with ZeRO also the all-gather of the new parameters."""
        for entry in self.update(stages):
            if "all_reduce" not in entry:
                ns = self._time_of([entry]).device_ns
                rank.work(MicroBatchPass(after_ns=ns))
                spent[MEMORY if "compute" in entry else DATA] += ns


def _extrapolated(few: StepTime, more: StepTime, rounds: int) -> StepTime:
    """``few`` with further rounds, each as long as the difference between ``more`` and ``few``."""
    spent: Counter[str] = Counter()
    for kind in sorted(few.spent.keys() | more.spent.keys()):
        spent[kind] = few.spent[kind] + rounds * (more.spent[kind] - few.spent[kind])
    return StepTime(few.makespan_ns + rounds * (more.makespan_ns - few.makespan_ns), spent)


def _is_host(entry: Entry) -> bool:
    fields = entry.get("compute")
    return isinstance(fields, dict) and fields.get("on") == "host"


def _host_ns(entry: Entry) -> int:
    """The host's time of an entry; 0 for work of the device."""
    if not _is_host(entry):
        return 0
    fields = cast("dict[str, object]", entry["compute"])
    return units.parse_duration_ns(fields["time"])


__all__ = ["DATA", "NORM", "PIPELINE", "EstimateCache", "StepTime", "StepEstimator"]
