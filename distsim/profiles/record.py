"""What a profile is: the blocking rules of a back end, as data and a few small functions.

Matching (`distsim.match`) asks it for keys, the rules (`distsim.semantics`) ask it what a match needs and when a call returns. It
has no clock and no cost. Functions take plain integers or resolved calls; all ranks are global.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.support import Support
from distsim.records import dataclass

#: What a run does in the end (design §5, "Verdicts and outcomes").
Outcome = Literal["completes", "hangs", "raises", "crashes", "wrong-data", "undefined"]


class Meeting(NamedTuple):
    """Calls that met and do not fit. ``fields`` are the words that differ (op, numel, dtype, reduce_op, root, splits;
    tag, of a message under a profile that ignores tags).

    Of a message, ``calls`` is the send and the receive; of a collective, those who have come, in order of arrival.
    ``nbytes`` are their sizes.
    """

    fields: tuple[str, ...]
    calls: tuple[Call, ...]
    nbytes: tuple[int, ...]
    is_message: bool


class Mishap(NamedTuple):
    """What such a meeting leads to: the outcome's word, the ranks whose process dies, whether the others are stuck in it."""

    outcome: Outcome
    crash: tuple[int, ...] = ()
    hangs: bool = False


class Workers(NamedTuple):
    """A queue that runs collectives in order, ``width`` at a time."""

    key: Hashable
    width: int


#: What becomes of a call that the contract forbids: the rank raises, stands still or dies there, torch warns and does nothing, or
#: the back end takes it as if nothing were wrong.
Reaction = Literal["raises", "hangs", "crashes", "ignored", "goes on"]

#: Who meets in new_group: its members, the world, nobody, or those who reach for the same name in the store.
Parties = Literal["members", "world", "nobody", "named"]


#: The options of a scenario, by name (`distsim.scenario.parts.Options`).
Options = Mapping[str, Any]


class BufferOption(NamedTuple):
    """The option of a scenario that says how many bytes a send may run ahead by, and its default."""

    name: str
    default: int

    def limit(self, options: Options) -> int:
        """The bytes in force; left out or null, the default."""
        value = options.get(self.name)
        return self.default if value is None else int(value)


#: Further outcomes that the numbers or the memory decide: of (outcome, the fields of each mismatch that leads to it, whether a call
#: names a partner outside the world).
Besides = Callable[[str, Sequence[tuple[str, ...]], bool], frozenset[str]]


class Awaited(NamedTuple):
    """What a member of a collective needs whose members do not agree on the root, or on whether there is anything to send, in global
    ranks: who must have come (itself aside, or all members), and whom of these it then waits for ``in_vain``, since they do something
    else or nothing."""

    ranks: frozenset[int]
    in_vain: frozenset[int] = frozenset()


#: Which group ranks must have come before a group rank may leave, by (op, group size, root as group rank, group rank).
#: None: all of them.
Needs = Callable[[str, int, int, int], frozenset[int] | None]


#: Whether anything passes between two members of a collective, by (op, group size, root, and the two as group ranks).
Talks = Callable[[str, int, int, int, int], bool]


