"""What DualPipe needs in addition to its schedule: a common update of both copies of each stage.

The copies are on ranks r and P - 1 - r.

Source: DeepSeek-V3 (arXiv:2412.19437, section 3.2.1: two copies of the parameters) and github
deepseek-ai/DualPipe, dualpipe.py and examples/example_dualpipe.py, where each stage's gradient is
the sum of those of both copies before the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distsim.scenario.strategies.base import Entry, ExpansionContext, Refusal

#: Fields that PyTorch's runtime supports and DualPipe does not, and why.
_UNSUPPORTED_FIELDS = {
    "defer_pp_recv": "the schedule sets the place of receives",
    "shapes_exchange": "shapes are set in advance (set_p2p_tensor_shapes)",
    "data_parallel": "reduce over replicas after the pipeline, in a separate entry",
}


def refuse_dualpipe(
    ranks: int, micro_batches: int, given: Mapping[str, object]
) -> Iterator[Refusal]:
    """Why DualPipe is impossible with this layout; ``given`` are the pipeline's fields."""
    if ranks % 2:
        yield (
            ("axis",),
            (
                "dualpipe pairs rank r with rank P - 1 - r, so it needs an even number of "
                f"ranks, found {ranks}; dualpipe_v supports any number"
            ),
        )
    if micro_batches % 2:
        near = f"use {micro_batches - 1} or {micro_batches + 1}"
        yield (
            ("micro_batches",),
            (
                "dualpipe starts half of the micro-batches at each end, but "
                f"{micro_batches} is odd; {near}"
            ),
        )
    if micro_batches < 2 * ranks:
        yield (
            ("micro_batches",),
            "dualpipe needs at least twice as many micro-batches as ranks, "
            f"found {micro_batches} for {ranks} ranks",
        )
    for field, reason in _UNSUPPORTED_FIELDS.items():
        if given[field]:
            yield (field,), f"dualpipe has no {field}: {reason}"


def stage_copies_group(axis: str, context: ExpansionContext) -> Entry:
    """The group of a stage's two copies.

    There is one group for each pair of copies, and for each position on the other axes; the
    expression numbers them.
    """
    terms = [f"min({axis}, {axis}_size - 1 - {axis})"]
    stride = context.mesh[axis]
    for other in reversed([name for name in context.mesh if name != axis]):
        terms.append(f"{stride} * {other}")
        stride *= context.mesh[other]
    return {"by": " + ".join(terms)}
