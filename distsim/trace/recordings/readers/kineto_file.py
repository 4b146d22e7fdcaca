"""Files of PyTorch's profiler (Kineto): the events of one rank, as compact arrays.

Fields: `torch.profiler.profile.export_chrome_trace` (torch 2.13). ``ts`` and ``dur`` are
microseconds; `baseTimeNanoseconds` may differ by file. Only host operations, annotations, kernels
and CUDA calls are kept, with the arguments that readers use.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from distsim.common.errors import UsageError
from distsim.trace.recordings.readers.file_content import read_content
from distsim.trace.recordings.readers.profile_json import ParsedProfile, parse_profile
from distsim.trace.recordings.recording import CHECKPOINT, DATA_LOADING, GARBAGE_COLLECTION

SUFFIXES = (".json", ".json.gz")
_STEP_NAME = re.compile(r"ProfilerStep#(\d{1,18})$")
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,18})(?!\d)", re.IGNORECASE)
_MAX_RANKS = 1 << 17
#: Longer times are damage. Some profiles count from 1970, and int64 must hold nanoseconds.
_LATEST_US = 4e15
_LATEST_BASE_NS = 1 << 62
_HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation"})
_CUDA_CALLS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_COMMUNICATION_ARGS = (
    "Collective name",
    "In msg nelems",
    "dtype",
    "Process Group Name",
    "Process Group Ranks",
    "Src Rank",
    "Dst Rank",
)
_DEVICE_ARGS = ("correlation", "stream", *_COMMUNICATION_ARGS)
_CALL_ARGS = ("Concrete Inputs", "Input Dims", *_COMMUNICATION_ARGS)
_CALL_PREFIXES = ("c10d::", "record_param_comms")
_NO_ARGS: Mapping[str, Any] = {}
_KEPT = _HOST_CATEGORIES | _CUDA_CALLS | _DEVICE_CATEGORIES | {"cuda_sync"}
#: Python functions, recorded with ``with_stack=True``, that explain why a rank is slow. `Python GC`
#: needs ``record_python_gc_info`` (torch 2.13).
_PYTHON_FUNCTION = "python_function"
_ACTIVITIES = {
    GARBAGE_COLLECTION: re.compile(r"Python GC$|<built-in function collect>$"),
    CHECKPOINT: re.compile(
        r"torch/serialization\.py\(\d+\): save$"
        r"|torch/distributed/checkpoint/state_dict_saver\.py\(\d+\): (?:async_)?save$"
    ),
}
_ACTIVITY_ENDS = ("GC", "collect>", "save")
_LOADER = "enumerate(DataLoader)"


class ProfileEvent(NamedTuple):
    """One complete event; times in ns since the base time of the profile."""

    name: str
    category: str
    thread: str
    start: float
    end: float
    args: Mapping[str, Any]

    @property
    def is_device(self) -> bool:
        return self.category in _DEVICE_CATEGORIES

    @property
    def is_host(self) -> bool:
        return self.category in _HOST_CATEGORIES

    @property
    def is_cuda_call(self) -> bool:
        return self.category in _CUDA_CALLS


class RankProfile(NamedTuple):
    """The profile of one rank. ``groups``: name -> ranks. ``steps``: number -> (start, end)."""

    file: str
    rank: int
    world_size: int
    backend: str
    groups: Mapping[str, tuple[int, ...]]
    base_ns: int
    events: list[ProfileEvent]
    steps: Mapping[int, tuple[float, float]]


def is_profile_name(path: Path) -> bool:
    """Whether the file's name may be that of a profile."""
    return path.name.lower().endswith(SUFFIXES)


def read_profile(path: Path) -> RankProfile:
    """Read one file. Raises UsageError if it is too large, damaged, or no profile of a rank."""
    reduce = _EventReducer(path)
    data, kept, has_events = _parse(path, reduce.kept_event)
    if not has_events:
        raise UsageError(
            f"{path}: unrecognised JSON (no traceEvents)", "expected a PyTorch profiler trace"
        )
    info = data.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    # Parents begin with their children at the latest, so longer events come first.
    kept.sort(key=lambda event: (event.start, -event.end))
    base = data.get("baseTimeNanoseconds")
    return RankProfile(
        str(path),
        _rank_of(info, path),
        _count(info.get("world_size")),
        str(info.get("backend") or ""),
        _groups_of(info),
        base if isinstance(base, int) and abs(base) < _LATEST_BASE_NS else 0,
        kept,
        steps_of(kept),
    )


def _parse(path: Path, keep: Callable[[Any], ProfileEvent | None]) -> ParsedProfile:
    remedy = "record fewer steps, without `with_stack` and `record_shapes`"
    content = read_content(path, remedy)
    try:
        return parse_profile(content, keep)
    except UsageError:
        raise
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: damaged JSON", "export the profile again") from None


