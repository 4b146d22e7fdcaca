"""No price moves unseen: those of every preset are kept in tests/data/prices.json."""

from __future__ import annotations

import json

import pytest

from tests.support.price_table import DATA, cases, prices

KEPT = json.loads(DATA.read_text(encoding="utf-8"))


def _terms_first(changed: tuple[str, list[object]]) -> bool:
    """The rows that show the forms of NCCL come first: they locate a change."""
    return not changed[0].startswith("told ")


@pytest.mark.parametrize("name", dict(cases()))
def test_costs_equal_the_recorded_ones(name: str) -> None:
    """Where a change of the model is meant: `python -m tests.support.price_table`, and say why in
    the change.
    """
    now = json.loads(json.dumps(prices(dict(cases())[name])))

    changed = {key: row for key, row in now.items() if KEPT[name].get(key) != row}
    assert not changed, "\n".join(
        f"{key}\n  recorded {KEPT[name].get(key)}\n  now      {row}"
        for key, row in sorted(changed.items(), key=_terms_first)
    )
    assert list(KEPT[name]) == list(now)


def test_every_preset_has_recorded_costs() -> None:
    assert list(KEPT) == list(dict(cases()))
