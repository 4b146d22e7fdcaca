"""Pages that explain a name: an operation from its row; the list of all names."""

from __future__ import annotations

from textwrap import fill, indent

from distsim.findings.codes import CODES
from distsim.ops.base import Op
from distsim.strategies.base import Strategy
from distsim.views.tables import cut, table

WIDTH = 80
#: Group sizes that a page shows the bus bandwidth factor and the rounds for.
SIZES = (2, 4, 8, 64)


def operation_page(row: type[Op]) -> str:
    """What `distsim explain NAME` says about an operation, in 80 columns: everything from its row."""
    words = row.words
    sections = [("Before", words.before), ("After", words.after), ("Who waits", words.waits)]
    if row.kind == "collective":
        sections += [("Bytes", _bytes(row)), ("Rounds", _rounds(row))]
    sections += [("Good to know" if i == 0 else "", note) for i, note in enumerate(words.notes)]
    also = f"  also written {', '.join(row.aliases)}\n" if row.aliases else ""
    head = f"{row.op}  ({_kind(row)})\n{also}" + fill(words.signature, WIDTH, initial_indent="  ", subsequent_indent="      ")
    body = "".join(f"\n\n{title}\n{_text(text)}" if title else f"\n{_text(text)}" for title, text in sections if text)
    return f"{head}{body}\n\nIn a scenario\n" + indent(words.example.rstrip(), "  ")


def strategy_page(row: type[Strategy]) -> str:
    """What `distsim explain NAME` says about a training strategy: what it does, and its fields."""
    needed = [info.alias or key for key, info in row.model_fields.items() if info.is_required()]
    free = [info.alias or key for key, info in row.model_fields.items() if not info.is_required()]
    lines = [f"{row.name}  (a training strategy: it expands into plain operations)", _text(row.about), "", "Fields"]
    lines += [_text(f"needed: {', '.join(needed)}")] if needed else []
    lines += [_text(f"may be left out: {', '.join(free)}")] if free else []
    return "\n".join([*lines, "", "See docs/strategies.md; `distsim expand FILE` prints the operations behind it."])


def _text(text: str) -> str:
    return fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _kind(row: type[Op]) -> str:
    kinds = {
        "p2p": "a message between two ranks",
        "collective": "a collective: all ranks of a group join",
        "batch": "a batch of messages",
        "wait": "a wait for requests",
        "local": "on one rank alone",
        "group": "about process groups",
        "block": "a block of steps",
    }
    return kinds[row.kind]


def _bytes(row: type[Op]) -> str:
    """The bus bandwidth factor as nccl-tests defines it (doc/PERFORMANCE.md)."""
    factors = [row.busbw_factor(n) for n in SIZES]
    if not any(factors):
        return "It moves no data, so it has no bandwidth."
    shown = ", ".join(f"{f:.4g} on {n} ranks" for n, f in zip(SIZES, factors, strict=True))
    name = f" ({row.nccl_tests} of nccl-tests)" if row.nccl_tests else ""
    return f"algbw is bytes per time; busbw is algbw times {shown}{name}."


def _rounds(row: type[Op]) -> str:
    counts = [(n, len(row.schedule(n, 0))) for n in SIZES[:3]]
    return "Its schedule takes " + ", ".join(f"{rounds} round{'s' * (rounds != 1)} on {n} ranks" for n, rounds in counts) + "."


def index_page() -> str:
    """Every name that `distsim explain` knows, with a line on each."""
    from distsim.ops.table import OPS
    from distsim.strategies import STRATEGIES

    strategies = table(("", ""), [(name, cut(row.about, WIDTH - 26)) for name, row in STRATEGIES.items()], left=(0, 1))
    operations = table(("", ""), [(name, cut(row.words.after, WIDTH - 26)) for name, row in OPS.items()], left=(0, 1))
    findings = table(("", ""), [(code, info.title) for code, info in CODES.items()], left=(0, 1))
    more = table(("", ""), [("backends", "what works on gloo, nccl and mpi, and which to choose")], left=(0, 1))
    known = ["Operations", *operations[1:], "", "Training strategies", *strategies[1:], ""]
    return "\n".join([*known, "Findings", *findings[1:], "", "Back ends", *more[1:]])