def all_talk(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Any two members may have something for each other."""
    return True


def never(nbytes: int, outstanding: int, options: Options) -> bool:
    """A send is a rendezvous at every size."""
    return False


def nothing_besides(outcome: str, fields: Sequence[tuple[str, ...]], outside: bool) -> frozenset[str]:
    """The outcome is the only one."""
    return frozenset()


def no_ring(op: str) -> bool:
    """Whatever members bring, they meet as one."""
    return False


#: What a collective that travels as messages needs connected: all pairs of its group, or one direction between each member and the root.
ALL_PAIRS, TO_ROOT, FROM_ROOT = "all pairs", "to root", "from root"


@dataclass(frozen=True, slots=True)
class Profile:
    """The blocking rules of a back end. Every field is one rule; the profile's module says where each comes from.

    ``device``: the host only enqueues; launches run on streams (`distsim.semantics.device_compiler`). Else the host waits for its requests.
    ``tags``, ``any_source``: whether they are obeyed, or ignored and refused.
    ``slot``: what besides group and number tells two collectives apart, of the operation.
    ``credit``: may a send complete without its receive, given (nbytes, bytes sent so and not yet received, options).
    ``needs``: who waits for whom in a collective. ``apart``: the same by rank, of calls that name different roots or
    do not bring equally much to a ``ring``; None where that is left to ``mismatch``.
    ``workers``: the queue of a rank's collectives on a group, of (rank, group id); None: they run at once.
    ``new_group``: who meets in it, given the options (`Parties`).
    ``local_groups``: why it makes no group with use_local_synchronization; None where it does.
    ``invalid``: what becomes of a call that the contract forbids, given the finding's code (DS101 …) and the options.
    ``dropped``: what becomes of a message whose request nobody can wait for any more; where it ``cancels``, whoever meets it falls
    silent towards its rank, in collectives between whose members ``talks`` says that something passes.
    ``peer_death``: what a rank does that has a transfer to a dead one.
    ``mismatch``: what calls that meet and don't fit lead to. ``neighbours``: of a collective's call, the group ranks with whose calls it
    decides who of them dies of that (what else comes of it goes by what kinds of calls there are); None: all of them.
    ``refuse``: the error text of a call that the back end rejects on its own, else None.
    ``specific_first``: see `distsim.match.Matcher`.
    ``timeout_ns``: torch's default of a group's timeout. ``timed_out``: what an expired one leads to; ``store_grace_ns``: how much
    longer a wait in the store lasts (making the world or a group).
    ``lock``: one lock per process is held through every blocking call of the library (mpi).
    ``support``: what the back end takes; None for a reading of the contract, which takes all. ``buffer_option``: what ``credit`` goes by;
    None where no option changes it. ``cluster``: the preset that a scenario runs on which names none. ``listed``: the place among the
    back ends, torch's (`torch.distributed.Backend.backend_list`). ``built_in``: torch's own packages have it.
    ``ring``: collectives that a member with nothing to send passes by, and of which ``apart`` tells who gets round where members do not
    bring equally much.
    ``besides``: outcomes that may come in place of the one found (`Besides`). ``by_messages``: collectives that travel as messages between
    members, with what they need connected.
    """

    name: str
    about: str
    needs: Needs
    mismatch: Callable[[Meeting], Mishap]
    refuse: Callable[[Call], str | None]
    credit: Callable[[int, int, Options], bool]
    slot: Callable[[str], Hashable]
    workers: Callable[[int, int], Workers | None]
    new_group: Callable[[Call, Options], Parties]
    invalid: Callable[[Call, str, Options], Reaction]
    device: bool = False
    tags: bool = True
    any_source: bool = True
    dropped: Literal["nothing", "cancels", "crashes"] = "nothing"
    peer_death: Literal["raises", "hangs"] = "hangs"
    specific_first: bool = False
    timeout_ns: int = 30 * 60 * 10**9
    timed_out: Literal["raises", "crashes", "nothing"] = "nothing"
    store_grace_ns: int = 0
    lock: bool = False
    support: Support | None = None
    buffer_option: BufferOption | None = None
    cluster: str = "cpu-10gbe"
    listed: int = 0
    built_in: bool = True
    local_groups: str | None = None
    besides: Besides = nothing_besides
    by_messages: Mapping[str, str] = field(default_factory=dict)
    apart: Callable[[Sequence[Call]], Mapping[int, Awaited]] | None = None
    neighbours: Callable[[Call], frozenset[int]] | None = None
    ring: Callable[[str], bool] = no_ring
    talks: Talks = all_talk

    @property
    def rendezvous(self) -> bool:
        """Every send waits for its receive, at every size."""
        return self.credit is never


# --- rules that several profiles share ---


def torch_layer(call: Call, code: str, options: Options) -> Reaction:
    """What torch's Python layer does before a back end sees the call: a non-member is warned and nothing happens, but in `send`,
    which raises ("Invalid process group specified"); every other wrong argument raises (2.1, 2.2, 2.3). Without any group left a
    non-member is still warned where torch asks for no root first (run: all_reduce and barrier return, broadcast raises)."""
    if code == "DS108" and call.group.group_rank(call.rank) < 0:
        return "ignored" if OPS[call.op].kind == "collective" and OPS[call.op].root_field is None else "raises"
    return "ignored" if code == "DS104" and call.op != "send" else "raises"


def needs_all(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Everybody waits for everybody."""
    return None


def by_number(op: str) -> Hashable:
    """The n-th collective of a group meets the n-th, whatever its kind."""
    return None


def no_neighbours(call: Call) -> frozenset[int]:
    """Nobody dies of collectives that don't fit."""
    return frozenset()


def no_workers(rank: int, group: int) -> Workers | None:
    """Collectives run at once, beside each other."""
    return None
