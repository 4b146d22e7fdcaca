"""What a profile is: the blocking rules of a back end, as data and a few small functions; what it
takes, and its words for the rest.

Matching (`distsim.backends.message_matching`) asks it for keys, the rules (`distsim.semantics`) ask
it what a match needs and when a call returns. It has no clock and no cost. Functions take plain
integers or resolved calls; all ranks are global.

What is taken (`BackendSupport`) is that of torch 2.9 to 2.13. What holds for one operation stands
in its row (`Op.bindings`), what holds for all in the back end's file. Both are read here, for the
profiles (`BackendProfile.refuse`) and for `distsim explain backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

from distsim.common.records import dataclass
from distsim.operations.core.operation_base import BackendBinding
from distsim.operations.core.resolved_call import (
    ResolvedCall,
    TensorBuffer,
    differing_part_dtypes,
    tensor_in_two_parts,
)
from distsim.operations.registry import OPERATIONS

# --- what a back end takes ---


DeviceType = Literal["cpu", "gpu"]
#: ``built``: only where the library underneath was built for it.
SupportLevel = Literal["yes", "no", "built"]

#: Operations at whose shapes a back end may look, not only at the elements.
SHAPE_CHECKED_OPS = tuple(
    op
    for op, row in OPERATIONS.items()
    if any(binding.shape_text for binding in row.bindings.values())
)
#: Operations that are a back end's business.
COMMUNICATION_OPS = tuple(
    op for op, row in OPERATIONS.items() if row.kind in ("p2p", "collective", "remote")
)
FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
FLOAT8_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
INTEGER_DTYPES = frozenset({"int64", "int32", "int8", "uint8"})
COMPLEX_DTYPES = frozenset({"complex64", "complex128"})
BITWISE_REDUCE_OPS = ("band", "bor", "bxor")
#: torch's C++ names of dtypes, as its messages print them.
TORCH_SCALAR_TYPES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


@dataclass(frozen=True, slots=True)
class BackendSupport:
    """What one back end takes.

    ``cpu``, ``gpu``: whether tensors there are taken at all. ``messages``, ``moved``: the dtypes of
    messages and of collectives. ``reduced``: reduce op -> dtypes. ``dtype_text``: the refusal of a
    dtype, ``{type}`` is torch's name. ``reduce_text``: the refusal of a reduce op, by reduce op
    (``""``: any other). ``any_source``: the text for a receive without a source, None where it is
    taken. ``bindings``: operations that the back end takes although their rows do not name it.
    """

    backend: str
    cpu: SupportLevel
    gpu: SupportLevel
    messages: frozenset[str]
    moved: frozenset[str]
    reduced: Mapping[str, frozenset[str]]
    dtype_text: str
    reduce_text: Mapping[str, str]
    any_source: str | None = None
    bindings: Mapping[str, BackendBinding] = field(default_factory=dict)

    def binding(self, op: str) -> BackendBinding | None:
        """What the back end makes of an operation; None where it has never heard of it."""
        return OPERATIONS[op].bindings.get(self.backend) or self.bindings.get(op)

    def on(self, op: str, device: DeviceType) -> SupportLevel:
        """Does the operation take tensors there?"""
        binding = self.binding(op)
        if binding is None or binding.refused or (device == "gpu" and not binding.gpu):
            return "no"
        return self.cpu if device == "cpu" else self.gpu

    def takes(self, op: str, dtype: str, reduce_op: str | None = None) -> bool:
        """Does the operation take this dtype, and reduce it so?"""
        return self.refusal(op, dtype, reduce_op) is None

    def refusal(self, op: str, dtype: str, reduce_op: str | None = None) -> str | None:
        """The text of the error that the call raises; None when it is taken. An empty dtype is a
        call without tensors.
        """
        row = OPERATIONS[op]
        binding = self.binding(op)
        if op not in COMMUNICATION_OPS:
            return None
        if binding is None or binding.refused:
            return self._lacks(op, binding)
        if not dtype:
            return None
        supported = self.messages if row.kind in ("p2p", "remote") else self.moved
        if dtype not in supported or dtype in binding.gaps:
            return (binding.dtype_text or self.dtype_text).format(type=TORCH_SCALAR_TYPES[dtype])
        if reduce_op is None or dtype in self.reduced.get(reduce_op, ()):
            return None
        if dtype in COMPLEX_DTYPES and reduce_op not in ("sum", "avg"):
            return complex_reduction_error(op, reduce_op)
        return self.reduce_text.get(reduce_op, self.reduce_text[""]).format(
            op=reduce_op.upper(), type=TORCH_SCALAR_TYPES[dtype]
        )

    def _lacks(self, op: str, binding: BackendBinding | None) -> str:
        """torch's default of an operation that a back end does not have, or words of its own."""
        if binding is not None and binding.refused:
            return binding.refused
        return f"Backend {self.backend} does not support {op}"

    def texts(self) -> tuple[str, ...]:
        """Every text of a refusal once, as a template."""
        bindings = {op: self.binding(op) for op in COMMUNICATION_OPS}
        bound = [b for b in bindings.values() if b is not None]
        texts = (
            self.any_source,
            self.dtype_text,
            *(b.dtype_text for b in bound),
            *self.reduce_text.values(),
            *(self._lacks(op, b) for op, b in bindings.items() if b is None or b.refused),
            *(b.shape_text for b in bound),
        )
        return tuple(dict.fromkeys(text for text in texts if text))

    def refuse(self, call: ResolvedCall) -> str | None:
        """`BackendProfile.refuse`: the text of the error that a resolved call raises, else None."""
        is_any_source = OPERATIONS[call.op].direction == "recv" and call.peer is None
        if is_any_source and self.any_source is not None:
            return self.any_source
        buffers = call.inputs or call.outputs
        reason = self.refusal(call.op, buffers[0].dtype if buffers else "", call.reduce_op)
        if reason:
            return reason
        binding = self.binding(call.op)
        if binding is not None and binding.shape_text:
            return _shape_error(call, binding.shape_text)
        return None

    def overlooks(self, call: ResolvedCall, code: str) -> bool:
        """Does the back end take a coalesced launch that the contract forbids, as it does not look
        for what is wrong with it? A tensor in two parts nobody looks for; parts of several dtypes
        only some."""
        binding = self.binding(call.op)
        if code != "DS110" or OPERATIONS[call.op].coalesces is None or binding is None:
            return False
        mixed = differing_part_dtypes((*call.inputs, *call.outputs))
        return (
            not binding.one_dtype
            if mixed
            else tensor_in_two_parts(call.inputs, call.outputs) is not None
        )


