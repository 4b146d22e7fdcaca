"""The page of `distsim explain backends`: which operation, dtype and reduction works where, and which back end to choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distsim.ops.records import DTYPE_BYTES, REDUCE_OPS
from distsim.ops.table import OPS
from distsim.profiles import SUPPORT, reductions
from distsim.profiles.support import Device, complex_text
from distsim.views.tables import folded, table

_DEVICES: tuple[Device, ...] = ("cpu", "gpu")
_SHOWN = {"yes": "yes", "no": "-", "built": "(1)"}
_CHOICE = (
    ("CPU tensors", "gloo: built into torch, and it says most when something is wrong."),
    ("GPU tensors", "nccl: made for them, over NVLink and InfiniBand. Gloo copies through the host."),
    ("both", "cpu:gloo,cuda:nccl, as when no back end is named: a tensor takes the one of its device."),
    ("mpi", "where a machine's fast network or GPUs are reached only through its own MPI library, or a job is started by mpirun and "
            "shared with MPI code. torch must be built from source for it. It has no timeout."),
    ("to debug", "gloo on CPU tensors: it never buffers, so what can hang does, and it obeys tags."),
)  # fmt: skip
_NOTES = (
    ("(1)", "only where torch was built against an MPI library that knows CUDA; torch asks it and refuses otherwise."),
    ("(2)", "only if the MPI library has such a type (MPIX_C_FLOAT16 and the like); mostly it has not."),
    ("(3)", "reduced with NCCL 2.24 or later on GPUs of compute capability 9.0 or later; else moved as bytes alone."),
    ("(4)", "torch passes complex numbers as pairs of real ones: sum and avg have a meaning then, the other reduce ops none. Gloo's "
            "gather refuses them, as do mpi's gather, reduce and reduce_scatter."),
    ("mpi", "reduce_scatter and all_gather_into_tensor came with pytorch#150162 in 2025."),
    ("coalesced", "several collectives as one launch (_coalescing_manager). Gloo lays them end to end and compares no lists; on a GPU "
                  "it has reduce_scatter alone."),
    ("shapes", "gloo wants the larger tensor of all_gather_into_tensor and reduce_scatter_tensor to be the smaller one with its first "
               "axis n times as long; nccl counts elements."),
    ("bool", "a sum of bools is an or: true where any is."),
    ("avg", "of integers: gloo refuses, after it has taken the sum; nccl divides and drops the rest."),
    ("gloo, GPU", "collectives copy to the host and back; the numbers are right, the speed is the host's. barrier and messages know "
                  "nothing of a GPU."),
    ("any source", "recv without src: gloo and mpi; nccl raises. Tags: gloo and mpi; nccl ignores them."),
)  # fmt: skip
_MARKS = {("mpi", "float16"): "(2)", ("mpi", "bfloat16"): "(2)", ("nccl", "float8_e4m3fn"): "(3)", ("nccl", "float8_e5m2"): "(3)"}


def backends_page() -> str:
    """What `distsim explain backends` says, in 80 columns: everything but the advice from `distsim.profiles.support`."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "backends  (what works where, with torch 2.9 and later)"
    yield from ("", "Which one to choose", *_terms(_CHOICE))
    yield from ("", "Operations, by the device of the tensors", *_operations())
    yield from ("", "Dtypes (p2p: send, recv and their kind; coll: collectives)", *_dtypes())
    yield from ("", "Reductions: who takes it, g gloo, n nccl, m mpi (4)", *_reductions())
    yield from ("", "Good to know", *_terms(_NOTES))
    yield from ("", "In their own words", *_refusals())


def _terms(terms: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in terms:
        yield from folded(f"{term:<11} {text}", "  ", " " * 14)


def _operations() -> list[str]:
    named = [op for op, row in OPS.items() if row.kind in ("p2p", "collective")]
    cells = {op: [_SHOWN[s.on(op, device)] for s in SUPPORT.values() for device in _DEVICES] for op in named}
    header = ("", *(f"{s.backend} CPU" if device == "cpu" else "GPU" for s in SUPPORT.values() for device in _DEVICES))
    return table(header, [(op, *cells[op]) for op in named])


def _dtypes() -> list[str]:
    """One row per dtype; (4) on complex, where only some collectives are gone."""
    rows = []
    for dtype in DTYPE_BYTES:
        cells = []
        for one in SUPPORT.values():
            mark = _MARKS.get((one.backend, dtype), "")
            collectives = "(4)" if dtype.startswith("complex") else mark or ("yes" if dtype in one.moved else "-")
            messages = mark if mark == "(2)" else "yes" if dtype in one.messages else "-"
            cells += [messages, collectives]
        rows.append((dtype, *cells))
    header = ("", *(word for s in SUPPORT.values() for word in (f"{s.backend} p2p", "coll")))
    return table(header, rows)


def _reductions() -> list[str]:
    rows = [(dtype, *(reductions(dtype)[op] for op in REDUCE_OPS)) for dtype in DTYPE_BYTES]
    return table(("", *REDUCE_OPS), rows)


def _refusals() -> Iterator[str]:
    """Every text of the table once; OP and TYPE stand for the reduce op and for torch's name of the dtype, SHAPE and ROWS for numbers."""
    for one in SUPPORT.values():
        for text in one.texts():
            yield from _quoted(one.backend, text.format(op="OP", type="TYPE", one="SHAPE", got="SHAPE", sizes="ROWS vs. ROWS"))
    for op in ("all_reduce", "reduce", "reduce_scatter"):
        yield from _quoted("all", complex_text(op, "op"))


def _quoted(backend: str, text: str) -> list[str]:
    return folded(f"{backend:<5}{text}", "  ", " " * 9)
