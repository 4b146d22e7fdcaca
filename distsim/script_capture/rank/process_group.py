"""The hub's process group: each operation that torch asks of a group becomes a call to the hub.

`distsim.script_capture.patches.install` combines `ProcessGroupMethods` with torch's own class, so
names and signatures of its methods are torch's (ProcessGroup.hpp, and its Python bindings in
torch/csrc/distributed/c10d/init.cpp).

Whether a backend accepts a call is not decided here: every call is made, so that the calls that
follow are known too, and the evaluation says which backend refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.script_capture.cuda.emulation import cuda_is_emulated
from distsim.script_capture.cuda.graphs import RecordedGraph, graph_being_recorded
from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.protocol.message_types import timeout_in_ns
from distsim.script_capture.protocol.wire import PayloadLocation, encoded_call_number
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.graph_calls import RecordedRequest
from distsim.script_capture.rank.profiler_events import is_profiling, record_profiler_event
from distsim.script_capture.rank.reduce_ops import (
    PREMUL_SUM,
    premultiplied_inputs,
    reduce_op_name,
)
from distsim.script_capture.rank.tensor_payloads import dtype_of, pack_tensors
from distsim.script_capture.rank.work import CombinedWork, HubRequest

if TYPE_CHECKING:
    from torch import Tensor

TorchOptions = Any
_P2P_OPS: Final = frozenset({"isend", "irecv"})
#: Names of events in a profile, where they differ from the operation's.
_PROFILER_NAMES: Final = {"isend": "send", "irecv": "recv"}
#: Requested backends under which a group can't communicate with CPU tensors.
_BACKENDS_WITHOUT_CPU: Final = ("nccl", "cuda:nccl")
#: Positions in a ``call`` message.
_NUMBER_FIELD: Final = 1
_OP_FIELD: Final = 4


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


class _BatchEntry(NamedTuple):
    """A call of an open batch, not yet sent."""

    message: list[Any]
    blobs: list[bytes]
    work: Any

    @property
    def is_message(self) -> bool:
        return self.message[_OP_FIELD] in _P2P_OPS


def _is_synchronous(opts: TorchOptions) -> bool:
    """Whether the call waits itself (``asyncOp=False``), without a `Work` for the script."""
    return opts is not None and getattr(opts, "asyncOp", True) is False


class ProcessGroupMethods:
    """Methods of the hub's `ProcessGroup`.

    ``number`` is the group's number in messages to the hub, ``members`` its global ranks, ``me``
    the group rank of this process, and ``requested_backend`` what the script asked for.
    ``__dict__["batch"]`` exists only while a batch is open.
    """

    client: HubClient
    number: int
    members: list[int]
    me: int
    title: str
    requested_backend: str
    make_work: Callable[[HubRequest, Sequence[Tensor]], Any]

    # --- what torch asks of every group ---
    def rank(self) -> int:
        """The group rank of this process."""
        return self.me

    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    def name(self) -> str:
        """The backend that the script asked for."""
        return self.requested_backend

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """What C++ sees (`reducer`, `logger`).

        Not the name of a real backend: C++ would look for that backend's own class.
        """
        return "distsim"

    @property
    def group_name(self) -> str:
        """The group's name in torch."""
        return self.title

    @property
    def group_desc(self) -> str:
        """The group's description in torch."""
        return str(self.__dict__.get("desc", ""))

    def getGroupName(self) -> str:  # noqa: N802
        """The name, as C++ asks for it."""
        return self.title

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description, as C++ asks for it."""
        return self.group_desc

    def _set_group_name(self, name: str) -> None:
        self.title = name

    def _set_group_desc(self, desc: str) -> None:
        self.__dict__["desc"] = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    @property
    def _device_types(self) -> list[object]:
        import torch

        if not torch.cuda.is_available():
            return [torch.device("cpu")]
        if self.requested_backend == "nccl":
            return [torch.device("cuda")]
        return [torch.device("cpu"), torch.device("cuda")]

    @property
    def options(self) -> object:
        """An object with the default timeout, which torch reads."""
        default = type("Options", (), {"_timeout": timedelta(minutes=30)})()
        return self.__dict__.setdefault("held_options", default)

    def _get_backend(self, device: object) -> object:
        """The group is its own backend, so calls through either arrive here."""
        return self

    def _has_hooks(self) -> bool:
        return False

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def _no_op(self, *args: object, **kwargs: object) -> None:
        """torch calls it; it has no meaning here."""

    abort = _no_op
    shutdown = _no_op
    set_timeout = _no_op
    setTimeout = _no_op  # noqa: N815
    perform_nocolor_split = _no_op
    eager_connect_single_device = _no_op
    _set_sequence_number_for_group = _no_op
    _wait_for_pending_works = _no_op
    _set_default_timeout = _no_op
    _add_ephemeral_timeout = _no_op
    _register_on_completion_hook = _no_op
    _enable_collectives_timing = _no_op

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # --- making a call ---
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
            return self._recorded_call(graph, None if graph.inside_operator else make, outputs)
        client = self.client
        is_sync = _is_synchronous(opts)
        buffers = [*inputs, *outputs]
        if "reduce_op" in extra:
            _refuse_sparse(op, buffers)
        if cuda_is_emulated() and buffers:
            self._check_device(buffers[0])
        if self._has_backend_per_device() and buffers:
            extra["on"] = buffers[0].device.type
        sent = inputs if transfer.sent is None else transfer.sent
        received = outputs if transfer.received is None else transfer.received
        if extra.get("reduce_op") == PREMUL_SUM:
            sent = premultiplied_inputs(sent, opts, self.requested_backend)
            extra["reduce_op"] = "sum"

        pieces, blobs = pack_tensors(client, sent, op)
        request = HubRequest(client, client.next_number(), received, transfer.completes_locally)
        site = client.site(4)
        dtype = dtype_of(buffers[0]) if buffers else "uint8"
        shapes = _shapes(inputs), _shapes(outputs)
        facts = CallFacts(op, peer, tag, not is_sync, *shapes, dtype, extra)
        if transfer.profiled and is_profiling():
            record_profiler_event(self._profiler_name(op, peer), inputs or outputs)
        work = self.make_work(request, outputs)
        if not is_sync:
            request.guard(site, inputs, outputs)

        batch = self.__dict__.get("batch")
        if batch is not None:
            request.in_open_batch = True
            # In a batch, even a call with asyncOp=False does not wait.
            facts = facts._replace(is_async=True)
            message = self._message(request.number, site, facts, pieces)
            batch.append(_BatchEntry(message, blobs, work))
            return work
        encoded, blobs = self._encoded_call(request.number, site, facts, pieces, blobs)
        if is_sync and not transfer.completes_locally:
            request.waited = True
            request.complete(*client.request(encoded, blobs))
        else:
            client.post(encoded, blobs)
            request.waited = request.done = is_sync
        return work

    def _recorded_call(
        self, graph: RecordedGraph, make: Callable[[], object] | None, outputs: Sequence[Tensor]
    ) -> Any:
        """The work of a call in a CUDA graph; each replay makes the call."""
        request: Any = RecordedRequest(self.client, graph, make)
        request.results = outputs
        work = self.make_work(request, outputs)
        batch = self.__dict__.get("batch")
        if batch is not None:
            batch.append(work)
        return work

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

    def _profiler_name(self, op: str, peer: int) -> str:
        """The name that the backend gives to the event of a call."""
        name = _PROFILER_NAMES.get(op, op)
        if op == "irecv" and peer < 0:
            name = "recvAnySource"
        return f"{self.requested_backend}:{name}"

    def _message(
        self, number: int, site: int, facts: CallFacts, pieces: Sequence[PayloadLocation]
    ) -> list[object]:
        """The ``call`` message, in full."""
        return [
            "call",
            number,
            site,
            self.number,
            facts.op,
            facts.peer,
            facts.tag,
            facts.is_async,
            facts.contribution,
            pieces,
        ]

    def _encoded_call(
        self,
        number: int,
        site: int,
        facts: CallFacts,
        pieces: Sequence[PayloadLocation],
        blobs: list[bytes],
    ) -> tuple[Sequence[object], list[bytes]]:
        """A call as it is sent: by the number of its template if possible, else in full.

        Payloads in shared memory have another location each time, so such calls have no template.
        """
        if len(blobs) < len(pieces):
            return self._message(number, site, facts, pieces), blobs
        client = self.client
        counts = tuple(map(len, blobs))
        key = (
            site,
            self.number,
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
            template = client.templates.get(key)
        except TypeError:  # a list among the arguments, such as the splits of an all_to_all
            return self._message(number, site, facts, pieces), blobs
        if template is None:
            waited = False
            template = client.register_template(
                key,
                (
                    site,
                    self.number,
                    facts.op,
                    facts.peer,
                    facts.tag,
                    facts.is_async,
                    waited,
                    facts.contribution,
                    counts,
                ),
            )
        return ("repeat", template), [encoded_call_number(number), *blobs]

    def needs_full_call(self) -> bool:
        """Whether a call must go through `call`, which checks the tensor's device.

        So do calls in a batch, and groups with a backend for each device.
        """
        # Runs for each message of the fast path, so `_has_backend_per_device` is written out.
        if cuda_is_emulated() and self.requested_backend in _BACKENDS_WITHOUT_CPU:
            return True
        return ":" in self.requested_backend or self.__dict__.get("batch") is not None

    # --- messages ---
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> object:  # noqa: N803
        """Send to a group rank; the message is buffered."""
        transfer = TensorTransfer(completes_locally=True)
        peer = self._global_rank(dstRank)
        return self.call("isend", tensors, (), peer=peer, tag=tag, transfer=transfer)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> object:  # noqa: N803
        """Receive from a group rank."""
        return self.call("irecv", (), tensors, peer=self._global_rank(srcRank), tag=tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> object:
        """Received under every backend; the evaluation says which of them refuses it."""
        return self.call("irecv", (), tensors, tag=tag)

    def _global_rank(self, group_rank: int) -> int:
        """Raises ValueError, from which `exit_reason` derives the finding for an invalid rank."""
        if not 0 <= group_rank < len(self.members):
            raise ValueError(
                f"Invalid rank {group_rank}: the group has ranks 0 to {len(self.members) - 1}"
            )
        return self.members[group_rank]

    # --- batches ---
    def start_batch(self) -> None:
        """Collect the calls that follow, until `end_batch`."""
        self.__dict__["batch"] = []
        graph = graph_being_recorded()
        if graph is not None:
            graph.add_step(self.start_batch)

    def end_batch(self) -> list[Any]:
        """Send all calls of the batch at once. Returns their works.

        Messages are one call. Collectives among them (NCCL's coalesced ones) follow as calls of
        their own: in one launch of NCCL there is no order between them and messages
        (ncclGroupEnd).
        """
        graph = graph_being_recorded()
        if graph is not None:
            graph.add_step(self.end_batch)
            return self.__dict__.pop("batch", None) or []
        entries: list[_BatchEntry] = self.__dict__.pop("batch", None) or []
        numbers = [entry.message[_NUMBER_FIELD] for entry in entries]
        # A stable sort: messages first, each kind in its own order.
        messages_first = sorted(entries, key=lambda entry: not entry.is_message)
        for number, entry in zip(numbers, messages_first, strict=True):
            request = entry.work.request
            request.number = entry.message[_NUMBER_FIELD] = number
            request.in_open_batch = False
            if entry.is_message:
                batch_number = numbers[0]
                self.client.queue([*entry.message, batch_number], entry.blobs)
            else:
                self.client.queue(entry.message, entry.blobs)
        self.client.flush()
        return [entry.work for entry in entries]

    def _start_coalescing(self, device: Any) -> None:
        """Raises RuntimeError as torch does for all backends but NCCL (Backend.hpp)."""
        backend = self.requested_backend
        for part in backend.split(","):
            device_type, colon, device_backend = part.partition(":")
            if colon and device_type == device.type:
                backend = device_backend
        if backend != "nccl":
            raise RuntimeError(f"Backend {backend} does not implement startCoalescing")
        self.start_batch()

    def _end_coalescing(self, device: object) -> Any:
        works = self.end_batch()
        return works[0] if len(works) == 1 else CombinedWork(works)

    # --- collectives without a root ---
    def allreduce(self, tensors: Any, opts: TorchOptions = None, timeout: object = None) -> object:
        """One tensor, in a list or alone."""
        tensors = _as_list(tensors)[:1]
        reduce_op = reduce_op_name(opts) if opts is not None else "sum"
        return self.call("all_reduce", tensors, tensors, opts, reduce_op=reduce_op)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: TorchOptions = None) -> object:
        """Several tensors in one call."""
        reduce_op = reduce_op_name(opts)
        return self.call("all_reduce_coalesced", tensors, tensors, opts, reduce_op=reduce_op)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: TorchOptions = None
    ) -> object:
        """Outputs are a list, or a list in a list."""
        inputs = _as_list(input_tensors)[:1]
        is_nested = isinstance(output_tensors[0], list | tuple)
        outputs = output_tensors[0] if is_nested else output_tensors
        return self.call("all_gather", inputs, outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: TorchOptions = None) -> object:
        """`all_gather_into_tensor`."""
        return self.call("all_gather_into_tensor", [input], [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: TorchOptions = None
    ) -> object:
        """Several `all_gather_into_tensor` in one call."""
        return self.call("all_gather_into_tensor_coalesced", inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: TorchOptions = None,
    ) -> object:
        """One all_gather for each tensor, but one event of the profiler."""
        if is_profiling():
            record_profiler_event(f"{self.requested_backend}:all_gather", inputs)
        transfer = TensorTransfer(profiled=False)
        works = []
        for tensor, gathered in zip(inputs, zip(*outputs, strict=True), strict=True):
            works.append(self.call("all_gather", [tensor], gathered, None, transfer=transfer))
        if _is_synchronous(opts):
            CombinedWork(works).wait()
        return works[0] if len(works) == 1 else CombinedWork(works)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: TorchOptions = None, timeout: object = None
    ) -> object:
        """Inputs are a list, or a list in a list."""
        parts = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        output = _as_list(outputs)[:1]
        reduce_op = reduce_op_name(opts)
        return self.call("reduce_scatter", parts, output, opts, reduce_op=reduce_op)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: TorchOptions = None
    ) -> object:
        """`reduce_scatter_tensor`."""
        self._check_reduce_scatter_sizes([input], [output])
        reduce_op = reduce_op_name(opts)
        return self.call("reduce_scatter_tensor", [input], [output], opts, reduce_op=reduce_op)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: TorchOptions = None
    ) -> object:
        """Several `reduce_scatter_tensor` in one call."""
        self._check_reduce_scatter_sizes(inputs, outputs)
        op = "reduce_scatter_tensor_coalesced"
        return self.call(op, inputs, outputs, opts, reduce_op=reduce_op_name(opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _check_reduce_scatter_sizes(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Raise as torch does if an input cannot be divided into one output for each member.

        Gloo raises RuntimeError and NCCL ValueError (ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp).
        """
        for tensor, output in zip(inputs, outputs, strict=False):
            if tensor.numel() != output.numel() * self.size():
                error = ValueError if "nccl" in self.requested_backend else RuntimeError
                raise error(
                    "input tensor must be the same size as output size times world size"
                    f" ({tensor.numel()} elements, not {output.numel()} * {self.size()})"
                )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: TorchOptions = None,
    ) -> object:
        """Empty splits mean equal parts."""
        return self.call(
            "all_to_all_single",
            [input],
            [output],
            opts,
            output_splits=list(output_splits),
            input_splits=list(input_splits),
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: TorchOptions = None
    ) -> object:
        """`all_to_all`, with one tensor for each member."""
        return self.call("all_to_all", inputs, outputs, opts)

    def barrier(self, opts: TorchOptions = None, timeout: object = None) -> object:
        """A collective without data."""
        return self.call("barrier", (), (), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier that raises after its timeout."""
        synchronous = type("Opts", (), {"asyncOp": False})
        self.call(
            "monitored_barrier",
            (),
            (),
            synchronous,
            timeout_ns=timeout_in_ns(timeout),
            wait_all_ranks=wait_all_ranks,
        )

    # --- collectives with a root ---
    def broadcast(self, tensors: Any, opts: TorchOptions = None, timeout: object = None) -> object:
        """The root sends; the other members receive into the same tensor."""
        tensors = _as_list(tensors)[:1]
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        if root == self.me:
            transfer = TensorTransfer(sent=tensors, received=(), completes_locally=True)
        else:
            transfer = TensorTransfer(sent=(), received=tensors)
        peer = self._global_rank(root)
        return self.call("broadcast", tensors, tensors, opts, peer=peer, transfer=transfer)

    def reduce(self, tensors: Any, opts: TorchOptions = None, *_: object) -> object:
        """Only the root receives the result."""
        tensors = _as_list(tensors)[:1]
        if opts.rootRank == self.me:
            transfer = TensorTransfer(received=tensors)
        else:
            transfer = TensorTransfer(received=(), completes_locally=True)
        return self.call(
            "reduce",
            tensors,
            tensors,
            opts,
            peer=self._global_rank(opts.rootRank),
            transfer=transfer,
            reduce_op=reduce_op_name(opts),
        )

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: TorchOptions = None,
    ) -> object:
        """Only the root has outputs."""
        is_nested = outputs and isinstance(outputs[0], list | tuple)
        gathered: Any = outputs[0] if is_nested else outputs
        is_root = opts.rootRank == self.me
        return self.call(
            "gather",
            inputs[:1],
            gathered if is_root else (),
            opts,
            peer=self._global_rank(opts.rootRank),
            transfer=TensorTransfer(completes_locally=not is_root),
        )

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: TorchOptions = None,
    ) -> object:
        """Only the root has inputs."""
        is_nested = inputs and isinstance(inputs[0], list | tuple)
        parts: Any = inputs[0] if is_nested else inputs
        is_root = opts.rootRank == self.me
        peer = self._global_rank(opts.rootRank)
        return self.call("scatter", parts if is_root else (), outputs[:1], opts, peer=peer)


def _shapes(tensors: Sequence[Tensor]) -> list[Any]:
    return [tensor.shape for tensor in tensors]


def _refuse_sparse(op: str, tensors: Sequence[Tensor]) -> None:
    if any(tensor.is_sparse for tensor in tensors):
        raise UnsupportedError(f"distsim capture does not support sparse tensors in {op}")


def _as_list(tensors: Any) -> list[Any]:
    """torch passes one tensor or a list of one, depending on the function."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]
