"""Programs and traces written by hand, so that the values pass is tested without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.common.expressions import parse_expression
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.resolved_call import RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CallSite, ChannelEndpoint, CodeCall, SharedCode
from distsim.program.model import Program, TensorSpec
from distsim.trace.model import COLUMN_TYPES, TEXT_COLUMNS, Trace

Plain = Mapping[str, Any]
#: (shape, dtype, value): a value is None, a number or text (an expression), or a list of them.
Declared = tuple[tuple[int, ...], str, Any]


def parsed(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(parsed(v) for v in value)
    return None if value is None else parse_expression(value)


class ByHand:
    """``ranks[r]``: calls of rank r, as ``{"op": "send", "tensor": "x", "peer": 1}``; a buffer is a
    name or (name, copy).
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Plain]],
        tensors: Mapping[str, Declared],
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.tensors, self.world = tensors, len(ranks)
        self.groups = [RankGroup(0, "world", tuple(range(self.world)))]
        self.groups += [RankGroup(i, f"g{i}", tuple(g)) for i, g in enumerate(groups, 1)]
        specs = {
            n: TensorSpec(n, dtype, 9, shape, parsed(value))
            for n, (shape, dtype, value) in tensors.items()
        }
        self.program = Program(
            name="by hand",
            file="",
            world_size=self.world,
            nodes=1,
            local_size=self.world,
            backend="gloo",
            options={},
            sites=[CallSite("", 1, 1, "")],
            groups=self.groups,
            tensors=specs,
            codes=[self._code(r, c) for r, c in enumerate(ranks)],
            code_of=list(range(self.world)),
            row_of=[0] * self.world,
            names={"rank": np.arange(self.world)},
        )

    def _code(self, rank: int, calls: Sequence[Plain]) -> SharedCode:
        code = SharedCode((rank,), [], [], [g.id for g in self.groups])
        code.calls.extend(self._call(code, plain) for plain in calls)
        return code

    def _call(self, code: SharedCode, plain: Plain) -> CodeCall:
        row, fields = (
            OPERATIONS[plain["op"]],
            {
                k: v
                for k, v in plain.items()
                if k in ("reduce_op", "root", "input_splits", "output_splits")
            },
        )
        for name in ("inputs", "outputs", "writes", "adds", "reads"):
            if name in plain:
                fields[name] = self.buffers(plain[name])
        if "tensor" in plain:
            fields["inputs"] = fields["outputs"] = self.buffers(plain["tensor"])
        if plain["op"] == "assign":
            fields.update(writes=fields["outputs"], value=parsed(plain["value"]), indices=())
        endpoint = -1
        if row.kind == "p2p":
            endpoint = len(code.endpoints)
            code.endpoints.append(ChannelEndpoint(plain["peer"], 0, 0))
        parts = tuple(self._call(code, p) for p in plain.get("parts", ()))
        return CodeCall(
            plain["op"],
            0,
            plain.get("async", row.nonblocking),
            plain.get("group", 0),
            endpoint,
            waits=tuple(plain.get("waits", ())),
            parts=parts,
            fields=fields,
        )

    def buffers(self, given: Any) -> tuple[BufferVector, ...]:
        names = given if isinstance(given, list) else [given]
        found = []
        for item in names:
            name, copy = item if isinstance(item, tuple) else (item, 0)
            found.append(BufferVector(name, copy, self.tensors[name][0], self.tensors[name][1]))
        return tuple(found)

    def trace(
        self,
        matches: Sequence[Sequence[tuple[int, ...]]] = (),
        times: Mapping[tuple[int, ...], tuple[int, int]] | None = None,
    ) -> Trace:
        """``matches``: who met, as (rank, position[, part]). ``times``: (started, finished) where
        not (0, 0).
        """
        of = {
            key if len(key) == 3 else (*key, -1): number
            for number, match in enumerate(matches)
            for key in match
        }
        when = {key if len(key) == 3 else (*key, -1): value for key, value in (times or {}).items()}
        rows: dict[str, list[int]] = {name: [] for name in COLUMN_TYPES}
        ops: list[str] = []
        for rank in range(self.world):
            for position, call in enumerate(self.program.code(rank).calls):
                for part, piece in enumerate((call, *call.parts), -1):
                    key = (rank, position, part)
                    meets = OPERATIONS[piece.op].kind in ("p2p", "collective")
                    started, finished = when.get(
                        key, (0, 0) if key in of or not meets else (-1, -1)
                    )
                    ops.append(piece.op)
                    values = {
                        "rank": rank,
                        "op": len(ops) - 1,
                        "position": position,
                        "part": part,
                        "match": of.get(key, -1),
                        "posted_ns": 0,
                        "started_ns": started,
                        "finished_ns": finished,
                    }
                    for name, column in rows.items():
                        column.append(values.get(name, 0))
        tables: dict[str, list[Any]] = {name: [""] for name in TEXT_COLUMNS}
        tables.update(op=ops, place=[SourceLocation("", 1, 1)])
        return Trace(
            {},
            tables,
            {name: np.array(rows[name], dtype=COLUMN_TYPES[name]) for name in COLUMN_TYPES},
        )
