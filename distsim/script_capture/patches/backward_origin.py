"""Which line of the forward pass a call of the backward pass comes from.

A node of autograd keeps the line on which it was made, in its own metadata: nodes of Python
functions (sequence and tensor parallelism, FSDP's), of what a module returns, and those that
collect a module's parameters' gradients (DDP's buckets).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

from distsim.script_capture.rank.call_sites import NO_CALL_SITE, CallOrigin, CallSiteFinder

#: Nodes behind a module's result that are given its line; a layer has fewer.
_MAX_NODES: Final = 24
#: Under which name a node keeps its line.
_METADATA_KEY: Final = "distsim.line"


class ForwardLineRecorder:
    """Notes lines as a forward pass goes on. ``sites``: whose frames are the user's."""

    def __init__(self, sites: CallSiteFinder) -> None:
        torch = import_module("torch")
        self.sites = sites
        self._tensor = torch.Tensor
        self._current: Callable[[], Any] = torch._C._current_autograd_node
        self._enabled: Callable[[], bool] = torch.is_grad_enabled
        self._compiling: Callable[[], bool] = torch.compiler.is_compiling

    def lay(self) -> None:
        """Watch functions of Python and modules, whose nodes would not know their line."""
        function: Any = import_module("torch.autograd").Function
        original, note, compiling = function.apply.__func__, self._note, self._compiling

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(cls, *args, **kwargs)
            if not compiling():
                note(found)
            return found

        apply.__doc__ = original.__doc__
        function.apply = classmethod(apply)
        import_module("torch.nn.modules.module").register_module_forward_hook(self._after)

    def _after(self, module: object, args: object, found: object) -> None:
        """Behind a module's forward: what it did since those of its parts, down to its own
        parameters.
        """
        if not self._compiling():
            self._note(found, _MAX_NODES)

    def _note(self, found: object, most: int = 0) -> None:
        """Give the nodes that made these tensors the line of the user's that is running, unless an
        inner call did.

        ``most``: how many nodes behind them as well.
        """
        if not self._enabled():
            return
        waiting = [node for node in self._nodes(found) if _METADATA_KEY not in node.metadata]
        line = self.sites.running(2) if waiting else NO_CALL_SITE
        for node in waiting:
            node.metadata[_METADATA_KEY] = line
            if most > 0:
                behind = [
                    n
                    for n, _ in node.next_functions
                    if n is not None and _METADATA_KEY not in n.metadata
                ]
                most -= len(behind)
                waiting += behind

    def _nodes(self, found: object) -> Iterator[Any]:
        if isinstance(found, self._tensor):
            node: Any = found.grad_fn
            if node is not None:
                yield node
        elif isinstance(found, tuple | list):
            for part in found:
                yield from self._nodes(part)

    def line(self) -> CallOrigin:
        """That of the node whose backward is running in this thread."""
        node = self._current()
        found: CallOrigin = (
            node.metadata.get(_METADATA_KEY, NO_CALL_SITE) if node is not None else NO_CALL_SITE
        )
        return found
