"""Find work of one stream that uses a tensor while another stream may still write it.

On the CPU all work is over when a call returns, so such a program computes right values here, and
wrong ones on a GPU. With `capture --check-values`, each operator reports its tensors to this
module, and each call of a process group too. Two uses of the same bytes, one of which writes, race
if no event, wait or synchronisation orders them (`distsim.script_capture.cuda.stream_clocks`).

Not found: uses that PyTorch does not see (``Tensor.numpy``, kernels of Triton), memory that is
freed too early because `Tensor.record_stream` is missing, and races of views that interleave.

`torch.cuda._sanitizer` does the same on a GPU, without calls of process groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.script_capture.cuda.operator_mode import operator_mode
from distsim.script_capture.cuda.stream_clocks import HOST, Clock, StreamClocks, stream_actor
from distsim.script_capture.protocol.message_types import RACE_REPORT
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.process_group import ProcessGroupMethods
from distsim.script_capture.rank.work import HubRequest

if TYPE_CHECKING:
    from torch import Tensor

#: Uses of one memory that are remembered.
_MAX_USES: Final = 32
#: The number of operators after which memory that was freed is forgotten.
_FORGET_INTERVAL: Final = 4096
#: Operators that use no bytes of their tensors.
_IDLE_OPS: Final = (
    "detach",
    "alias",
    "record_stream",
    "set_",
    "empty_like",
    "new_empty",
    "resize_",
)
_RESIZE_OP: Final = "distsim::resize_storage"


class _Use(NamedTuple):
    """A use of bytes ``start`` to ``end``; ``layout`` is None if these are all its bytes."""

    actor: str
    number: int
    writes: bool
    start: int
    end: int
    layout: object
    site: int
    what: str


@dataclass
class _Memory:
    """The uses of one storage, which ``reference`` keeps from being mistaken for a later one."""

    reference: Any
    uses: list[_Use] = field(default_factory=list)


class RaceProbes:
    """The probes of one process."""

    def __init__(self, client: HubClient) -> None:
        self.client = client
        self.clocks = StreamClocks()
        self._memory: dict[int, _Memory] = {}
        self._reported: set[tuple[int, int]] = set()
        self._clocks_of_requests: dict[int, tuple[HubRequest, Clock, bool]] = {}
        self._lock = threading.RLock()
        self._operators = 0
        self._is_active = False

    def install(self) -> Any:
        """Patch the hub's groups and requests. Returns a mode for all operators."""
        self.client.on_stream_step = self._observe
        plain_call = ProcessGroupMethods.call

        def call(
            group: Any,
            op: str,
            inputs: Sequence[Tensor],
            outputs: Sequence[Tensor],
            opts: Any = None,
            **more: Any,
        ) -> Any:
            clock = self._launch_call(group, op, inputs, outputs)
            work = plain_call(group, op, inputs, outputs, opts, **more)
            is_on_stream = "nccl" in group.requested_backend
            request = getattr(work, "request", None)
            if isinstance(request, HubRequest) and not request.done:
                self._clocks_of_requests[id(request)] = (request, clock, is_on_stream)
            else:
                self._wait(clock, is_on_stream)
            return work

        setattr(ProcessGroupMethods, "call", call)  # noqa: B010 - a method of a base class
        setattr(HubRequest, "wait", self._after_wait(HubRequest.wait))  # noqa: B010
        futures: Any = import_module("distsim.script_capture.rank.work").HubFutures
        futures.future_of = self._before_future(futures.future_of)
        return _probing_mode(self)

    def _observe(self, step: Any) -> None:
        self._is_active = True
        self.clocks.observe(step)

    # --- calls ---
    def _launch_call(
        self, group: Any, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> Clock:
        with self._lock:
            self.client.report_streams()
            self._is_active = True
            actor = f"group {group.title}"
            self.clocks.wait(actor, self.clocks.covered_by(self._current(inputs or outputs)))
            number = self.clocks.launch(actor)
            for tensors, writes in ((inputs, False), (outputs, True)):
                for tensor in tensors:
                    self._use(tensor, (actor, number), writes, op)
            return self.clocks.covered_by(actor)

    def _after_wait(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def wait(request: HubRequest, *args: Any, **kwargs: Any) -> None:
            original(request, *args, **kwargs)
            self._wait_for(request)

        return wait

    def _before_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """C++ waits for the futures of a backward pass unseen; assume that it does so at once."""

        @wraps(original)
        def future_of(futures: Any, request: HubRequest, results: Any) -> Any:
            self._wait_for(request)
            return original(futures, request, results)

        return future_of

    def _wait_for(self, request: HubRequest) -> None:
        found = self._clocks_of_requests.pop(id(request), None)
        if found is not None:
            self._wait(found[1], found[2])

    def _wait(self, clock: Clock, is_on_stream: bool) -> None:
        """The current stream waits for a call; without NCCL, the host does."""
        with self._lock:
            self.clocks.wait(self._stream() if is_on_stream else HOST, clock)

    # --- operators ---
    def _stream(self) -> str:
        """The current stream; the host, if the device has none."""
        streams = self.client.streams
        return HOST if streams is None else stream_actor(streams.current())

    def _current(self, tensors: Sequence[Tensor]) -> str:
        return self._stream() if any(tensor.is_cuda for tensor in tensors) else HOST

    def before_operator(self, func: Any, tensors: Sequence[tuple[Tensor, bool]]) -> None:
        """Note the uses of an operator that is about to run. ``tensors``: with "is written"."""
        with self._lock:
            self.client.report_streams()
            if not self._is_active or func._schema.name.partition("::")[2] in _IDLE_OPS:
                return
            self._operators += 1
            if self._operators % _FORGET_INTERVAL == 0:
                self._forget_freed_memory()
            if func._schema.name == _RESIZE_OP:
                self._memory.pop(tensors[0][0].untyped_storage()._cdata, None)
                return
            actor = self._current([tensor for tensor, _ in tensors])
            number = self.clocks.launch(actor)
            for tensor, writes in tensors:
                if actor == HOST or tensor.is_cuda or tensor.is_pinned():
                    self._use(tensor, (actor, number), writes, str(func))

    def _use(self, tensor: Tensor, by: tuple[str, int], writes: bool, what: str) -> None:
        if not tensor.numel() or hasattr(tensor, "fake_mode"):
            return
        storage = tensor.untyped_storage()
        memory = self._memory_of(storage)
        actor, number = by
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        is_dense = extent + 1 == tensor.numel()
        layout = None if is_dense else (start, tuple(tensor.shape), tensor.stride())
        end = start + (extent + 1) * size
        use = _Use(actor, number, writes, start, end, layout, self.client.site(5), what)
        for earlier in memory.uses:
            if _conflict(earlier, use) and not self.clocks.is_over(
                earlier.actor, earlier.number, actor
            ):
                self._report(earlier, use)
        is_same = (actor, writes, start, end)
        kept = [u for u in memory.uses if (u.actor, u.writes, u.start, u.end) != is_same]
        memory.uses = [*kept[-_MAX_USES:], use]

    def _memory_of(self, storage: Any) -> _Memory:
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None or memory.reference.expired():
            reference = import_module("torch.multiprocessing.reductions").StorageWeakRef(storage)
            memory = self._memory[key] = _Memory(reference)
        return memory

    def _forget_freed_memory(self) -> None:
        freed = [key for key, memory in self._memory.items() if memory.reference.expired()]
        for key in freed:
            del self._memory[key]

    def _report(self, earlier: _Use, use: _Use) -> None:
        if (earlier.site, use.site) in self._reported:
            return
        self._reported.add((earlier.site, use.site))
        place = self.client.origin_of(earlier.site)
        entries = [
            ("access", "writes" if use.writes else "reads"),
            ("actor", use.actor),
            ("operation", use.what),
            ("earlier access", "writes" if earlier.writes else "reads"),
            ("earlier actor", earlier.actor),
            ("earlier operation", earlier.what),
            ("earlier file", place.file),
            ("earlier line", str(place.line)),
        ]
        self.client.queue(["values", use.site, RACE_REPORT, 0, [], 0, entries])


def _conflict(one: _Use, other: _Use) -> bool:
    """Whether two uses of one memory have a byte in common, which at least one of them writes."""
    if not (one.writes or other.writes) or one.end <= other.start or other.end <= one.start:
        return False
    return one.layout == other.layout or one.layout is None is other.layout


def _probing_mode(probes: RaceProbes) -> Any:
    """A mode that reports to the probes which tensors each operator uses."""

    def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        used = list(_used_tensors(func, args, kwargs))
        # Fake tensors have no memory.
        if used and not any(type(tensor).__name__ == "FakeTensor" for tensor, _ in used):
            probes.before_operator(func, used)
        return func(*args, **kwargs)

    return operator_mode(run_operator)


def _used_tensors(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator uses, and whether it writes them. A view uses none."""
    returned = [result.alias_info for result in func._schema.returns]
    if returned and all(alias is not None and not alias.is_write for alias in returned):
        return
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if hasattr(tensor, "untyped_storage"):
                yield tensor, writes


__all__ = ["RaceProbes"]
