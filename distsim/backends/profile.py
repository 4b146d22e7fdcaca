"""The records that describe a backend: what it supports, and its blocking rules.

A `BackendProfile` holds the blocking rules as data and a few small functions. Message matching
(`distsim.backends.message_matching`) asks the profile for keys; the semantics (`distsim.semantics`)
ask what a match needs and when a call returns. A `BackendSupport` holds the supported operations,
dtypes and reduce ops, together with the text of each refusal.

A profile knows neither clock nor costs. Its functions take plain integers or resolved calls; ranks
are global ranks unless a comment says group rank.

The supported features are those of torch 2.9 to 2.13. Facts about one operation are in the table of
operations (`Operation.bindings`); facts about all operations are in the module of the backend. This
module combines both, for the profiles (`BackendProfile.refuse`) and for `distsim explain backends`.

In the docstrings of this package, tags such as G5 and N10 name rules of
docs/explanation/semantics.md, and numbers such as 2.3 name sections of the evidence behind them.
"Run" marks a fact that was observed in a real run, "read" a fact from the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple

from distsim.common.records import dataclass
from distsim.operations.core.operation_base import BackendBinding
from distsim.operations.core.resolved_call import (
    COMPLEX_DTYPES,
    ResolvedCall,
    TensorBuffer,
    differing_part_dtypes,
    tensor_in_two_parts,
)
from distsim.operations.registry import OPERATIONS

# --- what a backend supports ---


DeviceType = Literal["cpu", "gpu"]
#: ``built``: only if the library below torch was built with that support.
SupportLevel = Literal["yes", "no", "built"]

#: Operations for which some backend compares shapes, and not only element counts.
SHAPE_CHECKED_OPS = tuple(
    op
    for op, row in OPERATIONS.items()
    if any(binding.shape_text for binding in row.bindings.values())
)
#: Operations that a backend carries out.
COMMUNICATION_OPS = tuple(
    op for op, row in OPERATIONS.items() if row.kind in ("p2p", "collective", "remote")
)
FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
FLOAT8_DTYPES = frozenset({"float8_e4m3fn", "float8_e5m2"})
INTEGER_DTYPES = frozenset({"int64", "int32", "int8", "uint8"})
BITWISE_REDUCE_OPS = ("band", "bor", "bxor")
#: The C++ names of dtypes, as torch's error messages print them.
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
    """The operations, devices, dtypes and reduce ops that one backend supports."""

    backend: str
    #: Whether tensors in host memory, or on a GPU, are supported at all.
    cpu: SupportLevel
    gpu: SupportLevel
    #: The dtypes of point-to-point and one-sided messages.
    messages: frozenset[str]
    #: The dtypes that collectives can move. To reduce them is a separate question: see `reduced`.
    moved: frozenset[str]
    #: Reduce op -> the dtypes that the backend can reduce with it.
    reduced: Mapping[str, frozenset[str]]
    #: The error text for an unsupported dtype; ``{type}`` is torch's C++ name of it.
    dtype_text: str
    #: Reduce op -> the error text for it; the key ``""`` holds the text for all other reduce ops.
    reduce_text: Mapping[str, str]
    #: The error text for a receive without a source; None if such receives are supported.
    any_source: str | None = None
    #: Operations that the backend supports although their entry in the table does not name it.
    bindings: Mapping[str, BackendBinding] = field(default_factory=dict)

    def copied(self, backend: str, without: frozenset[str] = frozenset()) -> BackendSupport:
        """The support of a backend that resembles this one, without some dtypes.

        The table of operations names only this backend, so the copy carries all bindings itself.
        """
        bindings = {op: self.binding(op) for op in COMMUNICATION_OPS}
        return replace(
            self,
            backend=backend,
            messages=self.messages - without,
            moved=self.moved - without,
            reduced={op: dtypes - without for op, dtypes in self.reduced.items()},
            bindings={op: binding for op, binding in bindings.items() if binding is not None},
        )

    def binding(self, op: str) -> BackendBinding | None:
        """How the backend implements an operation; None if it does not know the operation."""
        return OPERATIONS[op].bindings.get(self.backend) or self.bindings.get(op)

    def on(self, op: str, device: DeviceType) -> SupportLevel:
        """Whether the operation supports tensors on the device."""
        binding = self.binding(op)
        if binding is None or binding.refused:
            return "no"
        if device == "cpu":
            return self.cpu
        return self.gpu if binding.gpu else "no"

    def takes(self, op: str, dtype: str, reduce_op: str | None = None) -> bool:
        """Whether the operation supports this dtype, and this reduction of it."""
        return self.refusal(op, dtype, reduce_op) is None

    def refusal(self, op: str, dtype: str, reduce_op: str | None = None) -> str | None:
        """The text of the error that a call raises; None if the call is supported.

        An empty ``dtype`` means a call without tensors.
        """
        row = OPERATIONS[op]
        binding = self.binding(op)
        if op not in COMMUNICATION_OPS:
            return None
        if binding is None or binding.refused:
            return self._missing_operation_error(op, binding)
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

    def _missing_operation_error(self, op: str, binding: BackendBinding | None) -> str:
        """The backend's own text for an operation that it refuses, else torch's default text."""
        if binding is not None and binding.refused:
            return binding.refused
        return f"Backend {self.backend} does not support {op}"

    def texts(self) -> tuple[str, ...]:
        """All texts of refusals as templates, without duplicates."""
        bindings = {op: self.binding(op) for op in COMMUNICATION_OPS}
        known = [binding for binding in bindings.values() if binding is not None]
        missing_operation_errors = [
            self._missing_operation_error(op, binding)
            for op, binding in bindings.items()
            if binding is None or binding.refused
        ]
        texts = (
            self.any_source,
            self.dtype_text,
            *(binding.dtype_text for binding in known),
            *self.reduce_text.values(),
            *missing_operation_errors,
            *(binding.shape_text for binding in known),
        )
        return tuple(dict.fromkeys(text for text in texts if text))

    def refuse(self, call: ResolvedCall) -> str | None:
        """The text of the error that a resolved call raises, else None.

        This is the default for `BackendProfile.refuse`.
        """
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
        """Whether the backend accepts a coalesced launch that the contract forbids (DS110).

        No backend checks whether two parts of a launch use the same tensor. Only some check
        whether all parts have one dtype (`BackendBinding.one_dtype`).
        """
        binding = self.binding(call.op)
        if code != "DS110" or OPERATIONS[call.op].coalesces is None or binding is None:
            return False
        if differing_part_dtypes((*call.inputs, *call.outputs)):
            return not binding.one_dtype
        return tensor_in_two_parts(call.inputs, call.outputs) is not None


def _shape_error(call: ResolvedCall, text: str) -> str | None:
    """The error for the first part whose larger tensor has the wrong shape, else None.

    The shape is right if it is that of the smaller tensor with a first dimension n times as long.
    A tensor with too few elements is not judged here: such a call is invalid under every backend.
    """
    row, n = OPERATIONS[call.op], call.group.size
    for part in row.separate(call):
        if row.output_parts == "n":
            small, large = part.inputs[0], part.outputs[0]
        else:
            small, large = part.outputs[0], part.inputs[0]
        if large.numel == n * small.numel and not _is_stacked_shape(large, small, n):
            large_rows = large.shape[0] if large.shape else 0
            small_rows = small.shape[0] if small.shape else 0
            expected_rows = -(-large_rows // n) if large.shape else 1
            return text.format(
                one=_torch_shape(small),
                got=_torch_shape(large, expected_rows),
                sizes=f"{small_rows * n} vs. {large_rows}",
            )
    return None


def _is_stacked_shape(large: TensorBuffer, small: TensorBuffer, n: int) -> bool:
    """Whether ``large`` has the shape of n tensors like ``small``, joined along dimension 0."""
    if not small.shape:
        return False
    return large.shape == (n * small.shape[0], *small.shape[1:])


def _torch_shape(buffer: TensorBuffer, rows: int | None = None) -> str:
    shape = buffer.shape if rows is None else (rows, *buffer.shape[1:])
    return f"({', '.join(map(str, shape))})"


def complex_reduction_error(op: str, reduce_op: str) -> str:
    """The error text for a reduction of complex tensors other than sum and avg.

    Backends move complex tensors as pairs of real numbers, which only sum and avg allow. torch
    refuses all_reduce in Python and the other operations in C++. The C++ message prints the reduce
    op as the control character of its number (between "support" and "on"), which is omitted here.
    """
    if OPERATIONS[op].torch_name in ("all_reduce", "all_reduce_coalesced"):
        return f"all_reduce does not support RedOpType.{reduce_op.upper()} on complex tensors"
    return f"{'reduce' if op == 'reduce' else 'all_reduce'} does not supporton complex tensors"


def dtypes_by_reduce_op(
    numbers: frozenset[str], means: frozenset[str], bits: frozenset[str], complex_: frozenset[str]
) -> dict[str, frozenset[str]]:
    """Reduce op -> dtypes, from the dtypes of each kind of reduction.

    ``numbers`` support sum, product, min and max; ``means`` support avg; ``bits`` support the
    bitwise reduce ops. ``complex_`` supports sum, and also avg if any dtype supports avg.
    """
    plain = {"sum": numbers | complex_, "product": numbers, "min": numbers, "max": numbers}
    return {
        **plain,
        "avg": means | (complex_ if means else frozenset()),
        **dict.fromkeys(BITWISE_REDUCE_OPS, bits),
    }


# --- the blocking rules ---


#: The final outcome of a run (design §5, "Verdicts and outcomes").
Outcome = Literal["completes", "hangs", "raises", "crashes", "wrong-data", "undefined"]


class MismatchedCalls(NamedTuple):
    """Calls that matched each other although their arguments differ."""

    #: The properties that differ: op, numel, dtype, reduce_op, root, splits. For a message also
    #: ``tag``, under a profile that ignores tags.
    fields: tuple[str, ...]
    #: A message: the send, then the receive. A collective: the calls of the members that have
    #: arrived, in order of arrival.
    calls: tuple[ResolvedCall, ...]
    #: The size of each call.
    nbytes: tuple[int, ...]
    is_message: bool


class MismatchOutcome(NamedTuple):
    """The consequence of mismatched calls."""

    outcome: Outcome
    #: The global ranks whose process dies.
    crash: tuple[int, ...] = ()
    #: Whether all other ranks hang in the call.
    hangs: bool = False
    #: The global ranks that raise after the call.
    raises: tuple[int, ...] = ()

    @property
    def stops_ranks(self) -> bool:
        """Whether some rank does not continue after the call."""
        return bool(self.crash or self.hangs or self.raises)


class WorkerQueue(NamedTuple):
    """A queue that runs collectives in order, ``width`` at a time."""

    key: Hashable
    width: int


#: The reaction to a call that the contract forbids: the rank raises, hangs or crashes; torch warns
#: and does nothing ("ignored"); or the backend executes the call as if it were valid ("goes on").
InvalidCallReaction = Literal["raises", "hangs", "crashes", "ignored", "goes on"]

#: The ranks that synchronise in new_group: its members, the world, none, or the ranks that use the
#: same group name in the store.
NewGroupParticipants = Literal["members", "world", "nobody", "named"]


#: The options of a scenario, by name
#: (`distsim.scenario.format.models.sections.ProcessGroupOptions`).
BackendOptions = Mapping[str, Any]


class BufferOption(NamedTuple):
    """The scenario option for the number of bytes that a send may buffer, with its default.

    ``description`` and ``example`` are the help text of the option in a scenario file.
    """

    name: str
    default: int
    description: str = "Number of bytes that a send may buffer."
    example: str = "8 MiB"

    def limit(self, options: BackendOptions) -> int:
        """The limit in bytes; the default applies if the option is missing or null."""
        value = options.get(self.name)
        return self.default if value is None else int(value)


#: Further possible outcomes, which depend on tensor values or on memory. Arguments: the outcome,
#: the differing fields of each mismatch that leads to it, and whether a call names a partner that
#: is outside the world.
AlternativeOutcomesRule = Callable[[str, Sequence[tuple[str, ...]], bool], frozenset[str]]


class MemberNeeds(NamedTuple):
    """The global ranks on which one member of an irregular collective depends.

    A collective is irregular if its members name different roots, or if only some of them have
    data to send.
    """

    #: The ranks that must have arrived before the member can return: ranks other than itself, or
    #: all members.
    ranks: frozenset[int]
    #: Those of ``ranks`` for which the member then waits forever, because they take part in
    #: another way or not at all.
    in_vain: frozenset[int] = frozenset()


#: The group ranks that must have arrived before a group rank may return; None means all of them.
#: Arguments: op, group size, root as a group rank, group rank.
NeedsRule = Callable[[str, int, int, int], frozenset[int] | None]


#: Whether two members of a collective exchange any data.
#: Arguments: op, group size, root, and the two members as group ranks.
TrafficRule = Callable[[str, int, int, int, int], bool]


class Contact(NamedTuple):
    """When a member of a collective uses its connection with another member (group ranks)."""

    #: The members that must have arrived before it posts a transfer there. Posting fails if the
    #: connection is closed by then.
    posts_after: frozenset[int]
    #: The members that must have arrived before it waits for that transfer. The wait fails if the
    #: connection has closed since.
    waits_after: frozenset[int]


#: A member that posts a transfer at once, and waits for it first.
IMMEDIATE_CONTACT = Contact(frozenset(), frozenset())
#: (op, group size, root, member, another member) -> contact; None: they exchange no data, or the
#: member waits for others until then.
ContactRule = Callable[[str, int, int, int, int], Contact | None]


def any_pair_has_traffic(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Any two members may exchange data."""
    return True


