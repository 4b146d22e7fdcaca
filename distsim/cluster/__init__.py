"""Clusters by name, or by mapping.

>>> preset("dgx-a100").intra.bytes_per_ns
300.0
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from distsim.cluster.model import Cluster, Curve, Device, Link, Network, Nics
from distsim.cluster.presets import PRESETS
from distsim.errors import UsageError
from distsim.names import listing, near

__all__ = ["PRESETS", "Cluster", "Curve", "Device", "Link", "Network", "Nics", "cluster_from", "preset"]

_REMEDY = "`distsim clusters` lists the presets; a cluster may also be written inline, as `{preset: dgx-h100, nics: {count: 4}}`"


def preset(name: str) -> Cluster:
    """The preset of that name. Raises UsageError with the near name for an unknown one."""
    return Cluster.model_validate(_preset_data(name))


def cluster_from(value: str | Mapping[str, object] | Cluster) -> Cluster:
    """A preset's name, or a mapping in people's units: whole, or ``preset: NAME`` and what differs from it, at any depth.

    Raises UsageError that names every key that is wrong.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, str):
        return preset(value)
    data = dict(value)
    base = data.pop("preset", None)
    if base is not None:
        merged = _merge(_preset_data(base), data)
        if data and "name" not in data:
            merged["name"] = f"{base}, changed"
        if data and "error_band" not in data:
            merged["error_band"] = f"{merged['error_band']}; wider where a preset is changed"
        data = merged
    try:
        return Cluster.model_validate(data)
    except ValidationError as fault:
        raise UsageError(_explain(fault), _REMEDY) from None


def _preset_data(name: object) -> dict[str, object]:
    if not isinstance(name, str) or name not in PRESETS:
        raise UsageError(f"no cluster preset `{name}` (known: {listing(PRESETS)}){near(name, PRESETS)}", _REMEDY)
    return PRESETS[name]


def _merge(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """``base`` with ``changes`` laid over it, mapping by mapping."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _explain(fault: ValidationError) -> str:
    """One line per wrong key: ``cluster.intra.latency: expected …``."""
    lines = []
    for error in fault.errors(include_url=False):
        path = ".".join(["cluster", *(str(part) for part in error["loc"])])
        if error["type"] == "extra_forbidden":
            text = f"unknown key{near(error['loc'][-1], _keys(error['loc'][:-1]))}"
        elif error["type"] == "missing":
            text = "this key is missing"
        else:
            text = str(error["msg"]).removeprefix("Value error, ")
        lines.append(f"{path}: {text}")
    return "\n".join(lines)


def _keys(path: tuple[int | str, ...]) -> list[str]:
    """The keys that a mapping of the cluster file may have, by its place."""
    parts: dict[str, type[Device | Link | Nics | Network]] = {"device": Device, "intra": Link, "nics": Nics, "network": Network}
    model = parts.get(str(path[0]), Cluster) if path else Cluster
    return [info.alias or name for name, info in model.model_fields.items()] + ["preset"] * (not path)
