"""The errors of DistributedDataParallel's constructor when the ranks wrap different models.

DDP compares the models in two steps: first the numbers of parameters, then the shapes. The errors
become `fail` steps behind the call that makes the difference known to a rank.

Source: torch 2.13, `torch/csrc/distributed/c10d/reducer.cpp` (verify_params_across_processes); the
behaviour was observed in runs of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.scenario.strategies.base import Entry, ModelLayer, ParameterShapes, step

_PARAM_COUNT_ERROR = (
    "DDP expects same model across all ranks, but Rank {} has {} params, "
    "while rank {} has inconsistent {} params."
)
_PARAM_SHAPE_ERROR = (
    "[{0}]: params[{1}] in this process with sizes {2} appears not to match "
    "sizes of the same param in process 0."
)


def parameter_count_error(rank: int, counts: Mapping[int, int]) -> Entry | None:
    """The error of a rank whose number of parameters differs from another rank's, else None.

    PyTorch names the first rank that differs.
    """
    own = counts[rank]
    other = next((r for r, count in counts.items() if count != own), None)
    if other is None:
        return None
    message = _PARAM_COUNT_ERROR.format(rank, own, other, counts[other])
    return step("fail", [rank], message=message)


def with_model_mismatch_errors(
    ranks: Sequence[int], models: Mapping[int, Sequence[ModelLayer]], steps: list[Entry]
) -> list[Entry]:
    """The entries of ``ranks``, with the errors of constructing DDP around different ``models``.

    Different numbers of parameters raise on all ranks, different shapes on the ranks that differ
    from rank 0. Shapes with another total number of dimensions are not reported here: they do not
    fit into the broadcast that compares them, so that this call aborts before.
    """
    shapes = {rank: _parameter_shapes(models[rank]) for rank in sorted(models)}
    counts = {rank: len(own) for rank, own in shapes.items()}
    total_dims = {sum(map(len, own)) for own in shapes.values()}
    after_counts: list[Entry] = []
    after_shapes: list[Entry] = []
    for rank in ranks:
        count_error = parameter_count_error(rank, counts)
        if count_error is not None:
            after_counts.append(count_error)
        elif len(total_dims) == 1:
            after_shapes += _shape_errors(rank, shapes[rank], shapes[0])
    if not after_counts and not after_shapes:
        return steps

    # The first block of the expansion is the construction: the all_gather of the counts, the
    # broadcast of the shapes, then the weights.
    construction = steps[0]["steps"]
    assert isinstance(construction, list)
    gather_counts, broadcast_shapes, *weights = construction
    checked = [gather_counts, *after_counts, broadcast_shapes, *after_shapes, *weights]
    return [{**steps[0], "steps": checked}, *steps[1:]]


def _parameter_shapes(model: Sequence[ModelLayer]) -> ParameterShapes:
    return tuple(shape for layer in model for shape in layer.params)


def _shape_errors(rank: int, own: ParameterShapes, first_rank: ParameterShapes) -> list[Entry]:
    """The error for the first parameter whose shape differs from rank 0's, if there is one."""
    for index, (shape, expected) in enumerate(zip(own, first_rank, strict=False)):
        if shape != expected:
            message = _PARAM_SHAPE_ERROR.format(rank, index, list(shape))
            return [step("fail", [rank], message=message)]
    return []
