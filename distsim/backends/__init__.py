"""The blocking rules of the backends (`BACKEND_PROFILES`) and of the readings of the contract
(`CONTRACT_READINGS`).

Each backend is a `BackendProfile` with a `BackendSupport` in a module of this package. A new
backend needs only its own file (docs/contributing/extending.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """Every backend of this package. Raises ValueError if two modules define one name."""
    known: dict[str, BackendProfile] = {}
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        for value in vars(module).values():
            if not isinstance(value, BackendProfile) or value.support is None:
                continue
            # A module may import the profile that it copies.
            if known.setdefault(value.name, value) is not value:
                raise ValueError(
                    f"{module.__name__} defines a second backend {value.name}; "
                    "give the copy a name: replace(..., name=...)"
                )
    yield from known.values()


def _letters(names: Iterable[str]) -> dict[str, str]:
    """A different character for each name: the first of its own that is still free."""
    letters: dict[str, str] = {}
    for name in names:
        free = (letter for letter in name if letter not in letters.values())
        letters[name] = next(free, "?")
    return letters


#: Name, as in ``backend:`` of a scenario -> profile, in torch's order.
BACKEND_PROFILES: dict[str, BackendProfile] = {
    p.name: p for p in sorted(_discovered_profiles(), key=lambda p: (p.listed, p.name))
}
#: Name -> reading, in the order in which the checker runs them.
CONTRACT_READINGS: dict[str, BackendProfile] = {p.name: p for p in (RENDEZVOUS, EARLY, BUFFERED)}
#: Operations, dtypes and reductions that each backend supports.
SUPPORT_BY_BACKEND: dict[str, BackendSupport] = {
    name: p.support for name, p in BACKEND_PROFILES.items() if p.support is not None
}
#: Backend -> its letter in lists of backends.
BACKEND_LETTERS: dict[str, str] = _letters(BACKEND_PROFILES)
#: The default of ``backend:``. It is part of torch and needs no GPU.
DEFAULT_BACKEND = next(name for name, p in BACKEND_PROFILES.items() if p.built_in and not p.device)
#: The backend for training on GPUs.
DEVICE_BACKEND = next(name for name, p in BACKEND_PROFILES.items() if p.built_in and p.device)


def default_cluster(backend: str) -> Cluster:
    """The cluster of a scenario without ``cluster:``."""
    return preset(BACKEND_PROFILES[backend].cluster)


def call_refusal(profile: BackendProfile, call: ResolvedCall) -> str | None:
    """Why the backend of the call refuses it, or None. See `profile_for_call`."""
    return profile_for_call(profile, call).refuse(call)


def profile_for_call(profile: BackendProfile, call: ResolvedCall) -> BackendProfile:
    """The profile whose support decides about a call: that of the group's own backend, otherwise
    ``profile``. A reading of the contract supports every call.

    The world always uses ``profile``, because callers ask about other backends than the program's.
    """
    if profile.support is None or not call.group.id:
        return profile
    return BACKEND_PROFILES.get(call.group.backend or "", profile)


def reduction_support(dtype: str) -> dict[str, str]:
    """Reduce op -> the letters (`BACKEND_LETTERS`) of the backends whose all_reduce supports this
    dtype, and ``-`` for each backend that does not (``gn-``).
    """
    return {op: _supporting_backends(dtype, op) for op in REDUCE_OPS}


def _supporting_backends(dtype: str, reduce_op: str) -> str:
    letters = [
        BACKEND_LETTERS[name] if support.takes("all_reduce", dtype, reduce_op) else "-"
        for name, support in SUPPORT_BY_BACKEND.items()
    ]
    return "".join(letters)


__all__ = [
    "BACKEND_LETTERS",
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
