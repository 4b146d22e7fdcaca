"""The collector is put off and comes back, and leaves alone what others have set."""

from __future__ import annotations

import gc

import pytest

from distsim.common.records import gc_paused


def test_the_collector_is_off_inside_and_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()

    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_made_meanwhile_counts_as_old() -> None:
    """No round of the young generations walks it; the oldest has it, where a full one finds its
    circles.
    """
    with gc_paused():
        made = [[k] for k in range(5000)]
        made.append(made)

    old = {id(x) for x in gc.get_objects(generation=2)}
    assert {id(x) for x in made} <= old


def test_objects_that_somebody_froze_stay_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with gc_paused():
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def test_an_error_inside_brings_the_collector_back_too() -> None:
    with pytest.raises(ValueError, match="x"), gc_paused():
        raise ValueError("x")

    assert gc.isenabled()
