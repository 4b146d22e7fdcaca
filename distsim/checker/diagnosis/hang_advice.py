"""Help lines for this very program: what to change, on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.checker.diagnosis.awaited_call import AwaitedCall, NearMiss
from distsim.checker.wording import number_list
from distsim.findings.final_state import WaitDependency
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS

#: A blocked rank, what it waits for, and who would have to act.
BlockedWait = tuple[int, WaitDependency, int]
#: A request that nobody can wait for any more.
UNIQUE_HANDLE_ADVICE = (
    "give each request a handle of its own, `as: h@i` in a loop, and wait for each",
)


def advise_keep_request(rank: int) -> tuple[str, ...]:
    """A request without a handle, or whose rank ended before it waited."""
    return (
        f"rank {rank} posted it and ended without a wait: keep the request (`as: h`) and wait for it",
    )


def advise_dropped_request(rank: int, other: int, where: str) -> tuple[str, ...]:
    """A dropped request keeps two ranks apart that have both posted."""
    return (
        f"rank {rank} drops its request for a message with rank {other}, {where}, and nothing passes between them since: keep it"
        " (`as: h`) and wait for it",
    )


def advise_cycle(
    turns: Sequence[BlockedWait], parts: Sequence[AwaitedCall | None], length: int
) -> tuple[str, ...]:
    """How to break a circle, by what its ranks stand in."""
    calls = [p.call for p in parts if p is not None]
    directions = {OPERATIONS[c.op].direction for c in calls}
    second = turns[1][0] if len(turns) > 1 else turns[0][0]
    who = "both" if length == 2 else "all of them"
    other = f"rank {second}" if length == 2 else "every second rank"
    if directions == {"send"}:
        return (
            f"{who} send first: let {other} receive first, or post both with batch_isend_irecv",
        )
    if directions == {"recv"}:
        return (
            f"{who} receive first: let rank {turns[0][0]} send first, or post both with batch_isend_irecv",
        )
    if directions == {None}:
        return advise_collectives(turns, parts)
    left_out = next(
        (p for p in parts if p is not None and not p.is_message and p.position is None), None
    )
    if left_out is not None and None in directions:
        return (
            f"rank {left_out.rank} leaves out {left_out.call.op} on {left_out.call.group.name}, which rank"
            f" {left_out.call.rank} makes: let every member of the group make the same calls",
        )
    if (
        length == 2
        and directions == {"send", "recv"}
        and calls[0].peer == calls[1].rank
        and calls[1].peer == calls[0].rank
    ):
        out, into = sorted(calls, key=lambda c: OPERATIONS[c.op].direction != "send")
        word = _message_label if out.group.id == into.group.id else _group_message_label
        return (
            f"rank {out.rank} sends {word(out)} first, rank {into.rank} receives {word(into)} first: use one order, or isend",
        )
    if None in directions:
        joined = next(c for c in calls if OPERATIONS[c.op].direction is None)
        message = next(c for c in calls if OPERATIONS[c.op].direction is not None)
        return (
            f"rank {joined.rank} joins {joined.op} while rank {message.rank} still waits for a message: "
            f"move the message before the {joined.op} on all of them, or after it",
        )
    return (
        "post the receives before the sends are waited for: irecv first, then send, or both in one batch_isend_irecv",
    )


def advise_collectives(
    turns: Sequence[BlockedWait], parts: Sequence[AwaitedCall | None]
) -> tuple[str, ...]:
    """How to break a circle of collectives: one order of groups or of axes, or one set of calls."""
    calls = [p.call for p in parts if p is not None]
    absent = next(
        (p for p in parts if p and p.position is None and not p.has and p.call.op != "new_group"),
        None,
    )
    if absent is not None and not absent.is_message:
        return (
            f"rank {absent.rank} makes no {absent.call.op} on {absent.call.group.name} at all: let it take part, with nothing to give",
            "where it has nothing (no tokens, no gradients), or make a group without it",
        )
    groups = list(dict.fromkeys(c.group.name for c in calls))
    if len(groups) < 2:
        return (
            "some members leave out a call that others make: let all make the same calls on the group",
        )
    if all(turn[0] in calls[0].group.ranks for turn in turns):
        return (
            f"they enter {word_list(groups)} in different order: let all of them enter {groups[0]} first",
        )
    axes = list(dict.fromkeys(name.partition("[")[0] for name in groups))
    if len(axes) < 2 or not all("[" in name for name in groups):
        return (
            f"they enter {word_list(groups)} in different order: let every rank enter its groups in one order",
        )
    return (
        f"they enter {word_list(axes)} in different order: use one order of axes on all ranks, say {axes[0]} first",
    )


def with_new_group_rule(found: Finding, call: ResolvedCall, missing: Sequence[int]) -> Finding:
    """The rule that was broken first, what ranks wait for then below it."""
    ranks = f"rank{'' if len(missing) == 1 else 's'} {number_list(list(missing), 4)}"
    do, whose = (
        "does" if len(missing) == 1 else "do",
        "all its members" if call.local_sync else "all ranks",
    )
    return replace(
        found,
        message=f"new_group({call.name}) is a call of {whose}, and {ranks} {do} not make it\n  {found.message}",
    )


def advise_new_group(missing: Sequence[int], local: bool = False) -> tuple[str, ...]:
    """The rule that a new_group without some ranks breaks; ``local``: it is a call of its members
    alone.
    """
    ranks = f"rank{'' if len(missing) == 1 else 's'} {number_list(list(missing), 4)}"
    if local:
        return (
            f"a new_group that its members make alone is a call of all of them: let {ranks} make it too",
        )
    return (
        f"new_group is a call of all ranks of the world, members or not: let {ranks} make it too,",
        "or say `use_local_synchronization: true` for a call of the members alone",
    )


def advise_one_communicator(batched: int, alone: int) -> tuple[str, ...]:
    """Two ends that are posted and never meet, for they travel on different communicators."""
    return (
        f"rank {batched} posts it in a batch, on the group's communicator, rank {alone} alone, on that of the pair: they never meet",
        "batch both or neither, or make the communicators at the start (`init: eager`)",
    )


def same_operation(one: ResolvedCall, other: ResolvedCall) -> bool:
    """The same operation on as much data: calls that could have met, had they been made on one
    group.
    """
    return one.op == other.op and [b.numel for b in one.inputs] == [b.numel for b in other.inputs]


class WrongGroupCall(NamedTuple):
    """A call on another group than that on which it is awaited, and where it is awaited."""

    call: ResolvedCall
    awaited: ResolvedCall
    place: SourceLocation | None

    @property
    def advice(self) -> tuple[str, ...]:
        """What the others use. An axis is named without its coordinates."""
        call, axis = self.call, self.awaited.group.name.partition("[")[0]
        return (
            f"rank {call.rank} makes {call.op} on {call.group.name}, and rank {self.awaited.rank} waits for it on"
            f" {self.awaited.group.name}: the others use {axis} here",
        )

    def lead(self, found: Finding) -> Finding:
        """The slip first, what ranks wait for then below it."""
        head = f"rank {self.call.rank} makes {self.call.op} on {self.call.group.name}, and is awaited on {self.awaited.group.name}"
        places = (*found.places, *([self.place] if self.place is not None else []))
        places = tuple(dict.fromkeys(places))
        return replace(found, message=f"{head}\n  {found.message}", places=places, slips=places)


def _message_label(call: ResolvedCall) -> str:
    """What tells a message from others of its pair: its tag, else its tensor."""
    buffers = call.inputs or call.outputs
    return (
        (tag_text(call.tag) or "tag 0")
        if call.tag or not buffers or not buffers[0].name
        else buffers[0].label
    )


def _group_message_label(call: ResolvedCall) -> str:
    return f"a message of {call.group.name}"


def advise_missing_ranks(
    status: str,
    part: AwaitedCall | None,
    gone: Sequence[int],
    message: str,
    waiting: Sequence[int] = (),
) -> tuple[str, ...]:
    """What to do about a rank that is no longer there. ``waiting``: who waits; fewer than are gone,
    they are the odd ones.
    """
    ranks = f"rank{'' if len(gone) == 1 else 's'} {number_list(list(gone), 4)}"
    if status == "absent":
        return (
            f"start {ranks} as well: the world size must be nnodes times nproc_per_node,",
            "every machine must run the launcher, and MASTER_ADDR must be reachable from it",
        )
    if status in ("raised", "crashed", "killed"):
        why = f": {message.rstrip('.')}" if message and message != "fault" else ""
        return (
            f"look at the log of {ranks} first{why}; the others only follow",
            *remedy_for_error(message),
        )
    if status == "silent":
        why = f": {message}" if message else ""
        return (
            f"see what {ranks} {'is' if len(gone) == 1 else 'are'} doing there{why}; the others only wait",
        )
    if part is not None and part.call.op == "new_group":
        return advise_new_group(gone, part.call.local_sync)
    if part is not None and not part.is_message and 0 < len(waiting) < len(gone):
        some = f"rank{'' if len(waiting) == 1 else 's'} {number_list(list(waiting), 4)}"
        return (
            f"{some} make{'s' if len(waiting) == 1 else ''} calls that the others do not: a batch more (uneven batches),",
            "or a branch that the others do not take, as a collective under `if` or a no_sync that is forgotten",
        )
    if part is not None and not part.is_message:
        return (
            f"uneven batches, an early return or a branch that {ranks} skip{'s' if len(gone) == 1 else ''}:",
            f"let every member of {part.call.group.name} make the same calls",
        )
    if part is not None and part.position is not None:
        return advise_keep_request(part.rank)
    return (f"let {ranks} make the missing call before it ends",)


def advise_message(part: AwaitedCall, near: Sequence[NearMiss], sends: bool) -> tuple[str, ...]:
    """What to do about a message that nobody takes or sends."""
    word = "receive" if sends else "send"
    if near:
        return {
            "channel": (
                "signal and wait on the same channel: each has a cell of its own in the pad",
            ),
            "tag": (
                "give both ends the same tag; nccl ignores tags, so there it would run, and hang on gloo and mpi",
            ),
            "group": (
                "use the same group on both ends: a message of one group is not received on another",
            ),
            "peer": (
                "one of the two names the wrong rank: src and dst are global ranks,",
                "group_src and group_dst count inside the group",
            ),
        }[near[0].what]
    if OPERATIONS[part.call.op].signals:
        missing = "wait_signal" if sends else "put_signal"
        more = (
            f"rank {part.rank} makes {part.has}, this would be number {part.number + 1}: "
            if part.has
            else ""
        )
        return (f"{more}add the {missing} on rank {part.rank}, or leave this call out",)
    if part.call.peer is None:
        return (
            f"add a send to rank {part.call.rank} with this tag and group, or leave the receive out",
        )
    if part.has:
        counted = f"{part.has} such {word}{'s' if part.has > 1 else ''}"
        return (
            f"rank {part.rank} makes {counted}, this would be number {part.number + 1}: one more there, or one less here",
        )
    return (f"add the {word} on rank {part.rank}, or leave this call out",)


def word_list(words: Sequence[str]) -> str:
    """`g1 and g2`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- what errors of PyTorch mean ---
