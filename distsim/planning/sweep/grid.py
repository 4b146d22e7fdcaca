"""The points of a grid: all of them, or those that a guided search proposes.

Two points are equal if the contents of their scenarios are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from distsim.common.errors import ScenarioErrors, UsageError
from distsim.common.message_text import name_list
from distsim.common.version import __version__
from distsim.planning.sweep.worker_pool import import_optional
from distsim.scenario import load_raw
from distsim.simulation.simulate_scenario import cluster_path

#: Keys of a file that do not change the result.
_IGNORED_KEYS = ("name", "about", "expect", "sweep", "launch")
_OPENING_BRACKETS, _CLOSING_BRACKETS = "[{(", "]})"


class GridPoint(NamedTuple):
    """``values``: the values of the grid's names, as given. ``cluster`` overrides the file's."""

    values: tuple[tuple[str, str], ...]
    cluster: str | None = None

    @property
    def sets(self) -> tuple[str, ...]:
        return tuple(f"{name}={value}" for name, value in self.values)


def parse_grid(given: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`name=a,b` texts as names and values; commas in brackets and quotes do not separate values.
    Raises UsageError.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        parts = tuple(part.strip() for part in _split_values(values))
        if not equals or not name.strip() or not all(parts):
            raise UsageError(f"--grid {text}: expected KEY=A,B", "for example --grid mesh.dp=1,2,4")
        if name.strip() in found:
            raise UsageError(
                f"--grid {text}: {name.strip()} is given twice", "give all its values at once"
            )
        found[name.strip()] = tuple(dict.fromkeys(parts))
    return found


def _split_values(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        depth += (c in _OPENING_BRACKETS) - (c in _CLOSING_BRACKETS) if not quote else 0
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def grid_points(grid: Mapping[str, Sequence[str]], clusters: Sequence[str] = ()) -> list[GridPoint]:
    """All points, the last name changing fastest; clusters change slowest."""
    rows = list(product(*([(name, value) for value in values] for name, values in grid.items())))
    return [GridPoint(tuple(row), cluster) for cluster in clusters or (None,) for row in rows]


def point_key(
    text: str, file: str, point: GridPoint, sets: Sequence[str] = (), more: object = None
) -> str:
    """A hash of everything on which the result of a point depends.

    This is the file's data with all settings, the contents of referenced files, and the version of
    distsim. For a file that cannot be parsed, its text counts. ``more``: further influences.
    """
    try:
        raw = load_raw(text, file, (*sets, *point.sets))
        data: object = {key: value for key, value in raw.items() if key not in _IGNORED_KEYS}
    except (ScenarioErrors, UsageError):
        data = [text, *sets, *point.sets]
    if isinstance(data, dict):
        data["cluster"] = point.cluster if point.cluster is not None else data.get("cluster")
    file_hashes = _referenced_file_hashes(data, Path(file).parent)
    content = json.dumps(
        [__version__, _with_text_keys(data), file_hashes, more],
        sort_keys=True,
        default=str,
        ensure_ascii=True,
    )
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _with_text_keys(data: object) -> object:
    """The data with texts as keys, so that the keys can be sorted.

    A mapping by rank may have `else` next to numbers. The number 0 and the text "0" stay different.
    """
    if isinstance(data, Mapping):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key}": _with_text_keys(value)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [_with_text_keys(item) for item in data]
    return data


def _referenced_file_hashes(data: object, folder: Path) -> list[str]:
    """Hashes of the files that data name: clusters and schedules."""
    if isinstance(data, Mapping):
        return [one for value in data.values() for one in _referenced_file_hashes(value, folder)]
    if isinstance(data, list | tuple):
        return [one for value in data for one in _referenced_file_hashes(value, folder)]
    if not isinstance(data, str) or not data.endswith((".yaml", ".yml", ".json", ".csv")):
        return []
    path = cluster_path(data, folder)
    return [hashlib.sha256(path.read_bytes()).hexdigest()] if path.is_file() else [data]


def check_grid_names(
    text: str, file: str, grid: Mapping[str, Sequence[str]], sets: Sequence[str]
) -> None:
    """Raises UsageError if a name of the grid is not in the file, before anything
    runs.
    """
    for name, values in grid.items():
        try:
            load_raw(text, file, (*sets, f"{name}={values[0]}"))
        except UsageError as error:
            said = error.message.replace("--set", "--grid", 1)
            raise UsageError(said, error.remedy.replace("--set", "--grid")) from None


def grid_text(grid: Mapping[str, Sequence[str]], clusters: Sequence[str]) -> str:
    """The grid in a line."""
    words = [f"{name} {name_list(values, 8)}" for name, values in grid.items()]
    return "; ".join([*words, *([f"cluster {name_list(clusters, 8)}"] if clusters else [])])


#: Proposals in a row that name points already tried, after which the search ends: it has found its
#: place.
_MAX_REPEATED_PROPOSALS = 200


def propose_points(
    space: Mapping[str, Sequence[str]],
    budget: int,
    seed: int,
    score: Callable[[dict[str, str]], float | None],
) -> Iterator[dict[str, str]]:
    """Optuna's sampler proposes, points are tried, the best are asked for again nearby.

    Up to ``budget`` different choices of one value for each name, each yielded before ``score`` is
    asked for it (what is least is best; None: it cannot be). The same seed and scores propose the
    same. Raises EnvironmentFault without Optuna."""
    optuna = import_optional("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(
            seed=seed, multivariate=True, n_startup_trials=max(budget // 4, 8)
        )
    )
    distributions = {
        name: optuna.distributions.CategoricalDistribution(list(values))
        for name, values in space.items()
    }
    tried: dict[tuple[str, ...], float | None] = {}
    stale = 0
    while len(tried) < budget and stale < _MAX_REPEATED_PROPOSALS:
        trial: Any = study.ask(distributions)
        choice = {name: str(trial.params[name]) for name in space}
        key = tuple(choice.values())
        stale = stale + 1 if key in tried else 0
        if key not in tried:
            yield choice
            tried[key] = score(choice)
        found = tried[key]
        if found is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, found)


__all__ = ["GridPoint", "check_grid_names", "grid_text", "point_key", "parse_grid", "grid_points"]
