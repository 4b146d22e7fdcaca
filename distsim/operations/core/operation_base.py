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
    """What `distsim explain NAME` says, in plain sentences. ``signature`` is torch's; ``torch``:
    the example as a call of torch.
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
    """A row. Subclasses fill the class variables; see the methods for the columns."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    # --- facts ---
    op: ClassVar[str]
    kind: ClassVar[OperationKind]
    aliases: ClassVar[tuple[str, ...]] = ()
    #: The field that a lone scalar stands for (`- sleep: 3 ms`); None: the step takes a mapping
    #: only.
    first_field: ClassVar[str | None] = None
    #: "src" or "dst" for a rooted collective (fields src/group_src or dst/group_dst), else None.
    root_field: ClassVar[Literal["src", "dst"] | None] = None
    #: Left out, the root is global rank 0.
    root_optional: ClassVar[bool] = False
    #: Which ranks give an input / get an output: all, or the root alone.
    gives: ClassVar[RankScope] = "none"
    gets: ClassVar[RankScope] = "none"
    #: Number of parts of input / output as a function of group size is 1 or n: "one" or "n".
    input_parts: ClassVar[Literal["one", "n"]] = "one"
    output_parts: ClassVar[Literal["one", "n"]] = "one"
    #: The n parts lie end to end along the first axis of one tensor (torch: `…_into_tensor`,
    #: `…_single`); else they are a list.
    flat: ClassVar[bool] = False
    reduces: ClassVar[bool] = False
    #: "send" or "recv" for p2p.
    direction: ClassVar[Literal["send", "recv"] | None] = None
    #: A signal: a message without data on a channel of its own, of which one may be on its way
    #: (`distsim.operations.one_sided`).
    signals: ClassVar[bool] = False
    #: True for isend, irecv: never blocks, has a request.
    nonblocking: ClassVar[bool] = False
    #: True where sizes are agreed on pair by pair (all_to_all): `cross_faults` judges them, not
    #: `agreement` alone.
    pairwise: ClassVar[bool] = False
    #: The operation of which this one launches several at once; None where a call is one operation
    #: (`separate`).
    coalesces: ClassVar["type[Operation] | None"] = None
    #: nccl-tests' program for the operation; None where it has none.
    nccl_tests: ClassVar[str | None] = None
    #: The function of torch.distributed; None where the operation is no call on it.
    torch_name: ClassVar[str | None] = None
    #: The back ends that have the operation, and what each makes of it. One that is not named here
    #: refuses it, unless its own file says that it takes it (`distsim.backends.profile`).
    bindings: ClassVar[Mapping[str, BackendBinding]] = {}
    #: Algorithms that bring the effect about, by name; the first one is the default schedule.
    algorithms: ClassVar[Mapping[str, CollectiveAlgorithm]] = {}
    #: Its fill in pictures, as hex: one of `distsim.operations.core.colours`.
    colour: ClassVar[str]
    words: ClassVar[OperationHelp]

    # --- columns on resolved calls ---
    @classmethod
    def parties(cls, call: ResolvedCall) -> tuple[int, ...]:
        """Global ranks that meet in this call; a local operation meets nobody."""
        return ()

    @classmethod
    def agreement(cls, call: ResolvedCall) -> dict[str, Hashable]:
        """What all parties must have in common, by the words of a finding: op, numel, dtype,
        reduce_op, root, splits.
        """
        return {}

    @classmethod
    def faults(cls, call: ResolvedCall) -> str | None:
        """Why no such call may be made under any back end (buffer sizes, splits that don't add up),
        else None.
        """
        return None

    @classmethod
    def mismatched_pairs(cls, calls: Sequence[ResolvedCall]) -> list[tuple[int, int, str]]:
        """What equality of `agreement` can't say: (global rank, global rank, why their calls don't
        fit) for each such pair.

        ``calls``: the calls of members, in group order; those who have not come are left out. To be
        asked where ``pairwise`` is set and the agreements differ or hold no "numel". Of a coalesced
        launch it says which parts differ.
        """
        return []

    @classmethod
    def separate(cls, call: ResolvedCall) -> tuple[ResolvedCall, ...]:
        """The calls that this launch holds: of a coalesced one each part as a call of its own, else
        the call itself.
        """
        return (call,)

    @classmethod
    def nbytes(cls, call: ResolvedCall) -> int:
        """Bytes as nccl-tests counts them: the large buffer (costs: doc/PERFORMANCE.md of
        nccl-tests); p2p: the message.
        """
        return 0

    # --- columns on group size and root (group ranks) ---
    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """busbw = algbw × this (nccl-tests doc/PERFORMANCE.md); 0 where the operation has none."""
        return 0.0

    @classmethod
    def effect(cls, n: int, root: int) -> tuple[OutputEffect, ...]:
        """Per group rank: what its output holds in the end. The values, the lineage, the proof and
        the picture follow from it.
        """
        return ()

    @classmethod
    def takes_from(cls, n: int, root: int, me: int) -> GroupRanks:
        """Whose data end in the output of a group rank, so that it can't leave before they have
        come; barriers: everybody's.
        """
        return None

    @classmethod
    def gives_to(cls, n: int, root: int, me: int) -> GroupRanks:
        """In whose output a group rank's data end; the other side of `takes_from`."""
        return None

    @classmethod
    def schedule(cls, n: int, root: int) -> list[Round]:
        """Rounds of transfers that bring the effect about; chunks are numbered as in
        `distsim.operations.core.algorithms`.
        """
        return next(iter(cls.algorithms.values())).rounds(n, root) if cls.algorithms else []

    @classmethod
    def single(cls) -> str:
        """The operation whose measured times stand for this one's: a launch of parts costs what one
        as large does.
        """
        return cls.op if cls.coalesces is None else cls.coalesces.op

    @classmethod
    def chunk_nbytes(cls, n: int, nbytes: int) -> int:
        """Bytes of one chunk of `schedule` when `nbytes` is the operation's size."""
        return (
            next(iter(cls.algorithms.values())).chunk_nbytes(n, nbytes)
            if cls.algorithms
            else nbytes
        )

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
        """Make the call on torch.distributed (`dist` handed in; nothing is imported here). Returns
        what torch returns.

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
    """Data of one rank for one other, whose effect and schedule are those of a pair: group rank 0
    gives, group rank 1 gets.
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
    """The other side of an operation between two ranks, where it must be named: exactly one of
    `dst` and `group_dst`.
    """

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
    """Exactly one of `src` and `group_src`."""

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
