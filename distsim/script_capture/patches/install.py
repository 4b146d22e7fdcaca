"""Replace the parts of torch.distributed that a rank must not use as they are.

Process groups and stores come from the hub. What would bypass the hub, or hide from it which call
the script made, is replaced too; each patch states its reason. The patches are installed before the
script is loaded, so functions of torch that the script imports by name are the replacements.

Packages that were loaded before the ranks were forked have torch's own functions; they are handled
in `distsim.script_capture.patches.rebind`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Final
from urllib.parse import parse_qsl, urlparse

from distsim.script_capture.cuda.emulation import cuda_is_emulated
from distsim.script_capture.patches.available_backends import report_all_backends_available
from distsim.script_capture.patches.p2p_fast_path import P2PFastPath
from distsim.script_capture.patches.rebind import rebind_references
from distsim.script_capture.patches.split_group import GroupSplitter
from distsim.script_capture.patches.store_classes import StoreClasses
from distsim.script_capture.patches.symmetric_memory import install_symmetric_memory
from distsim.script_capture.patches.unsupported import refuse_unsupported_transports
from distsim.script_capture.protocol.message_types import timeout_in_ns
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.process_group import ProcessGroupMethods
from distsim.script_capture.rank.work import HubFutures, HubRequest, HubWorkMethods

#: The name under which torch knows the hub's groups. Scripts see the backend that they asked for.
HUB_BACKEND: Final = "distsim"
_NCCL_DEFAULT_TIMEOUT: Final = timedelta(minutes=10)
#: Names that torch.distributed exports and the patches replace by functions that call torch's own.
_WRAPPED_FUNCTIONS: Final = (
    "init_process_group",
    "new_group",
    "_new_group_with_tag",
    "destroy_process_group",
    "batch_isend_irecv",
)


class TorchPatches:
    """The patched torch.distributed of one process.

    While torch creates a group, the attributes ``requested_backend``, ``group_title``,
    ``is_world`` and ``explicit_timeout`` hold what `_make_group` needs: torch calls it in between
    and does not pass them on.
    """

    def __init__(self, client: HubClient) -> None:
        dist: Any = import_module("torch.distributed")
        c10d: Any = import_module("torch.distributed.distributed_c10d")
        self.client = client
        self.c10d = c10d
        self.dist = dist
        self.futures = HubFutures(client, self._future_waits_in_cpp)
        self.work_type = type("HubWork", (HubWorkMethods, c10d.Work), {})
        self.group_type = type(
            "ProcessGroup",
            (ProcessGroupMethods, dist.ProcessGroup),
            {"__module__": "torch.distributed.distributed_c10d"},
        )
        self.stores = StoreClasses(client, dist)
        self.splitter = GroupSplitter(lambda *args, **kwargs: dist.new_group(*args, **kwargs))
        #: Works that only C++ refers to.
        self.kept_works: deque[object] = deque(maxlen=256)

        self.requested_backend = "gloo"
        self.group_title = ""
        self.is_world = False
        self.explicit_timeout: timedelta | None = None
        self.is_mpi = False

        self._originals: dict[str, Callable[..., Any]] = {
            name: getattr(c10d, name) for name in _WRAPPED_FUNCTIONS
        }
        self._new_process_group_helper = c10d._new_process_group_helper

    def install(self) -> None:
        """Install all patches."""
        self._patch_groups()
        self._patch_calls()
        refuse_unsupported_transports()
        install_symmetric_memory()
        report_all_backends_available()
        self._patch_stores()
        self._patch_futures()
        rebind_references()

    def _patch_groups(self) -> None:
        c10d = self.c10d
        self.dist.Backend.register_backend(
            HUB_BACKEND, self._make_group, extended_api=True, devices=["cpu", "cuda"]
        )
        # torch creates every group here: they become the hub's.
        c10d._new_process_group_helper = self._new_group_helper
        # A wait in a TCP store would not be seen.
        c10d.rendezvous = self._rendezvous
        # The hub's own start-up call replaces it.
        c10d._store_based_barrier = lambda *args, **kwargs: None
        # Reported: which rank starts up, with which timeout.
        self._replace_everywhere("init_process_group", self._init_process_group)
        # Reported for all variants: the call and its ranks.
        self._replace_everywhere("new_group", self._wrapped_new_group("new_group"))
        c10d._new_group_with_tag = self._wrapped_new_group("_new_group_with_tag")
        self._replace_everywhere("destroy_process_group", self._destroy_process_group)
        # torch's C++ can only split its own groups.
        self._replace_everywhere("split_group", self.splitter.split_group)
        # NCCL's default timeout is in its library.
        original_timeout = c10d._get_default_timeout

        def default_timeout(backend: object) -> object:
            return _NCCL_DEFAULT_TIMEOUT if str(backend) == "nccl" else original_timeout(backend)

        c10d._get_default_timeout = default_timeout

    def _patch_calls(self) -> None:
        c10d = self.c10d
        # Most of a small message's time was spent in torch's Python.
        fast_path = P2PFastPath(self.client, c10d._world)
        self._replace_everywhere("send", fast_path.send(c10d.send))
        self._replace_everywhere("recv", fast_path.recv(c10d.recv))
        # torch's own loop would hide where a batch ends.
        self._replace_everywhere("batch_isend_irecv", self._batch_isend_irecv)
        # torch only warns, and makes no call that a rule could evaluate.
        c10d._warn_not_in_group = self._report_non_member(c10d._warn_not_in_group)

    def _patch_stores(self) -> None:
        for name, store_class in self.stores.classes.items():
            for module in (self.dist, self.c10d):
                setattr(module, name, store_class)

    def _patch_futures(self) -> None:
        # C++ waits for the futures of a backward pass at its end.
        for name in ("torch.autograd", "torch.autograd.graph"):
            module: Any = import_module(name)
            module._engine_run_backward = self._report_backward_end(module._engine_run_backward)
        # The join context keeps only the C++ half of its work.
        join: Any = import_module("torch.distributed.algorithms.join")
        notify = self._keeping_work(join.Join.notify_join_context)
        join.Join.notify_join_context = staticmethod(notify)

    def _replace_everywhere(self, name: str, function: Callable[..., object]) -> None:
        """Replace a name in both modules in which torch has it."""
        for module in (self.c10d, self.dist):
            if hasattr(module, name):
                setattr(module, name, function)

    def _rendezvous(
        self, url: str, rank: int = -1, world_size: int = -1, **kwargs: object
    ) -> Iterator[tuple[object, int, int]]:
        """Join the world. The URL comes before the arguments, and those before the environment."""
        query = dict(parse_qsl(urlparse(url).query))
        if "rank" in query:
            rank = int(query["rank"])
        elif rank < 0:
            rank = _environment_int("RANK")
        if "world_size" in query:
            world_size = int(query["world_size"])
        elif world_size <= 0:
            world_size = _environment_int("WORLD_SIZE")
        self.client.join(rank, world_size)
        yield self.stores.make("world"), rank, world_size

    # --- creating a group ---
    def _make_group(self, options: Any, _: object = None) -> Any:
        """Called by torch's C++ to create a group of the hub's backend."""
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = str(options.group_id)
        group = self.group_type(options.group_rank, options.group_size)
        group.client = self.client
        group.members = ranks
        group.me = options.group_rank
        group.title = name
        group.requested_backend = self.requested_backend
        group.make_work = self._make_work
        group.number = len(self.client.groups) + 1
        self.client.groups[name, group.number] = group.number

        is_titled = self.group_title not in ("", "undefined")
        title = self.group_title if is_titled else f"group {name}"
        timeout_ns = timeout_in_ns(self.explicit_timeout)
        facts = [name, ranks, self.requested_backend, timeout_ns, title, self.is_world]
        self.client.queue(["group", group.number, *facts])
        return group

    def _make_work(self, request: HubRequest, results: Sequence[object]) -> object:
        work = self.work_type()
        work.request = request
        work.results = results
        work.futures = self.futures
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
        """torch's own, with the hub's backend; scripts see the backend that they asked for.

        An empty list of ranks means the world.
        """
        if self.is_mpi:
            self.requested_backend = "mpi"
        elif str(backend) != "undefined":
            self.requested_backend = str(backend)
        else:
            self.requested_backend = _default_backend()
        kwargs |= {"device_id": None, "backend_options": None}
        self.group_title = str(kwargs.get("group_desc") or "")
        self.is_world = not ranks
        if self.is_world:
            self.client.join(group_rank, group_size)
        hub_backend = self.dist.Backend(HUB_BACKEND)
        found = self._new_process_group_helper(
            group_size, group_rank, ranks, hub_backend, store, group_name, **kwargs
        )
        group = found[0]
        if isinstance(group, ProcessGroupMethods):
            requested = self.dist.Backend(self.requested_backend)
            world = self.c10d._world
            world.pg_map[group] = (requested, world.pg_map[group][1])
            world.pg_backend_config[group] = str(self.c10d.BackendConfig(requested))
        return found

    # --- calls that create and destroy groups ---
    def _init_process_group(self, *args: Any, **kwargs: Any) -> None:
        device = self.splitter.device = kwargs.get("device_id")
        if device is not None and not cuda_is_emulated():
            # There is no device that torch could compare it with. It implies the backend if the
            # script names none.
            del kwargs["device_id"]
            if not args and not kwargs.get("backend"):
                kwargs["backend"] = "nccl"
        timeout = kwargs.get("timeout", args[2] if len(args) > 2 else None)
        self.explicit_timeout = timeout
        args, kwargs = self._without_mpi(args, kwargs)
        site = self.client.site()
        try:
            self._originals["init_process_group"](*args, **kwargs)
        finally:
            self.explicit_timeout = None
            self.is_mpi = False
        group = self.c10d._get_default_group()
        # With a device, torch connects NCCL's group at once, and can split others off it.
        is_eager = device is not None and "nccl" in group.requested_backend
        facts = {
            "backend": group.requested_backend,
            "timeout_ns": timeout_in_ns(timeout),
            "eager": is_eager,
        }
        number = self.client.next_number()
        self.client.request(["meet", number, site, "init_process_group", group.members, facts])

    def _without_mpi(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Arguments of init_process_group with gloo in place of mpi.

        torch asks an MPI library for rank and world size; there is none, so they come from the
        environment, as for gloo.
        """
        backend = kwargs.get("backend", args[0] if args else None)
        self.is_mpi = str(backend).lower() == "mpi"
        if not self.is_mpi:
            return args, kwargs
        others = args[1:]
        if others:
            return ("gloo", *others), kwargs
        return (), {**kwargs, "backend": "gloo"}

    def _wrapped_new_group(self, name: str) -> Callable[..., object]:
        original = self._originals[name]

        def new_group(*args: object, **kwargs: object) -> object:
            if name == "new_group":  # it calls `_new_group_with_tag`, which reports the call
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
        is_local = bool(kwargs.get("use_local_synchronization"))
        self.explicit_timeout = timeout
        try:
            group = original(ranks, timeout, backend, *args, **kwargs)
        finally:
            self.explicit_timeout = None
        if is_local and world.rank() not in members:
            return group  # only the members synchronize, so this call has no effect
        facts = {
            "ranks": members,
            "timeout_ns": timeout_in_ns(timeout),
            "backend": str(backend) if backend else None,
            "local_sync": is_local,
        }
        group_number = group.number if isinstance(group, ProcessGroupMethods) else 0
        number = self.client.next_number()
        self.client.send(["event", number, site, "new_group", group_number, facts])
        return group

    def _destroy_process_group(self, group: Any = None) -> None:
        client = self.client
        site = client.site()
        group_number = getattr(group, "number", 0)
        self._originals["destroy_process_group"](group)
        if group is self.c10d.GroupMember.NON_GROUP_MEMBER:  # torch does nothing
            return
        number = client.next_number()
        client.send(["event", number, site, "destroy_process_group", group_number, {}])

    # --- other calls ---
    def _report_non_member(self, original: Callable[[str], None]) -> Callable[[str], None]:
        """Report a call on a group that this rank is not in."""
        client = self.client

        def warn(op_name: str) -> None:
            number = client.next_number()
            client.queue(["event", number, client.site(3), "non_member", 0, {"op": op_name}])
            original(op_name)

        return warn

    def _batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Any]:
        self.c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or self.c10d._get_default_group()
        if not isinstance(group, ProcessGroupMethods):
            return self._originals["batch_isend_irecv"](p2p_op_list)  # type: ignore[no-any-return]
        group.start_batch()
        try:
            for p2p in p2p_op_list:
                peer_argument = "group_dst" if p2p.op is self.dist.isend else "group_src"
                peer = {peer_argument: p2p.group_peer}
                p2p.op(p2p.tensor, group=p2p.group, tag=p2p.tag, **peer)
        finally:
            works = group.end_batch()
        return works

    # --- futures ---
    def _keeping_work(self, original: Callable[..., object]) -> Callable[..., object]:
        """Keep the Python half of a work that C++ waits for."""

        def notify_join_context(joinable: object) -> object:
            work = original(joinable)
            self.kept_works.append(work)
            return work

        return notify_join_context

    def _report_backward_end(self, original: Callable[..., object]) -> Callable[..., object]:
        """Report the end of a backward pass in which futures were requested."""
        client = self.client

        @wraps(original)
        def run(*args: object, **kwargs: object) -> object:
            with client.sites.backward():
                found = original(*args, **kwargs)
            if client.in_backward:
                client.in_backward = False
                number = client.next_number()
                client.queue(["event", number, client.site(), "backward", 0, {}])
            return found

        return run

    def _future_waits_in_cpp(self) -> bool:
        """Whether C++ waits for the future that is being requested.

        It does if the reducer requested it, or if a backward pass is running.
        """
        # Frame 1 is `HubFutures.future_of`, frame 2 the work's `get_future`, and the next its
        # caller. There is none if C++ called it in a thread of its own.
        frame: Any = sys._getframe(2).f_back
        if frame is None or "get_future" not in frame.f_code.co_names:
            return True
        # autograd runs hooks in threads that C++ started.
        if isinstance(threading.current_thread(), threading._DummyThread):
            return True
        is_own = False
        while frame is not None:
            is_own = is_own or self.client.sites.is_own(frame.f_code.co_filename)
            if frame.f_code.co_name == "_engine_run_backward":
                return True
            frame = frame.f_back
        return not is_own


def _default_backend() -> str:
    """The backends that torch uses if none is named (`Backend.default_device_backend_map`)."""
    cuda = import_module("torch.cuda")
    return "cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo"


def _environment_int(name: str) -> int:
    if name not in os.environ:
        raise ValueError(
            "Error initializing torch.distributed using env:// rendezvous: environment variable"
            f" {name} expected, but not set"
        )
    return int(os.environ[name])


def install_patches(client: HubClient) -> ModuleType:
    """Patch torch.distributed of this process and return it."""
    patches = TorchPatches(client)
    patches.install()
    dist: ModuleType = patches.dist
    return dist
