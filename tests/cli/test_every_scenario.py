"""Every shipped scenario with every command ends as documented: see `tests.support.every_scenario`."""

from __future__ import annotations

import os

import pytest

from tests.support.every_scenario import Pair, broken, chosen, pairs, serious

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs commands in forked processes")

#: Pairs that once broke a promise.
PAST = (Pair("scenarios/ring_of_four.yaml", "sweep FILE --grid backend=gloo,nccl -j 1"),)


def test_past_failures_and_a_few_random_pairs_keep_their_promises() -> None:
    assert serious(broken([*PAST, *chosen(6, seed=1)])) == {}


@pytest.mark.slow
def test_all_pairs_keep_their_promises() -> None:
    assert serious(broken(pairs())) == {}