def _shape_error(call: ResolvedCall, text: str) -> str | None:
    """Of the first part whose larger tensor does not begin with n times the smaller one's first
    axis. One of too few elements is invalid under every back end, which is no business of this
    table."""
    row, n = OPERATIONS[call.op], call.group.size
    for part in row.separate(call):
        small, large = (
            (part.inputs[0], part.outputs[0])
            if row.output_parts == "n"
            else (part.outputs[0], part.inputs[0])
        )
        if large.numel == n * small.numel and (
            not small.shape or large.shape != (n * small.shape[0], *small.shape[1:])
        ):
            rows = -(-large.shape[0] // n) if large.shape else 1
            first = small.shape[0] if small.shape else 0
            sizes = f"{first * n} vs. {large.shape[0] if large.shape else 0}"
            return text.format(one=_torch_shape(small), got=_torch_shape(large, rows), sizes=sizes)
    return None


def _torch_shape(buffer: TensorBuffer, rows: int | None = None) -> str:
    shape = buffer.shape if rows is None else (rows, *buffer.shape[1:])
    return f"({', '.join(map(str, shape))})"


def complex_reduction_error(op: str, reduce_op: str) -> str:
    """Complex tensors travel as pairs of real numbers, which only sum and avg allow. all_reduce is
    refused in Python, the others in C++, where the reduce op is printed as the control character of
    its number; it is left out here."""
    if OPERATIONS[op].single() == "all_reduce":
        return f"all_reduce does not support RedOpType.{reduce_op.upper()} on complex tensors"
    return f"{'reduce' if op == 'reduce' else 'all_reduce'} does not supporton complex tensors"


def dtypes_by_reduce_op(
    numbers: frozenset[str], means: frozenset[str], bits: frozenset[str], complex_: frozenset[str]
) -> dict[str, frozenset[str]]:
    """By reduce op: ``numbers`` have sum, product, min and max; ``means`` avg; ``bits`` the bitwise
    ones; ``complex_`` sum, and avg.
    """
    plain = {"sum": numbers | complex_, "product": numbers, "min": numbers, "max": numbers}
    return {
        **plain,
        "avg": means | (complex_ if means else frozenset()),
        **dict.fromkeys(BITWISE_REDUCE_OPS, bits),
    }


# --- the blocking rules ---


#: What a run does in the end (design §5, "Verdicts and outcomes").
Outcome = Literal["completes", "hangs", "raises", "crashes", "wrong-data", "undefined"]


class MismatchedCalls(NamedTuple):
    """Calls that met and do not fit. ``fields`` are the words that differ (op, numel, dtype,
    reduce_op, root, splits; tag, of a message under a profile that ignores tags).

    Of a message, ``calls`` is the send and the receive; of a collective, those who have come, in
    order of arrival. ``nbytes`` are their sizes.
    """

    fields: tuple[str, ...]
    calls: tuple[ResolvedCall, ...]
    nbytes: tuple[int, ...]
    is_message: bool


class MismatchOutcome(NamedTuple):
    """What such a meeting leads to: the outcome's word, the ranks whose process dies, whether the
    others are stuck in it.
    """

    outcome: Outcome
    crash: tuple[int, ...] = ()
    hangs: bool = False


class WorkerQueue(NamedTuple):
    """A queue that runs collectives in order, ``width`` at a time."""

    key: Hashable
    width: int


#: What becomes of a call that the contract forbids: the rank raises, stands still or dies there,
#: torch warns and does nothing, or the back end takes it as if nothing were wrong.
InvalidCallReaction = Literal["raises", "hangs", "crashes", "ignored", "goes on"]

#: Who meets in new_group: its members, the world, nobody, or those who reach for the same name in
#: the store.
NewGroupParticipants = Literal["members", "world", "nobody", "named"]


#: The options of a scenario, by name
#: (`distsim.scenario.format.models.sections.ProcessGroupOptions`).
BackendOptions = Mapping[str, Any]


class BufferOption(NamedTuple):
    """The option of a scenario that says how many bytes a send may run ahead by, and its
    default.
    """

    name: str
    default: int

    def limit(self, options: BackendOptions) -> int:
        """The bytes in force; left out or null, the default."""
        value = options.get(self.name)
        return self.default if value is None else int(value)


#: Further outcomes that the numbers or the memory decide: of (outcome, the fields of each mismatch
#: that leads to it, whether a call names a partner outside the world).
AlternativeOutcomesRule = Callable[[str, Sequence[tuple[str, ...]], bool], frozenset[str]]


class MemberNeeds(NamedTuple):
    """What a member of a collective needs whose members do not agree on the root, or on whether
    there is anything to send, in global ranks: who must have come (itself aside, or all members),
    and whom of these it then waits for ``in_vain``, since they do something else or nothing."""

    ranks: frozenset[int]
    in_vain: frozenset[int] = frozenset()


#: Which group ranks must have come before a group rank may leave, by (op, group size, root as group
#: rank, group rank). None: all of them.
NeedsRule = Callable[[str, int, int, int], frozenset[int] | None]


#: Whether anything passes between two members of a collective, by (op, group size, root, and the
#: two as group ranks).
TrafficRule = Callable[[str, int, int, int, int], bool]


def any_pair_has_traffic(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Any two members may have something for each other."""
    return True


def never_buffered(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    """A send is a rendezvous at every size."""
    return False


def no_alternative_outcomes(
    outcome: str, fields: Sequence[tuple[str, ...]], outside: bool
) -> frozenset[str]:
    """The outcome is the only one."""
    return frozenset()


def never_skips_empty(op: str) -> bool:
    """Whatever members bring, they meet as one."""
    return False


#: What a collective that travels as messages needs connected: all pairs of its group, or one
#: direction between each member and the root.
ALL_PAIRS, TO_ROOT, FROM_ROOT = "all pairs", "to root", "from root"


@dataclass(frozen=True, slots=True)
class BackendProfile:
    """The blocking rules of a back end. Every field is one rule; the profile's module says where
    each comes from.

    ``device``: the host only enqueues; launches run on streams
    (`distsim.semantics.form.device_compiler`). Else the host waits for its requests. ``tags``,
    ``any_source``: whether they are obeyed, or ignored and refused. ``slot``: what besides group
    and number tells two collectives apart, of the operation. ``credit``: may a send complete
    without its receive, given (nbytes, bytes sent so and not yet received, options). ``needs``: who
    waits for whom in a collective. ``apart``: the same by rank, of calls that name different roots
    or do not bring equally much to a ``ring``; None where that is left to ``mismatch``.
    ``workers``: the queue of a rank's collectives on a group, of (rank, group id); None: they run
    at once. ``new_group``: who meets in it, given the options (`NewGroupParticipants`).
    ``local_groups``: why it makes no group with use_local_synchronization; None where it does.
    ``invalid``: what becomes of a call that the contract forbids, given the finding's code (DS101
    …) and the options. ``dropped``: what becomes of a message whose request nobody can wait for any
    more; where it ``cancels``, whoever meets it falls silent towards its rank, in collectives
    between whose members ``talks`` says that something passes. ``peer_death``: what a rank does
    that has a transfer to a dead one. ``mismatch``: what calls that meet and don't fit lead to.
    ``neighbours``: of a collective's call, the group ranks with whose calls it decides who of them
    dies of that (what else comes of it goes by what kinds of calls there are); None: all of them.
    ``refuse``: the error text of a call that the back end rejects on its own, else None.
    ``specific_first``: see `distsim.backends.message_matching.MessageMatcher`. ``timeout_ns``:
    torch's default of a group's timeout. ``timed_out``: what an expired one leads to;
    ``store_grace_ns``: how much longer a wait in the store lasts (making the world or a group).
    ``lock``: one lock per process is held through every blocking call of the library (mpi).
    ``support``: what the back end takes; None for a reading of the contract, which takes all.
    ``buffer_option``: what ``credit`` goes by; None where no option changes it. ``cluster``: the
    preset that a scenario runs on which names none. ``listed``: the place among the back ends,
    torch's (`torch.distributed.Backend.backend_list`). ``built_in``: torch's own packages have it.
    ``ring``: collectives that a member with nothing to send passes by, and of which ``apart`` tells
    who gets round where members do not bring equally much. ``besides``: outcomes that may come in
    place of the one found (`AlternativeOutcomesRule`). ``by_messages``: collectives that travel as
    messages between members, with what they need connected.
    """

    name: str
    about: str
    needs: NeedsRule
    mismatch: Callable[[MismatchedCalls], MismatchOutcome]
    refuse: Callable[[ResolvedCall], str | None]
    credit: Callable[[int, int, BackendOptions], bool]
    slot: Callable[[str], Hashable]
    workers: Callable[[int, int], WorkerQueue | None]
    new_group: Callable[[ResolvedCall, BackendOptions], NewGroupParticipants]
    invalid: Callable[[ResolvedCall, str, BackendOptions], InvalidCallReaction]
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
    support: BackendSupport | None = None
    buffer_option: BufferOption | None = None
    cluster: str = "cpu-10gbe"
    listed: int = 0
    built_in: bool = True
    local_groups: str | None = None
    alternative_outcomes: AlternativeOutcomesRule = no_alternative_outcomes
    by_messages: Mapping[str, str] = field(default_factory=dict)
    per_rank_needs: Callable[[Sequence[ResolvedCall]], Mapping[int, MemberNeeds]] | None = None
    neighbours: Callable[[ResolvedCall], frozenset[int]] | None = None
    ring: Callable[[str], bool] = never_skips_empty
    has_traffic: TrafficRule = any_pair_has_traffic

    @property
    def rendezvous(self) -> bool:
        """Every send waits for its receive, at every size."""
        return self.credit is never_buffered


# --- rules that several profiles share ---


def torch_frontend_reaction(
    call: ResolvedCall, code: str, options: BackendOptions
) -> InvalidCallReaction:
    """What torch's Python layer does before a back end sees the call: a non-member is warned and
    nothing happens, but in `send`, which raises ("Invalid process group specified"); every other
    wrong argument raises (2.1, 2.2, 2.3). Without any group left a non-member is still warned where
    torch asks for no root first (run: all_reduce and barrier return, broadcast raises)."""
    if code == "DS108" and call.group.group_rank(call.rank) < 0:
        return (
            "ignored"
            if OPERATIONS[call.op].kind == "collective" and OPERATIONS[call.op].root_field is None
            else "raises"
        )
    return "ignored" if code == "DS104" and call.op != "send" else "raises"


def needs_all(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Everybody waits for everybody."""
    return None


def matched_by_number(op: str) -> Hashable:
    """The n-th collective of a group meets the n-th, whatever its kind."""
    return None


def no_neighbours(call: ResolvedCall) -> frozenset[int]:
    """Nobody dies of collectives that don't fit."""
    return frozenset()


def no_workers(rank: int, group: int) -> WorkerQueue | None:
    """Collectives run at once, beside each other."""
    return None
