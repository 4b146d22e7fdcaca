"""A torch mode that sees each operator on its way to its kernel, below autograd.

Operators on tensors with a dispatch of their own (DTensor, for example) are not seen: their parts
are, one by one. Fake tensors count as plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Function of (operator, positional arguments, keyword arguments) that returns the result.
RunOperator = Callable[[Any, Any, dict[str, Any]], Any]


def operator_mode(run_operator: RunOperator) -> Any:
    """A context manager inside which ``run_operator`` is called instead of each operator."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode as Untyped

    base: Any = Untyped
    plain = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)

    def consists_of_parts(kind: type) -> bool:
        own = getattr(kind, "__torch_dispatch__", None)
        return own not in plain and kind.__name__ != "FakeTensor"

    class OperatorMode(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if not isinstance(func, torch._ops.OpOverload) or func.namespace == "prim":
                return func(*args, **kwargs)
            if any(consists_of_parts(kind) for kind in types):
                return NotImplemented  # its parts arrive here next
            return run_operator(func, args, kwargs)

    return OperatorMode()


__all__ = ["RunOperator", "operator_mode"]
