"""Collective algorithms as data: rounds of transfers between the ranks of a group. No clock, no
bytes.

All transfers of a round start together, and each reads what its sender held when the round began. A
round may hold several transfers between the same two ranks: they travel as one message. Ranks are
group ranks, ``0 <= rank < n``.

What a *chunk* number means depends on the algorithm's `Chunking`:

* whole: chunk 0 is the whole buffer.
* split: the buffer is split into n equal pieces, and chunk c is piece c.
* origin: chunk c is the data of rank c.
* target: chunk c is the data for rank c (part c of every sender's input).
* pair: chunk ``s * n + d`` is the data of rank s for rank d.
* token: chunk 0 is the message "I have arrived", without bytes.

An algorithm is one decorated function here; operations use all algorithms that `ALGORITHMS` has
for their effect (docs/contributing/extending.md).

`tests/operations/test_algorithms.py` proves that each algorithm has the effect of its operation,
for n = 1..32 and every root: `start` places the contributions, `play` moves them, and
`output_chunks` reads the result.

The algorithms are textbook ones. Names as in Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005), and Patarasuk, Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar


class ChunkTransfer(NamedTuple):
    """One chunk moves from ``src`` to ``dst``. ``reduce``: it is reduced into the chunk there;
    otherwise it overwrites that chunk.
    """

    src: int
    dst: int
    chunk: int
    reduce: bool = False


class RotationRounds(NamedTuple):
    """``rounds`` rounds in which every rank sends ``chunks`` chunks to the rank ``distance`` places
    further on.
    """

    rounds: int
    distance: int
    chunks: int = 1
    reduce: bool = False


Round = list[ChunkTransfer]
#: ``rounds(n, root)``; ``root`` is ignored where the operation has none.
RoundsFunction = Callable[[int, int], list[Round]]
RoundsFunctionT = TypeVar("RoundsFunctionT", bound=RoundsFunction)
Chunking = Literal["whole", "split", "origin", "target", "pair", "token"]
#: Contributions (group rank, part of its input) in a chunk; one that is there twice stands there
#: twice.
ChunkContents = tuple[tuple[int, int], ...]
#: A shape whose cost is computed as a whole: a pipeline through all ranks, or every pair in one
#: round.
AlgorithmShape = Literal["chain", "all pairs"]


class CollectiveAlgorithm(NamedTuple):
    """One algorithm of an operation.

    ``of``: the operation's effect, a key of `ALGORITHMS`. ``rotations(n)``: a short form of the
    rounds for schedules with n squared transfers, so that costs for a thousand ranks need no list
    of transfers (tested against the rounds). ``shape``: see `AlgorithmShape`.
    """

    rounds: RoundsFunction
    chunking: Chunking
    of: str = ""
    rotations: Callable[[int], list[RotationRounds]] | None = None
    shape: AlgorithmShape | None = None

    def chunk_nbytes(self, n: int, nbytes: int) -> int:
        """Bytes of one chunk when the operation's large buffer (as nccl-tests counts it) has
        ``nbytes``; rounded up.
        """
        if self.chunking == "token":
            return 0
        return nbytes if self.chunking == "whole" else -(-nbytes // n)

    def ring_passes(self, n: int) -> int:
        """How often the buffer travels around the ring, or 0 if some round is not a hop to the next
        rank.
        """
        if n < 2 or self.rotations is None or self.chunking not in ("split", "origin", "target"):
            return 0
        rotations = self.rotations(n)
        is_ring = all((rotation.distance, rotation.chunks) == (1, 1) for rotation in rotations)
        return sum(rotation.rounds for rotation in rotations) // (n - 1) if is_ring else 0


#: By what they bring about, then by name; the first of each is what a row's own schedule is.
#: `algorithm` enters them.
ALGORITHMS: dict[str, dict[str, CollectiveAlgorithm]] = {}


def register_algorithm(
    of: str,
    name: str,
    chunking: Chunking,
    rotations: Callable[[int], list[RotationRounds]] | None = None,
    shape: AlgorithmShape | None = None,
) -> Callable[[RoundsFunctionT], RoundsFunctionT]:
    """Register the decorated function as an algorithm for ``of``. A cluster file may choose it by
    its name (`distsim.hardware.cost`).
    """

    def enter(rounds: RoundsFunctionT) -> RoundsFunctionT:
        ALGORITHMS.setdefault(of, {})[name] = CollectiveAlgorithm(
            rounds, chunking, of, rotations, shape
        )
        return rounds

    return enter


def algorithms_of(what: str) -> Mapping[str, CollectiveAlgorithm]:
    """All algorithms for an effect, by name, including those registered later."""
    return MappingProxyType(ALGORITHMS.setdefault(what, {}))


# --- rings ---


@register_algorithm("all_gather", "ring", "origin", lambda n: [RotationRounds(n - 1, 1)])
def ring_all_gather(n: int, root: int = 0) -> list[Round]:
    """n - 1 rounds; every rank forwards the chunk that it received last. Each rank sends (n - 1)/n
    of the gathered buffer.
    """
    return [[ChunkTransfer(r, (r + 1) % n, (r - k) % n) for r in range(n)] for k in range(n - 1)]


@register_algorithm(
    "reduce_scatter", "ring", "target", lambda n: [RotationRounds(n - 1, 1, reduce=True)]
)
def ring_reduce_scatter(n: int, root: int = 0) -> list[Round]:
    """n - 1 rounds; chunk c leaves rank c + 1, grows at each hop, and is complete when it reaches
    rank c.
    """
    return [
        [ChunkTransfer(r, (r + 1) % n, (r - k - 1) % n, True) for r in range(n)]
        for k in range(n - 1)
    ]


@register_algorithm(
    "all_reduce",
    "ring",
    "split",
    lambda n: [RotationRounds(n - 1, 1, reduce=True), RotationRounds(n - 1, 1)],
)
def ring_all_reduce(n: int, root: int = 0) -> list[Round]:
    """Reduce-scatter, then all-gather: 2(n - 1) rounds, 2(n - 1)/n of the buffer sent by each rank,
    the optimum.
    """
    return ring_reduce_scatter(n) + ring_all_gather(n)


# --- binomial trees, seen from the root ---


def _ring_position(root: int, n: int) -> Callable[[int], int]:
    """The group rank that is ``v`` places after the root."""
    return lambda v: (root + v) % n


def binomial_parent(v: int) -> int:
    """The sender to position ``v`` after the root: ``v`` without its highest set bit."""
    return v & ~(1 << (v.bit_length() - 1)) if v else 0


def binomial_parent_of(n: int, root: int, member: int) -> int:
    """The member that gives ``member`` its data, in the binomial tree of any root.

    For the root itself: the root.
    """
    return (binomial_parent((member - root) % n) + root) % n


def binomial_children(n: int, v: int) -> frozenset[int]:
    """The positions after the root to which position ``v`` sends: ``v`` with one higher bit set."""
    return frozenset(v | 1 << k for k in range(v.bit_length(), n.bit_length()) if v | 1 << k < n)


def binomial_path_and_children(n: int, root: int, me: int) -> frozenset[int]:
    """The ranks that must have arrived at the broadcast before ``me`` returns: all ranks between
    the root and ``me``, and its own children.
    """
    v = (me - root) % n
    near, above = set(binomial_children(n, v)), v
    while above:
        above = binomial_parent(above)
        near.add(above)
    return frozenset((w + root) % n for w in near)


@register_algorithm("broadcast", "binomial", "whole")
def binomial_broadcast(n: int, root: int = 0) -> list[Round]:
    """ceil(log2 n) rounds; in round k the 2**k ranks that have the buffer send it to the next
    2**k.
    """
    at, rounds, have = _ring_position(root, n), [], 1
    while have < n:
        rounds.append([ChunkTransfer(at(v), at(v + have), 0) for v in range(min(have, n - have))])
        have *= 2
    return rounds


@register_algorithm("reduce", "binomial", "whole")
def binomial_reduce(n: int, root: int = 0) -> list[Round]:
    """The broadcast backwards: partial results run down the tree to the root."""
    return _reversed_rounds(binomial_broadcast(n, root), reduce=True)


@register_algorithm("scatter", "binomial", "target")
def binomial_scatter(n: int, root: int = 0) -> list[Round]:
    """ceil(log2 n) rounds; a rank hands the far half of the chunks it holds to the rank in the
    middle of its range.
    """
    at, rounds = _ring_position(root, n), []
    step = 1 << max(n - 1, 0).bit_length()
    while step > 1:
        half = step // 2
        edges = [(v, v + half, min(v + step, n)) for v in range(0, n, step) if v + half < n]
        rounds.append(
            [ChunkTransfer(at(v), at(w), at(c)) for v, w, end in edges for c in range(w, end)]
        )
        step = half
    return rounds


@register_algorithm("gather", "binomial", "origin")
def binomial_gather(n: int, root: int = 0) -> list[Round]:
    """The scatter backwards. The root receives (n - 1)/n of the gathered buffer, in ceil(log2 n)
    messages.
    """
    return _reversed_rounds(binomial_scatter(n, root), reduce=False)


@register_algorithm("all_reduce", "tree", "whole")
def tree_all_reduce(n: int, root: int = 0) -> list[Round]:
    """Reduce to rank 0, broadcast from it: few rounds, the whole buffer on every edge; good for
    small buffers.
    """
    return binomial_reduce(n) + binomial_broadcast(n)


def _reversed_rounds(rounds: Sequence[Round], *, reduce: bool) -> list[Round]:
    return [
        [ChunkTransfer(t.dst, t.src, t.chunk, reduce) for t in round_]
        for round_ in reversed(rounds)
    ]


# --- one after the other ---


@register_algorithm("scatter", "linear", "target")
def linear_scatter(n: int, root: int = 0) -> list[Round]:
    """n - 1 rounds; the root serves one rank after the other."""
    return [[ChunkTransfer(root, (root + k) % n, (root + k) % n)] for k in range(1, n)]


@register_algorithm("gather", "linear", "origin")
def linear_gather(n: int, root: int = 0) -> list[Round]:
    """n - 1 rounds; the root takes from one rank after the other."""
    return [[ChunkTransfer((root + k) % n, root, (root + k) % n)] for k in range(1, n)]


@register_algorithm("broadcast", "chain", "split", shape="chain")
def chain_broadcast(n: int, root: int = 0) -> list[Round]:
    """A pipeline of n pieces along the chain root, root + 1, …: 2(n - 1) rounds, each rank sends
    the buffer once.
    """
    at = _ring_position(root, n)
    return [
        [ChunkTransfer(at(v), at(v + 1), t - v) for v in range(n - 1) if 0 <= t - v < n]
        for t in range(2 * (n - 1))
    ]


@register_algorithm("reduce", "chain", "split", shape="chain")
def chain_reduce(n: int, root: int = 0) -> list[Round]:
    """The chain broadcast backwards: each rank adds its piece and passes it on towards the root."""
    return _reversed_rounds(chain_broadcast(n, root), reduce=True)


@register_algorithm("broadcast", "scatter_all_gather", "split")
def scatter_all_gather_broadcast(n: int, root: int = 0) -> list[Round]:
    """Van de Geijn's broadcast: scatter the pieces, then all-gather them around the ring."""
    return binomial_scatter(n, root) + ring_all_gather(n)


