"""No price moves unseen: those of every preset are kept in tests/data/prices.json."""

from __future__ import annotations

import json

import pytest

from tests.support.price_table import DATA, cases, prices

KEPT = json.loads(DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", dict(cases()))
def test_prices_are_those_that_are_kept(name: str) -> None:
    """Where a change of the model is meant: `python -m tests.support.price_table`, and say why in
    the change.
    """
    now = json.loads(json.dumps(prices(dict(cases())[name])))

    assert {
        key: (row, KEPT[name].get(key)) for key, row in now.items() if KEPT[name].get(key) != row
    } == {}
    assert list(KEPT[name]) == list(now)


def test_every_preset_has_its_prices_kept() -> None:
    assert list(KEPT) == list(dict(cases()))
