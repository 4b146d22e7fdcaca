"""The blocking rules of the back ends (`PROFILES`) and of the contract's readings (`READINGS`)."""

from distsim.profiles.contract import BUFFERED, EARLY, RENDEZVOUS
from distsim.profiles.gloo import GLOO
from distsim.profiles.mpi import MPI
from distsim.profiles.nccl import NCCL
from distsim.profiles.record import Meeting, Mishap, Outcome, Profile, Workers

#: By name, as ``backend:`` in a file.
PROFILES: dict[str, Profile] = {p.name: p for p in (GLOO, NCCL, MPI)}
#: By name, in the order in which the contract takes them.
READINGS: dict[str, Profile] = {p.name: p for p in (RENDEZVOUS, EARLY, BUFFERED)}

__all__ = ["PROFILES", "READINGS", "Meeting", "Mishap", "Outcome", "Profile", "Workers"]
