"""The hub's process group: each operation that torch asks of a group becomes a call to the hub.

`distsim.script_capture.patches.install` combines `ProcessGroupMethods` with torch's own class, so
names and signatures of its methods are torch's (ProcessGroup.hpp, and its Python bindings in
torch/csrc/distributed/c10d/init.cpp). `distsim.script_capture.rank.hub_calls` makes the calls.

Whether a backend accepts a call is not decided here: every call is made, so that the calls that
follow are known too, and the evaluation says which backend refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from distsim.script_capture.protocol.message_types import timeout_in_ns
from distsim.script_capture.rank.hub_calls import (
    HubCalls,
    TensorTransfer,
    TorchOptions,
    is_synchronous,
)
from distsim.script_capture.rank.profiler_events import is_profiling, record_profiler_event
from distsim.script_capture.rank.reduce_ops import reduce_op_name
from distsim.script_capture.rank.work import CombinedWork

if TYPE_CHECKING:
    from torch import Tensor

#: Of torch's groups but NCCL's (torch/distributed/constants.py).
_DEFAULT_TIMEOUT: Final = timedelta(minutes=30)


class ProcessGroupMethods(HubCalls):
    """Methods of the hub's `ProcessGroup`."""

    _description = ""
    _held_options: object = None

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
        return self._description

    def getGroupName(self) -> str:  # noqa: N802
        """The name, as C++ asks for it."""
        return self.title

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description, as C++ asks for it."""
        return self.group_desc

    def _set_group_name(self, name: str) -> None:
        self.title = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

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
        if self._held_options is None:
            self._held_options = type("Options", (), {"_timeout": _DEFAULT_TIMEOUT})()
        return self._held_options

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
        if is_synchronous(opts):
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


def _as_list(tensors: Any) -> list[Any]:
    """torch passes one tensor or a list of one, depending on the function."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]
