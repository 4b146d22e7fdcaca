"""Programs that start ranks with torch's elastic agent: `fabric run`, `tune run`, and others.

They call torchrun's functions in their own process. The agent would start each rank as a new
Python, which has no patches. Here, a process that capture started as a rank becomes the program
that the agent would start; otherwise, the ranks are forked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.launch.command_line import parse_command
from distsim.script_capture.launch.rank_environment import (
    RANK_VARIABLE,
    RANKS_VARIABLE,
    RankPosition,
    launcher_environment,
)
from distsim.script_capture.patches.after_import import after_import
from distsim.script_capture.rank.client import HubClient

#: torch/distributed/elastic/utils/api.py: torch.distributed.launch passes it as an argument.
_LOCAL_RANK_MACRO: Final = "${local_rank}"


def patch_elastic_agent(client: HubClient) -> None:
    """Replace what starts the ranks in `torch.distributed.launcher`, once it is imported."""

    def launch(agent: Any, *args: Any) -> dict[int, object]:
        config = agent._config
        ranks = config.nproc_per_node * config.max_nodes
        work = _work_of_rank(client, agent._entrypoint, args)
        started_ranks = os.environ.get(RANKS_VARIABLE)
        if started_ranks is None or client.joined:
            _fork_ranks(work, config.max_nodes, ranks)
            return dict.fromkeys(range(ranks))
        if int(started_ranks) != ranks:
            raise SystemExit(
                f"the program starts {ranks} ranks itself: omit --nproc, or give --nproc {ranks}"
            )
        rank = int(os.environ[RANK_VARIABLE])
        return {rank: work()}

    def change(module: ModuleType) -> None:
        vars(module)["elastic_launch"].__call__ = launch

    after_import("torch.distributed.launcher.api", change)


def _work_of_rank(client: HubClient, entrypoint: Any, args: Sequence[Any]) -> Callable[[], object]:
    """What each rank does: call the function, or run the program that the command starts."""

    def run_program() -> object:
        local_rank = os.environ["LOCAL_RANK"]
        words = [str(word).replace(_LOCAL_RANK_MACRO, local_rank) for word in (entrypoint, *args)]
        target = parse_command(words).target
        if target is None:
            raise UnsupportedError(
                f"distsim capture does not support ranks that are not Python programs: {words[0]}"
            )
        client.sites.add_main(target.file)
        return target.run()

    if callable(entrypoint):
        return lambda: entrypoint(*args)
    return run_program


def _fork_ranks(work: Callable[[], object], nodes: int, ranks: int) -> None:
    def run(rank: int) -> None:
        position = RankPosition(rank, ranks, ranks // nodes, nodes)
        os.environ.update(launcher_environment("torchrun", position))
        work()

    sys.modules["torch.multiprocessing"].start_processes(run, nprocs=ranks)


__all__ = ["patch_elastic_agent"]
