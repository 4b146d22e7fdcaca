"""Pages that explain a name: an operation from its row, a strategy, the backends; the list of all
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import fill, indent

from distsim.backends import BACKEND_LETTERS, SUPPORT_BY_BACKEND, reduction_support
from distsim.backends.profile import BackendSupport, DeviceType, complex_reduction_error
from distsim.findings.codes import CODES
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import DTYPE_BYTES, REDUCE_OPS
from distsim.operations.core.torch_arguments import torch_argument_names
from distsim.operations.registry import OPERATIONS
from distsim.output.text.explain.buffer_table import buffer_legend, buffer_lines
from distsim.output.text.explain.glossary import GLOSSARY
from distsim.output.text_layout import page_width, table_lines, truncated, wrapped_lines

#: Group sizes that a page shows the bus bandwidth factor and the rounds for.
GROUP_SIZES = (2, 4, 8, 64)
#: Backends side by side in one table.
_BACKENDS_PER_TABLE = 3


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
    paragraphs = [("Before", words.before), ("After", words.after), ("Waits", words.waits)]
    if operation.kind == "collective":
        paragraphs.append(("Bytes", _bandwidth_sentence(operation)))
        paragraphs.append(("Rounds", _rounds_sentence(operation)))
    # One title for all notes.
    paragraphs += [("Notes" if i == 0 else "", note) for i, note in enumerate(words.notes)]
    paragraphs.append(("Names in torch", _torch_argument_names(operation)))
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
    return f"{', '.join(pairs)} in a scenario." if pairs else ""


def _wrapped_text(text: str) -> str:
    return fill(text, page_width(), initial_indent="  ", subsequent_indent="  ")


def _kind_text(row: type[Operation]) -> str:
    kinds = {
        "p2p": "a message between two ranks",
        "collective": "a collective: all ranks of a group take part",
        "remote": "one-sided access to the memory of another rank",
        "batch": "a batch of messages",
        "wait": "waits for requests",
        "local": "on one rank alone",
        "group": "about process groups",
        "block": "a block of steps",
    }
    return "a signal between two ranks" if row.signals else kinds[row.kind]


def _bandwidth_sentence(row: type[Operation]) -> str:
    """The bus bandwidth factor as nccl-tests defines it (doc/PERFORMANCE.md)."""
    factors = [row.busbw_factor(n) for n in GROUP_SIZES]
    if not any(factors):
        return "The operation moves no data, so it has no bandwidth."
    shown = ", ".join(f"{f:.4g} on {n} ranks" for n, f in zip(GROUP_SIZES, factors, strict=True))
    name = f" ({row.nccl_tests} of nccl-tests)" if row.nccl_tests else ""
    size = "bytes is the larger of input and output; " if row.kind == "collective" else ""
    return f"{size}algbw = bytes / time; busbw = algbw × {shown}{name}."


def _rounds_sentence(row: type[Operation]) -> str:
    counts = [(n, len(row.schedule(n, 0))) for n in GROUP_SIZES[:3]]
    return (
        "The operation takes "
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
        [("backends", "what gloo, nccl and mpi support, and which one to choose")],
        left=(0, 1),
    )
    known = ["Operations, and the state after each call", *operations[1:], ""]
    known += ["Training strategies", *strategies[1:], ""]
    pages = (
        ("scenario", "all keys; `world.nodes` or `all_reduce.op` explains one of them"),
        ("expressions", "expressions in numbers, quantities and conditions"),
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
    return "\n".join([*known, "Findings", *findings[1:], "", "Backends", *more[1:], *keys])


# --- which operation, dtype and reduction works where, and which backend to choose ---
_DEVICES: tuple[DeviceType, ...] = ("cpu", "gpu")
_SUPPORT_MARKS = {"yes": "yes", "no": "-", "built": "(1)"}
_BACKEND_ADVICE = (
    ("CPU tensors", "gloo: built into torch, with the most informative errors."),
    (
        "GPU tensors",
        "nccl: uses NVLink and InfiniBand. Gloo copies GPU tensors through the host.",
    ),
    (
        "both",
        "cpu:gloo,cuda:nccl, the default of torch: the device of a tensor selects the backend.",
    ),
    (
        "mpi",
        "if only the MPI library of a machine can use its fast network or GPUs, "
        "or if mpirun starts the job together with MPI code. "
        "Requires torch built from source. It has no timeout.",
    ),
    (
        "debugging",
        "gloo on CPU tensors: it never buffers sends, so it shows hangs that other backends hide. "
        "It also compares tags.",
    ),
)
_NOTES = (
    (
        "(1)",
        "only if torch was built with a CUDA-aware MPI library; "
        "torch checks this and raises an error otherwise.",
    ),
    (
        "(2)",
        "only if the MPI library has such a type, for example MPIX_C_FLOAT16; most have none.",
    ),
    (
        "(3)",
        "reductions need NCCL 2.24 and GPUs of compute capability 9.0; "
        "otherwise NCCL only moves the bytes.",
    ),
    (
        "(4)",
        "torch passes complex numbers as pairs of real numbers, so only sum and avg are "
        "meaningful. Gloo's gather rejects them, "
        "as do mpi's gather, reduce and reduce_scatter.",
    ),
    ("mpi", "supports reduce_scatter and all_gather_into_tensor since pytorch#150162 (2025)."),
    (
        "coalesced",
        "several collectives as one launch (_coalescing_manager). "
        "Gloo concatenates the tensors, and does not compare the lists of the ranks. On a GPU, it "
        "supports only reduce_scatter.",
    ),
    (
        "shapes",
        "in all_gather_into_tensor and reduce_scatter_tensor over n ranks, the first dimension of "
        "the larger tensor must be n times that of the smaller one on gloo. nccl compares only "
        "the number of elements.",
    ),
    ("bool", "the sum of bools is a logical or."),
    (
        "avg",
        "of integers: gloo computes the sum, then raises an error. nccl truncates the quotient.",
    ),
    (
        "gloo, GPU",
        "collectives copy to the host and back: correct, but only as fast as the host. "
        "barrier and messages do not support GPUs.",
    ),
    (
        "any source",
        "only gloo and mpi support recv without src, and tags. nccl raises an error without src, "
        "and ignores tags.",
    ),
)
_DTYPE_MARKS = {
    ("mpi", "float16"): "(2)",
    ("mpi", "bfloat16"): "(2)",
    ("nccl", "float8_e4m3fn"): "(3)",
    ("nccl", "float8_e5m2"): "(3)",
}


def backends_page() -> str:
    """The page of `distsim explain backends`: everything but the advice from
    `distsim.backends.profile`.
    """
    return "\n".join(_backend_lines())


def _backend_lines() -> Iterator[str]:
    yield "backends  (supported operations, with torch 2.9 and later)"
    yield from ("", "Which one to choose", *_term_lines(_BACKEND_ADVICE))
    yield from ("", "Operations, by the device of the tensors", *_operation_table())
    yield from ("", "Dtypes (p2p: send, recv and similar; coll: collectives)", *_dtype_table())
    letters = ", ".join(f"{letter} {name}" for name, letter in BACKEND_LETTERS.items())
    heading = wrapped_lines(f"Reductions by backend: {letters} (4)", "", "  ")
    yield from ("", *heading, *_reduction_table())
    yield from ("", "Notes", *_term_lines(_NOTES))
    yield from ("", "Error messages of the backends (verbatim)", *_refusal_lines())


def _term_lines(terms: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in terms:
        yield from wrapped_lines(f"{term:<11} {text}", "  ", " " * 14)


def _operation_table() -> list[str]:
    """One row per operation that communicates, one column per backend and device."""
    return _lines_of_tables(_operation_table_of)


def _lines_of_tables(table: Callable[[Sequence[BackendSupport]], list[str]]) -> list[str]:
    """A table for every few backends, so that no line exceeds 80 columns."""
    supports = list(SUPPORT_BY_BACKEND.values())
    lines = table(supports[:_BACKENDS_PER_TABLE])
    for first in range(_BACKENDS_PER_TABLE, len(supports), _BACKENDS_PER_TABLE):
        lines += ["", *table(supports[first : first + _BACKENDS_PER_TABLE])]
    return lines


def _operation_table_of(supports: Sequence[BackendSupport]) -> list[str]:
    columns = [(support, device) for support in supports for device in _DEVICES]
    header = [f"{support.backend} CPU" if device == "cpu" else "GPU" for support, device in columns]
    rows = []
    for op, operation in OPERATIONS.items():
        if operation.kind in ("p2p", "collective", "remote"):
            marks = [_SUPPORT_MARKS[support.on(op, device)] for support, device in columns]
            rows.append((op, *marks))
    return table_lines(("", *header), rows)


def _dtype_table() -> list[str]:
    """One row per dtype, two columns per backend: messages and collectives."""
    return _lines_of_tables(_dtype_table_of)


def _dtype_table_of(supports: Sequence[BackendSupport]) -> list[str]:
    rows = []
    for dtype in DTYPE_BYTES:
        cells = []
        for support in supports:
            cells.append(_message_mark(support, dtype))
            cells.append(_collective_mark(support, dtype))
        rows.append((dtype, *cells))
    header = [""]
    for support in supports:
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
    return wrapped_lines(f"{backend:<4} {text}", "  ", " " * 9)
