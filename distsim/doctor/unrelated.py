"""Files of the trade that tell nothing of a hang, known by what they hold, so that nobody wonders whether they were understood."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: What a file begins with -> what it is. Chakra's traces are protobuf: a message's length, then its `version` or first attribute.
_TEXTS: Final = (
    (re.compile(r"^# +nThreads? |^# nccl-tests", re.MULTILINE), "results of nccl-tests"),
    (re.compile(r"\A\s*<algo [^>]*\bcoll="), "an algorithm of MSCCL"),
    (re.compile(r"\A\S+ +model_parallel_NPU_group: *\d"), "a workload of SimAI"),
    (re.compile(r"\Atest\s*\n\w+:\s*\nallreduce,:", re.MULTILINE), "bandwidths of SimAI"),
    (re.compile(r"\A(?=(?s:.*)^npus_count:)(?=(?s:.*)^topology:)", re.MULTILINE), "a network of ASTRA-sim"),
    (re.compile(r"\A(?=(?s:.*)^world:)(?=(?s:.*)^program:)", re.MULTILINE), "a scenario of distsim"),
    (
        re.compile(r"\A(,*\d+(F|B|I|W|BW|SEND_\w|RECV_\w|UNSHARD|RESHARD)\d*)(,(\d+[A-Z_]+\d*|\([^)]*\)\w+)?){3}"),
        "a schedule of a pipeline",
    ),
)
_CHAKRA: Final = re.compile(rb"\A[\x80-\xff]{0,3}[\x01-\x7f](\x0a[\x05-\x08]\d+\.\d+\.\d|\x12.\x0a\x06schema)", re.DOTALL)


def unrelated_text(text: str) -> str:
    """What a text is that is no evidence; empty where that is not known."""
    head = text[:4096]
    return next((f"{what}, which tells nothing of a hang" for pattern, what in _TEXTS if pattern.search(head)), "")


def unrelated_bytes(data: bytes) -> str:
    """The same for what is no text."""
    return "an execution trace of Chakra, which tells nothing of a hang" if _CHAKRA.match(data[:96]) else ""


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
