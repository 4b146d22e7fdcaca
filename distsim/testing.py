"""Tests of distributed code: a function on N ranks under the hub, from Python or as
``@pytest.mark.ranks(4)``.

::

    import pytest, torch, torch.distributed as dist

    @pytest.mark.ranks(4, backend=["gloo", "nccl"])
    def test_sum():
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 4

The group exists when the function starts, unless ``init=False``. A hang fails at once, with its
diagnosis; so does a call that the back end's rules do not let through. Loaded by pytest as a
plugin; torch and the rest of distsim are loaded when a test needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsim.script_capture.result.evaluation import CaptureResult

#: How the plugin's marker is described by ``pytest --markers``.
_MARKER = "ranks(n, backend='gloo', init=True, timeout=600): run the test on n ranks of torch.distributed, without network or GPU"
_BACKEND_FIXTURE = "distsim_backend"


class RanksFailed(AssertionError):
    """A function did not come through on all ranks; the text is the report. ``judged``: what `run`
    would have returned.
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
    timeout: float | None = 600.0,
    check: bool = True,
) -> CaptureResult:
    """Run a function on ``nproc`` ranks and judge what it called by the rules of ``backend``.

    ``init``: make the process group before it and destroy it afterwards. ``timeout``: seconds of
    real time that it may run; hangs need none. Raises RanksFailed with the report where a rank
    raised or the program does not complete, unless ``check`` is false.
    """
    from distsim.backends import DEFAULT_BACKEND
    from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
    from distsim.script_capture.launch.rank_process import function_target
    from distsim.script_capture.result.evaluation import evaluate_capture

    backend = backend or DEFAULT_BACKEND
    target = function_target(function, backend, args, kwargs or {}, init)
    judged = evaluate_capture(
        run_capture(
            CaptureRunOptions(target, nproc, backend=backend, timeout_s=timeout, keep_output=True)
        ),
        backend=backend,
    )
    failed = [s for s in judged.stands if s.state in ("raised", "exited", "killed")]
    if check and (failed or judged.outcome != "completes"):
        raise RanksFailed(failure_text(judged), judged)
    return judged


def failure_text(judged: CaptureResult) -> str:
    """The report, with the traceback of the first rank that raised and what each rank wrote."""
    from distsim.output.text.capture_report import capture_text

    first = next(
        (
            m
            for m in judged.captured.ranks.values()
            if m.ended is not None and m.ended.how == "raised"
        ),
        None,
    )
    parts = (
        [f"rank {first.rank} raised\n{first.ended.trace}"]
        if first is not None and first.ended is not None
        else []
    )
    return "\n".join([*parts, capture_text(judged)])


def outputs_by_rank(judged: CaptureResult) -> dict[int, str]:
    """What each rank wrote to its standard output and error."""
    return {rank: text for rank, text in sorted(judged.captured.outputs.items()) if text}


# --- the plugin ---
def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: Any) -> None:
    """One test for each back end of a list."""
    marker = metafunc.definition.get_closest_marker("ranks")
    backends = marker.kwargs.get("backend") if marker is not None else None
    if isinstance(backends, Iterable) and not isinstance(backends, str):
        if _BACKEND_FIXTURE not in metafunc.fixturenames:
            metafunc.fixturenames.append(_BACKEND_FIXTURE)
        metafunc.parametrize(_BACKEND_FIXTURE, list(backends))


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a marked test on its ranks; all others as ever."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    given = {"nproc": 2, **({"nproc": marker.args[0]} if marker.args else {}), **marker.kwargs}
    given["nproc"] = given.pop("n", given["nproc"])
    params = getattr(getattr(pyfuncitem, "callspec", None), "params", {})
    given["backend"] = params.get(_BACKEND_FIXTURE, given.get("backend"))
    named = pyfuncitem._fixtureinfo.argnames
    values = {name: pyfuncitem.funcargs[name] for name in named}
    try:
        judged = run(pyfuncitem.obj, kwargs=values, **given)
    except RanksFailed as failed:
        _add_report_sections(pyfuncitem, failed.judged)
        raise _FailureReport(str(failed)) from None
    _add_report_sections(pyfuncitem, judged)
    return True


class _FailureReport(AssertionError):
    """A failure whose text says all; pytest need not show distsim's own frames."""

    __tracebackhide__ = True


def _add_report_sections(item: Any, judged: CaptureResult) -> None:
    for rank, text in outputs_by_rank(judged).items():
        item.add_report_section("call", f"rank {rank}", text)


def pytest_exception_interact(node: object, call: Any, report: Any) -> None:
    """Show the report alone."""
    if call.excinfo is not None and isinstance(call.excinfo.value, _FailureReport):
        report.longrepr = str(call.excinfo.value)
