"""Requests of a rank: `Work` and futures whose waits end when the hub replies.

A wait is a call of the captured program, so each one is reported with its line, even if its result
is known already. A request that the script drops is reported too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.script_capture.protocol.message_types import timeout_in_ns
from distsim.script_capture.protocol.wire import PayloadLocation, PayloadReader
from distsim.script_capture.rank.buffer_guard import (
    TensorSnapshot,
    changing_line,
    snapshot_tensors,
    tensors_changed,
)
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.tensor_payloads import unpack_into

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

#: torch's "no timeout given" (`kNoTimeout`).
_NO_TIMEOUT: Final = timedelta(0)


def store_results(
    client: HubClient,
    number: int,
    tensors: Sequence[Tensor],
    reply: Sequence[Any],
    blobs: PayloadReader,
) -> None:
    """Copy the result of call ``number`` into its tensors."""
    outputs: list[list[PayloadLocation]] = reply[1]
    for tensor, pieces in zip(tensors, outputs, strict=False):
        unpack_into(client, tensor, pieces, blobs)
    for pieces in outputs:
        for piece in pieces:
            if len(piece) == 3:  # in shared memory, which the hub frees once it has been read
                client.send(["read", number])
                return


@dataclass
class HubRequest:
    """A call whose result is to come. ``number`` is the call's own.

    ``completes_locally``: the call depends on no other rank, so the hub need not be asked.
    ``waited``: a wait has been reported. ``guarded`` are the tensors that the script must not
    change before it waits.

    ``in_open_batch``: the call is part of a batch that is still open, where a wait or a poll
    succeeds at once. NCCL launches coalesced calls at the batch's end, and no event is recorded
    before (WorkNCCL::synchronizeStream, CUDAEvent::query).
    """

    client: HubClient
    number: int
    outputs: Sequence[Tensor]
    completes_locally: bool = False
    done: bool = False
    source: int = -1
    future: Any = None
    waited: bool = False
    site: int = 0
    in_open_batch: bool = False
    guarded: tuple[TensorSnapshot, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, reply: Sequence[Any], blobs: PayloadReader) -> None:
        """Take over the result, unless another thread has done so."""
        with self.lock:
            if self.done:
                return
            self.done = True
            self.source = reply[2]
            store_results(self.client, self.number, self.outputs, reply, blobs)

    def wait(self, timeout: timedelta | None = None, depth: int = 4) -> None:
        """Wait, and report the wait; only the first wait is reported."""
        if self.in_open_batch or (self.done and self.waited):
            return
        if self.guarded:
            self._report_changes()
        number = self.client.next_number()
        site = self.client.site(depth)
        self.waited = True
        if self.completes_locally or self.done:
            self.done = True
            self.client.queue(["waited", number, site, [self.number]])
            return
        timeout_ns = timeout_in_ns(timeout) if timeout else None
        self.complete(*self.client.request(["wait", number, site, self.number, timeout_ns]))

    def poll(self) -> bool:
        """Whether the call is done."""
        if self.in_open_batch:
            return True
        if not self.done and not self.completes_locally:
            number = self.client.next_number()
            site = self.client.site(4)
            reply, blobs = self.client.request(["poll", self.number, number, site])
            if reply[0] == "result":
                self._report_changes()
                self.complete(reply, blobs)
        is_done = self.done or self.completes_locally
        if is_done:
            self.guarded = ()
        return is_done

    def guard(self, site: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note the contents of its tensors, until the script waits for it."""
        self.site = site
        self.guarded = snapshot_tensors(inputs, outputs)

    def _report_changes(self) -> None:
        """Report whether the script has changed the tensors meanwhile."""
        if tensors_changed(self.guarded):
            call = self.client.origin_of(self.site)
            origin, name = changing_line(call, self.client.sites.where(4))
            facts = {"call": self.number, "name": name}
            number = self.client.next_number()
            site = self.client.site_of(origin)
            self.client.queue(["event", number, site, "changed", 0, facts])
        self.guarded = ()


