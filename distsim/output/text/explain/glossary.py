"""The terms that reports and the documentation use: one definition each.

`distsim explain TERM` and docs/reference/glossary.md both come from this table.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.output.text_layout import wrapped_lines


class GlossaryTerm(NamedTuple):
    """A term and its definition. ``see``: names that `distsim explain` takes as well."""

    name: str
    definition: str
    see: tuple[str, ...] = ()


_TERMS = (
    GlossaryTerm(
        "algbw",
        "Algorithm bandwidth: the size of the buffer divided by the time of the operation. "
        "nccl-tests defines it. Use it to predict the time of a buffer of another size.",
        ("busbw",),
    ),
    GlossaryTerm(
        "blocked",
        "A rank is blocked while it waits in a call that cannot complete yet.",
        ("hang",),
    ),
    GlossaryTerm(
        "bubble",
        (
            "Share of a training step in which a rank neither computes nor communicates: the rank "
            "waits for other ranks, is idle, or launches work. In a pipeline, filling and draining "
            "the pipeline cause the bubble."
        ),
        ("exposed", "pipeline"),
    ),
    GlossaryTerm(
        "busbw",
        "Bus bandwidth: algbw times a factor that depends on the operation and the number of "
        "ranks, for example 2 (n - 1) / n for all_reduce. nccl-tests defines it. Compare it with "
        "the bandwidth of the hardware.",
        ("algbw", "all_reduce"),
    ),
    GlossaryTerm(
        "critical path",
        "The chain of work and transfers that determines the makespan. A run gets faster only if "
        "a part of this chain gets faster.",
        ("makespan", "straggler"),
    ),
    GlossaryTerm(
        "deadlock",
        "Verdict: in some order of events, ranks block and can never proceed. Each waits for a "
        "rank that never arrives, or the ranks wait for each other (a wait-for cycle).",
        ("hang", "wait-for cycle", "DS301"),
    ),
    GlossaryTerm(
        "eager",
        "A send is eager if the backend copies the message and the call returns before the "
        "receive is posted. MPI sends small messages this way. A program that needs eager sends "
        "hangs when its messages grow. For NCCL, eager initialisation means that "
        "init_process_group creates the communicator (`device_id`).",
        ("rendezvous", "mpi"),
    ),
    GlossaryTerm(
        "exposed",
        "Exposed communication is the time in which a message or a collective is in flight and "
        "the rank computes nothing. Communication that overlaps compute is not exposed.",
        ("bubble",),
    ),
    GlossaryTerm(
        "gloo",
        "Backend for CPU tensors, built into torch. Every send waits for its receive.",
        ("backends", "rendezvous"),
    ),
    GlossaryTerm(
        "hang",
        "Outcome: the program stops making progress, because blocked ranks can never proceed.",
        ("deadlock", "blocked"),
    ),
    GlossaryTerm(
        "invalid",
        "Verdict: a call is not allowed, whatever the other ranks do. Examples are a peer outside "
        "the group and an unsupported argument.",
        ("verdict",),
    ),
    GlossaryTerm(
        "leak",
        "Verdict: the program completes, but a request or a message stays unfinished.",
        ("verdict",),
    ),
    GlossaryTerm(
        "makespan",
        "Predicted time from the start of the run to the end of its last call.",
        ("critical path",),
    ),
    GlossaryTerm(
        "mismatch",
        "Verdict: calls that should match differ, for example in operation, shape, type, root or "
        "reduction.",
        ("verdict", "DS201"),
    ),
    GlossaryTerm(
        "mpi",
        "Backend on an MPI library. Small sends are eager, and larger ones wait for the receive.",
        ("backends", "eager"),
    ),
    GlossaryTerm(
        "nccl",
        "Backend for GPU tensors. Calls are enqueued as kernels on a CUDA stream, so a kernel may "
        "hang after its call has returned.",
        ("backends",),
    ),
    GlossaryTerm(
        "outcome",
        "Result of one run under one backend: completes, hangs, raises, crashes, wrong-data or "
        "undefined. The verdict, in contrast, covers all orders of events.",
        ("verdict",),
    ),
    GlossaryTerm(
        "race",
        "Verdict: the result depends on the order of events. For example, a receive from any "
        "source takes one of several messages, or a buffer is written while a request uses it.",
        ("verdict",),
    ),
    GlossaryTerm(
        "rendezvous",
        "A send is a rendezvous if it waits until its receive is posted. Also the start-up step in "
        "which the ranks find each other through a store.",
        ("eager", "gloo"),
    ),
    GlossaryTerm(
        "representative rank",
        "One rank that is simulated for all ranks with equal roles. Its results count for all of "
        "them. `simulate --all-ranks` simulates every rank.",
    ),
    GlossaryTerm(
        "straggler",
        "A rank that is slower than its peers and makes them wait. "
        "`simulate --seeds N --stragglers 1%x1.3` predicts the effect.",
        ("critical path",),
    ),
    GlossaryTerm(
        "verdict",
        "Result of checking a program over all orders of events and all rules that a backend may "
        "choose for blocking: ok, leak, race, deadlock, mismatch or invalid.",
        ("outcome", "deadlock", "mismatch", "race", "leak", "invalid"),
    ),
    GlossaryTerm(
        "wait-for cycle",
        "Ranks that wait for each other: the first waits for the second, and so on, and the last "
        "waits for the first.",
        ("deadlock", "DS301"),
    ),
)
#: Term -> its definition, sorted by name.
GLOSSARY = {term.name: term for term in _TERMS}


def find_term(name: str) -> GlossaryTerm | None:
    """The term with this name; upper and lower case, spaces, `_` and `-` count as equal."""
    wanted = _normalised(name)
    for term in _TERMS:
        if _normalised(term.name) == wanted:
            return term
    return None


def term_page(term: GlossaryTerm) -> str:
    """The page of `distsim explain TERM`."""
    lines = [term.name, *wrapped_lines(term.definition, "  ")]
    if term.see:
        lines += ["", *wrapped_lines(f"See also: {', '.join(term.see)}.", "  ")]
    return "\n".join(lines)


def glossary_page() -> list[str]:
    """The paragraphs of docs/reference/glossary.md."""
    paragraphs = ["# Glossary", "`distsim explain TERM` prints the same definition."]
    for term in _TERMS:
        see = f" See also: {', '.join(term.see)}." if term.see else ""
        paragraphs.append(f"**{term.name}**: {term.definition}{see}")
    return paragraphs


def _normalised(name: str) -> str:
    return name.strip().lower().replace("_", " ").replace("-", " ")