class _EventReducer:
    """Turns parsed events into compact ones, which share equal texts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts: dict[str, str] = {}

    def kept_event(self, event: object) -> ProfileEvent | None:
        if not isinstance(event, dict) or event.get("ph") != "X":
            return None
        category = str(event.get("cat", "")).lower()
        activity = _activity(str(event.get("name", ""))) if category == _PYTHON_FUNCTION else ""
        if (category not in _KEPT and not activity) or not isinstance(event.get("ts"), int | float):
            return None
        start = _time_ns(event, "ts", self.path)
        has_length = isinstance(event.get("dur"), int | float)
        length = _time_ns(event, "dur", self.path) if has_length else 0.0
        name = self._shared(activity or str(event.get("name", "")))
        return ProfileEvent(
            name,
            self._shared(category),
            self._shared(str(event.get("tid", ""))),
            round(start),
            round(start + max(length, 0.0)),
            _kept_args(name, event.get("args")),
        )

    def _shared(self, text: str) -> str:
        return self.texts.setdefault(text, text)


def _activity(function: str) -> str:
    """The activity that a Python function is known for, or an empty text."""
    if not function.endswith(_ACTIVITY_ENDS):
        return ""  # most of them
    return next((kind for kind, names in _ACTIVITIES.items() if names.search(function)), "")


def activity_times(events: Iterable[ProfileEvent]) -> list[tuple[str, float, float]]:
    """Activity, start and end of all known activities, in the order of the events."""
    found = []
    for event in events:
        if event.category == _PYTHON_FUNCTION:
            found.append((event.name, event.start, event.end))
        elif event.is_host and event.name.startswith(_LOADER):
            found.append((DATA_LOADING, event.start, event.end))
    return found


def activities_in(
    times: Sequence[tuple[str, float, float]], step: tuple[float, float]
) -> dict[str, float]:
    """How long each activity lasts in a step; nested and overlapping ones count once.

    ``times``: by start. Activities that begin before the step are not counted.
    """
    totals: dict[str, float] = {}
    reached: dict[str, float] = {}
    first, last = (bisect_left(times, border, key=itemgetter(1)) for border in step)
    for kind, start, end in times[first:last]:
        begin = max(start, reached.get(kind, start))
        until = min(end, step[1])
        if until > begin:
            totals[kind] = totals.get(kind, 0.0) + until - begin
            reached[kind] = until
    return totals


def _kept_args(name: str, args: object) -> Mapping[str, Any]:
    """The arguments that readers use; most operations have none of them."""
    if not isinstance(args, dict):
        return _NO_ARGS
    is_call = name.startswith(_CALL_PREFIXES)
    keys = _CALL_ARGS if is_call else _DEVICE_ARGS
    return {key: args[key] for key in keys if key in args} or _NO_ARGS


def _time_ns(event: Mapping[str, Any], key: str, path: Path) -> float:
    microseconds = event[key]
    # A NaN fails this comparison, too, and an integer of any length passes through it.
    if not abs(microseconds) <= _LATEST_US:
        name = str(event.get("name", ""))[:60]
        shown = str(microseconds)[:24]
        raise UsageError(
            f"{path}: event {name!r} has {key}={shown}, which is not a time in microseconds",
            "export the profile again",
        )
    return float(microseconds) * 1000


def _rank_of(info: Mapping[str, Any], path: Path) -> int:
    rank = info.get("rank")
    if isinstance(rank, int) and 0 <= rank < _MAX_RANKS:
        return rank
    numbers = _RANK_IN_NAME.findall(path.name)
    if numbers and int(numbers[-1]) < _MAX_RANKS:
        return int(numbers[-1])
    raise UsageError(
        f"{path}: PyTorch profiler trace without a rank",
        "name the file rank<N>.json, or record it after init_process_group",
    )


def _groups_of(info: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    groups = {}
    configs = info.get("pg_config")
    for config in configs if isinstance(configs, list) else ():
        if not isinstance(config, dict):
            continue
        ranks = config.get("ranks")
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            groups[str(config.get("pg_name", ""))] = tuple(ranks)
    return groups


def steps_of(events: list[ProfileEvent]) -> dict[int, tuple[float, float]]:
    """The steps between two calls of `profiler.step()`; each lasts until the next one begins."""
    found: dict[int, tuple[float, float]] = {}
    for event in events:
        match = _STEP_NAME.match(event.name) if event.category == "user_annotation" else None
        if match:
            found[int(match[1])] = (event.start, event.end)
    numbers = sorted(found)
    following = dict(itertools.pairwise(numbers))
    return {
        number: (found[number][0], found.get(following.get(number, -1), (0, found[number][1]))[0])
        if following.get(number) == number + 1
        else found[number]
        for number in numbers
    }


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MAX_RANKS else 0
