"""Keep dynamo (torch.compile) out of this package.

torch's own groups are C++, in which dynamo sees no frame. The hub's groups are Python, and must
look the same to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

from distsim.script_capture.folders import CAPTURE_FOLDER

_PACKAGE: Final = "distsim.script_capture"


@cache
def exclude_from_dynamo() -> None:
    """Let dynamo skip every function of this package, in this process and those forked from it.

    Set through torch's C API, so that a script without torch.compile does not import dynamo.
    """
    dynamo: Any = import_module("torch._C")._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    strategy = dynamo._FrameExecStrategy(skip, skip)
    for code in _code_objects():
        dynamo.set_code_exec_strategy(code, strategy)


def _code_objects() -> Iterator[CodeType]:
    """The code of every function of this package that is loaded, nested functions included."""
    for name in _module_names():
        module = sys.modules.get(name)
        if module is None:
            continue
        for value in list(vars(module).values()):
            for code in _code_objects_of(value):
                yield from _with_nested(code)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _module_names() -> Iterator[str]:
    """The modules of this package, from its folder.

    Searching `sys.modules` instead would touch the modules of all libraries, and give each rank a
    copy of the memory in which they are.
    """
    root = Path(CAPTURE_FOLDER)
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        yield ".".join((_PACKAGE, *parts)).removesuffix(".__init__")


def _code_objects_of(value: object) -> Iterator[CodeType]:
    """The code of a function or of a class's methods, if this package defines it."""
    if isinstance(value, FunctionType) and value.__module__.startswith(_PACKAGE):
        yield value.__code__
    elif isinstance(value, type) and value.__module__.startswith(_PACKAGE):
        for member in vars(value).values():
            yield from _code_objects_of_member(member)


def _code_objects_of_member(member: object) -> Iterator[CodeType]:
    functions: tuple[object, ...] = (member,)
    if isinstance(member, property):
        functions = (member.fget, member.fset)
    elif isinstance(member, staticmethod | classmethod):
        functions = (member.__func__,)
    for function in functions:
        if isinstance(function, FunctionType):
            yield function.__code__
