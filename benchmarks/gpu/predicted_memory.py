"""Predicts the memory of each layout that `memory.py` measured on one H100 (`memory_h100.json`).

The strategy `transformer` makes the predictions. This module does not need torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distsim.scenario import loads
from distsim.scenario.format.models.sections import MemoryDecl

_STAGES = {"first": "transformer_pp_0", "middle": "transformer_pp_1", "last": "transformer_pp_3"}
_GPT = "{{layers: 24, hidden: 2048, heads: 16, ffn: 8192, vocabulary: 50257, mlp: gelu, positions: 2048, dropout: {}}}"


def readings() -> list[dict[str, Any]]:
    """Every measured layout with all its fields and its measured bytes."""
    found = json.loads((Path(__file__).resolve().parent / "memory_h100.json").read_text())
    return [{**found["defaults"], **one} for one in found["readings"]]


def predicted_memory(run: Mapping[str, Any]) -> MemoryDecl:
    """The memory that distsim predicts for the rank of a layout."""
    zero = {"ddp": 0, "zero1": 1}.get(
        run["wrap"], 1 if run["stage"] else 3 if run["reshard"] else 2
    )
    mesh = {
        "pp": 4 if run["stage"] else 1,
        "dp": run["dp"] // run["ep"],
        "ep": run["ep"],
        "tp": run["tp"],
    }
    model = (
        _GPT.format(str(bool(run["dropout"])).lower())
        if run["model"].startswith("gpt")
        else run["model"]
    )
    fields = {
        "model": model,
        "micro_batch": run["batch"],
        "sequence": run["sequence"],
        "zero": zero,
        "micro_batches": run["micro_batches"],
        "recompute": run["ac"],
        **({} if run["wrap"] == "fsdp" else {"autocast": "true"}),
    }
    shown = {axis: size for axis, size in mesh.items() if size > 1}
    text = "\n".join(
        (
            "name: memory",
            f"world: {mesh['pp'] * run['dp'] * run['tp']}",
            "backend: nccl",
            "cluster: dgx-h100",
            f"mesh: {{{', '.join(f'{axis}: {size}' for axis, size in shown.items())}}}",
            "program:",
            f"  - transformer: {{{', '.join(f'{key}: {value}' for key, value in fields.items())}}}",
        )
    )
    return loads(text).memory[_STAGES.get(run["stage"], "transformer_rank")]
