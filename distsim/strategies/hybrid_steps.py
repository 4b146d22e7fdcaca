"""The calls of a product of strategies: stages filled with what their ranks share, then gradients over the data axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distsim import units
from distsim.strategies.base import Context, Entry, Expansion, block, compute, step
from distsim.strategies.context_parallel import ContextParallel, ContextWriter
from distsim.strategies.expert_parallel import ExpertParallel, ExpertWriter
from distsim.strategies.hybrid import PlainPipeline
from distsim.strategies.pipeline import Pipeline
from distsim.strategies.tensor_parallel import TensorParallel, TensorWriter

if TYPE_CHECKING:
    from distsim.strategies.base import Strategy
    from distsim.strategies.hybrid import Hybrid


class HybridWriter:
    def __init__(self, fields: Hybrid, context: Context) -> None:
        self.f, self.context, self.p = fields, context, context.prefix("hybrid")
        self.tensors: dict[str, Any] = {}
        self.gradient = self._gradient()
        self.forward: list[Entry] = []
        self.backward: list[Entry] = []
        for _, part in fields.parts:
            there, back = self._passes(part)
            self.forward += there
            self.backward = back + self.backward

    def _gradient(self) -> str | None:
        if not isinstance(self.f.gradient, int):
            return self.f.gradient
        name = f"{self.p}_gradient"
        self.tensors[name] = {"shape": [self.f.gradient], "dtype": "float32"}
        return name

    def _passes(self, part: Strategy) -> tuple[list[Entry], list[Entry]]:
        """One micro-batch of a stage through one of its parts, and back."""
        writer: TensorWriter | ContextWriter | ExpertWriter
        if isinstance(part, TensorParallel):
            writer = TensorWriter(part, self.context)
        elif isinstance(part, ContextParallel):
            writer = ContextWriter(part, self.context)
        elif isinstance(part, ExpertParallel):
            writer = ExpertWriter(part, self.context)
        else:
            return [], []
        found = part.there(writer), part.back(writer)
        self.tensors |= writer.tensors
        return found

    def expansion(self) -> Expansion:
        inner = self._stages()
        steps = [*inner.steps]
        if self.gradient is not None and self.f.data is not None:
            group = list(self.f.data) if isinstance(self.f.data, tuple) else self.f.data
            steps.append(step("all_reduce", tensor=self.gradient, group=group, op="avg"))
        if self.f.optimizer is not None:
            reads = [self.gradient] if self.gradient is not None else []
            steps.append(compute("optimizer", self.f.optimizer, reads=reads))
        return inner._replace(steps=steps, tensors={**self.tensors, **inner.tensors})

    def _stages(self) -> Expansion:
        if self.f.pipeline is None:
            done = [compute("gradients", {"time": "0 ns"}, writes=[self.gradient])] if isinstance(self.f.gradient, int) else []
            return Expansion([*self.forward, *self.backward, *done])
        if self.f.plain:
            return Expansion(self._plain(PlainPipeline.model_validate(self.f.pipeline)))
        given: dict[str, Any] = {"forward": self.forward, "backward": self.backward} if self.f.parts else {}
        own = {} if self.gradient is None else {"gradient": self.gradient}
        context = self.context._replace(tensors={**self.context.tensors, **self.tensors})
        return Pipeline.model_validate({**self.f.pipeline, **given, **own}, context={"names": {}}).expand(context)

    # --- stages by hand ---
    def _plain(self, pipe: PlainPipeline) -> list[Entry]:
        """The first stage starts, the middle ones hand on, the last one turns round; each waits for its neighbours."""
        axis, count = pipe.axis, self.context.mesh[pipe.axis]
        act, grad = pipe.activation, f"{pipe.activation}_grad"
        below = {"group": axis, "group_dst": f"{axis} - 1"}, {"group": axis, "group_src": f"{axis} - 1"}
        above = {"group": axis, "group_dst": f"{axis} + 1"}, {"group": axis, "group_src": f"{axis} + 1"}
        send_up, recv_up = step("send", tensor=act, **above[0]), step("recv", tensor=grad, **above[1])
        recv_down, send_down = step("recv", tensor=act, **below[1]), step("send", tensor=grad, **below[0])
        first = [*self._work(pipe, "forward", [], [act]), send_up, recv_up, *self._work(pipe, "backward", [grad], [])]
        middle = [
            recv_down, *self._work(pipe, "forward", [act], [act]), send_up,
            recv_up, *self._work(pipe, "backward", [grad], [grad]), send_down,
        ]  # fmt: skip
        last = [recv_down, *self._turn(pipe, act, grad), send_down]
        stages = [block(first, f"{axis} == 0")]
        if count > 2:
            stages.append(block(middle, f"{axis} > 0 and {axis} < {count - 1}"))
        if count > 1:
            stages.append(block(last, f"{axis} == {count - 1}"))
        return stages if pipe.micro_batches == 1 else [{"repeat": {"times": pipe.micro_batches, "steps": stages}}]

    def _work(self, pipe: PlainPipeline, word: str, reads: list[str], writes: list[str]) -> list[Entry]:
        price = getattr(pipe, word)
        inner = self.forward if word == "forward" else self.backward
        return inner if price is None else [compute(word, price, reads=reads, writes=writes)]

    def _turn(self, pipe: PlainPipeline, act: str, grad: str) -> list[Entry]:
        """The last stage goes forward and backward in one piece."""
        prices = [price for price in (pipe.forward, pipe.backward) if price is not None]
        if len(prices) == 2 and all("time" in price for price in prices):
            total = units.duration_text(sum(units.parse_duration_ns(price["time"]) for price in prices))
            return [compute("forward and backward", {"time": total}, reads=[act], writes=[grad])]
        return [*self._work(pipe, "forward", [act], []), *self._work(pipe, "backward", [], [grad])]
