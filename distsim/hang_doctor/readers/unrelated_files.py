"""Files of the field that contain no information about hangs.

They are recognised so that the report can say so, instead of leaving open whether a file was
understood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

#: The end of each description.
NOTHING_ABOUT_HANGS: Final = " (contains no information about hangs)"
#: How much of a text is searched.
_HEAD_LENGTH: Final = 4096


class _TextKind(NamedTuple):
    pattern: re.Pattern[str]
    description: str


_TEXT_KINDS: Final = (
    _TextKind(re.compile(r"^# +nThreads? |^# nccl-tests", re.MULTILINE), "nccl-tests results"),
    _TextKind(re.compile(r"\A\s*<algo [^>]*\bcoll="), "MSCCL algorithm"),
    _TextKind(re.compile(r"\A\S+ +model_parallel_NPU_group: *\d"), "SimAI workload"),
    _TextKind(re.compile(r"\Atest\s*\n\w+:\s*\nallreduce,:", re.MULTILINE), "SimAI bandwidths"),
    _TextKind(
        re.compile(r"\A(?=(?s:.*)^npus_count:)(?=(?s:.*)^topology:)", re.MULTILINE),
        "ASTRA-sim network file",
    ),
    _TextKind(
        re.compile(r"\A(?=(?s:.*)^world:)(?=(?s:.*)^program:)", re.MULTILINE),
        "distsim scenario",
    ),
    _TextKind(
        re.compile(
            r"\A(,*\d+(F|B|I|W|BW|SEND_\w|RECV_\w|UNSHARD|RESHARD)\d*)"
            r"(,(\d+[A-Z_]+\d*|\([^)]*\)\w+)?){3}"
        ),
        "pipeline schedule",
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
            return f"{kind.description}{NOTHING_ABOUT_HANGS}"
    return ""


def unrelated_bytes(data: bytes) -> str:
    """The same for a binary file."""
    if _CHAKRA.match(data[:96]):
        return f"Chakra execution trace{NOTHING_ABOUT_HANGS}"
    return ""


def unrelated_json(parsed: object) -> str:
    """The same for JSON."""
    if not isinstance(parsed, Mapping):
        return ""
    if isinstance(parsed.get("nodes"), list) and "schema" in parsed:
        return f"PyTorch execution trace{NOTHING_ABOUT_HANGS}"
    if "scheduling-policy" in parsed and "all-reduce-implementation" in parsed:
        return f"ASTRA-sim system file{NOTHING_ABOUT_HANGS}"
    if any(str(key).startswith("pytorch.wait_counter") for key in parsed):
        return "torch wait counters (they name no calls)"
    return ""
