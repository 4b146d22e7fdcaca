"""Find the line of the forward pass that a call of the backward pass is for.

Each node of autograd's graph can carry metadata. While a forward pass runs, nodes are given the
user's line: nodes of Python functions (sequence and tensor parallelism, FSDP), nodes of what a
module returns, and those that collect the gradients of a module's parameters (DDP's buckets). When
a call is made in a backward pass, the node that is running knows the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

from distsim.script_capture.protocol.message_types import NO_CALL_SITE, CallOrigin
from distsim.script_capture.rank.call_sites import CallSiteFinder

#: Nodes behind a module's result that are given its line; a layer has fewer.
_MAX_NODES: Final = 24
#: The search for the user's line starts at the hook that calls `_record`.
_FRAMES_OF_HOOK: Final = 2
#: The key in a node's metadata.
_METADATA_KEY: Final = "distsim.line"


class ForwardLineRecorder:
    """Records lines while forward passes run. ``sites`` finds the user's frames."""

    def __init__(self, sites: CallSiteFinder) -> None:
        torch = import_module("torch")
        self.sites = sites
        self._tensor = torch.Tensor
        self._current_node: Callable[[], Any] = torch._C._current_autograd_node
        self._is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling

    def install(self) -> None:
        """Hook Python functions and modules, whose nodes would not know their line."""
        function: Any = import_module("torch.autograd").Function
        original = function.apply.__func__
        record = self._record
        is_compiling = self._is_compiling

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(cls, *args, **kwargs)
            if not is_compiling():
                record(found)
            return found

        apply.__doc__ = original.__doc__
        function.apply = classmethod(apply)
        modules = import_module("torch.nn.modules.module")
        modules.register_module_forward_hook(self._after_module)

    def _after_module(self, module: object, args: object, result: object) -> None:
        """After a module's forward: record what it did since its submodules' forwards.

        That includes the nodes of its own parameters.
        """
        if not self._is_compiling():
            self._record(result, _MAX_NODES)

    def _record(self, result: object, nodes_behind: int = 0) -> None:
        """Give the nodes that made these tensors the user's line that is running.

        Nodes that have a line keep it: an inner call gave it to them. ``nodes_behind``: about how
        many of the nodes behind them get it too.
        """
        if not self._is_grad_enabled():
            return
        pending = [node for node in self._nodes(result) if _METADATA_KEY not in node.metadata]
        if not pending:
            return
        line = self.sites.running(_FRAMES_OF_HOOK)
        remaining = nodes_behind
        for node in pending:  # Grows while it is iterated: the search is breadth-first.
            node.metadata[_METADATA_KEY] = line
            if remaining > 0:
                behind = _nodes_without_line(node.next_functions)
                remaining -= len(behind)
                pending += behind

    def _nodes(self, result: object) -> Iterator[Any]:
        if isinstance(result, self._tensor):
            node: Any = result.grad_fn
            if node is not None:
                yield node
        elif isinstance(result, tuple | list):
            for part in result:
                yield from self._nodes(part)

    def line(self) -> CallOrigin:
        """The forward line of the node whose backward is running in this thread."""
        node = self._current_node()
        if node is None:
            return NO_CALL_SITE
        found: CallOrigin = node.metadata.get(_METADATA_KEY, NO_CALL_SITE)
        return found


def _nodes_without_line(next_functions: Any) -> list[Any]:
    nodes = (node for node, _ in next_functions if node is not None)
    return [node for node in nodes if _METADATA_KEY not in node.metadata]