def immediate_contact(op: str, n: int, root: int, me: int, other: int) -> Contact | None:
    """Every member notices at once that another one is dead."""
    return IMMEDIATE_CONTACT


def never_buffered(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    """A send is a rendezvous at every size."""
    return False


def no_alternative_outcomes(
    outcome: str, fields: Sequence[tuple[str, ...]], outside: bool
) -> frozenset[str]:
    """The predicted outcome is the only possible one."""
    return frozenset()


def never_skips_empty(op: str) -> bool:
    """Members synchronise even if some of them have no data to send."""
    return False


#: The connections that a collective needs if the backend implements it with messages: between all
#: pairs of its group, or in one direction between each member and the root.
ALL_PAIRS, TO_ROOT, FROM_ROOT = "all pairs", "to root", "from root"


@dataclass(frozen=True, slots=True)
class BackendProfile:
    """The blocking rules of a backend, or of one reading of the contract.

    Every field is one rule. The module that defines a profile states the source of each rule.
    A profile with ``support`` is a backend; one without is a reading of the contract, which
    supports everything.
    """

    name: str
    #: The description of the blocking rules for users.
    about: str

    # --- collectives ---
    #: The group ranks that a group rank waits for in a collective.
    needs: NeedsRule
    #: The consequence of calls that match although their arguments differ.
    mismatch: Callable[[MismatchedCalls], MismatchOutcome]
    #: The error text for a call that the backend itself rejects, else None.
    refuse: Callable[[ResolvedCall], str | None]
    #: Whether a send may complete without its receive. Arguments: its size in bytes, the bytes of
    #: earlier such sends that are not yet received, the options.
    credit: Callable[[int, int, BackendOptions], bool]
    #: The part of a collective's matching key that depends on its operation. The rest of the key
    #: is the group and the number of the call on it.
    slot: Callable[[str], Hashable]
    #: The queue that runs a rank's collectives on a group, by (rank, group id). None: each
    #: collective starts at once.
    workers: Callable[[int, int], WorkerQueue | None]
    #: The ranks that synchronise in new_group.
    new_group: Callable[[ResolvedCall, BackendOptions], NewGroupParticipants]
    #: The reaction to a call that the contract forbids, by the code of the finding (DS101 …).
    invalid: Callable[[ResolvedCall, str, BackendOptions], InvalidCallReaction]
    #: Whether the host only enqueues and operations run on streams, as with NCCL
    #: (`distsim.semantics.form.device_compiler`). Otherwise the host waits for its requests.
    device: bool = False
    #: Whether tags take part in matching; otherwise the backend ignores them.
    tags: bool = True
    #: Whether receives may omit the source; otherwise the backend refuses such receives.
    any_source: bool = True
    #: The fate of a message whose request can no longer be waited for. If it "cancels", the
    #: partner of the message gets no more data from that rank, in messages and in collectives
    #: between whose members data flows (``has_traffic``). No built-in backend combines "cancels"
    #: with ``credit``: the rules take an unmatched send that is no longer open for a dropped one
    #: (`distsim.semantics.ordered.state.CLOSED`), and would confuse it with a buffered one.
    dropped: Literal["nothing", "cancels", "crashes"] = "nothing"
    #: The reaction of a rank that has a transfer to or from a dead rank.
    peer_death: Literal["raises", "hangs"] = "hangs"
    #: Whether a process that ends by itself first waits for its open collectives. A process that is
    #: killed does not.
    joins_collectives_at_exit: bool = False
    #: The order of receives: see `distsim.backends.message_matching.MessageMatcher`.
    specific_first: bool = False
    #: torch's default timeout of a group.
    timeout_ns: int = 30 * 60 * 10**9
    #: The consequence of an expired timeout.
    timed_out: Literal["raises", "crashes", "nothing"] = "nothing"
    #: The additional time that waits in the store last (in init_process_group and new_group).
    store_grace_ns: int = 0
    #: Whether the first rank of a communicator publishes its id in the store, where the other ranks
    #: wait for it (``ProcessGroupNCCL::broadcastUniqueNCCLID``). That wait ends with the timeout of
    #: the store, which is the world's, even for other groups (``init_process_group`` calls
    #: ``store.set_timeout``). Once the id is there, nothing limits the wait for the other ranks.
    publishes_communicator_id: bool = False
    #: Whether every blocking call of the library holds one lock per process (MPI).
    lock: bool = False
    #: The supported features; None for a reading of the contract, which supports everything.
    support: BackendSupport | None = None
    #: The option that ``credit`` reads; None if no option changes the buffering.
    buffer_option: BufferOption | None = None
    #: The cluster preset for scenarios that name no cluster.
    cluster: str = "cpu-10gbe"
    #: The position in torch's list of backends (`torch.distributed.Backend.backend_list`).
    listed: int = 0
    #: Whether the packages of torch contain the backend.
    built_in: bool = True
    #: The error text for new_group with use_local_synchronization; None if that is supported.
    local_groups: str | None = None
    #: Outcomes that are possible in place of the predicted one.
    alternative_outcomes: AlternativeOutcomesRule = no_alternative_outcomes
    #: Collectives that the backend implements with messages between members, each with the
    #: connections that it needs (`ALL_PAIRS`, `TO_ROOT` or `FROM_ROOT`).
    by_messages: Mapping[str, str] = field(default_factory=dict)
    #: ``needs`` by global rank, for calls that name different roots, or whose sizes differ in a
    #: ring (``skips_empty``). None: ``mismatch`` alone decides about such calls.
    per_rank_needs: Callable[[Sequence[ResolvedCall]], Mapping[int, MemberNeeds]] | None = None
    #: The group ranks whose calls decide, together with this call, which of them crash in a
    #: mismatch. All other consequences depend only on which kinds of calls there are. None: all
    #: group ranks.
    neighbours: Callable[[ResolvedCall], frozenset[int]] | None = None
    #: Whether a member without data to send skips the collective. Such collectives are rings;
    #: ``per_rank_needs`` decides which members complete if the sizes differ.
    skips_empty: Callable[[str], bool] = never_skips_empty
    #: Whether two members of a collective exchange data.
    has_traffic: TrafficRule = any_pair_has_traffic
    #: When a member of a collective notices that another one is dead (``peer_death``).
    contact: ContactRule = immediate_contact

    @property
    def rendezvous(self) -> bool:
        """Every send waits for its receive, at every size."""
        return self.credit is never_buffered


# --- rules that several profiles share ---


def torch_frontend_reaction(
    call: ResolvedCall, code: str, options: BackendOptions
) -> InvalidCallReaction:
    """The reaction of torch's Python layer, before a backend sees the call (2.1, 2.2, 2.3).

    A call by a non-member only warns and does nothing, except `send`, which raises ("Invalid
    process group specified"). Every other wrong argument raises.

    After the last group was destroyed (DS108), a non-member still gets only the warning if torch
    does not look up a root first (run: all_reduce and barrier return, broadcast raises).
    """
    is_non_member = call.group.group_rank(call.rank) < 0
    if code == "DS108" and is_non_member:
        operation = OPERATIONS[call.op]
        is_rootless = operation.kind == "collective" and operation.root_field is None
        return "ignored" if is_rootless else "raises"
    return "ignored" if code == "DS104" and call.op != "send" else "raises"


def needs_all(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Every member waits for all members."""
    return None


def matched_by_number(op: str) -> Hashable:
    """The n-th collectives of a group match each other, whatever their operations."""
    return None


def no_neighbours(call: ResolvedCall) -> frozenset[int]:
    """No process dies of mismatched collectives."""
    return frozenset()


def no_workers(rank: int, group: int) -> WorkerQueue | None:
    """Collectives start at once and run concurrently."""
    return None