#: Where models differ by rank.
SAME_MODEL_ADVICE = (
    "build the same model on all ranks, with the same parameters frozen: DistributedDataParallel raises where it is made,",
    '"DDP expects same model across all ranks"',
)
_NO_GPU_ADVICE = (
    "there is no GPU here: under `distsim capture`, `--cuda` gives each rank one over this memory",
)
#: Words of an error (torch 2.13, torch/nn/parallel/distributed.py, reducer.cpp,
#: torch/cuda/__init__.py; Megatron-Core) -> what to do.
_ADVICE_BY_ERROR: dict[str, tuple[str, ...]] = {
    "expects same model across all ranks": SAME_MODEL_ADVICE,
    "appears not to match": SAME_MODEL_ADVICE,
    "Expected to have finished reduction in the prior iteration": (
        "some of its parameters got no gradient in the pass before: let the forward pass use them all on every rank,",
        "or pass find_unused_parameters=True to DistributedDataParallel",
    ),
    "Communication call has not been issued for this bucket": (
        "a parameter of that bucket got no gradient, and nothing was sent for it: let every parameter take part in the loss,",
        "or train without overlap_grad_reduce",
    ),
    "Torch not compiled with CUDA enabled": _NO_GPU_ADVICE,
    "Found no NVIDIA driver": _NO_GPU_ADVICE,
    "No CUDA GPUs are available": _NO_GPU_ADVICE,
    "has no attribute '_cuda_": _NO_GPU_ADVICE,
}


def remedy_for_error(error: str) -> tuple[str, ...]:
    """What to do about an error that a rank raised before the others wait for it; empty where it is
    none that is known.
    """
    return next((lines for words, lines in _ADVICE_BY_ERROR.items() if words in error), ())