# --- halving and doubling ---


def _doubling_rotations(n: int) -> list[RotationRounds]:
    """Distances 1, 2, 4, …, and as many chunks, at most what is missing."""
    distances = [1 << k for k in range(max(n - 1, 0).bit_length())]
    return [RotationRounds(1, have, min(have, n - have)) for have in distances]


@register_algorithm(
    "all_gather",
    "bruck",
    "origin",
    lambda n: [r._replace(distance=n - r.distance) for r in _doubling_rotations(n)],
)
def bruck_all_gather(n: int, root: int = 0) -> list[Round]:
    """ceil(log2 n) rounds for any n: in round k a rank sends all it has (at most what is missing)
    to rank r - 2**k.
    """
    rounds, have = [], 1
    while have < n:
        many = min(have, n - have)
        rounds.append(
            [ChunkTransfer(r, (r - have) % n, (r + c) % n) for r in range(n) for c in range(many)]
        )
        have *= 2
    return rounds


@register_algorithm(
    "reduce_scatter",
    "bruck",
    "target",
    lambda n: [r._replace(reduce=True) for r in _doubling_rotations(n)],
)
def bruck_reduce_scatter(n: int, root: int = 0) -> list[Round]:
    """Bruck's all-gather backwards: each chunk is reduced along the tree that would have spread
    it.
    """
    return _reversed_rounds(bruck_all_gather(n), reduce=True)


