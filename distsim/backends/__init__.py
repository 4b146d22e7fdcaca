"""The blocking rules of the back ends (`BACKEND_PROFILES`) and of the contract's readings
(`CONTRACT_READINGS`).

A back end is a `BackendProfile` with a `BackendSupport`, in a module of this folder; a new one
needs no more than its own file (docs/contributing/extending.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from distsim.backends.contract import BUFFERED, EARLY, RENDEZVOUS
from distsim.backends.profile import (
    BackendProfile,
    BackendSupport,
    MismatchedCalls,
    MismatchOutcome,
    Outcome,
    WorkerQueue,
)
from distsim.hardware.cluster import Cluster, preset
from distsim.operations.core.resolved_call import REDUCE_OPS, ResolvedCall


def _discovered_profiles() -> Iterator[BackendProfile]:
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        for value in vars(module).values():
            if isinstance(value, BackendProfile) and value.support is not None:
                yield value


#: By name, as ``backend:`` in a file; in the order in which torch lists them.
BACKEND_PROFILES: dict[str, BackendProfile] = {
    p.name: p for p in sorted(_discovered_profiles(), key=lambda p: (p.listed, p.name))
}
#: By name, in the order in which the contract takes them.
CONTRACT_READINGS: dict[str, BackendProfile] = {p.name: p for p in (RENDEZVOUS, EARLY, BUFFERED)}
#: What each back end takes.
SUPPORT_BY_BACKEND: dict[str, BackendSupport] = {
    name: p.support for name, p in BACKEND_PROFILES.items() if p.support is not None
}
#: The back end of a file that names none: it comes with torch, and needs no GPU.
DEFAULT_BACKEND = next(name for name, p in BACKEND_PROFILES.items() if p.built_in and not p.device)
#: The one that GPUs are trained with.
DEVICE_BACKEND = next(name for name, p in BACKEND_PROFILES.items() if p.built_in and p.device)


def default_cluster(backend: str) -> Cluster:
    """What a scenario runs on that names no cluster."""
    return preset(BACKEND_PROFILES[backend].cluster)


def call_refusal(profile: BackendProfile, call: ResolvedCall) -> str | None:
    """Why a call is refused: by the back end of its group where that has one of its own, else by
    ``profile``. None where it is taken.
    """
    return profile_for_call(profile, call).refuse(call)


def profile_for_call(profile: BackendProfile, call: ResolvedCall) -> BackendProfile:
    """Whose support counts for a call: its group's own back end, else ``profile``; a reading of the
    contract takes all.

    The world has the program's back end, in whose place ``profile`` is asked about.
    """
    if profile.support is None or not call.group.id:
        return profile
    return BACKEND_PROFILES.get(call.group.backend or "", profile)


def reduction_support(dtype: str) -> dict[str, str]:
    """Reduce op -> the first letters of the back ends whose all_reduce takes this dtype, ``-`` for
    each that does not (``gn-``).
    """
    return {op: _supporting_backends(dtype, op) for op in REDUCE_OPS}


def _supporting_backends(dtype: str, reduce_op: str) -> str:
    letters = [
        support.backend[0] if support.takes("all_reduce", dtype, reduce_op) else "-"
        for support in SUPPORT_BY_BACKEND.values()
    ]
    return "".join(letters)


__all__ = [
    "DEFAULT_BACKEND",
    "DEVICE_BACKEND",
    "BACKEND_PROFILES",
    "CONTRACT_READINGS",
    "SUPPORT_BY_BACKEND",
    "MismatchedCalls",
    "MismatchOutcome",
    "Outcome",
    "BackendProfile",
    "WorkerQueue",
    "default_cluster",
    "profile_for_call",
    "reduction_support",
    "call_refusal",
]
