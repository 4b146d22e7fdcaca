"""Help lines that say what to change in the program at hand, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.checker.diagnosis.awaited_call import AwaitedCall, NearMiss
from distsim.checker.diagnosis.wait_for_graph import WaitEdge
from distsim.checker.wording import location_text, number_list, parenthesised
from distsim.findings.final_state import FAILURES
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS

#: Ranks that a help line lists one by one.
_MAX_SHOWN_RANKS = 4


# --- requests ---
#: A request whose handle was bound again, so that no call can wait for it.
UNIQUE_HANDLE_ADVICE = (
    "give each request its own handle (`as: h@i` in a loop), and wait for each",
)


def advise_keep_request(rank: int) -> tuple[str, ...]:
    """A request without a handle, or whose rank ended before it waited."""
    return (f"on rank {rank}, keep the request (`as: h`) and wait for it",)


class DroppedRequest(NamedTuple):
    """A request that a rank dropped; it separates two ranks that have both posted."""

    rank: int
    other: int
    place: SourceLocation

    @property
    def advice(self) -> tuple[str, ...]:
        """Keep the request."""
        rank, other = self.rank, self.other
        return (
            f"on rank {rank}, keep the request (`as: h`) and wait for it: it was dropped"
            f"{parenthesised(location_text(self.place))}, and since then no message between "
            f"ranks {rank} and {other} completes",
        )


# --- cycles ---
def advise_cycle(
    edges: Sequence[WaitEdge],
    awaited: Sequence[AwaitedCall | None],
    length: int,
    *,
    one_tensor: bool = False,
) -> tuple[str, ...]:
    """How to break a cycle, according to the calls in which its ranks are blocked.

    ``length`` is the number of ranks of the cycle; ``edges`` may show only some of them.
    ``one_tensor``: some rank sends and receives the same tensor, so the two calls must not overlap.
    """
    known = [part for part in awaited if part is not None]
    calls = [part.call for part in known]
    directions = {OPERATIONS[call.op].direction for call in calls}
    if directions == {"send"} or directions == {"recv"}:
        advice = _advise_same_direction(edges, length, sends="send" in directions)
        apart = ", with separate tensors for sending and receiving" if one_tensor else ""
        return (f"{advice}{apart}",)
    if directions == {None}:
        return advise_collectives(edges, awaited)
    if None in directions:
        return _advise_collective_and_message(known)
    if length == 2 and directions == {"send", "recv"} and _name_each_other(calls):
        return _advise_crossed_messages(calls)
    return (
        "post each receive before the send blocks: call irecv first and then send, "
        "or put both into one batch_isend_irecv",
    )


def _advise_same_direction(edges: Sequence[WaitEdge], length: int, *, sends: bool) -> str:
    """All ranks send first, or all receive first."""
    if not sends:
        return (
            f"let rank {edges[0].rank} send before it receives, "
            "or post both calls with batch_isend_irecv"
        )
    second = edges[1].rank if len(edges) > 1 else edges[0].rank
    others = f"rank {second}"
    if length > 2:
        others = "at least one rank (better: every second one)"
    return f"let {others} receive before it sends, or post both calls with batch_isend_irecv"


def _name_each_other(calls: Sequence[ResolvedCall]) -> bool:
    first, second = calls[0], calls[1]
    return first.peer == second.rank and second.peer == first.rank


def _advise_crossed_messages(calls: Sequence[ResolvedCall]) -> tuple[str, ...]:
    """Two ranks exchange two messages in different order."""
    send, receive = sorted(calls, key=lambda call: OPERATIONS[call.op].direction != "send")
    label, on_nccl = _message_label, ""
    if send.group.id != receive.group.id:
        label = _group_message_label
    elif send.tag != receive.tag:
        label = _tag_label
        on_nccl = (
            ". nccl ignores tags: there, the two calls match, and data arrive in the wrong tensor"
        )
    alternative = "" if send.op == "isend" else ", or send with isend"
    return (
        f"rank {send.rank} sends {label(send)} first, but rank {receive.rank} receives "
        f"{label(receive)} first: use the same order on both ranks{alternative}{on_nccl}",
    )


def _advise_collective_and_message(known: Sequence[AwaitedCall]) -> tuple[str, ...]:
    """Some ranks are blocked in a collective, others wait for a message."""
    for part in known:
        if not part.is_message and part.position is None:
            call = part.call
            return (
                f"call {call.op} on {call.group.name} on rank {part.rank} too: rank {call.rank} "
                "calls it, and every member of the group must make the same calls",
            )
    calls = [part.call for part in known]
    collective = next(call for call in calls if OPERATIONS[call.op].direction is None)
    message = next(call for call in calls if OPERATIONS[call.op].direction is not None)
    return (
        f"move the message before the {collective.op} on all ranks, or after it on all ranks: "
        f"rank {collective.rank} is in the {collective.op} while rank {message.rank} still waits "
        "for the message",
    )


def advise_collectives(
    edges: Sequence[WaitEdge], awaited: Sequence[AwaitedCall | None]
) -> tuple[str, ...]:
    """How to break a cycle of collectives: one order of groups or axes, or one set of calls."""
    known = [part for part in awaited if part is not None]
    calls = [part.call for part in known]
    never_made = next((part for part in known if _is_never_made(part)), None)
    if never_made is not None and not never_made.is_message:
        call = never_made.call
        return (
            f"call {call.op} on {call.group.name} on rank {never_made.rank} too, with empty input "
            "if it has no data (no tokens, no gradients), or create a group without this rank",
        )
    groups = list(dict.fromkeys(call.group.name for call in calls))
    if len(groups) < 2:
        return (
            f"make the same calls on {groups[0]} on all its members: some members skip a call "
            "that others make",
        )
    if all(edge.rank in calls[0].group.ranks for edge in edges):
        return (
            f"use the groups in the same order on all ranks, for example {groups[0]} first: now "
            f"they use {word_list(groups)} in different orders",
        )
    # The groups of a mesh are named `axis[coordinates]`.
    axes = list(dict.fromkeys(name.partition("[")[0] for name in groups))
    if len(axes) < 2 or not all("[" in name for name in groups):
        return (
            "use the groups in the same order on all ranks: now they use "
            f"{word_list(groups)} in different orders",
        )
    return (
        f"use the axes in the same order on all ranks, for example {axes[0]} first: now they use "
        f"{word_list(axes)} in different orders",
    )


def _is_never_made(part: AwaitedCall) -> bool:
    """Whether the awaited rank makes no call at all on the sequence."""
    return part.position is None and not part.has and part.call.op != "new_group"


#: In the headline of a hang whose reason is that a call creates the communicator.
COMMUNICATOR_CREATION = "NCCL creates the communicator"
JOIN_COMMUNICATOR_ADVICE = (
    "call a collective on all ranks first, or pass `device_id` to init_process_group "
    "(`init: eager`)",
)


def advise_one_communicator(batched: int, alone: int) -> tuple[str, ...]:
    """Two posted ends that never meet, because they use different communicators."""
    return (
        f"use batch_isend_irecv on both ranks or on neither: rank {batched} posts the message in "
        f"a batch, on the group's communicator; rank {alone} posts it alone, on the communicator "
        "of the pair, so they never match. Or create the communicators at start-up "
        "(`init: eager`)",
    )


# --- new groups ---
def with_new_group_rule(finding: Finding, call: ResolvedCall, missing: Sequence[int]) -> Finding:
    """Put the rule that some ranks broke first, and what the others wait for below it."""
    never_call = "never calls" if len(missing) == 1 else "never call"
    members = "all members of the group" if call.local_sync else "all ranks"
    head = (
        f"{_short_rank_list(missing)} {never_call} new_group({call.name}), "
        f"which {members} must call"
    )
    return replace(finding, message=f"{head}\n  {finding.message}")


def advise_new_group(missing: Sequence[int], local: bool = False) -> tuple[str, ...]:
    """The rule that a new_group without some ranks breaks.

    ``local``: it is a call of the group's members alone.
    """
    ranks = _short_rank_list(missing)
    if local:
        return (f"call new_group on {ranks} too: all members of the group must call it",)
    return (
        f"call new_group on {ranks} too: all ranks of the world must call it, members or not. "
        "Or set `use_local_synchronization: true`, so that only the members call it",
    )


# --- destroyed groups ---
class EarlyDestroy(NamedTuple):
    """A rank destroyed a group before another rank's last call on it.

    ``missing``: the call that the rank does not join; both places are given.
    """

    rank: int
    missing: ResolvedCall
    destroy_place: SourceLocation
    missing_place: SourceLocation | None

    @property
    def advice(self) -> tuple[str, ...]:
        """Join the call, then destroy the group."""
        return (f"on rank {self.rank}, call that {self.missing.op} before destroy_process_group",)

    def with_cause_first(self, finding: Finding) -> Finding:
        """Put the early destruction first, and what ranks wait for below it."""
        call = self.missing
        head = (
            f"rank {self.rank} destroyed group {call.group.name}"
            f"{parenthesised(location_text(self.destroy_place))} without joining rank "
            f"{call.rank}'s {call.op} on it{parenthesised(location_text(self.missing_place))}"
        )
        places = tuple(dict.fromkeys((self.destroy_place, *finding.places)))
        message = f"{head}\n  {finding.message}"
        return replace(finding, message=message, help=self.advice, places=places, slips=places)


# --- exited ranks ---
def advise_missing_ranks(
    status: str,
    awaited: AwaitedCall | None,
    exited: Sequence[int],
    message: str,
    waiting: Sequence[int] = (),
) -> tuple[str, ...]:
    """What to do about ranks that have exited.

    ``waiting``: the ranks that wait for them. If they are fewer than the exited ones, the waiting
    ranks are the outliers.
    """
    ranks = _short_rank_list(exited)
    if status == "absent":
        return (
            f"start {ranks} as well: the world size must be nnodes times nproc_per_node, every "
            "node must run the launcher, and MASTER_ADDR must be reachable from every node",
        )
    if status in FAILURES:
        why = f' (error: "{message.rstrip(".")}")' if message and message != "fault" else ""
        return (
            f"read the log of {ranks} first{why}",
            *remedy_for_error(message),
        )
    if status == "silent":
        why = f": {message}" if message else ""
        make = "makes" if len(exited) == 1 else "make"
        return (f"find out why {ranks} {make} no progress there{why}",)
    if awaited is None:
        return (f"make the missing call on {ranks} before it ends",)
    if awaited.call.op == "new_group":
        return advise_new_group(exited, awaited.call.local_sync)
    if not awaited.is_message:
        return _advise_uneven_collectives(awaited, exited, waiting)
    if awaited.position is not None:
        return advise_keep_request(awaited.rank)
    return (f"make the missing call on {ranks} before it ends",)


def _advise_uneven_collectives(
    awaited: AwaitedCall, exited: Sequence[int], waiting: Sequence[int]
) -> tuple[str, ...]:
    group = awaited.call.group.name
    if 0 < len(waiting) < len(exited):
        make = "makes" if len(waiting) == 1 else "make"
        return (
            f"make the same calls on all members of {group}: {_short_rank_list(waiting)} {make} "
            "more calls than the others. Common causes: uneven batches, a collective under `if`, "
            "no_sync() on some ranks only",
        )
    make = "makes" if len(exited) == 1 else "make"
    return (
        f"make the same calls on all members of {group}: {_short_rank_list(exited)} {make} fewer "
        "calls. Common causes: uneven batches, an early return, a collective under `if`",
    )


# --- messages without a counterpart ---
_NEAR_MISS_ADVICE = {
    "channel": ("use the same channel for both: each channel has its own cell in the signal pad",),
    "tag": (
        "use the same tag in both calls. nccl ignores tags: there, the two calls match, and the "
        "receive may get a message that it does not expect",
    ),
    "group": (
        "use the same group on both ends: a message sent on one group cannot be received on "
        "another",
    ),
    "peer": (
        "correct the rank that one of the two calls names: src and dst are global ranks, "
        "group_src and group_dst count inside the group",
    ),
}


def advise_message(
    part: AwaitedCall, near: Sequence[NearMiss], sends: bool, started: str = ""
) -> tuple[str, ...]:
    """What to do about a message that no rank receives (``sends``) or sends.

    ``started``: where the message was started, if its rank is blocked in a wait for it.
    """
    if near:
        return _advise_near_miss(part, near, sends, started)
    counterpart = "receive" if sends else "send"
    if OPERATIONS[part.call.op].signals:
        missing = "wait_signal" if sends else "put_signal"
        counted = _calls_made(part, missing)
        return (f"add the {missing} on rank {part.rank}, or remove this {part.call.op}{counted}",)
    if part.call.peer is None:
        return (
            f"add a send to rank {part.call.rank} with this tag and group, or remove the receive",
        )
    if part.has > 1:
        return (_advise_equal_counts(part, counterpart, "send" if sends else "receive"),)
    counted = _calls_made(part, counterpart)
    this = f"this {part.call.op} from the batch" if part.batched else "this call"
    return (f"add the {counterpart} on rank {part.rank}, or remove {this}{counted}",)


def _advise_equal_counts(part: AwaitedCall, counterpart: str, own: str) -> str:
    """What to do if the peer makes several counterparts, but not enough of them."""
    return (
        f"let rank {part.call.rank} {own} as often as rank {part.rank} {counterpart}s, for example "
        "with the same number of iterations or micro-batches on both: rank "
        f"{part.rank} makes {part.has} matching {counterpart}s; this call needs one more"
    )


def _calls_made(part: AwaitedCall, counterpart: str) -> str:
    """How many matching calls the peer makes; empty if it makes none."""
    if not part.has:
        return ""
    calls = f"{counterpart}{'s' if part.has > 1 else ''}"
    return f". Rank {part.rank} makes {part.has} matching {calls}; this call needs one more"


def _advise_near_miss(
    part: AwaitedCall, near: Sequence[NearMiss], sends: bool, started: str
) -> tuple[str, ...]:
    """The argument to change; for a wrong peer, the rank that waits for the calling rank."""
    counterpart = next((miss for miss in near if miss.rank != part.rank), None)
    if near[0].what == "peer" and counterpart is not None:
        argument = "dst" if sends else "src"
        waiting = part.call.rank
        in_call = f" in its {part.call.op} ({started})" if started else ""
        return (f"set rank {waiting}'s `{argument}` to {counterpart.rank}{in_call}",)
    return _NEAR_MISS_ADVICE[near[0].what]


# --- words ---
def _short_rank_list(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {number_list(list(ranks), _MAX_SHOWN_RANKS)}"


def _message_label(call: ResolvedCall) -> str:
    """What distinguishes a message from others of its pair: its tag, or else its tensor."""
    buffers = call.inputs or call.outputs
    if not call.tag and buffers and buffers[0].name:
        return buffers[0].label
    return _tag_label(call)


def _tag_label(call: ResolvedCall) -> str:
    return tag_text(call.tag) or "tag 0"


def _group_message_label(call: ResolvedCall) -> str:
    return f"a message of {call.group.name}"


def word_list(words: Sequence[str]) -> str:
    """`g1 and g2`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- what errors of PyTorch mean ---
