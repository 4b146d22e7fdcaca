"""Blocking sends and receives of small plain tensors in the world's group, past torch's own Python,
which took most of their time.

Whatever is not plain, wrong arguments first, goes torch's way.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove, string_at
from functools import wraps
from importlib import import_module
from sys import _getframe
from typing import TYPE_CHECKING, Any

from distsim.script_capture.protocol.wire import INLINE_LIMIT
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.process_group import ProcessGroupMethods
from distsim.script_capture.rank.tensor_payloads import dtype_of, has_plain_memory
from distsim.script_capture.rank.work import store_results

if TYPE_CHECKING:
    from torch import Tensor


class P2PFastPath:
    """``send`` and ``recv`` of a process. ``world``: torch's record of its groups."""

    def __init__(self, client: HubClient, world: Any) -> None:
        torch: Any = import_module("torch")
        self.client, self.world = client, world
        self._compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._watched: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
        self._profiled: Callable[[], bool] = torch.autograd._profiler_enabled

    def send(self, original: Callable[..., None]) -> Callable[..., None]:
        """What stands for `torch.distributed.send`."""

        @wraps(original)
        def send(
            tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None
        ) -> None:
            own = (
                None
                if group_dst is not None or self._compiling()
                else self._group(tensor, dst, group)
            )
            if own is None:
                return original(tensor, dst, group, tag, group_dst)
            name = self._name(own, "isend", tensor, dst, tag)
            self.client.send_cached(name, string_at(tensor.data_ptr(), tensor.nbytes))
            return None

        return send

    def recv(self, original: Callable[..., int]) -> Callable[..., int]:
        """What stands for `torch.distributed.recv`."""

        @wraps(original)
        def recv(
            tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None
        ) -> int:
            own = (
                None
                if group_src is not None or self._compiling()
                else self._group(tensor, src, group)
            )
            if own is None:
                return original(tensor, src, group, tag, group_src)
            count: int = tensor.nbytes
            number, address, answer = self.client.receive_cached(
                self._name(own, "irecv", tensor, src, tag), src, count
            )
            if answer is None:
                memmove(tensor.data_ptr(), address, count)
            else:
                store_results(self.client, number, (tensor,), *answer)
            return int(src)

        return recv

    def _group(self, tensor: Any, peer: Any, group: Any) -> ProcessGroupMethods | None:
        """The group of a plain call; None where it is another."""
        own = self.world.default_pg
        if (
            (group is not None and group is not own)
            or type(peer) is not int
            or not isinstance(own, ProcessGroupMethods)
        ):
            return None
        if (
            not 0 <= peer < len(own.members) or peer == own.me or own.is_special()
        ):  # the world's ranks are 0, 1, 2 …
            return None
        if (
            self._profiled()
            or self._watched()
            or not has_plain_memory(tensor)
            or tensor.is_complex()
        ):
            return None
        return own if 0 < tensor.nbytes <= INLINE_LIMIT else None

    def _name(self, own: ProcessGroupMethods, op: str, tensor: Tensor, peer: int, tag: int) -> int:
        """The name of a call whose wait is the next: by where the script makes it, looked at once
        for a place of the script's own.
        """
        client = self.client
        frame, here = _getframe(2), not client.sites.passes
        shapes, place = (
            client.shapes,
            (
                id(frame.f_code),
                frame.f_lasti,
                op,
                own.number,
                peer,
                tag,
                tensor.shape,
                tensor.dtype,
            ),
        )
        name = shapes.get(place) if here else None
        if name is None:
            site = client.site(4)
            key = (site, own.number, op, peer, tag, tensor.shape, tensor.dtype)
            name = shapes.get(key) or self._learnt(op, tensor, key)
            if here and client.sites.is_own(
                frame.f_code.co_filename
            ):  # `sites` keeps its code, so that no other gets its number
                shapes[place] = name
        return name

    def _learnt(self, op: str, tensor: Tensor, key: tuple[Any, ...]) -> int:
        site, number, _, peer, tag, *_ = key
        sides: list[list[int]] = [list(tensor.shape)]
        facts = (
            [sides, [], dtype_of(tensor), {}]
            if op == "isend"
            else [[], sides, dtype_of(tensor), {}]
        )
        counts = [tensor.nbytes] if op == "isend" else []
        return self.client.learn(key, (site, number, op, peer, tag, True, True, facts, counts))
