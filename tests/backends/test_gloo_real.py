"""Programs of the zoo and sound ones, run for real on gloo in processes of their own: the profile's
outcome is what happens.

A standstill is real too: it is broken off after two seconds in which nothing moved. On a busy
machine a sound run may pause as long; then it has a second chance, with a minute.
"""

from __future__ import annotations

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.engine.backend_outcomes import backend_outcome
from distsim.program.lower import lower
from tests.support.real_runs import run, scenario

pytest.importorskip("torch.distributed", reason="torch is not installed")

#: Faulty and sound, at most four ranks, each with what gloo makes of it.
SAMPLE = {
    "zoo/z01_ring_recv_first": "hangs",
    "zoo/z02_both_send_first": "hangs",
    "zoo/z02_repaired": "completes",
    "zoo/z04_tags_reversed": "hangs",
    "zoo/z05_recv_larger": "wrong-data",
    "zoo/z06_recv_smaller": "crashes",
    "zoo/z08_roots_differ": "hangs",
    "zoo/z11_groups_opposite_order": "hangs",
    "zoo/z12_groups_opposite_order_async": "completes",
    "zoo/f11_uneven_batches": "raises",
    "hybrid": "completes",
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_scenario_ends_on_real_gloo_as_simulated(name: str) -> None:
    written = scenario(name)
    said = backend_outcome(lower(written), BACKEND_PROFILES["gloo"])
    assert said.outcome == SAMPLE[name]

    for patience_s in (2.0, 60.0):
        real = run(written, timeout_s=patience_s)
        if real.outcome in said.possible and (
            real.outcome != "hangs" or set(real.final_state.stuck) <= set(said.ranks)
        ):
            break

    assert real.outcome in said.possible
    assert real.outcome != "hangs" or set(real.final_state.stuck) <= set(said.ranks)