#: Models that differ by rank.
SAME_MODEL_ADVICE = (
    "build the same model on all ranks, with the same parameters frozen: otherwise the constructor "
    'of DistributedDataParallel raises "DDP expects same model across all ranks"',
)
_NO_GPU_ADVICE = (
    "pass `--cuda` to `distsim capture`: this machine has no GPU, and the option emulates one per "
    "rank in CPU memory",
)
#: Words of an error -> what to do. Sources: torch 2.13, torch/nn/parallel/distributed.py,
#: reducer.cpp and torch/cuda/__init__.py; Megatron-Core.
_ADVICE_BY_ERROR: dict[str, tuple[str, ...]] = {
    "expects same model across all ranks": SAME_MODEL_ADVICE,
    "appears not to match": SAME_MODEL_ADVICE,
    "Expected to have finished reduction in the prior iteration": (
        "use all parameters in the forward pass on every rank, or pass find_unused_parameters=True "
        "to DistributedDataParallel: some parameters got no gradient in the previous pass",
    ),
    "Communication call has not been issued for this bucket": (
        "let every parameter contribute to the loss, or train without overlap_grad_reduce: "
        "a parameter got no gradient, so the bucket that contains it was never reduced",
    ),
    "Torch not compiled with CUDA enabled": _NO_GPU_ADVICE,
    "Found no NVIDIA driver": _NO_GPU_ADVICE,
    "No CUDA GPUs are available": _NO_GPU_ADVICE,
    "has no attribute '_cuda_": _NO_GPU_ADVICE,
}


def remedy_for_error(error: str) -> tuple[str, ...]:
    """What to do about an error that a rank raised; empty if the error is not known."""
    return next((lines for words, lines in _ADVICE_BY_ERROR.items() if words in error), ())
