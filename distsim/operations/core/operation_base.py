"""The base class of operations: one class states all facts of one operation.

The Pydantic fields are the arguments of a step in a scenario (expressions allowed). All other facts
are class variables, or class methods on resolved calls (`ResolvedCall`: plain values) or on the
size and the root of a group, in *group ranks*. `tests/operations/test_table.py` checks every
operation and fails if a fact is missing.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from distsim.common.errors import UsageError
from distsim.operations.core.algorithms import ChunkTransfer, CollectiveAlgorithm, Round
from distsim.operations.core.field_types import ExpressionField
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.core.torch_protocols import TensorLookup, TorchWork

OperationKind = Literal["p2p", "collective", "remote", "batch", "wait", "local", "group", "block"]
RankScope = Literal["all", "root", "none"]


class InputPart(NamedTuple):
    """One contribution: part ``part`` of the input of group rank ``rank``."""

    rank: int
    part: int


#: The final output of a group rank: for each part the contributions to it (several are reduced).
#: None: no output.
OutputEffect = tuple[tuple[InputPart, ...], ...] | None


class OperationHelp(NamedTuple):
    """The texts of `distsim explain NAME`. ``signature`` is torch's; ``torch`` is the example as a
    call of torch.
    """

    signature: str
    before: str
    after: str
    waits: str
    example: str  # a YAML step that validates
    notes: tuple[str, ...] = ()
    torch: str = ""


#: Group ranks; None means all others.
GroupRanks = frozenset[int] | None


class MemberRoute(NamedTuple):
    """The transfers of one member of a collective, in group ranks.

    The member first takes part in a ring through all members if ``ring`` is set. Then it receives
    from ``receives``, and finally sends to ``sends``.
    """

    receives: frozenset[int] = frozenset()
    sends: frozenset[int] = frozenset()
    ring: bool = False


class BackendBinding(NamedTuple):
    """How one backend implements an operation. The defaults are the plain case."""

    #: Whether tensors on a GPU are supported, if the backend supports GPUs at all.
    gpu: bool = True
    #: The collective that implements the operation, for backends that match collectives by
    #: operation. None: the operation itself.
    slot: str | None = None
    #: The group ranks that must have arrived before a member may return, by (group size, root,
    #: member). None: every member waits for all members.
    needs: Callable[[int, int, int], GroupRanks] | None = None
    #: The transfers of a member, by (call, the root that the member names, member). ``needs``
    #: follows from it if all members name the same root.
    route: Callable[[ResolvedCall, int, int], MemberRoute] | None = None
    #: The error text, if the backend knows the operation only to refuse it.
    refused: str | None = None
    #: Dtypes that the backend supports, but not for this operation.
    gaps: frozenset[str] = frozenset()
    #: The operation's own error text for an unsupported dtype; ``{type}`` is torch's name of it.
    dtype_text: str | None = None
    #: The error text if the larger tensor does not have the shape of the smaller one with a first
    #: axis n times as long. ``{one}`` and ``{got}`` are shapes as torch prints them, ``{sizes}``
    #: two lengths.
    shape_text: str | None = None
    #: Whether a coalesced launch is refused if its parts have different dtypes.
    one_dtype: bool = False
    #: Whether the parts of a coalesced launch or of a list are executed one by one.
    part_by_part: bool = False


class Operation(BaseModel):
    """One operation. Subclasses set the class variables and override the methods."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    # --- facts ---
    op: ClassVar[str]
    kind: ClassVar[OperationKind]
    aliases: ClassVar[tuple[str, ...]] = ()
    #: The field that a lone scalar sets (`- sleep: 3 ms`). None: the step needs a mapping.
    first_field: ClassVar[str | None] = None
    #: "src" or "dst" for a rooted collective (fields src/group_src or dst/group_dst), else None.
    root_field: ClassVar[Literal["src", "dst"] | None] = None
    #: Whether the root defaults to global rank 0.
    root_optional: ClassVar[bool] = False
    #: The ranks that have an input / an output: all ranks, or only the root.
    gives: ClassVar[RankScope] = "none"
    gets: ClassVar[RankScope] = "none"
    #: Number of parts of input / output as a function of group size is 1 or n: "one" or "n".
    input_parts: ClassVar[Literal["one", "n"]] = "one"
    output_parts: ClassVar[Literal["one", "n"]] = "one"
    #: The n parts lie end to end along the first dimension of one tensor (torch: `…_into_tensor`,
    #: `…_single`); else they are a list.
    flat: ClassVar[bool] = False
    reduces: ClassVar[bool] = False
    #: "send" or "recv" for p2p.
    direction: ClassVar[Literal["send", "recv"] | None] = None
    #: A signal: a message without data on its own channel, which holds at most one signal
    #: (`distsim.operations.one_sided`).
    signals: ClassVar[bool] = False
    #: True for isend, irecv: never blocks, has a request.
    nonblocking: ClassVar[bool] = False
    #: True if pairs of ranks agree on sizes (all_to_all): `mismatched_pairs` compares them in
    #: addition to `agreement`.
    pairwise: ClassVar[bool] = False
    #: The operation of which this one launches several at once (`separate`), or None.
    coalesces: ClassVar["type[Operation] | None"] = None
    #: The program of nccl-tests for the operation, or None.
    nccl_tests: ClassVar[str | None] = None
    #: The function of torch.distributed, or None.
    torch_name: ClassVar[str | None] = None
    #: Backend -> how it implements the operation. A backend without an entry refuses the operation,
    #: unless its own file has a binding (`distsim.backends.profile`).
    bindings: ClassVar[Mapping[str, BackendBinding]] = {}
    #: Algorithms of the operation, by name; the first one is the default schedule.
    algorithms: ClassVar[Mapping[str, CollectiveAlgorithm]] = {}
    #: Its fill in pictures, as hex: one of `distsim.operations.core.colours`.
    colour: ClassVar[str]
    words: ClassVar[OperationHelp]

    # --- columns on resolved calls ---
    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that take part in this call; none for a local operation."""
        return ()

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """The values that all parties must have in common, by the terms of findings: op, numel,
        dtype, reduce_op, root, splits.
        """
        return {}

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why the call is invalid on every backend (buffer sizes, splits that do not add up), or
        None.
        """
        return None

    @classmethod
    def mismatched_pairs(cls, calls: Sequence[ResolvedCall]) -> list[tuple[int, int, str]]:
        """Mismatches that `agreement` cannot express: (global rank, global rank, reason) for each
        pair.

        ``calls``: the calls of the members that have arrived, in group order. Callers ask if
        ``pairwise`` is set and the agreements differ or have no "numel". For a coalesced launch
        the reason names the parts that differ.
        """
        return []

    @classmethod
    def separate(cls, call: ResolvedCall) -> tuple[ResolvedCall, ...]:
        """The parts of a coalesced launch as separate calls; otherwise the call itself."""
        return (call,)

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them (its doc/PERFORMANCE.md): the larger buffer of a
        collective, or the message.
        """
        return 0

    # --- columns on group size and root (group ranks) ---
    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """The factor from algbw to busbw (nccl-tests doc/PERFORMANCE.md), or 0."""
        return 0.0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The final content of each group rank's output.

        Values, lineage, the proof and the picture are derived from it. `takes_from` must name the
        ranks that it mentions. The tests of the table also expect that a reducing operation
        includes the rank's own input, and that every rank's input reaches some output; an operation
        without these properties needs an exception there.
        """
        return ()

    @classmethod
    def takes_from(cls, n: int, root: int, me: int) -> GroupRanks:
        """The group ranks whose data end in the output of ``me``. It cannot return before they have
        arrived. For barriers: all ranks.
        """
        return None

    @classmethod
    def gives_to(cls, n: int, root: int, me: int) -> GroupRanks:
        """The group ranks whose output contains data of ``me``: the inverse of `takes_from`."""
        return None

    @classmethod
    def schedule(cls, n: int, root: int) -> list[Round]:
        """Rounds of transfers that produce the effect; chunks are numbered as in
        `distsim.operations.core.algorithms`.
        """
        default = cls._default_algorithm()
        return [] if default is None else default.rounds(n, root)

    @classmethod
    def _default_algorithm(cls) -> CollectiveAlgorithm | None:
        return next(iter(cls.algorithms.values()), None)

    @classmethod
    def measured_as(cls) -> str:
        """The operation whose measured times apply. A coalesced launch costs as much as one
        operation of its size; an operation with a fixed argument names the general one.
        """
        return cls.op if cls.coalesces is None else cls.coalesces.op

    @classmethod
    def chunk_nbytes(cls, n: int, nbytes: int) -> int:
        """Bytes of one chunk of `schedule` when `nbytes` is the operation's size."""
        default = cls._default_algorithm()
        return nbytes if default is None else default.chunk_nbytes(n, nbytes)

    # --- torch ---
    @classmethod
    def torch_call(
        cls,
        dist: ModuleType,
        call: ResolvedCall,
        tensors: TensorLookup,
        group: object,
        works: Sequence[TorchWork] = (),
    ) -> object:
        """Make the call on torch.distributed and return torch's result. ``dist`` is passed in,
        because this module does not import torch.

        ``tensors[buffer]`` is the torch tensor of a Buffer, contiguous and of its shape. ``group``
        is torch's process group of `call.group`, or None for the world. ``works`` are the requests
        that a `wait` waits for.
        """
        assert cls.torch_name is None, f"{cls.op} names a torch function but does not call it"
        if cls.kind != "local":
            raise UsageError(
                f"torch.distributed has no {cls.op}",
                "simulate the program, or remove the call for a real run",
            )
        return None


