"""Report the random state at each dropout, for `capture --check-values`.

Ranks of a tensor-parallel group hold copies of some activations. A dropout of such a copy must draw
the same numbers on all of them, else the copies differ from there on. Replicas of data parallelism
have other activations, and their random states may differ.

Nothing names the tensor-parallel groups. They are recognised by what they do: modules call
collectives on them in a forward pass, and neither DDP nor FSDP uses them. What is compared, and
how, is in `distsim.script_capture.result.random_state_checks`.

Dropout of a DTensor is not reported: DTensor sees to its random state itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, Final

from distsim.script_capture.patches.value_checksums import checksum
from distsim.script_capture.protocol.message_types import DROPOUT_REPORT, MODEL_GROUP_REPORT
from distsim.script_capture.rank.client import HubClient
from distsim.script_capture.rank.process_group import ProcessGroupMethods

#: Collectives by which tensor parallelism combines activations.
_ACTIVATION_COLLECTIVES: Final = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)
_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")


class RandomProbes:
    """The probes of one process.

    ``data_parallel`` are ranks of groups that DDP or FSDP uses.
    """

    def __init__(self, client: HubClient) -> None:
        self.client = client
        self.data_parallel: set[tuple[int, ...]] = set()
        self._reported: set[tuple[int, ...]] = set()
        self._forward = threading.local()
        self._dropouts = 0

    def install(self) -> None:
        """Patch dropouts, modules and the hub's groups of this process."""
        modules: Any = import_module("torch.nn.modules.module")
        modules.register_module_forward_pre_hook(self._enter_forward)
        modules.register_module_forward_hook(self._leave_forward, always_call=True)
        functional: Any = import_module("torch.nn.functional")
        for name in _DROPOUTS:
            setattr(functional, name, self._before_dropout(getattr(functional, name)))
        plain_call = ProcessGroupMethods.call

        def call(group: Any, op: str, *args: Any, **kwargs: Any) -> Any:
            if op in _ACTIVATION_COLLECTIVES and self._is_in_forward():
                self._report_group(tuple(group.members))
            return plain_call(group, op, *args, **kwargs)

        setattr(ProcessGroupMethods, "call", call)  # noqa: B010 - a method of a base class

    def _is_in_forward(self) -> bool:
        return bool(vars(self._forward).get("depth"))

    def _enter_forward(self, *_: object) -> None:
        self._forward.depth = vars(self._forward).get("depth", 0) + 1

    def _leave_forward(self, *_: object) -> None:
        self._forward.depth -= 1

    def _report_group(self, ranks: tuple[int, ...]) -> None:
        is_data_parallel = any(set(ranks) <= set(others) for others in self.data_parallel)
        if ranks in self._reported or is_data_parallel:
            return
        self._reported.add(ranks)
        self.client.queue(["values", self.client.site(), MODEL_GROUP_REPORT, 0, list(ranks), 0, []])

    def _before_dropout(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def dropout(
            input: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any
        ) -> Any:
            is_plain = not hasattr(input, "placements")
            if training and p > 0 and is_plain:
                self._report_dropout(input)
            return original(input, p, training, *args, **kwargs)

        return dropout

    def _report_dropout(self, tensor: Any) -> None:
        torch: Any = import_module("torch")
        if tensor.is_cuda:
            state = torch.cuda.get_rng_state(tensor.device)
        else:
            state = torch.get_rng_state()
        entries = [
            ("activation", checksum(tensor)),
            ("random state", checksum(state)),
        ]
        site = self.client.site(4)
        self.client.queue(["values", site, DROPOUT_REPORT, 0, [], self._dropouts, entries])
        self._dropouts += 1


__all__ = ["RandomProbes"]
