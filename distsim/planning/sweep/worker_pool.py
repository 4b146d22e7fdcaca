"""Runs tasks in this process, on all cores, or on the workers of a Dask or Ray cluster.

Parallel execution uses joblib and its backends, which is optional: without it, tasks run one after
the other in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from distsim.common.errors import EnvironmentFault, UsageError, raise_if_out_of_memory
from distsim.common.installation import install_command
from distsim.common.worker_process import end_with_parent, starting_workers

T = TypeVar("T")
R = TypeVar("R")


def available_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def run_tasks(
    function: Callable[[T], R],
    tasks: Sequence[T],
    *,
    jobs: int | None = None,
    address: str | None = None,
) -> Iterator[tuple[int, R]]:
    """Yield (number of the task, its result) as the tasks finish.

    ``jobs``: the number of processes (default: one per core). ``address``: `tcp://…` of a Dask
    scheduler, `ray` or `ray://…`. Raises EnvironmentFault if a package is missing or no scheduler
    answers, UsageError for any other address.
    """
    count = min(jobs or available_cores(), len(tasks))
    # joblib is required only if the user asked for several processes.
    may_run_here = count <= 1 or (jobs is None and not _is_installed("joblib"))
    if address is None and may_run_here:
        for number, task in enumerate(tasks):
            yield number, function(task)
        return
    joblib = import_optional("joblib")
    with _joblib_backend(joblib, address):
        pool = joblib.Parallel(
            n_jobs=-1 if address else count,
            return_as="generator_unordered",
            pre_dispatch="4*n_jobs",
        )
        parent = None if address else os.getpid()
        with starting_workers():
            results = pool(
                joblib.delayed(_run_numbered)(function, number, task, parent)
                for number, task in enumerate(tasks)
            )
        yield from results


def _run_numbered(
    function: Callable[[T], R], number: int, task: T, parent: int | None
) -> tuple[int, R]:
    """In a worker: run a task. ``parent``: the process that started the worker, if it did."""
    if parent is not None:
        end_with_parent(parent)
    return number, function(task)


@contextmanager
def _joblib_backend(joblib: Any, address: str | None) -> Iterator[None]:
    """joblib's workers: processes here, or those of a cluster."""
    if address is None:
        with joblib.parallel_config(backend="loky"):
            yield
    elif address.startswith(("tcp://", "tls://", "ucx://")):
        distributed = import_optional("distributed")
        try:
            client = distributed.Client(address, timeout="10s")
        except OSError as error:
            raise EnvironmentFault(
                f"no Dask scheduler answers at {address}: {error}", "start one: `dask scheduler`"
            ) from None
        with client, joblib.parallel_config(backend="dask"):
            yield
    elif address == "ray" or address.startswith("ray://"):
        ray, register = import_optional("ray"), import_optional("ray.util.joblib")
        ray.init(address="auto" if address == "ray" else address, ignore_reinit_error=True)
        register.register_ray()
        with joblib.parallel_config(backend="ray"):
            yield
    else:
        raise UsageError(
            f"--address {address}: expected the address of a Dask scheduler or a Ray cluster",
            "for example tcp://node0:8786 or ray://node0:10001",
        )


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def import_optional(name: str) -> Any:
    """A package that is no part of the base. Raises EnvironmentFault with the extra that brings
    it.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise_if_out_of_memory(error)
        package = name.partition(".")[0]
        extra = {
            "joblib": "sweep",
            "distributed": "sweep-dask",
            "optuna": "sweep",
            "pyarrow": "sweep",
        }.get(package)
        remedy = install_command(extra) if extra else f"pip install {package}"
        raise EnvironmentFault(f"{package} is not installed", remedy) from None


__all__ = ["available_cores", "run_tasks", "import_optional"]
