"""torch.compile under the hub: frames that dynamo must leave alone, and who turns its graphs into
code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

_PACKAGE: Final = "distsim.script_capture"


@cache
def exclude_from_dynamo() -> None:
    """Keep dynamo out of this package: torch's own groups are C++, in which it sees no frame, and
    the hub's are to be no other.

    Once, for a process and those that it forks. Set in C, so that a script without torch.compile
    does not import dynamo.
    """
    dynamo: Any = import_module("torch._C")._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    strategy = dynamo._FrameExecStrategy(skip, skip)
    for code in _code_objects():
        dynamo.set_code_exec_strategy(code, strategy)


def _code_objects() -> Iterator[CodeType]:
    """The code of every function of this package that is loaded, nested ones too."""
    for module in filter(None, map(sys.modules.get, _module_names())):
        waiting = [
            code for value in list(vars(module).values()) for code in _code_objects_of(value)
        ]
        while waiting:
            code = waiting.pop()
            yield code
            waiting += [c for c in code.co_consts if isinstance(c, CodeType)]


def _module_names() -> Iterator[str]:
    """The modules of this package. To look through those of all libraries would give each rank a
    copy of the memory in which they are.
    """
    here = Path(__file__).parents[1]  # the folder of script_capture
    for file in sorted(here.rglob("*.py")):
        yield ".".join((_PACKAGE, *file.relative_to(here).with_suffix("").parts)).removesuffix(
            ".__init__"
        )


def _code_objects_of(value: object) -> Iterator[CodeType]:
    if isinstance(value, FunctionType) and value.__module__.startswith(_PACKAGE):
        yield value.__code__
    elif isinstance(value, type) and value.__module__.startswith(_PACKAGE):
        for member in vars(value).values():
            if isinstance(member, property):
                yield from (
                    f.__code__ for f in (member.fget, member.fset) if isinstance(f, FunctionType)
                )
            plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            if isinstance(plain, FunctionType):
                yield plain.__code__


def run_traced_graph(wrapper: object, model: Any, inputs: Sequence[Any], **more: object) -> Any:
    """What torch.compile makes of a graph on the device: it runs as it was traced, forward and
    backward, operator by operator.
    """
    aot_eager: Any = import_module("torch._dynamo.backends.debugging").aot_eager
    return aot_eager(model, inputs)
