"""Communication hooks of DistributedDataParallel, and the optimizer that shares its states: what they call in the place of all_reduce.

Sources, torch 2.13, `torch/distributed/`: `algorithms/ddp_comm_hooks/default_hooks.py` (allreduce, fp16_compress, bf16_compress),
`powerSGD_hook.py` (powerSGD_hook: vectors uncompressed, then the factors P, then Q; Vogels et al., arXiv:1905.13727),
`optim/zero_redundancy_optimizer.py` (_partition_parameters, _sync_params).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, NamedTuple

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from distsim.names import listing, near, shown
from distsim.strategies.base import Entry
from distsim.strategies.buckets import Bucket, Param
from distsim.strategies.fields import integer

#: Hooks by torch's name without `_hook`; the dtype that travels, where it is another.
_PLAIN = {"allreduce": "", "fp16_compress": "float16", "bf16_compress": "bfloat16"}


class Hook(NamedTuple):
    """``dtype``: what travels, empty where it is the bucket's own. ``rank`` above 0: PowerSGD, from iteration ``start`` on."""

    dtype: str = ""
    rank: int = 0
    start: int = 0
    #: min_compression_rate: a matrix is left whole where its factors would not be so many times smaller.
    rate: int = 2


def _hook(value: object, info: ValidationInfo) -> Hook:
    if isinstance(value, str):
        name = value.removesuffix("_hook")
        if name not in _PLAIN:
            raise ValueError(
                f"unknown hook {value}; known are {listing(_PLAIN)}, or {{powersgd: 1, start: 10}}{near(name, _PLAIN)}"
            )
        return Hook(_PLAIN[name])
    if not isinstance(value, Mapping) or "powersgd" not in value:
        raise ValueError(f"expected a hook's name ({listing(_PLAIN)}) or {{powersgd: 1, start: 10}}, found {shown(value)}")
    extra = [key for key in value if key not in ("powersgd", "start", "min_compression_rate")]
    if extra:
        raise ValueError(f"unknown key {extra[0]}; powersgd has start and min_compression_rate")
    rank, start = integer(1)(value["powersgd"], info), integer(0)(value.get("start", 1000), info)
    if start < 2:
        raise ValueError(
            f"PyTorch's PowerSGD starts at iteration 2 or later (buckets are rebuilt in iteration 1), found start: {start}"
        )
    return Hook("", rank, start, integer(1)(value.get("min_compression_rate", 2), info))


_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["powersgd"]}]}
HookField = Annotated[Hook, PlainValidator(_hook), WithJsonSchema(_SCHEMA)]


class Factors(NamedTuple):
    """Elements of a bucket under PowerSGD: what is left whole, the factors P, the factors Q."""

    whole: int
    p: int
    q: int


def factors(bucket: Bucket, hook: Hook) -> Factors:
    """Each parameter as a matrix of its first axis by the rest; compressed where (n + m) * r * rate < n * m."""
    whole = p = q = 0
    for param in bucket.params:
        n, m = param.shape[0], prod(param.shape[1:])
        rank = min(n, m, hook.rank)
        if (n + m) * rank * hook.rate < n * m:
            p, q = p + n * rank, q + m * rank
        else:
            whole += param.numel
    return Factors(whole, p, q)


def owners(params: Sequence[Param], ranks: int) -> list[list[Param]]:
    """ZeroRedundancyOptimizer's parts: the largest parameter first, each to the rank that has least."""
    found: list[list[Param]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for param in sorted(params, key=lambda p: p.numel, reverse=True):
        least = sizes.index(min(sizes))
        found[least].append(param)
        sizes[least] += param.numel
    return found


def cast(target: str, source: str, ranks: str | None = None) -> Entry:
    """A copy into another dtype."""
    entry: Entry = {"assign": {"tensor": target, "value": source}}
    return entry if ranks is None else {**entry, "ranks": ranks}
