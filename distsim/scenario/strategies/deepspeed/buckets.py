"""DeepSpeed's gradient buckets, which all ZeRO stages fill during the backward pass.

A bucket collects gradients in the order in which they become ready. It is reduced when a gradient
comes for which it has no room, or at the end.

Source: DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`
(reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_and_scatter).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class GradientBucket(NamedTuple):
    """The parameters of a bucket, and the position in the order of gradients that sends it.

    The bucket goes out when the gradient at ``sent_at`` becomes ready; for the last bucket this
    position is beyond the end.
    """

    params: list[int]
    sent_at: int


def gradient_buckets(params: Sequence[tuple[int, int]], capacity: int) -> list[GradientBucket]:
    """Buckets of at most ``capacity`` elements, where possible.

    ``params`` are pairs (parameter, elements) in the order in which gradients become ready. A
    gradient larger than ``capacity`` has a bucket of its own.
    """
    buckets: list[GradientBucket] = []
    open_params: list[int] = []
    open_numel = 0
    for position, (param, numel) in enumerate(params):
        if open_params and open_numel + numel > capacity:
            buckets.append(GradientBucket(open_params, position))
            open_params = []
            open_numel = 0
        open_params.append(param)
        open_numel += numel
    if open_params:
        buckets.append(GradientBucket(open_params, len(params)))
    return buckets


class BucketPlan:
    """The buckets of a backward pass whose gradients become ready in a given ``order``."""

    def __init__(self, order: Sequence[int], numel: Sequence[int], capacity: int) -> None:
        self.buckets = gradient_buckets([(p, numel[p]) for p in order], capacity)
        self._bucket_of: dict[int, int] = {}
        #: Parameters whose gradient makes a bucket go out, and that bucket.
        self._sent_by: dict[int, int] = {}
        for index, bucket in enumerate(self.buckets):
            self._bucket_of.update(dict.fromkeys(bucket.params, index))
            if bucket.sent_at < len(order):
                self._sent_by[order[bucket.sent_at]] = index

    def buckets_of(self, params: Iterable[int]) -> list[int]:
        """The buckets that take the gradients of some parameters, without duplicates."""
        return list(dict.fromkeys(self._bucket_of[p] for p in params))

    def sent_by(self, params: Iterable[int]) -> list[int]:
        """The buckets that go out when the gradients of some parameters are ready, in order."""
        return sorted(self._sent_by[p] for p in params if p in self._sent_by)


def large_gradient_pieces(start: int, numel: int, part: int, most: int) -> list[int]:
    """Elements of each call that reduces a gradient larger than a bucket.

    The gradient is split where an owner's part of the flat parameters ends. A piece is sent as soon
    as it has more than ``most`` elements, the capacity of a bucket. ``start`` is the gradient's
    offset among all parameters, ``part`` the size of an owner's part.
    """
    pieces: list[int] = []
    piece = 0
    position = start
    end = start + numel
    while position < end:
        end_of_part = (position // part + 1) * part
        following = min(end, end_of_part)
        piece += following - position
        position = following
        if piece > most:
            pieces.append(piece)
            piece = 0
    if piece:
        pieces.append(piece)
    return pieces
