"""Blocking sends and receives of small plain tensors in the world's group, past torch's own Python, which took most of their time.

Whatever is not plain, wrong arguments first, goes torch's way.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import string_at
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distsim.capture.client import Client
from distsim.capture.group import GroupMethods, torch_profiles
from distsim.capture.repeats import numbered
from distsim.capture.tensors import dtype_of, is_simple
from distsim.capture.wire import INLINE
from distsim.capture.work import take

if TYPE_CHECKING:
    from torch import Tensor


class Direct:
    """``send`` and ``recv`` of a process. ``world``: torch's record of its groups."""

    def __init__(self, client: Client, world: Any) -> None:
        torch: Any = import_module("torch")
        self.client, self.world = client, world
        self._compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._watched: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

    def send(self, original: Callable[..., None]) -> Callable[..., None]:
        """What stands for `torch.distributed.send`."""

        @wraps(original)
        def send(tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> None:
            own = None if group_dst is not None or self._compiling() else self._group(tensor, dst, group)
            if own is None:
                return original(tensor, dst, group, tag, group_dst)
            number, message = self._message(own, "isend", tensor, dst, tag)
            self.client.post(message, (numbered(number), string_at(tensor.data_ptr(), tensor.nbytes)))
            return None

        return send

    def recv(self, original: Callable[..., int]) -> Callable[..., int]:
        """What stands for `torch.distributed.recv`."""

        @wraps(original)
        def recv(tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> int:
            own = None if group_src is not None or self._compiling() else self._group(tensor, src, group)
            if own is None:
                return original(tensor, src, group, tag, group_src)
            number, message = self._message(own, "irecv", tensor, src, tag)
            take(self.client, number, (tensor,), *self.client.ask(message, (numbered(number),)))
            return int(src)

        return recv

    def _group(self, tensor: Any, peer: Any, group: Any) -> GroupMethods | None:
        """The group of a plain call; None where it is another."""
        own = self.world.default_pg
        if (group is not None and group is not own) or type(peer) is not int or not isinstance(own, GroupMethods):
            return None
        if not 0 <= peer < len(own.members) or peer == own.me or own.members[peer] != peer or own.is_special():
            return None
        if torch_profiles() or self._watched():
            return None
        plain = is_simple(tensor) and not tensor.is_complex() and 0 < tensor.nbytes <= INLINE
        return own if plain else None

    def _message(self, own: GroupMethods, op: str, tensor: Tensor, peer: int, tag: int) -> tuple[int, tuple[object, ...]]:
        """The number of a call whose wait has the next, and its words."""
        client = self.client
        number, site = client.numbers(), client.site(4)
        key = (site, own.number, op, peer, tag, tensor.shape, tensor.dtype)
        name = client.shapes.get(key)
        if name is None:
            sides: list[list[int]] = [list(tensor.shape)]
            facts = [sides, [], dtype_of(tensor), {}] if op == "isend" else [[], sides, dtype_of(tensor), {}]
            counts = [tensor.numel() * tensor.element_size()] if op == "isend" else []
            name = client.learn(key, (site, own.number, op, peer, tag, True, True, facts, counts))
        return number, ("again", name)
