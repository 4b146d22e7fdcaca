"""Report values that must be equal on several ranks, for `capture --check-values`.

Calls can match and still train garbage. These probes report, with the line of the script:

- DDP: the order of the parameters when the model is wrapped, the parameters at each forward pass,
  and gradients, optimizer state and learning rates at each optimizer step;
- FSDP1 and FSDP2: which unit each all_gather of parameters belongs to;
- DTensor: parameters with the placement Replicate, at each optimizer step;
- dropout under tensor parallelism (`distsim.script_capture.patches.random_probes`).

A value is reported as a checksum of its bytes, and compared in
`distsim.script_capture.result.value_checks`. Models that synchronise without these wrappers are not
checked: nothing says which of their values must be equal. Local SGD lets replicas differ on
purpose, so its models are exempt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from distsim.script_capture.patches.random_probes import RandomProbes
from distsim.script_capture.patches.value_checksums import checksum
from distsim.script_capture.rank.client import HubClient

Entry = tuple[str, str]


class ValueProbes:
    """The probes of one process.

    ``replicated`` has for the id of each parameter of a DDP model its name and the model's ranks.
    """

    def __init__(self, client: HubClient) -> None:
        self.client = client
        self.replicated: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._steps: WeakKeyDictionary[object, Iterator[int]] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._next_number = itertools.count()
        self.random = RandomProbes(client)

    def install(self) -> None:
        """Patch DDP, FSDP, the optimizers and dropouts of this process."""
        self.random.install()
        ddp: Any = import_module("torch.nn.parallel").DistributedDataParallel
        ddp.__init__ = self._after_init(ddp.__init__)
        ddp.forward = self._before_forward(ddp.forward)
        optimizer: Any = import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        fsdp: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
        group = fsdp.FSDPParamGroup
        group.__init__ = self._after_unit_init(group.__init__)
        group.unshard = self._before_unshard(group.unshard)
        flat: Any = import_module("torch.distributed.fsdp._flat_param").FlatParamHandle
        flat.__init__ = self._after_unit_init(flat.__init__)
        flat._all_gather_flat_param = self._before_flat_all_gather(flat._all_gather_flat_param)

    def _report(
        self, kind: str, owner: object, ranks: Iterable[int], step: int, entries: list[Entry]
    ) -> None:
        """``owner``: the model, optimizer or unit. Ranks create those in the same order."""
        number = self._numbers.get(owner)
        if number is None:
            number = self._numbers[owner] = next(self._next_number)
        site = self.client.site(4)
        self.client.queue(["values", site, kind, number, list(ranks), step, entries])

    def _step_of(self, owner: object) -> int:
        steps = self._steps.get(owner)
        if steps is None:
            steps = self._steps[owner] = itertools.count()
        return next(steps)

    # --- DDP ---
    def _after_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            ranks = _ranks_of(model.process_group)
            self.random.data_parallel.add(ranks)
            named = list(model.module.named_parameters())
            for name, parameter in named:
                self.replicated[id(parameter)] = (name, ranks)
            order = [(f"position {k}", name) for k, (name, _) in enumerate(named)]
            self._report("parameter order", model, ranks, 0, order)

        return init

    def _before_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model.training and not _is_local_sgd(model):
                entries = [(name, checksum(p)) for name, p in model.module.named_parameters()]
                ranks = _ranks_of(model.process_group)
                self._report("parameter", model, ranks, self._step_of(model), entries)
            return original(model, *args, **kwargs)

        return forward

    # --- optimizers ---
    def _before_step(self, optimizer: Any, *_: object) -> None:
        step = self._step_of(optimizer)
        by_ranks: dict[tuple[int, ...], list[Entry]] = {}
        copies: dict[tuple[int, ...], list[Entry]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name, ranks = self.replicated.get(id(parameter), ("", ()))
                if ranks:
                    entries = by_ranks.setdefault(ranks, [])
                    entries += _gradient_entries(name, parameter, optimizer.state.get(parameter))
                    entries.append((f"learning rate of {name}", str(float(group["lr"]))))
                for mesh_ranks in _replicating_ranks(parameter):
                    entry = (f"{position} of group {number}", checksum(parameter.to_local()))
                    copies.setdefault(mesh_ranks, []).append(entry)
        for ranks, entries in by_ranks.items():
            self._report("value", optimizer, ranks, step, entries)
        for ranks, entries in copies.items():
            self._report("copy", optimizer, ranks, step, entries)

    # --- FSDP ---
    def _after_unit_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(unit: Any, *args: Any, **kwargs: Any) -> None:
            original(unit, *args, **kwargs)
            self._numbers[unit] = next(self._next_number)
            group = getattr(unit, "process_group", None) or unit._all_gather_process_group
            self.random.data_parallel.add(_ranks_of(group))

        return init

    def _before_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def unshard(unit: Any, *args: Any, **kwargs: Any) -> Any:
            before = unit._all_gather_result
            site = self.client.site(3)
            found = original(unit, *args, **kwargs)
            if unit._all_gather_result is not before and unit._all_gather_result is not None:
                self._report_unit(unit, unit._all_gather_process_group, unit._module_fqn, site)
            return found

        return unshard

    def _before_flat_all_gather(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """FSDP1."""

        @wraps(original)
        def all_gather(handle: Any, *args: Any, **kwargs: Any) -> Any:
            self._report_unit(handle, handle.process_group, "", self.client.site(3))
            return original(handle, *args, **kwargs)

        return all_gather

    def _report_unit(self, unit: object, group: Any, name: str | None, site: int) -> None:
        """Report which unit an all_gather belongs to; a unit without a name is numbered."""
        label = name or f"unit {self._numbers[unit]}"
        # One sequence for the group: what meets is the k-th all_gather of each rank.
        step, ranks = self._step_of(group), list(_ranks_of(group))
        self.client.queue(["values", site, "unit", 0, ranks, step, [("unit", label)]])


def _ranks_of(group: Any) -> tuple[int, ...]:
    distributed: Any = import_module("torch.distributed")
    return tuple(distributed.get_process_group_ranks(group))


def _is_local_sgd(model: Any) -> bool:
    """Whether a communication hook of local SGD is registered."""
    hooks = getattr(model, "_comm_hooks", ())
    return any("local" in getattr(hook, "__qualname__", "").lower() for hook, _ in hooks)


def _gradient_entries(name: str, parameter: Any, state: Any) -> list[Entry]:
    entries: list[Entry] = []
    if parameter.grad is not None:
        entries.append((f"gradient of {name}", checksum(parameter.grad)))
    for key, value in (state or {}).items():
        if hasattr(value, "data_ptr"):
            entries.append((f"optimizer state {key} of {name}", checksum(value)))
    return entries


def _replicating_ranks(parameter: Any) -> Iterator[tuple[int, ...]]:
    """For a DTensor: the ranks of each dimension of its mesh that hold copies of one value."""
    for dimension, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_replicate():
            yield _ranks_of(parameter.device_mesh.get_group(dimension))


__all__ = ["ValueProbes"]
