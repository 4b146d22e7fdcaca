"""What of torch.distributed is replaced in a rank: where groups and stores come from, and what
would leave the hub unseen.

Each patch says why. They are laid before the script is loaded; functions of torch that the script
imports by name are these.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlparse

from distsim.script_capture.cuda import cuda_is_emulated
from distsim.script_capture.launch.preload import report_all_backends_available
from distsim.script_capture.patches import rebind
from distsim.script_capture.patches.p2p_fast_path import P2PFastPath
from distsim.script_capture.patches.split_group import GroupSplitter
from distsim.script_capture.patches.store_classes import StoreClasses
from distsim.script_capture.patches.unsupported import refuse_unsupported_transports
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.process_group import ProcessGroupMethods
from distsim.script_capture.rank.work import HubFutures, HubRequest, HubWorkMethods

#: The name under which torch knows the hub's groups; scripts see the back end that they asked for.
HUB_BACKEND = "distsim"


class TorchPatches:
    """The patched torch.distributed of one process."""

    def __init__(self, client: HubClient) -> None:
        dist: Any = import_module("torch.distributed")
        c10d: Any = import_module("torch.distributed.distributed_c10d")
        self.client, self.c10d, self.dist = client, c10d, dist
        self.futures = HubFutures(client, self._in_cpp)
        self.work_type = type("HubWork", (HubWorkMethods, c10d.Work), {})
        self.group_type = type(
            "ProcessGroup",
            (ProcessGroupMethods, dist.ProcessGroup),
            {"__module__": "torch.distributed.distributed_c10d"},
        )
        self.stores = StoreClasses(client, dist)
        self.kept_works: deque[object] = deque(maxlen=256)
        self.explicit: timedelta | None = None
        self.asked, self.title, self.is_world, self.is_mpi = "gloo", "", False, False
        names = (
            "init_process_group",
            "new_group",
            "_new_group_with_tag",
            "destroy_process_group",
            "batch_isend_irecv",
        )
        self._originals: dict[str, Callable[..., Any]] = {
            name: getattr(c10d, name) for name in names
        }  # as they are before `lay`

    def lay(self) -> None:
        """Replace them all."""
        c10d, dist = self.c10d, self.dist
        dist.Backend.register_backend(
            HUB_BACKEND, self._make_group, extended_api=True, devices=["cpu", "cuda"]
        )
        self._helper = c10d._new_process_group_helper
        c10d._new_process_group_helper = (
            self._new_group_helper
        )  # all groups are made here: they become the hub's
        c10d.rendezvous = self._rendezvous  # no TCP store: waits in one would be unseen
        c10d._store_based_barrier = lambda *args, **kwargs: (
            None
        )  # the hub's own meeting stands for it
        self._everywhere("init_process_group", self._init)  # who begins, with which time-out
        self._everywhere("new_group", self._wrapped_new_group("new_group"))
        c10d._new_group_with_tag = self._wrapped_new_group(
            "_new_group_with_tag"
        )  # all variants: who calls, for which ranks
        self._everywhere("destroy_process_group", self._destroy)
        self.splitting = GroupSplitter(lambda *args, **kwargs: dist.new_group(*args, **kwargs))
        self._everywhere(
            "split_group", self.splitting.split_group
        )  # C++ splits its own groups alone
        direct = P2PFastPath(self.client, c10d._world)
        self._everywhere(
            "send", direct.send(c10d.send)
        )  # most of a small message's time was torch's Python
        self._everywhere("recv", direct.recv(c10d.recv))
        self._everywhere(
            "batch_isend_irecv", self._batch
        )  # torch's own loop would hide where a batch ends
        c10d._warn_not_in_group = self._stranger(
            c10d._warn_not_in_group
        )  # torch warns and does nothing: a call that no rule sees
        refuse_unsupported_transports()
        report_all_backends_available()  # judged by their rules, without their libraries
        for name, kind in self.stores.kinds.items():
            for place in (dist, c10d):
                setattr(place, name, kind)
        default = c10d._get_default_timeout  # nccl's own is in its library
        c10d._get_default_timeout = lambda backend: (
            timedelta(minutes=10) if str(backend) == "nccl" else default(backend)
        )
        for autograd in (
            "torch.autograd",
            "torch.autograd.graph",
        ):  # C++ waits for a pass's futures at its end
            module = import_module(autograd)
            module._engine_run_backward = self._backward(module._engine_run_backward)  # type: ignore[attr-defined]
        join = sys.modules.get("torch.distributed.algorithms.join") or import_module(
            "torch.distributed.algorithms.join"
        )
        join.Join.notify_join_context = staticmethod(self._keeping(join.Join.notify_join_context))
        rebind.rebind_references()

    def _everywhere(self, name: str, function: Callable[..., object]) -> None:
        """In both modules in which torch keeps the name."""
        for module in (self.c10d, self.dist):
            if hasattr(module, name):
                setattr(module, name, function)
        for attribute in ("__doc__", "__name__", "__module__"):
            value = getattr(getattr(self, "_" + name, None), attribute, None)
            if value is not None and not hasattr(function, "__self__"):
                setattr(function, attribute, value)

    def _rendezvous(
        self, url: str, rank: int = -1, world_size: int = -1, **kwargs: object
    ) -> Iterator[tuple[object, int, int]]:
        """Rank and world as the URL, the arguments or the environment have them."""
        asked = dict(parse_qsl(urlparse(url).query))
        rank = int(asked.get("rank", rank if rank >= 0 else _environment_int("RANK")))
        world_size = int(
            asked.get(
                "world_size", world_size if world_size > 0 else _environment_int("WORLD_SIZE")
            )
        )
        self.client.join(rank, world_size)
        yield self.stores.make("world"), rank, world_size

    # --- groups ---
    def _make_group(self, options: Any, _: object = None) -> Any:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        group = self.group_type(options.group_rank, options.group_size)
        group.client, group.members, group.me = self.client, ranks, options.group_rank
        group.title, group.requested_backend = str(options.group_id), self.asked
        group.make_work = self._make_work
        group.number = len(self.client.groups) + 1
        self.client.groups[group.title, group.number] = group.number
        explicit = self.explicit
        limit = None if explicit is None else round(explicit.total_seconds() * 1e9)
        title = self.title if self.title not in ("", "undefined") else f"group {group.title}"
        self.client.hold(
            ["group", group.number, group.title, ranks, self.asked, limit, title, self.is_world]
        )
        return group

    def _make_work(self, request: HubRequest, results: Sequence[object]) -> object:
        work = self.work_type()
        work.request, work.results, work.futures = request, results, self.futures
        return work

    def _new_group_helper(
        self,
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: Any,
        store: Any,
        group_name: Any,
        **kwargs: Any,
    ) -> Any:
        """The original, with the hub's back end; the script is told the one that it asked for."""
        self.asked = (
            "mpi"
            if self.is_mpi
            else str(backend)
            if str(backend) != "undefined"
            else _default_backend()
        )
        kwargs |= {"device_id": None, "backend_options": None}
        self.title, self.is_world = str(kwargs.get("group_desc") or ""), not ranks
        if not ranks:
            self.client.join(group_rank, group_size)
        found = self._helper(
            group_size,
            group_rank,
            ranks,
            self.dist.Backend(HUB_BACKEND),
            store,
            group_name,
            **kwargs,
        )
        group = found[0]
        if isinstance(group, ProcessGroupMethods):
            asked = self.dist.Backend(self.asked)
            self.c10d._world.pg_map[group] = (asked, self.c10d._world.pg_map[group][1])
            self.c10d._world.pg_backend_config[group] = str(self.c10d.BackendConfig(asked))
        return found

    # --- what the program says of groups ---
    def _init(self, *args: Any, **kwargs: Any) -> None:
        client, c10d = self.client, self.c10d
        device = self.splitting.device = kwargs.get("device_id")
        if (
            device is not None and not cuda_is_emulated()
        ):  # nothing here that torch could hold it against; it names the back end, if nothing does
            del kwargs["device_id"]
            kwargs |= {} if args or kwargs.get("backend") else {"backend": "nccl"}
        timeout = kwargs.get("timeout", args[2] if len(args) > 2 else None)
        self.explicit = timeout
        args, kwargs = self._without_mpi(args, kwargs)
        site = client.site()
        try:
            self._originals["init_process_group"](*args, **kwargs)
        finally:
            self.explicit, self.is_mpi = None, False
        group = c10d._get_default_group()
        eager = (
            device is not None and "nccl" in group.requested_backend
        )  # torch connects the group at once, and splits others off it
        facts = {
            "backend": group.requested_backend,
            "timeout_ns": _timeout_ns(timeout),
            "eager": eager,
        }
        self.client.ask(
            ["meet", self.client.number(), site, "init_process_group", group.members, facts]
        )

    def _without_mpi(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """torch asks an MPI library for rank and world; there is none, so they come as for gloo."""
        named = kwargs.get("backend", args[0] if args else None)
        self.is_mpi = str(named).lower() == "mpi"
        if not self.is_mpi:
            return args, kwargs
        return args[1:] and ("gloo", *args[1:]), {
            **kwargs,
            **({} if args[1:] else {"backend": "gloo"}),
        }

    def _wrapped_new_group(self, name: str) -> Callable[..., object]:
        original = self._originals[name]

        def new_group(*args: object, **kwargs: object) -> object:
            if name == "new_group":  # it hands on to the other
                return original(*args, **kwargs)
            return self._new_group(original, *args, **kwargs)

        return new_group

    def _new_group(
        self,
        original: Callable[..., Any],
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        site = self.client.site(5)
        world = self.c10d._get_default_group()
        members = sorted(ranks) if ranks is not None else list(range(world.size()))
        local = bool(kwargs.get("use_local_synchronization"))
        self.explicit = timeout
        try:
            group = original(ranks, timeout, backend, *args, **kwargs)
        finally:
            self.explicit = None
        if not local or world.rank() in members:
            facts = {
                "ranks": members,
                "timeout_ns": _timeout_ns(timeout),
                "backend": str(backend) if backend else None,
                "local_sync": local,
            }
            number = group.number if isinstance(group, ProcessGroupMethods) else 0
            self.client.say(["mark", self.client.number(), site, "new_group", number, facts])
        return group

    def _destroy(self, group: Any = None) -> None:
        site = self.client.site()
        number = getattr(group, "number", 0)
        self._originals["destroy_process_group"](group)
        if group is self.c10d.GroupMember.NON_GROUP_MEMBER:  # torch does nothing
            return
        self.client.say(["mark", self.client.number(), site, "destroy_process_group", number, {}])

    def _stranger(self, original: Callable[[str], None]) -> Callable[[str], None]:
        """Say that a rank called on a group that it is not in."""

        def warn(op_name: str) -> None:
            self.client.hold(
                ["mark", self.client.number(), self.client.site(3), "stranger", 0, {"op": op_name}]
            )
            original(op_name)

        return warn

    # --- batches ---
    def _batch(self, p2p_op_list: list[Any]) -> list[Any]:
        self.c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or self.c10d._get_default_group()
        if not isinstance(group, ProcessGroupMethods):
            return self._originals["batch_isend_irecv"](p2p_op_list)  # type: ignore[no-any-return]
        group.start_batch()
        try:
            for one in p2p_op_list:
                key = "group_dst" if one.op is self.dist.isend else "group_src"
                one.op(one.tensor, group=one.group, tag=one.tag, **{key: one.group_peer})
        finally:
            works = group.end_batch()
        return works

    def _keeping(self, original: Callable[..., object]) -> Callable[..., object]:
        """C++ waits for this work, whose Python half must live as long."""

        def notify_join_context(joinable: object) -> object:
            work = original(joinable)
            self.kept_works.append(work)
            return work

        return notify_join_context

    def _backward(self, original: Callable[..., object]) -> Callable[..., object]:
        """Say where a backward pass in which futures were asked for has ended."""
        client = self.client

        @wraps(original)
        def run(*args: object, **kwargs: object) -> object:
            with client.sites.backward():
                found = original(*args, **kwargs)
            if client.in_backward:
                client.in_backward = False
                client.hold(["mark", client.number(), client.site(), "backward", 0, {}])
            return found

        return run

    def _in_cpp(self) -> bool:
        """Is the future one that C++ waits for: asked for by the reducer, or inside a backward
        pass?
        """
        frame: Any = sys._getframe(2)
        if "get_future" not in frame.f_code.co_names:
            return True
        own = False
        while frame is not None:
            own = own or self.client.sites.is_own(frame.f_code.co_filename)
            if frame.f_code.co_name == "_engine_run_backward":
                return True
            frame = frame.f_back
        return not own


def _default_backend() -> str:
    """What torch takes where no back end is named: one for each device that is there
    (`Backend.default_device_backend_map`).
    """
    cuda = import_module("torch.cuda")
    return "cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo"


def _environment_int(name: str) -> int:
    if name not in os.environ:
        raise ValueError(
            f"Error initializing torch.distributed using env:// rendezvous: environment variable {name} expected, but not set"
        )
    return int(os.environ[name])


def _timeout_ns(timeout: timedelta | None) -> int | None:
    return None if timeout is None else round(timeout.total_seconds() * 1e9)


def install_patches(client: HubClient) -> ModuleType:
    """Patch torch.distributed of this process and return it."""
    patches = TorchPatches(client)
    patches.lay()
    dist: ModuleType = patches.dist
    return dist
