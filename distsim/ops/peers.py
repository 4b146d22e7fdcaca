"""The other side of an operation between two ranks, where it must be named: by its global number or by its number in the group."""

from __future__ import annotations

from pydantic import model_validator

from distsim.ops.base import Op
from distsim.ops.fields import Expr


class To(Op):
    """Exactly one of `dst` and `group_dst`."""

    dst: Expr = None
    group_dst: Expr = None

    @model_validator(mode="after")
    def _one_peer(self) -> To:
        if (self.dst is None) == (self.group_dst is None):
            raise ValueError(f"expected either `dst` (a global rank) or `group_dst` (a group rank) in {self.op}")
        return self


class From(Op):
    """Exactly one of `src` and `group_src`."""

    src: Expr = None
    group_src: Expr = None

    @model_validator(mode="after")
    def _one_peer(self) -> From:
        if (self.src is None) == (self.group_src is None):
            raise ValueError(f"expected either `src` (a global rank) or `group_src` (a group rank) in {self.op}")
        return self


__all__ = ["From", "To"]
