"""Calls of process groups in CUDA graphs: recorded, and made at each replay.

While a graph is recorded, a call returns a request that is complete at once. The call, and the wait
for it, become steps of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distsim.script_capture.cuda.graphs import GraphHooks, RecordedGraph
from distsim.script_capture.rank.client import HubClient

if TYPE_CHECKING:
    from torch import Tensor


class RecordedRequest:
    """In place of a `distsim.script_capture.rank.work.HubRequest`, with the same interface.

    ``work`` is that of the latest replay.
    """

    done = completes_locally = waited = True
    source = -1

    def __init__(
        self, client: HubClient, graph: RecordedGraph, make: Callable[[], Any] | None
    ) -> None:
        """``make`` makes the call; None if an operator of the graph does so."""
        self.client = client
        self.results: Sequence[Tensor] = ()
        self.work: Any = None
        self._graph = graph
        self._future: Any = None
        self._is_own = make is not None
        if make is not None:
            graph.add_step(lambda: setattr(self, "work", make()))

    def wait(self, timeout: object = None, depth: int = 4) -> None:
        """Let the replay wait here."""
        if self._is_own:
            self._graph.add_step(lambda: self.work.request.wait(depth=depth))
            self._is_own = False

    def poll(self) -> bool:
        """Whether it is done: nothing is open while a graph is recorded."""
        return True

    @property
    def future(self) -> Any:
        """A future that is done; the replay waits where it was requested."""
        if self._future is None:
            self._future = import_module("torch").futures.Future()
            self._future.set_result(list(self.results))
            self.wait()
        return self._future


class ClientGraphHooks(GraphHooks):
    """Reports what was computed before a graph, and counts nothing while it is recorded."""

    def __init__(self, client: HubClient) -> None:
        self._client = client

    def begin(self) -> None:
        """Recording starts."""
        self._client.report_streams()
        self._client.report_computed()
        self._set_paused(True)

    def end(self) -> None:
        """Recording ends."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        if self._client.counter is not None:
            self._client.counter.is_paused = paused

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Copies of results."""
        self._set_paused(True)
        try:
            yield
        finally:
            self._set_paused(False)


__all__ = ["ClientGraphHooks", "RecordedRequest"]
