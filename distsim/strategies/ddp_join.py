"""DistributedDataParallel inside `with model.join():`, for ranks that have unequal numbers of batches.

Source: torch 2.13, `torch/distributed/algorithms/join.py` (Join.__exit__, notify_join_context) and `_DDPJoinHook` in
`torch/nn/parallel/distributed.py`. The default divide_by_initial_world_size is meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.strategies.base import Entry, block

if TYPE_CHECKING:
    from distsim.strategies.ddp_steps import DdpWriter


def joined(w: DdpWriter) -> list[Entry]:
    """Rounds of the rank with the most batches; the others shadow it once theirs are spent. At the end all take the last one's model."""
    inputs = w.ddp.inputs or {}
    mine, most = f"{w.p}_inputs", max(inputs.values())
    w.vars[mine] = _by_rank(inputs)
    live, done = f"{w.now} < {mine}", f"{w.now} >= {mine}"
    rounds = [block(_live(w), live), block(_shadow(w), done)]
    return [{"repeat": {"times": most, "index": w.now, "steps": rounds}}, *_end(w, mine, most)]


def _by_rank(inputs: dict[int | str, int]) -> str | int:
    """Per-rank numbers as an expression, since a var takes no mapping."""
    named = sorted((key, value) for key, value in inputs.items() if isinstance(key, int))
    text = str(inputs.get("else", named[-1][1] if named else 0))
    for rank, value in reversed(named):
        text = f"{value} if rank == {rank} else {text}"
    return text


def _live(w: DdpWriter) -> list[Entry]:
    """A rank with a batch tells that it is still there, and that it will reduce. Nobody waits for either call."""
    fresh = {"shape": [1], "dtype": "float32"}  # a new tensor of every call
    steps = [w.call("all_reduce", tensor=fresh, async_=True)]
    if w.rebuilds(1):
        steps += w.rebuild(f"{w.now} == 1")
    steps += _common(w, "rank")
    steps.append(w.call("all_reduce", tensor=fresh, async_=True))
    return [*steps, *w.forward(), *w.by_layout(0, synced=True), *w.optimizer()]


def _shadow(w: DdpWriter) -> list[Entry]:
    """A rank without batches asks who is left, then makes every call of an iteration with zeros."""
    left, sync = w.tensor("left", 1, "float32", 0), w.tensor("must_reduce", 1, "float32", 0)
    steps = [w.call("all_reduce", tensor=left)]
    if w.rebuilds(1):
        steps += w.rebuild(f"{w.now} == 1")
    steps += _common(w, "-1")
    steps.append(w.call("all_reduce", tensor=sync))
    for word, when in w.phases():
        steps += _zeros(w, word) if when is None else [block(_zeros(w, word), when)]
    return steps


def _zeros(w: DdpWriter, word: str) -> list[Entry]:
    """_match_all_reduce_for_bwd_pass: zeros of each bucket's size, all sent, then all waited for."""
    names = [f"{w.p}_zeros_{word}_{k}" for k in range(len(w.layouts[word]))]
    for name, bucket in zip(names, w.layouts[word], strict=True):
        w.tensors[name] = {"shape": [bucket.numel], "dtype": w.ddp.dtype, "value": 0}
    steps: list[Entry] = [{"assign": {"tensor": name, "value": 0}} for name in names]
    steps += [w.reduce(name, "shadowed", k, None) for k, name in enumerate(names)]
    if w.ddp.find_unused_parameters:
        steps.append(w.call("all_reduce", tensor={"shape": [len(w.params)], "dtype": "int32"}, async_=True))
    return steps + [{"wait": f"{w.p}_shadowed@{k}"} for k in range(len(names))]


def _common(w: DdpWriter, mine: str) -> list[Entry]:
    """Whose buffers hold: the highest rank that still has a batch; then they are broadcast."""
    if not w.ddp.buffers:
        return []
    common = w.tensor("common", 1, "int64")
    return [
        {"assign": {"tensor": common, "value": mine}},
        w.call("all_reduce", tensor=common, op="max"),
        *w.coalesced([w.buffers()], "synced", _highest(w)),
    ]


def _highest(w: DdpWriter) -> str | int:
    """The highest rank that has a batch in this round, as an expression of the round."""
    inputs, n = w.ddp.inputs or {}, w.context.world_size
    most, steps = 0, []
    for rank in reversed(range(n)):
        own = inputs.get(rank, inputs.get("else", 0))
        if own > most:
            steps.append((own, rank))
            most = own
    if not steps:
        return 0
    text = str(steps[-1][1])
    for rounds, rank in reversed(steps[:-1]):
        text = f"{rank} if {w.now} < {rounds} else {text}"
    return text


def _end(w: DdpWriter, mine: str, most: int) -> list[Entry]:
    """The last question, who is left: nobody. The highest of the ranks that joined last gives its model to all."""
    left, last = w.tensor("left", 1, "float32", 0), w.tensor("last", 1, "int64", f"rank if {mine} == {most} else -1")
    inputs = w.ddp.inputs or {}
    src = max((r for r in range(w.context.world_size) if inputs.get(r, inputs.get("else", 0)) == most), default=0)
    return [
        w.call("all_reduce", tensor=left),
        w.call("all_reduce", tensor=last, op="max"),
        *w.coalesced(w.weights(), "final", src),
    ]
