"""The grid of a sweep: the given one, or else that of the scenario's `sweep:` block."""

from __future__ import annotations

from dataclasses import replace

from distsim.common.errors import UsageError
from distsim.planning.sweep.run_sweep import SweepRequest, grid_from_block
from distsim.scenario import loads


def with_grid(request: SweepRequest) -> SweepRequest:
    """The request with a grid; ``budget`` of the `sweep:` block counts unless one is given.

    Raises UsageError if neither the request nor the file has a grid, ScenarioErrors.
    """
    if request.grid or request.clusters:
        return request
    block = loads(request.text, request.file, request.sets).sweep
    if block is not None:
        request = replace(
            request,
            grid=grid_from_block(block.grid),
            clusters=tuple(block.cluster),
            budget=request.budget or block.budget,
        )
    if not request.grid and not request.clusters:
        raise UsageError(
            f"{request.file}: there is nothing to sweep",
            "add --grid mesh.dp=1,2,4 or --cluster a,b, or `sweep:` in the file",
        )
    return request
