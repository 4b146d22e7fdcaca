"""Pages that explain a name: an operation from its row, a strategy, the back ends; the list of all
names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from textwrap import fill, indent

from distsim.backends import SUPPORT_BY_BACKEND, reduction_support
from distsim.backends.profile import BackendSupport, DeviceType, complex_reduction_error
from distsim.findings.codes import CODES
from distsim.operations.core.field_help import torch_argument_names
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import DTYPE_BYTES, REDUCE_OPS
from distsim.operations.registry import OPERATIONS
from distsim.output.text.explain.buffer_table import buffer_legend, buffer_lines
from distsim.output.text.explain.glossary import GLOSSARY
from distsim.output.text_layout import page_width, table_lines, truncated, wrapped_lines

#: Group sizes that a page shows the bus bandwidth factor and the rounds for.
GROUP_SIZES = (2, 4, 8, 64)


def operation_page(operation: type[Operation]) -> str:
    """The page of `distsim explain NAME` about an operation; everything is from its class."""
    words = operation.words
    lines = wrapped_lines(f"{operation.op}  ({_kind_text(operation)})", "", "  ")
    if operation.aliases:
        lines.append(f"  also written {', '.join(operation.aliases)}")
    lines.append(
        fill(words.signature, page_width(), initial_indent="  ", subsequent_indent="      ")
    )
    if operation.kind == "collective":
        table = buffer_lines(operation)
        lines += ["", "Buffers", *table, *wrapped_lines(buffer_legend(operation, table), "  ")]
    paragraphs = [("Before", words.before), ("After", words.after), ("Who waits", words.waits)]
    if operation.kind == "collective":
        paragraphs.append(("Bytes", _bandwidth_sentence(operation)))
        paragraphs.append(("Rounds", _rounds_sentence(operation)))
    # One title for all notes.
    paragraphs += [("Good to know" if i == 0 else "", note) for i, note in enumerate(words.notes)]
    paragraphs.append(("torch's names", _torch_argument_names(operation)))
    for title, text in paragraphs:
        if not text:
            continue
        if title:
            lines += ["", title]
        lines.append(_wrapped_text(text))
    lines += ["", "In a scenario", indent(words.example.rstrip(), "  ")]
    if words.torch:
        lines += ["", "In torch", indent(words.torch, "  ")]
    return "\n".join(lines)


def _torch_argument_names(operation: type[Operation]) -> str:
    """The arguments of torch whose fields in the file have other names."""
    fields = {info.alias or key for key, info in operation.model_fields.items()}
    words_of_signature = re.findall(r"\w+", operation.words.signature)
    pairs = [
        f"{name} is `{field}`"
        for name, field in torch_argument_names(operation.op, fields).items()
        if field and name in words_of_signature
    ]
    return f"{', '.join(pairs)} in a file." if pairs else ""


def _wrapped_text(text: str) -> str:
    return fill(text, page_width(), initial_indent="  ", subsequent_indent="  ")


def _kind_text(row: type[Operation]) -> str:
    kinds = {
        "p2p": "a message between two ranks",
        "collective": "a collective: all ranks of a group join",
        "remote": "one rank's own access to another's memory",
        "batch": "a batch of messages",
        "wait": "a wait for requests",
        "local": "on one rank alone",
        "group": "about process groups",
        "block": "a block of steps",
    }
    return "a signal between two ranks" if row.signals else kinds[row.kind]


def _bandwidth_sentence(row: type[Operation]) -> str:
    """The bus bandwidth factor as nccl-tests defines it (doc/PERFORMANCE.md)."""
    factors = [row.busbw_factor(n) for n in GROUP_SIZES]
    if not any(factors):
        return "It moves no data, so it has no bandwidth."
    shown = ", ".join(f"{f:.4g} on {n} ranks" for n, f in zip(GROUP_SIZES, factors, strict=True))
    name = f" ({row.nccl_tests} of nccl-tests)" if row.nccl_tests else ""
    return f"algbw is bytes per time; busbw is algbw times {shown}{name}."


def _rounds_sentence(row: type[Operation]) -> str:
    counts = [(n, len(row.schedule(n, 0))) for n in GROUP_SIZES[:3]]
    return (
        "Its schedule takes "
        + ", ".join(f"{rounds} round{'s' * (rounds != 1)} on {n} ranks" for n, rounds in counts)
        + "."
    )


def index_page() -> str:
    """Every name that `distsim explain` knows, with a line on each."""
    from distsim.scenario.strategies import STRATEGIES

    strategies = table_lines(
        ("", ""),
        [
            (name, truncated(row.about, max(20, page_width() - 26)))
            for name, row in STRATEGIES.items()
        ],
        left=(0, 1),
    )
    operations = table_lines(
        ("", ""),
        [
            (name, truncated(row.words.after, max(20, page_width() - 26)))
            for name, row in OPERATIONS.items()
        ],
        left=(0, 1),
    )
    findings = table_lines(
        ("", ""), [(code, info.title) for code, info in CODES.items()], left=(0, 1)
    )
    more = table_lines(
        ("", ""),
        [("backends", "what works on gloo, nccl and mpi, and which to choose")],
        left=(0, 1),
    )
    known = ["Operations", *operations[1:], "", "Training strategies", *strategies[1:], ""]
    pages = (
        ("scenario", "its keys; `world.nodes`, `tensors.x.shape`, `all_reduce.op` is one each"),
        ("expressions", "what may stand for a number"),
    )
    keys = ["", "The scenario file", *table_lines(("", ""), pages, left=(0, 1))[1:]]
    terms = table_lines(
        ("", ""),
        [
            (name.replace(" ", "-"), truncated(term.definition, max(20, page_width() - 26)))
            for name, term in GLOSSARY.items()
        ],
        left=(0, 1),
    )
    keys += ["", "Terms", *terms[1:]]
    return "\n".join([*known, "Findings", *findings[1:], "", "Back ends", *more[1:], *keys])


# --- which operation, dtype and reduction works where, and which back end to choose ---
_DEVICES: tuple[DeviceType, ...] = ("cpu", "gpu")
_SUPPORT_MARKS = {"yes": "yes", "no": "-", "built": "(1)"}
_BACKEND_ADVICE = (
    ("CPU tensors", "gloo: built into torch, and it says most when something is wrong."),
    (
        "GPU tensors",
        "nccl: made for them, over NVLink and InfiniBand. Gloo copies through the host.",
    ),
    (
        "both",
        "cpu:gloo,cuda:nccl, as when no back end is named: a tensor takes the one of its device.",
    ),
    (
        "mpi",
        "where a machine's fast network or GPUs are reached only through its own MPI library, "
        "or a job is started by mpirun and shared with MPI code. "
        "torch must be built from source for it. It has no timeout.",
    ),
    (
        "to debug",
        "gloo on CPU tensors: it never buffers, so what can hang does, and it obeys tags.",
    ),
)
_NOTES = (
    (
        "(1)",
        "only where torch was built against an MPI library that knows CUDA; "
        "torch asks it and refuses otherwise.",
    ),
    (
        "(2)",
        "only if the MPI library has such a type (MPIX_C_FLOAT16 and the like); mostly it has not.",
    ),
    (
        "(3)",
        "reduced with NCCL 2.24 or later on GPUs of compute capability 9.0 or later; "
        "else moved as bytes alone.",
    ),
    (
        "(4)",
        "torch passes complex numbers as pairs of real ones: sum and avg have a meaning then, "
        "the other reduce ops none. Gloo's gather refuses them, "
        "as do mpi's gather, reduce and reduce_scatter.",
    ),
    ("mpi", "reduce_scatter and all_gather_into_tensor came with pytorch#150162 in 2025."),
    (
        "coalesced",
        "several collectives as one launch (_coalescing_manager). "
        "Gloo lays them end to end and compares no lists; on a GPU it has reduce_scatter alone.",
    ),
    (
        "shapes",
        "gloo wants the larger tensor of all_gather_into_tensor and reduce_scatter_tensor "
        "to be the smaller one with its first axis n times as long; nccl counts elements.",
    ),
    ("bool", "a sum of bools is an or: true where any is."),
    (
        "avg",
        "of integers: gloo refuses, after it has taken the sum; nccl divides and drops the rest.",
    ),
    (
        "gloo, GPU",
        "collectives copy to the host and back; the numbers are right, the speed is the host's. "
        "barrier and messages know nothing of a GPU.",
    ),
    (
        "any source",
        "recv without src: gloo and mpi; nccl raises. Tags: gloo and mpi; nccl ignores them.",
    ),
)
_DTYPE_MARKS = {
    ("mpi", "float16"): "(2)",
    ("mpi", "bfloat16"): "(2)",
    ("nccl", "float8_e4m3fn"): "(3)",
    ("nccl", "float8_e5m2"): "(3)",
}


def backends_page() -> str:
    """What `distsim explain backends` says, in 80 columns: everything but the advice from
    `distsim.backends.profile`.
    """
    return "\n".join(_backend_lines())


def _backend_lines() -> Iterator[str]:
    yield "backends  (what works where, with torch 2.9 and later)"
    yield from ("", "Which one to choose", *_term_lines(_BACKEND_ADVICE))
    yield from ("", "Operations, by the device of the tensors", *_operation_table())
    yield from ("", "Dtypes (p2p: send, recv and their kind; coll: collectives)", *_dtype_table())
    yield from ("", "Reductions: who takes it, g gloo, n nccl, m mpi (4)", *_reduction_table())
    yield from ("", "Good to know", *_term_lines(_NOTES))
    yield from ("", "In their own words", *_refusal_lines())


def _term_lines(terms: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in terms:
        yield from wrapped_lines(f"{term:<11} {text}", "  ", " " * 14)


def _operation_table() -> list[str]:
    """One row per operation that communicates, one column per backend and device."""
    columns = [(support, device) for support in SUPPORT_BY_BACKEND.values() for device in _DEVICES]
    header = [f"{support.backend} CPU" if device == "cpu" else "GPU" for support, device in columns]
    rows = []
    for op, operation in OPERATIONS.items():
        if operation.kind in ("p2p", "collective", "remote"):
            marks = [_SUPPORT_MARKS[support.on(op, device)] for support, device in columns]
            rows.append((op, *marks))
    return table_lines(("", *header), rows)


def _dtype_table() -> list[str]:
    """One row per dtype, two columns per backend: messages and collectives."""
    rows = []
    for dtype in DTYPE_BYTES:
        cells = []
        for support in SUPPORT_BY_BACKEND.values():
            cells.append(_message_mark(support, dtype))
            cells.append(_collective_mark(support, dtype))
        rows.append((dtype, *cells))
    header = [""]
    for support in SUPPORT_BY_BACKEND.values():
        header += [f"{support.backend} p2p", "coll"]
    return table_lines(header, rows)


def _message_mark(support: BackendSupport, dtype: str) -> str:
    mark = _DTYPE_MARKS.get((support.backend, dtype))
    if mark == "(2)":
        # Note (2) is about the types of the MPI library, so it holds for messages as well.
        return mark
    return "yes" if dtype in support.messages else "-"


def _collective_mark(support: BackendSupport, dtype: str) -> str:
    if dtype.startswith("complex"):
        # Only some reduce operations and collectives refuse complex numbers.
        return "(4)"
    mark = _DTYPE_MARKS.get((support.backend, dtype))
    return mark or ("yes" if dtype in support.moved else "-")


def _reduction_table() -> list[str]:
    rows = [(dtype, *(reduction_support(dtype)[op] for op in REDUCE_OPS)) for dtype in DTYPE_BYTES]
    return table_lines(("", *REDUCE_OPS), rows)


def _refusal_lines() -> Iterator[str]:
    """The error messages of the backends, each once.

    OP and TYPE stand for the reduce op and for torch's name of the dtype, SHAPE and ROWS for
    numbers.
    """
    for support in SUPPORT_BY_BACKEND.values():
        for template in support.texts():
            text = template.format(
                op="OP", type="TYPE", one="SHAPE", got="SHAPE", sizes="ROWS vs. ROWS"
            )
            yield from _quoted_refusal(support.backend, text)
    for op in ("all_reduce", "reduce", "reduce_scatter"):
        yield from _quoted_refusal("all", complex_reduction_error(op, "op"))


def _quoted_refusal(backend: str, text: str) -> list[str]:
    return wrapped_lines(f"{backend:<5}{text}", "  ", " " * 9)
