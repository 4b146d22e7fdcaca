"""Which machine a host's name leads to."""

from __future__ import annotations

from typing import NamedTuple

from distsim.startup.records import Address, Surroundings

_LOOPBACK = ("localhost", "127.", "::1")
#: Names that never resolve (RFC 6761), and addresses that no machine has (RFC 5737).
_NEVER = (".invalid",)
_NOBODY = ("192.0.2.", "198.51.100.", "203.0.113.")


class Place(NamedTuple):
    """A store's place: a port of a machine, or a file. ``node``: None where no machine of the job is meant."""

    kind: str
    node: int | None
    path: str
    port: int


def resolves(host: str, around: Surroundings) -> bool:
    """Has the name an address? Where the file lists its hosts, no other name has."""
    return not host.endswith(_NEVER) and (host in around.hosts or not around.closed or host[:1].isdigit() or is_loopback(host))


def is_loopback(host: str) -> bool:
    return host.startswith(_LOOPBACK)


def leads_to(address: Address, node: int, around: Surroundings) -> Place:
    """Where a process on machine ``node`` comes to. A name that is not listed means the machine of rank 0."""
    if address.kind != "tcp":
        return Place(address.kind, 0, address.path, 0)
    host = address.host
    if is_loopback(host) and host not in around.hosts:
        return Place("tcp", node, "", address.port)
    if host in around.hosts:
        return Place("tcp", around.hosts[host], "", address.port)
    elsewhere = around.closed or not resolves(host, around) or host.startswith(_NOBODY)
    return Place("tcp", None if elsewhere else 0, "", address.port)
