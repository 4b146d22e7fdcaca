"""A guided search over a space too large to walk: Optuna's sampler proposes, points are tried, the best are asked for again nearby."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distsim.sweep.backends import _needed

#: Proposals in a row that name points already tried, after which the search ends: it has found its place.
_STALE = 200


def proposed(
    space: Mapping[str, Sequence[str]], budget: int, seed: int, score: Callable[[dict[str, str]], float | None]
) -> Iterator[dict[str, str]]:
    """Up to ``budget`` different choices of one value for each name, each yielded before ``score`` is asked for it (what is least is
    best; None: it can't be). The same seed and scores propose the same. Raises EnvironmentFault without Optuna."""
    optuna = _needed("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=max(budget // 4, 8))
    )
    distributions = {name: optuna.distributions.CategoricalDistribution(list(values)) for name, values in space.items()}
    tried: dict[tuple[str, ...], float | None] = {}
    stale = 0
    while len(tried) < budget and stale < _STALE:
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


__all__ = ["proposed"]