#: Pydantic inspects the annotations of all base classes for every subclass. It keeps the names of
#: class variables elsewhere, so the annotations can be cleared.
Operation.__annotations__ = {}


def _single_transfer(n: int, root: int) -> list[Round]:
    """Group rank 0 represents the sender, group rank 1 the receiver."""
    return [[ChunkTransfer(0, 1, 0)]]


class PairOperation(Operation):
    """A transfer between two ranks. In effect and schedule, group rank 0 is the sender and group
    rank 1 the receiver.
    """

    algorithms = {"direct": CollectiveAlgorithm(_single_transfer, "whole")}

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """1: nccl-tests doc/PERFORMANCE.md, sendrecv."""
        return 1.0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """The contributions to the output of each group rank (`Operation.effect`)."""
        return (None, ((InputPart(0, 0),),))


class WithDestination(Operation):
    """An operation that must name its receiver: exactly one of `dst` and `group_dst`."""

    dst: ExpressionField = Field(
        default=None,
        description="Global rank of the receiver.",
        examples=["(rank + 1) % world_size"],
    )
    group_dst: ExpressionField = Field(
        default=None,
        description="Group rank of the receiver.",
        examples=["group_rank + 1"],
    )

    @model_validator(mode="after")
    def _one_peer(self) -> Self:
        if (self.dst is None) == (self.group_dst is None):
            raise ValueError(
                f"expected either `dst` (a global rank) or `group_dst` (a group rank) in {self.op}"
            )
        return self


class WithSource(Operation):
    """An operation that must name its source: exactly one of `src` and `group_src`."""

    src: ExpressionField = Field(
        default=None,
        description="Global rank of the sender or of the tensor's owner.",
        examples=[0],
    )
    group_src: ExpressionField = Field(
        default=None,
        description="Group rank of the sender or of the tensor's owner.",
        examples=[0],
    )

    @model_validator(mode="after")
    def _one_peer(self) -> Self:
        if (self.src is None) == (self.group_src is None):
            raise ValueError(
                f"expected either `src` (a global rank) or `group_src` (a group rank) in {self.op}"
            )
        return self


__all__ = [
    "BackendBinding",
    "OutputEffect",
    "WithSource",
    "OperationKind",
    "PairOperation",
    "Operation",
    "GroupRanks",
    "RankScope",
    "InputPart",
    "WithDestination",
    "OperationHelp",
]
