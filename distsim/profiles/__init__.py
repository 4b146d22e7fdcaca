"""The blocking rules of the back ends (`PROFILES`) and of the contract's readings (`READINGS`).

A back end is a `Profile` with a `Support`, in a module of this folder; a new one needs no more than its own file (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from distsim.cluster import Cluster, preset
from distsim.ops.records import REDUCE_OPS, Call
from distsim.profiles.contract import BUFFERED, EARLY, RENDEZVOUS
from distsim.profiles.record import Meeting, Mishap, Outcome, Profile, Support, Workers


def _back_ends() -> Iterator[Profile]:
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        yield from (v for v in vars(module).values() if isinstance(v, Profile) and v.support is not None)


#: By name, as ``backend:`` in a file; in the order in which torch lists them.
PROFILES: dict[str, Profile] = {p.name: p for p in sorted(_back_ends(), key=lambda p: (p.listed, p.name))}
#: By name, in the order in which the contract takes them.
READINGS: dict[str, Profile] = {p.name: p for p in (RENDEZVOUS, EARLY, BUFFERED)}
#: What each back end takes.
SUPPORT: dict[str, Support] = {name: p.support for name, p in PROFILES.items() if p.support is not None}
#: The back end of a file that names none: it comes with torch, and needs no GPU.
DEFAULT_BACKEND = next(name for name, p in PROFILES.items() if p.built_in and not p.device)
#: The one that GPUs are trained with.
DEVICE_BACKEND = next(name for name, p in PROFILES.items() if p.built_in and p.device)


def default_cluster(backend: str) -> Cluster:
    """What a scenario runs on that names no cluster."""
    return preset(PROFILES[backend].cluster)


def refusal(profile: Profile, call: Call) -> str | None:
    """Why a call is refused: by the back end of its group where that has one of its own, else by ``profile``. None where it is taken."""
    return judge_of(profile, call).refuse(call)


def judge_of(profile: Profile, call: Call) -> Profile:
    """Whose support counts for a call: its group's own back end, else ``profile``; a reading of the contract takes all.

    The world has the program's back end, in whose place ``profile`` is asked about.
    """
    own = call.group.backend if call.group.id else None
    return profile if profile.support is None else PROFILES.get(own or "", profile)


def reductions(dtype: str) -> dict[str, str]:
    """Reduce op -> the first letters of the back ends whose all_reduce takes this dtype, ``-`` for each that does not (``gn-``)."""
    return {op: "".join(s.backend[0] if s.takes("all_reduce", dtype, op) else "-" for s in SUPPORT.values()) for op in REDUCE_OPS}


__all__ = [
    "DEFAULT_BACKEND",
    "DEVICE_BACKEND",
    "PROFILES",
    "READINGS",
    "SUPPORT",
    "Meeting",
    "Mishap",
    "Outcome",
    "Profile",
    "Workers",
    "default_cluster",
    "judge_of",
    "reductions",
    "refusal",
]
