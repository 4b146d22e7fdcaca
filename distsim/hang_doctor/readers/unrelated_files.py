"""Files of the field that contain no information about hangs.

They are recognised so that the report can say so, instead of leaving open whether a file was
understood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

#: How much of a text is searched.
_HEAD_LENGTH: Final = 4096


class _TextKind(NamedTuple):
    pattern: re.Pattern[str]
    description: str


_TEXT_KINDS: Final = (
    _TextKind(re.compile(r"^# +nThreads? |^# nccl-tests", re.MULTILINE), "results of nccl-tests"),
    _TextKind(re.compile(r"\A\s*<algo [^>]*\bcoll="), "an algorithm of MSCCL"),
    _TextKind(re.compile(r"\A\S+ +model_parallel_NPU_group: *\d"), "a workload of SimAI"),
    _TextKind(re.compile(r"\Atest\s*\n\w+:\s*\nallreduce,:", re.MULTILINE), "bandwidths of SimAI"),
    _TextKind(
        re.compile(r"\A(?=(?s:.*)^npus_count:)(?=(?s:.*)^topology:)", re.MULTILINE),
        "a network of ASTRA-sim",
    ),
    _TextKind(
        re.compile(r"\A(?=(?s:.*)^world:)(?=(?s:.*)^program:)", re.MULTILINE),
        "a scenario of distsim",
    ),
    _TextKind(
        re.compile(
            r"\A(,*\d+(F|B|I|W|BW|SEND_\w|RECV_\w|UNSHARD|RESHARD)\d*)"
            r"(,(\d+[A-Z_]+\d*|\([^)]*\)\w+)?){3}"
        ),
        "a schedule of a pipeline",
    ),
)
#: Chakra's traces are protobuf: a message's length, then its `version` or first attribute.
_CHAKRA: Final = re.compile(
    rb"\A[\x80-\xff]{0,3}[\x01-\x7f](\x0a[\x05-\x08]\d+\.\d+\.\d|\x12.\x0a\x06schema)", re.DOTALL
)


def unrelated_text(text: str) -> str:
    """What kind of unrelated text this is; empty if it is not known to be one."""
    head = text[:_HEAD_LENGTH]
    for kind in _TEXT_KINDS:
        if kind.pattern.search(head):
            return f"{kind.description}, which tells nothing of a hang"
    return ""


def unrelated_bytes(data: bytes) -> str:
    """The same for a binary file."""
    if _CHAKRA.match(data[:96]):
        return "an execution trace of Chakra, which tells nothing of a hang"
    return ""


def unrelated_json(parsed: object) -> str:
    """The same for JSON."""
    if not isinstance(parsed, Mapping):
        return ""
    if isinstance(parsed.get("nodes"), list) and "schema" in parsed:
        return "a PyTorch execution trace, which tells nothing of a hang"
    if "scheduling-policy" in parsed and "all-reduce-implementation" in parsed:
        return "a system of ASTRA-sim, which tells nothing of a hang"
    if any(str(key).startswith("pytorch.wait_counter") for key in parsed):
        return "torch's wait counters, which name no call"
    return ""
