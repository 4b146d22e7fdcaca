"""Random programs for property tests, as plain lists of calls (`distsim.program.from_calls`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

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

#: The stream that is current at a call.
STREAM = st.sampled_from(("", "", "", "copy", "reduce"))
COALESCED = (
    "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)


KERNELS = st.tuples(
    st.integers(0, 10**9),
    st.integers(1, 10**6),
    st.integers(1, 3),
    st.sampled_from(("float32", "bfloat16")),
)
#: How long a compute takes: a time, or the work from which the cluster determines it.
COMPUTE_COST = st.one_of(
    st.builds(lambda ns: {"time_ns": ns}, st.integers(0, 2_000_000)),
    st.builds(lambda rows: {"work": tuple(rows)}, st.lists(KERNELS, min_size=1, max_size=2)),
)


class Plain(NamedTuple):
    """What `build_program` takes, and the places of matched pairs: (rank, index) of a call without
    which the others can't go on.
    """

    world_size: int
    programs: dict[int, list[dict[str, Any]]]
    groups: dict[str, list[int]]
    needed: list[tuple[int, int]]


@st.composite
def valid_programs(
    draw: st.DrawFn, most_events: int = 14, sizes: tuple[int, ...] = (1, 300, 2048, 5_000_000)
) -> Plain:
    """A program whose calls follow one global order of events: correct under every reading that the
    contract knows.

    Messages are blocking or not (waited for later, or at the end), tags vary, groups overlap.
    """
    world = draw(st.integers(2, 5))
    groups: dict[str, list[int]] = {}
    for i in range(draw(st.integers(0, 2))):
        ranks = draw(st.sets(st.integers(0, world - 1), min_size=2, max_size=world))
        groups[f"g{i}"] = sorted(ranks)
    programs: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(world)}
    opened: dict[int, list[str]] = {rank: [] for rank in range(world)}
    needed: list[tuple[int, int]] = []
    for event in range(draw(st.integers(1, most_events))):
        kind = draw(
            st.sampled_from(
                (
                    "message",
                    "message",
                    "message",
                    "exchange",
                    "collective",
                    "compute",
                    "wait",
                    "streams",
                )
            )
        )
        if kind == "message":
            src, dst = draw(st.permutations(range(world)))[:2]
            common = {
                "numel": draw(st.sampled_from(sizes)),
                "tag": draw(st.integers(0, 1)),
                "dtype": "uint8",
            }
            for rank, peer, op in ((src, dst, "send"), (dst, src, "recv")):
                needed.append((rank, len(programs[rank])))
                call = {"op": op, "peer": peer, "queue": draw(STREAM), **common}
                if draw(st.booleans()):
                    call |= {"op": f"i{op}", "handle": f"h{event}"}
                    opened[rank].append(f"h{event}")
                programs[rank].append(call)
        elif kind == "exchange":
            a, b = draw(st.permutations(range(world)))[:2]
            sizes_both = [draw(st.sampled_from(sizes)) for _ in range(2)]
            for rank, peer, out, into in ((a, b, *sizes_both), (b, a, *reversed(sizes_both))):
                parts = [
                    {"op": "isend", "peer": peer, "numel": out, "dtype": "uint8"},
                    {"op": "irecv", "peer": peer, "numel": into, "dtype": "uint8"},
                ]
                call = {
                    "op": "batch",
                    "ops": list(draw(st.permutations(parts))),
                    "queue": draw(STREAM),
                }
                if draw(st.booleans()):
                    call["handle"] = f"h{event}"
                    opened[rank].append(f"h{event}")
                needed.append((rank, len(programs[rank])))
                programs[rank].append(call)
        elif kind == "collective":
            name = draw(st.sampled_from(("world", *groups)))
            members = groups.get(name, list(range(world)))
            op = draw(st.sampled_from((*COLLECTIVES, draw(st.sampled_from(COALESCED)))))
            call = {
                "op": op,
                "group": name,
                "numel": len(members) * draw(st.integers(1, 4)),
                "root": members[draw(st.integers(0, len(members) - 1))],
            }
            if call["op"] in COALESCED:
                call["numels"] = [
                    len(members) * draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))
                ]
            for rank in members:
                needed.append((rank, len(programs[rank])))
                mine = {**call, "queue": draw(STREAM)}
                if draw(st.integers(0, 3)) == 0:
                    mine |= {"async": True, "handle": f"h{event}"}
                    opened[rank].append(f"h{event}")
                programs[rank].append(mine)
        elif kind == "compute":
            rank = draw(st.integers(0, world - 1))
            queue = draw(st.sampled_from(("", "", "host", "copy")))
            programs[rank].append({"op": "compute", "queue": queue, **draw(COMPUTE_COST)})
        elif kind == "streams":
            rank = draw(st.integers(0, world - 1))
            waiting, other = draw(st.permutations(("", "copy", "reduce")))[:2]
            programs[rank].append({"op": "wait_stream", "stream": other, "queue": waiting})
        else:
            rank = draw(st.integers(0, world - 1))
            if opened[rank]:
                # one that is waited for early: whatever it waits for stands before it in the global
                # order
                handle = opened[rank].pop(draw(st.integers(0, len(opened[rank]) - 1)))
                programs[rank].append({"op": "wait", "handles": [handle], "queue": draw(STREAM)})
    for rank, handles in opened.items():
        if handles:
            programs[rank].append({"op": "wait", "handles": list(draw(st.permutations(handles)))})
    return Plain(world, programs, groups, needed)


@st.composite
def any_programs(draw: st.DrawFn) -> Plain:
    """A valid program, or one with a call left out, moved or changed: often stuck."""
    plain = draw(valid_programs())
    for _ in range(draw(st.integers(0, 2))):
        rank = draw(st.integers(0, plain.world_size - 1))
        calls = plain.programs[rank]
        places = [
            i for i, call in enumerate(calls) if call["op"] != "wait" and "handle" not in call
        ]
        if not places:
            continue
        place = draw(st.sampled_from(places))
        if draw(st.booleans()):
            del calls[place]
        else:
            call = calls.pop(place)
            calls.insert(draw(st.integers(0, len(calls))), call)
    return plain
