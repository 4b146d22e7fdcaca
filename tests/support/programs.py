"""Random programs for property tests: right ones, made event by event, and then spoilt."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Programs = dict[int, list[dict[str, Any]]]
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
COALESCED = ("all_reduce_coalesced", "reduce_scatter_tensor_coalesced")
GROUPS = {"odd": [0, 1], "even": [0, 2]}


@st.composite
def programs(
    draw: st.DrawFn,
    spoil: bool = True,
    tags: bool = True,
    max_events: int = 8,
    coalesced: bool = False,
) -> tuple[int, Programs, dict[str, list[int]]]:
    """(world size, calls of each rank, groups). Every request has a handle of its own and is waited
    for, unless spoilt.

    ``coalesced``: also coalesced launches, which mpi does not have.
    """
    size = draw(st.integers(2, 5))
    groups = {name: ranks for name, ranks in GROUPS.items() if max(ranks) < size}
    calls: Programs = {rank: [] for rank in range(size)}
    handles: dict[int, list[str]] = {rank: [] for rank in range(size)}
    for n in range(draw(st.integers(1, max_events))):
        if draw(st.booleans()):
            _message(draw, n, size, calls, handles, tags)
        else:
            _collective(draw, n, size, groups, calls, handles, COLLECTIVES + COALESCED * coalesced)
        for rank in range(size):
            if handles[rank] and draw(st.integers(0, 2)) == 0:
                _wait(draw, rank, calls, handles)
    for rank in range(size):
        while handles[rank]:
            _wait(draw, rank, calls, handles)
    if spoil:
        for _ in range(draw(st.integers(0, 3))):
            _spoil(draw, size, calls)
    return size, calls, groups


def _message(
    draw: st.DrawFn, n: int, size: int, calls: Programs, handles: dict[int, list[str]], tags: bool
) -> None:
    src, dst = draw(st.permutations(range(size)))[:2]
    about = {
        "numel": draw(st.sampled_from([1, 2048])),
        "tag": draw(st.integers(0, 1)) if tags else 0,
    }
    for rank, peer, op in ((src, dst, "send"), (dst, src, "recv")):
        kind = draw(st.integers(0, 2))
        if kind == 0:
            calls[rank].append({"op": op, "peer": peer, **about})
        else:
            call = {"op": f"i{op}", "peer": peer, **about}
            handle = f"h{n}"
            handles[rank].append(handle)
            if kind == 1:
                calls[rank].append({**call, "handle": handle})
            else:
                calls[rank].append({"op": "batch_isend_irecv", "ops": [call], "handle": handle})


def _collective(
    draw: st.DrawFn,
    n: int,
    size: int,
    groups: dict[str, list[int]],
    calls: Programs,
    handles: dict[int, list[str]],
    ops: tuple[str, ...],
) -> None:
    group = draw(st.sampled_from(["world", *groups]))
    ranks = groups.get(group, list(range(size)))
    call: dict[str, Any] = {
        "op": draw(st.sampled_from(ops)),
        "group": group,
        "numel": 4 * len(ranks),
    }
    if call["op"].endswith("_coalesced"):
        call["numels"] = [4 * len(ranks), 1]
    if call["op"] in ("broadcast", "reduce", "gather", "scatter"):
        call["root"] = draw(st.sampled_from(ranks))
    for rank in ranks:
        if draw(st.booleans()):
            handles[rank].append(f"h{n}")
            calls[rank].append({**call, "async": True, "handle": f"h{n}"})
        else:
            calls[rank].append(call)


def _wait(draw: st.DrawFn, rank: int, calls: Programs, handles: dict[int, list[str]]) -> None:
    handle = handles[rank].pop(draw(st.integers(0, len(handles[rank]) - 1)))
    calls[rank].append({"op": "wait", "handles": [handle]})


def _spoil(draw: st.DrawFn, size: int, calls: Programs) -> None:
    """Leave a call out, or let two neighbours change places, where no handle is touched."""
    rank = draw(st.integers(0, size - 1))
    plain = [
        k for k, call in enumerate(calls[rank]) if "handle" not in call and call["op"] != "wait"
    ]
    if not plain:
        return
    k = draw(st.sampled_from(plain))
    if draw(st.booleans()):
        del calls[rank][k]
    elif k + 1 < len(calls[rank]):
        calls[rank][k], calls[rank][k + 1] = calls[rank][k + 1], calls[rank][k]