@register_algorithm("all_reduce", "halving_doubling", "split")
def halving_doubling_all_reduce(n: int, root: int = 0) -> list[Round]:
    """Rabenseifner: recursive halving, then recursive doubling. Beyond a power of two, the odd
    ranks fold in and out.
    """
    core = 1 << (n.bit_length() - 1)
    fold = [ChunkTransfer(core + r, r, c, True) for r in range(n - core) for c in range(n)]
    halving = []
    distance = core // 2
    while distance:
        pairs = [(r, r ^ distance) for r in range(core)]
        halving.append(
            [
                ChunkTransfer(r, peer, c, True)
                for r, peer in pairs
                for c in _kept_pieces(peer, distance, core, n)
            ]
        )
        distance //= 2
    rounds = halving + _reversed_rounds(halving, reduce=False)
    return [fold, *rounds, *_reversed_rounds([fold], reduce=False)] if fold else rounds


def _kept_pieces(rank: int, distance: int, core: int, n: int) -> range:
    """Pieces that ``rank`` of a power of two ``core`` keeps after the halving step at
    ``distance``.
    """
    first = rank // distance * distance
    return range(first * n // core, (first + distance) * n // core)


# --- all to all, barriers ---


@register_algorithm(
    "all_to_all", "pairwise", "pair", lambda n: [RotationRounds(1, k) for k in range(1, n)]
)
def pairwise_all_to_all(n: int, root: int = 0) -> list[Round]:
    """n - 1 rounds; in round k every rank sends to the rank k places after it."""
    return [
        [ChunkTransfer(r, (r + k) % n, r * n + (r + k) % n) for r in range(n)] for k in range(1, n)
    ]


@register_algorithm("all_to_all", "direct", "pair", shape="all pairs")
def direct_all_to_all(n: int, root: int = 0) -> list[Round]:
    """All transfers at once, as a group of n - 1 sends and receives on each rank."""
    if n <= 1:
        return []
    return [[ChunkTransfer(src, dst, src * n + dst) for src, dst in permutations(range(n), 2)]]


@register_algorithm(
    "barrier",
    "dissemination",
    "token",
    lambda n: [r._replace(chunks=1) for r in _doubling_rotations(n)],
)
def dissemination_barrier(n: int, root: int = 0) -> list[Round]:
    """ceil(log2 n) rounds; in round k every rank signals the rank 2**k places after it (Hensgen,
    Finkel, Manber 1988).
    """
    rounds, step = [], 1
    while step < n:
        rounds.append([ChunkTransfer(r, (r + step) % n, 0, True) for r in range(n)])
        step *= 2
    return rounds


@register_algorithm("barrier", "central", "token")
@register_algorithm("monitored_barrier", "central", "token")
def central_barrier(n: int, root: int = 0) -> list[Round]:
    """Every rank reports to the root, one after the other in rank order. The root answers when all
    ranks have arrived.
    """
    others = [r for r in range(n) if r != root]
    return [[ChunkTransfer(r, root, 0, True)] for r in others] + [
        [ChunkTransfer(root, r, 0)] for r in others
    ]


# --- the proof ---


def initial_chunks(
    chunking: Chunking, n: int, givers: Iterable[int]
) -> list[dict[int, ChunkContents]]:
    """What each rank holds before the first round: chunk -> contributions. Only ``givers`` have an
    input.
    """
    held: list[dict[int, ChunkContents]] = [{} for _ in range(n)]
    for r in givers:
        if chunking in ("whole", "token"):
            held[r] = {0: ((r, 0),)}
        elif chunking == "split":
            held[r] = dict.fromkeys(range(n), ((r, 0),))
        elif chunking == "origin":
            held[r] = {r: ((r, 0),)}
        else:
            held[r] = {(c if chunking == "target" else r * n + c): ((r, c),) for c in range(n)}
    return held


def apply_rounds(
    rounds: Iterable[Round], held: list[dict[int, ChunkContents]]
) -> list[dict[int, ChunkContents]]:
    """Move the contributions. Raises ValueError where a rank sends a chunk it does not hold, or to
    itself.
    """
    held = [dict(chunks) for chunks in held]
    for number, round_ in enumerate(rounds):
        moving = [(t, held[t.src].get(t.chunk)) for t in round_]
        for t, what in moving:
            if what is None or t.src == t.dst:
                raise ValueError(
                    f"round {number}: rank {t.src} cannot send chunk {t.chunk} to rank {t.dst}"
                )
            there = held[t.dst].get(t.chunk, ()) if t.reduce else ()
            held[t.dst][t.chunk] = tuple(sorted(there + what))
    return held


def output_chunks(chunking: Chunking, n: int, rank: int, part: int) -> tuple[int, ...]:
    """The chunks that make up part ``part`` of the output of ``rank``."""
    if chunking == "split":
        return tuple(range(n))
    return (
        {"whole": 0, "token": 0, "origin": part, "target": rank, "pair": part * n + rank}[chunking],
    )


def chunks_sent_and_received(rounds: Iterable[Round], n: int) -> tuple[list[int], list[int]]:
    """Chunks that each rank sends, and receives."""
    sent, received = [0] * n, [0] * n
    for round_ in rounds:
        for t in round_:
            sent[t.src] += 1
            received[t.dst] += 1
    return sent, received
