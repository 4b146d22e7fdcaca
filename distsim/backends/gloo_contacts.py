"""When a member of a gloo collective notices that another member is dead (G13).

Key idea: a dead process closes its connections. A member notices that when it posts a transfer to
the dead one, or waits for one, and both depend on the place of that transfer in the algorithm.
"""

from __future__ import annotations

from functools import lru_cache

from distsim.backends.gloo_collectives import (
    implementing_collective,
    is_ring,
    is_star,
    is_tree,
)
from distsim.backends.profile import IMMEDIATE_CONTACT, Contact
from distsim.operations.core.algorithms import binomial_parent
from distsim.operations.registry import OPERATIONS


def has_traffic(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Whether two members exchange data in a collective.

    Run on four ranks, of which ranks 0 and 1 get no data from each other.
    """
    # After the ring of a reduce, all members send their parts of the result to the root.
    if op == "reduce" and root in (one, other):
        return True
    return contact(op, n, root, one, other) is not None


@lru_cache(maxsize=1 << 12)
def contact(op: str, n: int, root: int, me: int, other: int) -> Contact | None:
    """When a member uses its connection with another one, and so notices its death (G13).

    Run: each collective on 3 to 6 ranks of which one had died before or died meanwhile, with and
    without an absent rank. The orders of the transfers are read in the sources of gloo.

    * ring: the neighbours;
    * tree: the parent; the children once the data have arrived;
    * gather and scatter: the root with every member;
    * barrier: members whose distance is a power of two, nearest first;
    * all_to_all: any two members.
    """
    if is_star(op) or op == "monitored_barrier":
        return IMMEDIATE_CONTACT if root in (me, other) else None
    if is_tree(op):
        return _contact_in_tree(n, root, me, other)
    if is_ring(op):
        return _contact_in_ring(op, n, me, other)
    if OPERATIONS[op].pairwise:
        return IMMEDIATE_CONTACT
    return _contact_in_barrier(n, me, other)


def _contact_in_tree(n: int, root: int, me: int, other: int) -> Contact | None:
    # Positions in the tree, whose root has position 0.
    mine, others = (me - root) % n, (other - root) % n
    if mine > 0 and binomial_parent(mine) == others:
        return IMMEDIATE_CONTACT
    if others == 0 or binomial_parent(others) != mine:
        return None
    ancestors = set[int]()
    while mine > 0:
        mine = binomial_parent(mine)
        ancestors.add((mine + root) % n)
    # A member can send to its children only what it has received.
    return Contact(frozenset(ancestors), frozenset(ancestors))


def _contact_in_ring(op: str, n: int, me: int, other: int) -> Contact | None:
    """all_gather waits for both neighbours at once. The other rings receive into a separate buffer,
    so a member waits for its target only after the data of its source have arrived.
    """
    # The segments of a ring travel to the previous rank (`distsim.backends.gloo_rings`).
    source, target = (me + 1) % n, (me - 1) % n
    if other not in (source, target):
        return None
    if other == source or implementing_collective(op) == "all_gather":
        return IMMEDIATE_CONTACT
    return Contact(posts_after=frozenset(), waits_after=frozenset({source}))


def _contact_in_barrier(n: int, me: int, other: int) -> Contact | None:
    """Each round doubles the distance, and needs the data of all members that are nearer."""
    distances = [d for d in ((me - other) % n, (other - me) % n) if _is_power_of_two(d)]
    if not distances:
        return None
    nearer = frozenset((me - k) % n for k in range(1, min(distances)))
    return Contact(nearer, nearer)


def _is_power_of_two(number: int) -> bool:
    """Also true for 0, which is not a distance between two different ranks."""
    return number & (number - 1) == 0
