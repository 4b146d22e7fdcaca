"""Test distributed code: run a function on N ranks, from Python or with ``@pytest.mark.ranks(4)``.

::

    import pytest, torch, torch.distributed as dist

    @pytest.mark.ranks(4, backend=["gloo", "nccl"])
    def test_sum():
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 4

The group exists when the function starts, unless ``init=False``. A hang fails at once, with its
diagnosis; so does a call that the backend's rules reject. A test that all ranks skip is skipped,
and an async test runs in an event loop on each rank. pytest loads this module as a plugin; torch
and the rest of distsim are loaded when a test needs them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

if TYPE_CHECKING:
    from distsim.script_capture.result.evaluation import CaptureResult
    from distsim.script_capture.result.rank_status import CapturedRankStatus

#: The description of the marker in ``pytest --markers``.
_MARKER = (
    "ranks(n, backend='gloo', init=True, timeout=600, cuda=False, fake=False): run the test on n"
    " ranks of torch.distributed, without network or GPU"
)
_BACKEND_FIXTURE = "distsim_backend"


class RunOptions(TypedDict, total=False):
    """``timeout``: seconds that the function may run (600); hangs are found without it.

    ``check``: raise RanksFailed if the ranks do not complete (True). ``cuda``: each rank finds
    GPUs, which are the CPU by another name (False). ``fake``: tensors have sizes only (False).
    ``check_values``: compare replicas, gradients and FSDP units between ranks (False).
    """

    timeout: float | None
    check: bool
    cuda: bool
    fake: bool
    check_values: bool


class RanksFailed(AssertionError):
    """A function did not complete on all ranks; the text is the report.

    ``judged`` is what `run` would have returned.
    """

    def __init__(self, text: str, judged: CaptureResult) -> None:
        super().__init__(text)
        self.judged = judged


def run(
    function: Callable[..., object],
    nproc: int = 2,
    *,
    backend: str | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    init: bool = True,
    **options: Unpack[RunOptions],
) -> CaptureResult:
    """Run a function on ``nproc`` ranks and evaluate its calls by the rules of ``backend``.

    ``init``: create the process group before, and destroy it afterwards. Raises RanksFailed with
    the report if a rank raised or the program does not complete.
    """
    from distsim.backends import DEFAULT_BACKEND
    from distsim.script_capture.launch.function_target import function_target
    from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
    from distsim.script_capture.launch.rank_process import ChildOptions
    from distsim.script_capture.result.evaluation import evaluate_capture

    backend = backend or DEFAULT_BACKEND
    target = function_target(function, backend, args, kwargs or {}, init)
    capture_options = CaptureRunOptions(
        target,
        nproc,
        backend=backend,
        timeout_s=options.get("timeout", 600.0),
        keep_output=True,
        child_options=ChildOptions(
            fakes=options.get("fake", False),
            checks_values=options.get("check_values", False),
            alias_devices=nproc if options.get("cuda") else 0,
        ),
    )
    judged = evaluate_capture(run_capture(capture_options), backend=backend)
    has_failed = any(status.state in ("raised", "exited", "killed") for status in judged.stands)
    if options.get("check", True) and (has_failed or judged.outcome != "completes"):
        raise RanksFailed(failure_text(judged), judged)
    return judged


def failure_text(judged: CaptureResult) -> str:
    """The report, after the traceback of the first rank that raised."""
    from distsim.output.text.capture_report import capture_text

    report = capture_text(judged)
    for process in judged.captured.ranks.values():
        if process.ended is not None and process.ended.how == "raised":
            return f"rank {process.rank} raised\n{process.ended.trace}\n{report}"
    return report


def outputs_by_rank(judged: CaptureResult) -> dict[int, str]:
    """What each rank wrote to its standard output and error."""
    return {rank: text for rank, text in sorted(judged.captured.outputs.items()) if text}


# --- the plugin ---
def pytest_configure(config: Any) -> None:
    """Register the marker `ranks`."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: Any) -> None:
    """One test for each backend of a list."""
    marker = metafunc.definition.get_closest_marker("ranks")
    backends = marker.kwargs.get("backend") if marker is not None else None
    if isinstance(backends, Iterable) and not isinstance(backends, str):
        if _BACKEND_FIXTURE not in metafunc.fixturenames:
            metafunc.fixturenames.append(_BACKEND_FIXTURE)
        metafunc.parametrize(_BACKEND_FIXTURE, list(backends))


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a marked test on its ranks; pytest runs all others."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    fixtures = {name: pyfuncitem.funcargs[name] for name in names}
    function = _synchronous(pyfuncitem.obj)
    try:
        judged = run(function, kwargs=fixtures, **_run_arguments(pyfuncitem, marker))
    except RanksFailed as failed:
        _add_report_sections(pyfuncitem, failed.judged)
        _raise_outcome_of_all_ranks(failed.judged)
        raise _FailureReport(str(failed)) from None
    _add_report_sections(pyfuncitem, judged)
    return True


def _synchronous(function: Callable[..., object]) -> Callable[..., object]:
    """The function; for a coroutine function, one that runs it to its end."""
    if not inspect.iscoroutinefunction(function):
        return function

    @wraps(function)
    def run_coroutine(*args: object, **kwargs: object) -> object:
        coroutine: Any = function(*args, **kwargs)
        return asyncio.run(coroutine)

    return run_coroutine


def _raise_outcome_of_all_ranks(judged: CaptureResult) -> None:
    """Raise `pytest.skip` or `pytest.xfail` if every rank called it.

    If only some ranks call it, the others would hang in a real run: that is a failure.
    """
    import pytest

    errors = [_error_of(status) for status in judged.stands]
    kinds = {error.partition(":")[0].rpartition(".")[2] for error in errors}
    reason = errors[0].partition(": ")[2]
    if kinds <= {"Skipped", "SkipTest"}:
        pytest.skip(reason)
    if kinds <= {"XFailed", "XFailedException"}:
        pytest.xfail(reason)


def _error_of(status: CapturedRankStatus) -> str:
    """The error that ended a rank, "" if none did."""
    return status.what if status.state == "raised" else ""


def _run_arguments(item: Any, marker: Any) -> dict[str, Any]:
    """The arguments of `run` that a marker gives; the number of ranks may be called ``n``."""
    arguments: dict[str, Any] = {"nproc": 2, **marker.kwargs}
    if marker.args and "nproc" not in marker.kwargs:
        arguments["nproc"] = marker.args[0]
    if "n" in arguments:
        arguments["nproc"] = arguments.pop("n")
    params = getattr(getattr(item, "callspec", None), "params", {})
    arguments["backend"] = params.get(_BACKEND_FIXTURE, arguments.get("backend"))
    return arguments


class _FailureReport(AssertionError):
    """A failure whose text is complete; pytest need not show distsim's own frames."""

    __tracebackhide__ = True


def _add_report_sections(item: Any, judged: CaptureResult) -> None:
    for rank, text in outputs_by_rank(judged).items():
        item.add_report_section("call", f"rank {rank}", text)


def pytest_exception_interact(node: object, call: Any, report: Any) -> None:
    """Show only the report."""
    if call.excinfo is not None and isinstance(call.excinfo.value, _FailureReport):
        report.longrepr = str(call.excinfo.value)
