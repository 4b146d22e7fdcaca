"""A process group of the hub: every operation that torch's Python and C++ ask of one, as a call
with its call site.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.script_capture.hub.call_templates import encoded_call_number
from distsim.script_capture.patches.fake_tensors import is_fake
from distsim.script_capture.protocol.wire import PayloadLocation
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.tensor_payloads import UnsupportedError, dtype_of, pack_tensors
from distsim.script_capture.rank.work import CombinedWork, HubRequest

if TYPE_CHECKING:
    from torch import Tensor

TorchOptions = Any
#: A call: op, peer, tag, is_async; shapes of inputs and outputs, dtype, what else it says.
CallFacts = tuple[str, int, int, bool, list[Any], list[Any], str, dict[str, Any]]
#: The reduce op of nccl that multiplies before it adds; FSDP2 takes it to divide gradients.
PREMUL_SUM = "premul_sum"
_P2P_OPS = frozenset({"isend", "irecv"})
#: Names of events in a profile, where they differ.
_PROFILER_NAMES = {"isend": "send", "irecv": "recv"}


class TensorTransfer(NamedTuple):
    """Which numbers of a call travel: ``given`` and ``taken``, None for all of its inputs and
    outputs.

    ``kept``: it needs nobody, so its rank goes on at once. ``shown``: it is an event of torch's
    profiler.
    """

    given: Sequence[Tensor] | None = None
    taken: Sequence[Tensor] | None = None
    kept: bool = False
    shown: bool = True


DEFAULT_TRANSFER = TensorTransfer()


def reduce_op_name(opts: TorchOptions) -> str:
    """The reduce op as distsim names it, or `PREMUL_SUM`."""
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", None)
    return _lowercase_name(op) if kind is None else _cached_reduce_op_name(kind)


@cache
def _cached_reduce_op_name(kind: object) -> str:
    return _lowercase_name(kind)


def _lowercase_name(kind: object) -> str:
    return str(getattr(kind, "name", kind)).rsplit(".", 1)[-1].lower()


def premultiplied_inputs(
    tensors: Sequence[Tensor], opts: TorchOptions, backend: str
) -> list[Tensor]:
    """What is summed up under PREMUL_SUM: each input times the op's factor. Raises RuntimeError as
    torch does where it is not nccl's.
    """
    if "nccl" not in backend:
        raise RuntimeError(f"Cannot use ReduceOp.PREMUL_SUM with {backend.capitalize()}")
    python = import_module("torch.utils._python_dispatch")
    factor = (opts.reduceOp if hasattr(opts, "reduceOp") else opts).__getstate__()[1]
    with (
        python._disable_current_modes()
    ):  # nccl's kernel does it on the way: nothing of the script's to count
        return [t if is_fake(t) else t.detach() * factor for t in tensors]


def _is_synchronous(opts: TorchOptions) -> bool:
    return opts is not None and getattr(opts, "asyncOp", True) is False


class ProcessGroupMethods:
    """What a `ProcessGroup` of the hub does. `patches` lays it over torch's class."""

    client: HubClient
    number: int
    members: list[int]
    me: int
    title: str
    requested_backend: str
    make_work: Callable[[HubRequest, Sequence[Tensor]], Any]

    # --- what torch asks of every group ---
    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return len(self.members)

    def name(self) -> str:
        return self.requested_backend

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802
        """What C++ is told: under the name of a back end it would look for that one's own class
        (`reducer`, `logger`).
        """
        return "distsim"

    @property
    def group_name(self) -> str:
        return self.title

    @property
    def group_desc(self) -> str:
        return str(self.__dict__.get("desc", ""))

    def getGroupName(self) -> str:  # noqa: N802
        return self.title

    def getGroupDesc(self) -> str:  # noqa: N802
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
        return [
            torch.device(kind)
            for kind in ("cpu", "cuda")
            if kind == "cuda" or self.requested_backend != "nccl"
        ]

    @property
    def options(self) -> object:
        return self.__dict__.setdefault(
            "held_options", type("Options", (), {"_timeout": timedelta(minutes=30)})()
        )

    def _get_backend(self, device: object) -> object:
        return self

    def _has_hooks(self) -> bool:
        return False

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def _nothing(self, *args: object, **kwargs: object) -> None:
        """Asked for by torch, of no meaning here."""

    abort = shutdown = set_timeout = setTimeout = _set_sequence_number_for_group = (
        _wait_for_pending_works
    ) = _nothing  # noqa: N815
    _set_default_timeout = _add_ephemeral_timeout = _register_on_completion_hook = (
        eager_connect_single_device
    ) = _nothing
    _enable_collectives_timing = perform_nocolor_split = _nothing

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # --- saying a call ---
    def call(
        self,
        op: str,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        opts: TorchOptions = None,
        *,
        peer: int = -1,
        tag: int = 0,
        flow: TensorTransfer = DEFAULT_TRANSFER,
        **extra: object,
    ) -> Any:
        """Make a call: ``ins`` and ``outs`` are its buffers, ``flow`` says which of their numbers
        travel.

        ``peer`` is a global rank: the other side, or the root. Returns torch's Work.
        """
        given, taken, kept, shown = flow
        client, is_sync = self.client, _is_synchronous(opts)
        some = [*ins, *outs]
        if extra.get("reduce_op") is not None and any(t.is_sparse for t in some):
            raise UnsupportedError(f"distsim capture does not support sparse tensors in {op}")
        if ":" in self.requested_backend and some:  # a back end for each device
            extra["on"] = some[0].device.type
        given = ins if given is None else given
        if extra.get("reduce_op") == PREMUL_SUM:
            given, extra["reduce_op"] = (
                premultiplied_inputs(given, opts, self.requested_backend),
                "sum",
            )
        pieces, blobs = pack_tensors(client, given, op)
        request = HubRequest(client, client.number(), outs if taken is None else taken, kept)
        dtype = dtype_of(some[0]) if some else "uint8"
        site = client.site(4)
        facts = (
            op,
            peer,
            tag,
            not is_sync,
            [t.shape for t in ins],
            [t.shape for t in outs],
            dtype,
            extra,
        )
        if shown and is_profiling():
            record_profiler_event(
                f"{self.requested_backend}:{_PROFILER_NAMES.get(op, op) if peer >= 0 or op != 'irecv' else 'recvAnySource'}",
                ins or outs,
            )
        work = self.make_work(request, outs)
        if not is_sync:
            request.watch(site, ins, outs)
        batch = self.__dict__.get("batch")
        if batch is not None:
            request.in_open_batch = True
            batch.append(
                (
                    self._message(request.number, site, (op, peer, tag, True, *facts[4:]), pieces),
                    blobs,
                    work,
                )
            )
            return work
        message, blobs = self._said(request.number, site, facts, pieces, blobs)
        if is_sync and not kept:
            request.waited = True
            request.take(*client.ask(message, blobs))
        else:
            client.post(message, blobs)
            request.waited = request.done = is_sync
        return work

    def _message(
        self, number: int, site: int, facts: CallFacts, pieces: Sequence[PayloadLocation]
    ) -> list[object]:
        """A call in full."""
        op, peer, tag, is_async, *sides = facts
        return ["call", number, site, self.number, op, peer, tag, is_async, sides, pieces]

    def _said(
        self,
        number: int,
        site: int,
        facts: CallFacts,
        pieces: Sequence[PayloadLocation],
        blobs: list[bytes],
    ) -> tuple[Sequence[object], list[bytes]]:
        """A call as it is said: in full, or by the name of those that are alike. Payloads in shared
        memory lie elsewhere each time.
        """
        if len(blobs) < len(pieces):
            return self._message(number, site, facts, pieces), blobs
        client = self.client
        op, peer, tag, is_async, ins, outs, dtype, extra = facts
        counts = tuple(map(len, blobs))
        key = (
            site,
            self.number,
            op,
            peer,
            tag,
            is_async,
            tuple(ins),
            tuple(outs),
            dtype,
            counts,
            *extra.items(),
        )
        try:
            name = client.shapes.get(key)
        except TypeError:  # lists among what is said, as the splits of an all_to_all
            return self._message(number, site, facts, pieces), blobs
        if name is None:
            name = client.learn(
                key, (site, self.number, op, peer, tag, is_async, False, facts[4:], counts)
            )
        return ("again", name), [encoded_call_number(number), *blobs]

    def is_special(self) -> bool:
        """Does a call need more than to be said: is it part of a batch, or is there a back end for
        each device?
        """
        return ":" in self.requested_backend or self.__dict__.get("batch") is not None

    # --- messages ---
    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> object:  # noqa: N803
        return self.call(
            "isend",
            tensors,
            (),
            peer=self._global(dstRank),
            tag=tag,
            flow=TensorTransfer(kept=True),
        )

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> object:  # noqa: N803
        return self.call("irecv", (), tensors, peer=self._global(srcRank), tag=tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> object:
        """It is received under every back end, so that what follows is known; the judgement says
        which of them refuses it.
        """
        return self.call("irecv", (), tensors, tag=tag)

    def _global(self, rank: int) -> int:
        if not 0 <= rank < len(self.members):
            raise ValueError(
                f"Invalid rank {rank}: the group has ranks 0 to {len(self.members) - 1}"
            )
        return self.members[rank]

    # --- a batch as one unit ---
    def start_batch(self) -> None:
        self.__dict__["batch"] = []

    def end_batch(self) -> list[Any]:
        """Hand all of it over at once. Returns the works.

        Messages are one call; collectives among them, as nccl's coalesced ones, follow each as
        its own, since between them and messages there is no order in one launch of nccl
        (ncclGroupEnd).
        """
        held = self.__dict__.pop("batch", None) or []
        numbers = [message[1] for message, _, _ in held]
        first = sorted(held, key=lambda one: one[0][4] not in _P2P_OPS)
        for number, (message, blobs, work) in zip(numbers, first, strict=True):
            message[1] = work.request.number = number
            work.request.in_open_batch = False
            self.client.hold([*message, numbers[0]] if message[4] in _P2P_OPS else message, blobs)
        self.client.flush()
        return [work for _, _, work in held]

    def _start_coalescing(self, device: Any) -> None:
        """Raises RuntimeError as torch does where the device's back end has none (Backend.hpp,
        `startCoalescing`): all but nccl.
        """
        pairs = dict(
            pair.split(":", 1) for pair in self.requested_backend.split(",") if ":" in pair
        )
        backend = pairs.get(device.type, self.requested_backend)
        if backend != "nccl":
            raise RuntimeError(f"Backend {backend} does not implement startCoalescing")
        self.start_batch()

    def _end_coalescing(self, device: object) -> Any:
        works = self.end_batch()
        return works[0] if len(works) == 1 else CombinedWork(works)

    # --- collectives in which all play the same part ---
    def allreduce(self, tensors: Any, opts: TorchOptions = None, timeout: object = None) -> object:
        tensors = _as_list(tensors)
        return self.call(
            "all_reduce",
            tensors[:1],
            tensors[:1],
            opts,
            reduce_op=reduce_op_name(opts) if opts is not None else "sum",
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: TorchOptions = None) -> object:
        return self.call(
            "all_reduce_coalesced", tensors, tensors, opts, reduce_op=reduce_op_name(opts)
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: TorchOptions = None
    ) -> object:
        outs, ins = output_tensors, _as_list(input_tensors)
        return self.call(
            "all_gather", ins[:1], outs[0] if isinstance(outs[0], list | tuple) else outs, opts
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: TorchOptions = None) -> object:
        return self.call("all_gather_into_tensor", [input], [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: TorchOptions = None
    ) -> object:
        return self.call("all_gather_into_tensor_coalesced", inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: TorchOptions = None,
    ) -> object:
        if is_profiling():
            record_profiler_event(f"{self.requested_backend}:all_gather", inputs)
        works = [
            self.call("all_gather", [one], outs, None, flow=TensorTransfer(shown=False))
            for one, outs in zip(inputs, zip(*outputs, strict=True), strict=True)
        ]
        if _is_synchronous(opts):
            CombinedWork(works).wait()
        return works[0] if len(works) == 1 else CombinedWork(works)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: TorchOptions = None, timeout: object = None
    ) -> object:
        ins = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        return self.call(
            "reduce_scatter", ins, _as_list(outputs)[:1], opts, reduce_op=reduce_op_name(opts)
        )

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: TorchOptions = None
    ) -> object:
        return self.call(
            "reduce_scatter_tensor", [input], [output], opts, reduce_op=reduce_op_name(opts)
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: TorchOptions = None
    ) -> object:
        return self.call(
            "reduce_scatter_tensor_coalesced", inputs, outputs, opts, reduce_op=reduce_op_name(opts)
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: TorchOptions = None,
    ) -> object:
        splits: dict[str, Any] = {
            "output_splits": list(output_splits),
            "input_splits": list(input_splits),
        }
        return self.call("all_to_all_single", [input], [output], opts, **splits)

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: TorchOptions = None
    ) -> object:
        return self.call("all_to_all", inputs, outputs, opts)

    def barrier(self, opts: TorchOptions = None, timeout: object = None) -> object:
        return self.call("barrier", (), (), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        limit = None if timeout is None else round(timeout.total_seconds() * 1e9)
        sync = type("Opts", (), {"asyncOp": False})
        self.call(
            "monitored_barrier", (), (), sync, timeout_ns=limit, wait_all_ranks=wait_all_ranks
        )

    # --- collectives with a root ---
    def broadcast(self, tensors: Any, opts: TorchOptions = None, timeout: object = None) -> object:
        tensors = _as_list(tensors)[:1]
        root = opts.rootRank if hasattr(opts, "rootRank") else int(opts or 0)
        mine = root == self.me
        flow = TensorTransfer(
            given=tensors if mine else (), taken=() if mine else tensors, kept=mine
        )
        return self.call("broadcast", tensors, tensors, opts, peer=self._global(root), flow=flow)

    def reduce(self, tensors: Any, opts: TorchOptions = None, *_: object) -> object:
        tensors, mine = _as_list(tensors)[:1], opts.rootRank == self.me
        flow, root = (
            TensorTransfer(taken=tensors if mine else (), kept=not mine),
            self._global(opts.rootRank),
        )
        return self.call(
            "reduce", tensors, tensors, opts, peer=root, flow=flow, reduce_op=reduce_op_name(opts)
        )

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: TorchOptions = None,
    ) -> object:
        outs: Any = outputs[0] if outputs and isinstance(outputs[0], list | tuple) else outputs
        mine = opts.rootRank == self.me
        return self.call(
            "gather",
            inputs[:1],
            outs if mine else (),
            opts,
            peer=self._global(opts.rootRank),
            flow=TensorTransfer(kept=not mine),
        )

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: TorchOptions = None,
    ) -> object:
        ins: Any = inputs[0] if inputs and isinstance(inputs[0], list | tuple) else inputs
        mine = opts.rootRank == self.me
        return self.call(
            "scatter", ins if mine else (), outputs[:1], opts, peer=self._global(opts.rootRank)
        )


@cache
def _profiler_query() -> Callable[[], bool]:
    autograd = import_module("torch.autograd")
    found: Callable[[], bool] = autograd._profiler_enabled
    return found


def is_profiling() -> bool:
    return _profiler_query()()


def record_profiler_event(name: str, tensors: Sequence[Tensor]) -> None:
    """The event that torch's profiler would have of a call. It ends on another thread, as that of a
    back end's worker does.
    """
    autograd = import_module("torch.autograd")
    event = autograd._record_function_with_args_enter(name, *tensors)
    ends = threading.Thread(target=autograd._record_function_with_args_exit, args=(event,))
    ends.start()
    ends.join()


def _as_list(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]
