"""What a training step does between its last gradient and the update: tied embeddings, the gradients' norm.

Source: Megatron-LM core/distributed/finalize_model_grads.py (_allreduce_word_embedding_grads, over the first and the last stage) and
core/optimizer/clip_grads.py (get_grad_norm_fp32: one float32, over all ranks with the distributed optimizer, else over those that share
a copy of the model).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distsim.strategies.base import Entry, step

if TYPE_CHECKING:
    from distsim.strategies.train_steps import TrainWriter


class Ends:
    """Entries of one layout."""

    def __init__(self, writer: TrainWriter) -> None:
        self.w, self.name = writer, f"{writer.p}_ends"

    @property
    def tied(self) -> bool:
        """The embeddings stand on two ranks."""
        w = self.w
        asked = w.model.tied if w.train.embedding_all_reduce is None else w.train.embedding_all_reduce
        return asked and w.stages > 1 and w.schedule.rank_of[0] != w.schedule.rank_of[-1]

    def groups(self) -> dict[str, Any]:
        """The first and the last stage of each pipeline; in between the others, who make no call of it."""
        if not self.tied:
            return {}
        mesh, axis = self.w.context.mesh, self.w.train.axis("pipeline", self.w.context)
        terms: list[str] = []
        stride = 1
        for other in reversed(tuple(mesh)):
            if other != axis:
                terms.append(f"{other} * {stride}")
                stride *= mesh[other]
        column = " + ".join(reversed(terms)) or "0"
        return {self.name: {"by": f"{column} + (0 if {axis} == 0 or {axis} == {axis}_size - 1 else {stride})"}}

    def before_update(self, stages: Sequence[int]) -> list[Entry]:
        return [*self._embeddings(stages), *self._norm()]

    def _embeddings(self, stages: Sequence[int]) -> list[Entry]:
        if not self.tied or not {0, self.w.stages - 1} & set(stages):
            return []
        elements = self.w.model.vocabulary * self.w.model.hidden // self.w.one.tensor
        return [step("all_reduce", tensor={"shape": [elements], "dtype": self.w.train.gradient_dtype}, group=self.name)]

    def _norm(self) -> list[Entry]:
        w = self.w
        if not w.train.clip_grad_norm or w.context.world_size == 1:
            return []
        one = {"shape": [1], "dtype": "float32"}
        if w.train.zero:
            return [step("all_reduce", tensor=one)]
        data = w.train.data_axes(w.context)
        group = w.group(tuple(axis for axis in w.context.mesh if axis not in data))
        where = list(group) if isinstance(group, tuple) else group
        return [] if group is None else [step("all_reduce", tensor=one, group=where)]
