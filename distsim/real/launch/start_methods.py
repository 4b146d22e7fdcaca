"""Starts the ranks of this machine as processes, and ends them.

fork, spawn and forkserver use multiprocessing (`ProcessLauncher`); elastic uses torch's elastic
launcher (`ElasticLauncher`), which owns its processes, so they are ended by their process IDs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from distsim.common.errors import EnvironmentFault
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import parse_snapshot
from distsim.real.shared.rendezvous import listen, serve_store
from distsim.real.worker import rank_process

MainArgument = TypeVar("MainArgument")
START_METHODS = ("fork", "spawn", "forkserver", "elastic")
_FORKSERVER_PRELOAD = [
    "torch.distributed",
    "distsim.real.worker.runner",
    "distsim.operations.registry",
    "ml_dtypes",
]


class ProcessLauncher:
    """Starts ranks with multiprocessing. ``processes``: by rank."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.processes: dict[int, BaseProcess] = {}

    def start(self, job: WorkerJob, ranks: Sequence[int]) -> None:
        """Start the ranks."""
        # Under forkserver the parent is the server, so ranks cannot check for this process.
        parent = 0 if self.method == "forkserver" else os.getpid()
        self.start_each(rank_process.run_rank, replace(job, parent=parent), ranks)

    def start_each(
        self,
        main: Callable[[MainArgument, int], None],
        argument: MainArgument,
        ranks: Sequence[int],
    ) -> None:
        """Start a process for each rank, which calls ``main(argument, rank)``."""
        context: Any = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            context.set_forkserver_preload(_FORKSERVER_PRELOAD)
        for rank in ranks:
            process = context.Process(
                target=main, args=(argument, rank), name=f"rank {rank}", daemon=True
            )
            process.start()
            self.processes[rank] = process

    def exit_of(self, rank: int) -> int | None:
        """The exit status of a rank; None while it lives.

        It is minus the signal's number if a signal ended the rank. A rank that was never started
        never ends.
        """
        process = self.processes.get(rank)
        if process is None or process.is_alive():
            return None
        return process.exitcode

    def pid(self, rank: int) -> int:
        """The process id of a rank; 0 if it was not started."""
        return int(self.processes[rank].pid or 0)

    def end(self, grace_s: float) -> None:
        """Wait ``grace_s`` for ranks that are exiting, then kill the others; all are reaped."""
        deadline = time.monotonic() + grace_s
        for process in self.processes.values():
            process.join(max(deadline - time.monotonic(), 0))
        for process in self.processes.values():
            if process.pid is not None and process.is_alive():
                # A rank is the leader of its process group, except at its very beginning.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    process.kill()
        for process in self.processes.values():
            process.join(5)


class ElasticLauncher(ProcessLauncher):
    """torch's elastic launcher without restarts, in a thread next to the monitor.

    It reports one failed rank, and ends all the others by SIGTERM.
    """

    def __init__(self, job: WorkerJob, start_method: str = "spawn") -> None:
        super().__init__("elastic")
        self.job, self.start_method = job, start_method
        self.failed: dict[int, int] = {}
        self.fault: BaseException | None = None
        self.ranks: tuple[int, ...] = ()
        self._started: dict[int, BaseProcess] = {}  # multiprocessing's processes by process ID
        self._thread: threading.Thread | None = None
        self._store: object = None

    def start(self, job: WorkerJob, ranks: Sequence[int]) -> None:
        """Start the ranks in torch's elastic launcher, which runs in a thread."""
        self.ranks = tuple(ranks)
        job = replace(job, environment_is_set=True, init_method="env://")
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def _run(self, job: WorkerJob) -> None:
        import logging

        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        # torch's own rendezvous would listen on every address. Within one process, all stores of a
        # port share the server that exists first, so torch will use this one.
        listening, port = listen("127.0.0.1", 0, allow_other_port=True)
        self._store = serve_store(listening, "127.0.0.1", port, shared=True)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=len(self.ranks),
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"rank": 0, "timeout": 60},
            run_id=f"distsim-{os.getpid()}",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=self.start_method,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=job.directory),
        )
        try:
            elastic_launch(config, rank_process.run_elastic_rank)(job)
        except ChildFailedError as error:
            self.failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except BaseException as error:
            self.fault = error

    @property
    def is_over(self) -> bool:
        """Whether the launcher's thread has ended."""
        return self._thread is None or not self._thread.is_alive()

    def exit_of(self, rank: int) -> int | None:
        """The exit status by the process itself, because the launcher reports one failed rank only.

        Ranks whose process is unknown count as ended by SIGTERM if another rank failed. Raises
        EnvironmentFault if the launcher failed.
        """
        if rank not in self.ranks:
            return None
        if self.fault is not None:
            raise EnvironmentFault(
                f"torch's elastic launcher failed: {self.fault}", "try --launcher spawn"
            )
        self._started |= {int(child.pid or 0): child for child in multiprocessing.active_children()}
        process = self._started.get(self.pid(rank))
        if process is not None and process.exitcode is not None:
            return int(process.exitcode)
        if not self.is_over:
            return None
        return self.failed.get(rank, -signal.SIGTERM if self.failed else 0)

    def pid(self, rank: int) -> int:
        """The process ID that the rank wrote into its progress file."""
        return parse_snapshot(self.job.progress_path(rank).read_bytes(), rank).pid

    def end(self, grace_s: float) -> None:
        """Wait for the ranks for ``grace_s`` seconds, then kill those that still run."""
        if self._thread is None:
            return
        self._thread.join(grace_s)
        for rank in self.ranks:
            if not self.is_over and self.pid(rank):
                with suppress(ProcessLookupError):
                    os.kill(self.pid(rank), signal.SIGKILL)
        self._thread.join(10)