class HubWorkMethods:
    """Methods of the hub's `Work`; `distsim.script_capture.patches.install` adds torch's class."""

    request: HubRequest
    results: Sequence[Tensor]
    futures: HubFutures

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is done."""
        self.request.wait(None if timeout is None or timeout <= _NO_TIMEOUT else timeout)
        return True

    def synchronize(self) -> None:
        """As `wait`: no stream runs ahead here."""
        self.request.wait()

    def block_current_stream(self) -> None:
        """As `wait`: no stream runs ahead here."""
        self.request.wait()

    def is_completed(self) -> bool:
        """Whether the call is done."""
        return self.request.poll()

    def is_success(self) -> bool:
        """Whether the call is done; a call that fails raises instead."""
        return self.request.poll()

    def exception(self) -> None:
        """Always None: errors are raised by `wait`."""
        return None

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return list(self.results)

    def source_rank(self) -> int:
        """The rank whose message a receive took."""
        return self.request.source

    def _source_rank(self) -> int:
        return self.request.source

    def get_future(self) -> Future[object]:
        """A future of the output tensors."""
        return self.futures.future_of(self.request, list(self.results))

    getFuture = get_future  # noqa: N815 - the name that torch's C++ asks for

    def __del__(self) -> None:
        request = self.request
        if request.waited or request.future is not None or not request.client.joined:
            return
        request.client.queue(["dropped", request.client.unordered_number(), request.number])


class CombinedWork:
    """Work of several calls as one."""

    def __init__(self, parts: Sequence[HubWorkMethods]) -> None:
        self.parts = parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until all calls are done."""
        for part in self.parts:
            part.request.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all calls are done."""
        return all(part.is_completed() for part in self.parts)


class _OpenFuture(NamedTuple):
    """A future whose call is not done."""

    request: HubRequest
    results: list[Tensor]
    future: Any


class HubFutures:
    """The futures of one process.

    The thread that handles notices sets a future when the hub reports that its call is done.
    ``waits_in_cpp`` says of the future that is just being requested whether C++ waits for it.
    """

    def __init__(self, client: HubClient, waits_in_cpp: Callable[[], bool]) -> None:
        self.client = client
        self.waits_in_cpp = waits_in_cpp
        self._open: dict[int, _OpenFuture] = {}  # by the number of the call
        self._future_type: Callable[[HubRequest], Any] | None = None
        client.on_done = self._set_result

    def future_of(self, request: HubRequest, results: list[Tensor]) -> Future[Any]:
        """The future of a request, created and reported at the first call."""
        if request.future is not None:
            return request.future  # type: ignore[no-any-return]
        request.guarded = ()
        client = self.client
        if self._future_type is None:
            self._future_type = hub_future_type()
        future = request.future = self._future_type(request)
        if request.done or request.completes_locally:
            future.set_result(results)
            client.queue(["waited", client.next_number(), client.site(4), [request.number]])
            request.waited = True
        else:
            self._open[request.number] = _OpenFuture(request, results, future)
            # Called from here: it counts the frames up to the caller of `get_future`.
            waits_in_cpp = self.waits_in_cpp()
            client.in_backward |= waits_in_cpp
            number = client.next_number()
            client.send(["future", request.number, number, client.site(4), waits_in_cpp])
        return future  # type: ignore[no-any-return]

    def _set_result(self, message: list[Any], blobs: PayloadReader) -> None:
        """Handle a ``done`` notice; callbacks of the future run in this thread."""
        number = message[3]
        request, results, future = self._open.pop(number)
        request.complete(message, blobs)
        future.set_result(results)


def hub_future_type() -> Callable[[HubRequest], Any]:
    """torch's Future, with a wait that is reported when Python makes it.

    A wait in C++ does not call this method; it is added when the backward pass ends.
    """
    import torch

    def wait(self: Any) -> Any:
        request = self.request
        if not request.waited:
            request.waited = True
            client = request.client
            client.send(["waited", client.next_number(), client.site(3), [request.number]])
        if not self.done():
            request.client.hand_over_notices()
        return torch.futures.Future.wait(self)

    def __init__(self: Any, request: HubRequest) -> None:  # noqa: N807
        torch.futures.Future.__init__(self)
        self.request = request

    return type("HubFuture", (torch.futures.Future,), {"wait": wait, "__init__": __init__})
