"""Requests of a rank: `Work` and futures whose waits end when the hub says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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

#: torch's "no time-out given" (`kNoTimeout`).
_NO_TIMEOUT = timedelta(0)


def store_results(
    client: HubClient,
    number: int,
    tensors: Sequence[Tensor],
    answer: Sequence[Any],
    blobs: PayloadReader,
) -> None:
    """Put what came for a call where it belongs."""
    outs: list[list[PayloadLocation]] = answer[1]
    shared = False
    for tensor, pieces in zip(tensors, outs, strict=False):
        unpack_into(client, tensor, pieces, blobs)
    for pieces in outs:
        for piece in pieces:
            shared = shared or len(piece) == 3
    if shared:
        client.say(["read", number])


@dataclass
class HubRequest:
    """A call whose answer is to come. ``number``: the call's own. ``kept``: it needs nobody, so
    nobody has to be asked.

    ``unsaid``: it is part of a batch that is still open. A wait or a poll in there passes at once:
    of nccl, whose coalesced calls are launched at the batch's end, no event is recorded before that
    (WorkNCCL::synchronizeStream, CUDAEvent::query).
    """

    client: HubClient
    number: int
    outs: Sequence[Tensor]
    kept: bool = False
    done: bool = False
    source: int = -1
    future: Any = None
    waited: bool = False
    site: int = 0
    in_open_batch: bool = False
    watched: tuple[TensorSnapshot, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, answer: Sequence[Any], blobs: PayloadReader) -> None:
        """Put what came where it belongs."""
        with self.lock:
            if self.done:
                return
            self.done = True
            self.source = answer[2]
            store_results(self.client, self.number, self.outs, answer, blobs)

    def wait(self, timeout: timedelta | None = None, depth: int = 4) -> None:
        """Wait, and say so: a wait is a call of the program."""
        if self.in_open_batch or (self.done and self.waited):
            return
        if self.watched:
            self._look()
        number, site = self.client.number(), self.client.site(depth)
        self.waited = True
        if self.kept or self.done:
            self.done = True
            self.client.hold(["waited", number, site, [self.number]])
            return
        limit = None if not timeout else round(timeout.total_seconds() * 1e9)
        self.take(*self.client.ask(["wait", number, site, self.number, limit]))

    def poll(self) -> bool:
        if self.in_open_batch:
            return True
        if not self.done and not self.kept:
            answer, blobs = self.client.ask(
                ["poll", self.number, self.client.number(), self.client.site(4)]
            )
            if answer[0] == "result":
                self._look()
                self.take(answer, blobs)
        self.watched = () if self.done or self.kept else self.watched
        return self.done or self.kept

    def watch(self, site: int, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Note what its tensors are, until somebody waits for it."""
        self.site, self.watched = site, snapshot_tensors(ins, outs)

    def _look(self) -> None:
        """Say where the script has changed its tensors meanwhile."""
        if tensors_changed(self.watched):
            line, name = changing_line(self.client.place(self.site), self.client.sites.where(4))
            facts = {"call": self.number, "name": name}
            self.client.hold(
                ["mark", self.client.number(), self.client.site_of(line), "changed", 0, facts]
            )
        self.watched = ()


class HubWorkMethods:
    """What a `Work` of the hub does. `types` lays it over torch's class."""

    request: HubRequest
    results: Sequence[Tensor]
    futures: HubFutures

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.request.wait(None if timeout is None or timeout <= _NO_TIMEOUT else timeout)
        return True

    def synchronize(self) -> None:
        self.request.wait()

    def block_current_stream(self) -> None:
        self.request.wait()

    def is_completed(self) -> bool:
        return self.request.poll()

    def is_success(self) -> bool:
        return self.request.poll()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return list(self.results)

    def source_rank(self) -> int:
        return self.request.source

    def _source_rank(self) -> int:
        return self.request.source

    def get_future(self) -> Future[object]:
        return self.futures.of(self.request, list(self.results))

    getFuture = get_future  # noqa: N815 - the name that torch's C++ asks for

    def __del__(self) -> None:
        request = self.request
        if not request.waited and request.future is None and request.client.joined:
            request.client.hold(["dropped", request.client.aside(), request.number])


class CombinedWork:
    """Work of several calls as one."""

    def __init__(self, parts: Sequence[HubWorkMethods]) -> None:
        self.parts = parts

    def wait(self, timeout: timedelta | None = None) -> bool:
        for part in self.parts:
            part.request.wait()
        return True

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self.parts)


class HubFutures:
    """Futures of one process; a thread of its own sets them when the hub says that a call is
    done.
    """

    def __init__(self, client: HubClient, in_cpp: Callable[[], bool]) -> None:
        self.client, self.in_cpp = client, in_cpp
        self._open: dict[int, tuple[HubRequest, list[Tensor], Any]] = {}
        client.on_notice = self._done

    def of(self, request: HubRequest, results: list[Tensor]) -> Future[Any]:
        if request.future is not None:
            return request.future  # type: ignore[no-any-return]
        request.watched = ()
        future = request.future = hub_future_type(self)(request)
        if request.done or request.kept:
            future.set_result(results)
            self.client.hold(
                ["waited", self.client.number(), self.client.site(4), [request.number]]
            )
            request.waited = True
        else:
            self._open[request.number] = (request, results, future)
            in_cpp = self.in_cpp()
            self.client.in_backward |= in_cpp
            self.client.say(
                ["future", request.number, self.client.number(), self.client.site(4), in_cpp]
            )
        return future  # type: ignore[no-any-return]

    def _done(self, message: list[Any], blobs: PayloadReader) -> None:
        request, results, future = self._open.pop(message[3])
        request.take(message, blobs)
        future.set_result(results)


def hub_future_type(owner: HubFutures) -> Callable[[HubRequest], Any]:
    """torch's Future, with a wait that is a call of the program when Python makes it."""
    import torch

    known = owner.__dict__.get("type")
    if known is None:

        def wait(self: Any) -> Any:
            request = self.request
            if not request.waited:
                request.waited = True
                request.client.say(
                    ["waited", request.client.number(), request.client.site(3), [request.number]]
                )
            if not self.done():
                request.client.hand_over_notices()
            return torch.futures.Future.wait(self)

        def start(self: Any, request: HubRequest) -> None:
            torch.futures.Future.__init__(self)
            self.request = request

        known = owner.__dict__["type"] = type(
            "HubFuture", (torch.futures.Future,), {"wait": wait, "__init__": start}
        )
    return known
