"""The collector is put off and comes back, and leaves alone what others have set."""

from __future__ import annotations

import gc

import pytest

from distsim.common.records import gc_paused


def test_the_collector_is_off_inside_and_restored_afterwards() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()

    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_created_inside_count_as_old() -> None:
    """No round of the young generations walks it; the oldest has it, where a full one finds its
    circles.
    """
    with gc_paused():
        made = [[k] for k in range(5000)]
        made.append(made)

    old = {id(x) for x in gc.get_objects(generation=2)}
    assert {id(x) for x in made} <= old


def test_objects_frozen_by_the_caller_stay_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with gc_paused():
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def test_an_exception_inside_restores_the_collector() -> None:
    with pytest.raises(ValueError, match="x"), gc_paused():
        raise ValueError("x")

    assert gc.isenabled()
