"""A fast path for blocking sends and receives of small tensors in the world's group.

torch's own Python took most of their time. Only plain calls take the fast path; everything else,
wrong arguments first of all, goes through torch's function.
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
    """Replacements for ``send`` and ``recv`` of a process. ``world``: torch's record of its groups.

    It is dense where it runs for each message; `_template` must be called by `send` and `recv`
    directly, because it looks at the frame of their caller.
    """

    def __init__(self, client: HubClient, world: Any) -> None:
        torch: Any = import_module("torch")
        self.client = client
        self.world = world
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
        self._is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled

    def send(self, original: Callable[..., None]) -> Callable[..., None]:
        """The replacement for `torch.distributed.send`."""

        @wraps(original)
        def send(
            tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None
        ) -> None:
            world_group = None
            if group_dst is None and not self._is_compiling():
                world_group = self._group_of_plain_call(tensor, dst, group)
            if world_group is None:
                return original(tensor, dst, group, tag, group_dst)
            template = self._template(world_group, "isend", tensor, dst, tag)
            self.client.send_cached(template, string_at(tensor.data_ptr(), tensor.nbytes))
            return None

        return send

    def recv(self, original: Callable[..., int]) -> Callable[..., int]:
        """The replacement for `torch.distributed.recv`."""

        @wraps(original)
        def recv(
            tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None
        ) -> int:
            world_group = None
            if group_src is None and not self._is_compiling():
                world_group = self._group_of_plain_call(tensor, src, group)
            if world_group is None:
                return original(tensor, src, group, tag, group_src)
            nbytes: int = tensor.nbytes
            template = self._template(world_group, "irecv", tensor, src, tag)
            number, address, reply = self.client.receive_cached(template, src, nbytes)
            if reply is None:
                memmove(tensor.data_ptr(), address, nbytes)
            else:
                store_results(self.client, number, (tensor,), *reply)
            return int(src)

        return recv

    def _group_of_plain_call(
        self, tensor: Any, peer: Any, group: Any
    ) -> ProcessGroupMethods | None:
        """The world's group if the call can take the fast path, else None."""
        world_group = self.world.default_pg
        if group is not None and group is not world_group:
            return None
        if type(peer) is not int or not isinstance(world_group, ProcessGroupMethods):
            return None
        # The world's global ranks are its group ranks.
        if not 0 <= peer < len(world_group.members) or peer == world_group.me:
            return None
        if world_group.needs_full_call():
            return None
        if self._is_profiling() or self._has_function_mode():
            return None
        if not has_plain_memory(tensor) or tensor.is_complex():
            return None
        return world_group if 0 < tensor.nbytes <= INLINE_LIMIT else None

    def _template(
        self, group: ProcessGroupMethods, op: str, tensor: Tensor, peer: int, tag: int
    ) -> int:
        """The template of a call together with the wait for it.

        Looked up by the position in the script's code that makes the call, so that the stack need
        not be searched for the call site again. This holds only if that code is the user's own, and
        not in a backward pass, whose call sites name the forward line.
        """
        client = self.client
        templates = client.templates
        frame = _getframe(2)
        in_backward = client.sites.backward_passes
        position = (
            id(frame.f_code),
            frame.f_lasti,
            op,
            group.number,
            peer,
            tag,
            tensor.shape,
            tensor.dtype,
        )
        template = None if in_backward else templates.get(position)
        if template is None:
            site = client.site(4)
            key = (site, group.number, op, peer, tag, tensor.shape, tensor.dtype)
            template = templates.get(key) or self._register_template(op, tensor, key)
            if not in_backward and client.sites.is_own(frame.f_code.co_filename):
                # `CallSiteFinder` keeps the code object, so no other gets its id.
                templates[position] = template
        return template

    def _register_template(self, op: str, tensor: Tensor, key: tuple[Any, ...]) -> int:
        """Define a call that is waited for at once. Only a send has a payload."""
        site, group_number, _, peer, tag, *_ = key
        shapes = [list(tensor.shape)]
        dtype = dtype_of(tensor)
        contribution: list[object]
        if op == "isend":
            contribution = [shapes, [], dtype, {}]
            counts = [tensor.nbytes]
        else:
            contribution = [[], shapes, dtype, {}]
            counts = []
        is_async = waited = True
        facts = (site, group_number, op, peer, tag, is_async, waited, contribution, counts)
        return self.client.register_template(key, facts)
