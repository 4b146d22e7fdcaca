"""How a call of a process group reaches the hub: checked, packed, and sent alone or in a batch.

A call becomes one message with the shapes, the dtype and further arguments, and one payload for
each tensor whose data travel. The hub matches it with the calls of the other ranks and answers with
their data (`distsim.script_capture.hub.matching`).

Key idea: a script repeats the same calls thousands of times. The first call at a place is sent in
full and defines a template; later ones send only the template's number and their payloads.

`distsim.script_capture.rank.process_group` translates torch's methods into these calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.script_capture.cuda.emulation import cuda_is_emulated
from distsim.script_capture.cuda.graphs import RecordedGraph, graph_being_recorded
from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.protocol.wire import PayloadLocation, encoded_call_number
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.graph_calls import RecordedRequest
from distsim.script_capture.rank.profiler_events import is_profiling, record_profiler_event
from distsim.script_capture.rank.reduce_ops import PREMUL_SUM, premultiplied_inputs
from distsim.script_capture.rank.tensor_payloads import dtype_of, pack_tensors
from distsim.script_capture.rank.work import HubRequest

if TYPE_CHECKING:
    from torch import Tensor

TorchOptions = Any
_P2P_OPS: Final = frozenset({"isend", "irecv"})
#: Names of events in a profile, where they differ from the operation's.
_PROFILER_NAMES: Final = {"isend": "send", "irecv": "recv"}
#: Requested backends under which a group can't communicate with CPU tensors.
_BACKENDS_WITHOUT_CPU: Final = ("nccl", "cuda:nccl")
#: Where the search for the user's line starts: above `HubClient.site`, `HubCalls.call`, and the
#: method that torch calls, such as ``allreduce``.
_FRAMES_BELOW_TORCH: Final = 4


class CallFacts(NamedTuple):
    """What a call says, apart from its number, its site and its payloads."""

    op: str
    peer: int
    tag: int
    is_async: bool
    input_shapes: list[Any]
    output_shapes: list[Any]
    dtype: str
    extra: dict[str, Any]

    @property
    def contribution(self) -> tuple[object, ...]:
        """The facts of a `distsim.script_capture.hub.collective_results.CallContribution`."""
        return (self.input_shapes, self.output_shapes, self.dtype, self.extra)


class TensorTransfer(NamedTuple):
    """Which data of a call travel: ``sent`` and ``received``, None for all inputs and outputs.

    ``completes_locally``: the call depends on no other rank, so its rank continues at once.
    ``profiled``: the call is an event of torch's profiler.
    """

    sent: Sequence[Tensor] | None = None
    received: Sequence[Tensor] | None = None
    completes_locally: bool = False
    profiled: bool = True


DEFAULT_TRANSFER = TensorTransfer()


class PreparedCall(NamedTuple):
    """A call that is ready to be sent.

    ``number``: its place in the order of events of the rank. ``locations``: for each payload, its
    size if it travels with the message, or its place in shared memory. ``payloads``: those that
    travel with the message.
    """

    number: int
    site: int
    group: int
    facts: CallFacts
    locations: Sequence[PayloadLocation]
    payloads: list[bytes]

    def full_message(self) -> list[object]:
        """The ``call`` message, with all facts; `HubEventLoop._on_call` reads it."""
        facts = self.facts
        return [
            "call",
            self.number,
            self.site,
            self.group,
            facts.op,
            facts.peer,
            facts.tag,
            facts.is_async,
            facts.contribution,
            self.locations,
        ]


class _BatchEntry(NamedTuple):
    """A call of an open batch, not yet sent."""

    call: PreparedCall
    work: Any

    @property
    def is_message(self) -> bool:
        return self.call.facts.op in _P2P_OPS


def is_synchronous(opts: TorchOptions) -> bool:
    """Whether the call waits itself (``asyncOp=False``), without a `Work` for the script."""
    return opts is not None and getattr(opts, "asyncOp", True) is False


class HubCalls:
    """Makes the calls of a process group.

    ``number`` is the group's number in messages to the hub, ``members`` its global ranks, ``me``
    the group rank of this process, and ``requested_backend`` what the script asked for.
    """

    client: HubClient
    number: int
    members: list[int]
    me: int
    title: str
    requested_backend: str
    make_work: Callable[[HubRequest, Sequence[Tensor]], Any]
    #: The calls of the open batch; None if no batch is open. In a CUDA graph: their works.
    _open_batch: list[Any] | None = None

    def call(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: TorchOptions = None,
        *,
        peer: int = -1,
        tag: int = 0,
        transfer: TensorTransfer = DEFAULT_TRANSFER,
        **extra: object,
    ) -> Any:
        """Make a call with these buffers. Returns torch's Work.

        ``peer`` is a global rank: that of the other side, or of the root. ``extra`` has further
        arguments, such as ``reduce_op``.
        """
        graph = graph_being_recorded()
        if graph is not None:
            arguments: dict[str, Any] = {"peer": peer, "tag": tag, "transfer": transfer, **extra}
            make = partial(self.call, op, inputs, outputs, opts, **arguments)
            # A call inside an operator is made again when the replay runs the operator.
            return self._recorded_call(graph, None if graph.inside_operator else make, outputs)
        client = self.client
        waits_itself = is_synchronous(opts)
        buffers = [*inputs, *outputs]
        self._check_tensors(op, buffers, reduces="reduce_op" in extra)
        if self._has_backend_per_device() and buffers:
            # Each device has a backend of its own, and so a sequence of collectives of its own.
            extra["on"] = buffers[0].device.type
        sent = inputs if transfer.sent is None else transfer.sent
        received = outputs if transfer.received is None else transfer.received
        if extra.get("reduce_op") == PREMUL_SUM:
            sent = premultiplied_inputs(sent, opts, self.requested_backend)
            extra["reduce_op"] = "sum"

        locations, payloads = pack_tensors(client, sent, op)
        request = HubRequest(client, client.next_number(), received, transfer.completes_locally)
        site = client.site(_FRAMES_BELOW_TORCH)
        in_batch = self._open_batch is not None
        facts = CallFacts(
            op=op,
            peer=peer,
            tag=tag,
            # In a batch, even a call with asyncOp=False does not wait.
            is_async=in_batch or not waits_itself,
            input_shapes=[tensor.shape for tensor in inputs],
            output_shapes=[tensor.shape for tensor in outputs],
            dtype=dtype_of(buffers[0]) if buffers else "uint8",
            extra=extra,
        )
        call = PreparedCall(request.number, site, self.number, facts, locations, payloads)
        if transfer.profiled and is_profiling():
            record_profiler_event(self._profiler_name(op, peer), inputs or outputs)
        work = self.make_work(request, outputs)
        if not waits_itself:
            request.guard(site, inputs, outputs)
        if self._open_batch is not None:
            request.in_open_batch = True
            self._open_batch.append(_BatchEntry(call, work))
        else:
            self._send(call, request, waits_itself)
        return work

    def _send(self, call: PreparedCall, request: HubRequest, waits_itself: bool) -> None:
        """Send a call outside batches and, if it waits itself, wait for its result."""
        message, payloads = self._shortest_message(call)
        if waits_itself and not request.completes_locally:
            request.waited = True
            request.complete(*self.client.request(message, payloads))
        else:
            self.client.post(message, payloads)
            request.waited = request.done = waits_itself

    def _recorded_call(
        self, graph: RecordedGraph, make: Callable[[], object] | None, outputs: Sequence[Tensor]
    ) -> Any:
        """The work of a call in a CUDA graph; each replay makes the call."""
        request: Any = RecordedRequest(self.client, graph, make)
        request.results = outputs
        work = self.make_work(request, outputs)
        if self._open_batch is not None:
            self._open_batch.append(work)
        return work

    # --- checks ---
    def _check_tensors(self, op: str, buffers: Sequence[Tensor], reduces: bool) -> None:
        if reduces and any(tensor.is_sparse for tensor in buffers):
            raise UnsupportedError(f"distsim capture does not support sparse tensors in {op}")
        if cuda_is_emulated() and buffers:
            self._check_device(buffers[0])

    def _check_device(self, tensor: Tensor) -> None:
        """Raises torch's error for a CPU tensor on a group that has only NCCL.

        (`ProcessGroup::getBackend` in ProcessGroup.hpp.) Only with emulated GPUs: without them,
        NCCL's rules apply to the tensors of the CPU.
        """
        if tensor.is_cpu and self.requested_backend in _BACKENDS_WITHOUT_CPU:
            raise RuntimeError("No backend type associated with device type cpu")

    def _has_backend_per_device(self) -> bool:
        """Whether it was created with a backend for each device, as ``cpu:gloo,cuda:nccl``."""
        return ":" in self.requested_backend

    def needs_full_call(self) -> bool:
        """Whether a call must go through `call`, which checks the tensor's device.

        So do calls in a batch, and groups with a backend for each device.
        """
        # Runs for each message of the fast path, so `_has_backend_per_device` is written out.
        if cuda_is_emulated() and self.requested_backend in _BACKENDS_WITHOUT_CPU:
            return True
        return ":" in self.requested_backend or self._open_batch is not None

    def _profiler_name(self, op: str, peer: int) -> str:
        """The name that the backend gives to the event of a call."""
        name = _PROFILER_NAMES.get(op, op)
        if op == "irecv" and peer < 0:
            name = "recvAnySource"
        return f"{self.requested_backend}:{name}"

    # --- messages to the hub ---
    def _shortest_message(self, call: PreparedCall) -> tuple[Sequence[object], list[bytes]]:
        """The message of a call and its payloads: by the number of its template, or in full.

        A payload in shared memory has another location each time, so such a call has no template.
        """
        has_shared_memory = len(call.payloads) < len(call.locations)
        template = None if has_shared_memory else self._template_of(call)
        if template is None:
            return call.full_message(), call.payloads
        return ("repeat", template), [encoded_call_number(call.number), *call.payloads]

    def _template_of(self, call: PreparedCall) -> int | None:
        """The number of the template of equal calls, which the first one defines; None: none."""
        facts = call.facts
        counts = tuple(map(len, call.payloads))
        key = (
            call.site,
            call.group,
            facts.op,
            facts.peer,
            facts.tag,
            facts.is_async,
            tuple(facts.input_shapes),
            tuple(facts.output_shapes),
            facts.dtype,
            counts,
            *facts.extra.items(),
        )
        try:
            template = self.client.templates.get(key)
        except TypeError:
            # The arguments contain a list, such as the splits of an all_to_all, which has no hash.
            return None
        if template is not None:
            return template
        waited = False  # The wait is an event of its own; the fast path has calls with their wait.
        return self.client.register_template(
            key,
            (
                call.site,
                call.group,
                facts.op,
                facts.peer,
                facts.tag,
                facts.is_async,
                waited,
                facts.contribution,
                counts,
            ),
        )

    # --- batches ---
    def start_batch(self) -> None:
        """Collect the calls that follow, until `end_batch`."""
        self._open_batch = []
        graph = graph_being_recorded()
        if graph is not None:
            graph.add_step(self.start_batch)

    def end_batch(self) -> list[Any]:
        """Send all calls of the batch at once. Returns their works.

        Messages are one call. Collectives among them (NCCL's coalesced ones) follow as calls of
        their own: in one launch of NCCL there is no order between them and messages
        (ncclGroupEnd).
        """
        entries, self._open_batch = self._open_batch or [], None
        graph = graph_being_recorded()
        if graph is not None:
            graph.add_step(self.end_batch)
            return entries
        # The numbers order the events of a rank. The calls share theirs out again, in the order in
        # which they are sent.
        numbers = [entry.call.number for entry in entries]
        # A stable sort: messages first, each kind in its own order.
        messages_first = sorted(entries, key=lambda entry: not entry.is_message)
        for number, entry in zip(numbers, messages_first, strict=True):
            request = entry.work.request
            request.number = number
            request.in_open_batch = False
            message = entry.call._replace(number=number).full_message()
            if entry.is_message:
                batch_number = numbers[0]
                message.append(batch_number)
            self.client.queue(message, entry.call.payloads)
        self.client.flush()
        return [entry.work for entry in entries]
