"""The progress of many transfers in one table is the same as that of each on its own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from distsim.engine.flow_progress import NO_SLOT, ActiveFlow, ProgressTable
from distsim.hardware.cost.max_min_fairness import DemandTable, PortDemand


def _started(draw: random.Random, now: int) -> tuple[ActiveFlow, ActiveFlow]:
    """Two equal flows."""
    cost_ns = draw.randint(1, 10_000)
    moving_ns = draw.randint(0, cost_ns)
    demand = PortDemand((draw.randrange(9),), (1.0,), draw.uniform(0.1, 50.0))
    one, two = (ActiveFlow([], demand, (0, 1), now, cost_ns, moving_ns) for _ in range(2))
    return one, two


@pytest.mark.parametrize("seed", range(5))
def test_the_table_changes_speeds_like_single_flows(seed: int) -> None:
    draw = random.Random(seed)
    table, now = ProgressTable(), 0
    here: list[tuple[ActiveFlow, ActiveFlow]] = []
    for _ in range(60):
        started = [_started(draw, now) for _ in range(draw.randint(0, 20))]
        table.enter([inside for inside, _ in started])
        here += started
        now += draw.randint(0, 3_000)
        chosen = [pair for pair in here if draw.random() < 0.7]
        speeds = [draw.choice((1.0, 0.5, draw.uniform(0.001, 1.0))) for _ in chosen]
        slots = np.array([inside.slot for inside, _ in chosen], dtype=np.int64)
        table.set_speeds(slots, np.array(speeds, dtype=np.float64), now)
        for (_, alone), speed in zip(chosen, speeds, strict=True):
            alone.set_speed(speed, now)
        for inside, alone in here:
            slot = inside.slot
            assert table.flows[slot] is inside
            assert table.end[slot] == alone.end
            assert table.since[slot] == alone.since
            assert table.speed[slot] == alone.speed
            assert table.remaining_ns[slot] == alone.remaining_ns
        assert table.next_end() == min((alone.end for _, alone in here), default=None)
        assert table.ended(now) == [inside for inside, alone in here if alone.end <= now]
        staying = []
        for pair in here:
            if draw.random() < 0.8:
                staying.append(pair)
                continue
            table.leave(pair[0])
            assert (pair[0].slot, pair[0].end) == (NO_SLOT, pair[1].end)
        here = staying
        assert table.count == len(here)
        assert table.slots().tolist() == [inside.slot for inside, _ in here]


def test_a_table_selects_the_ports_of_demands_in_the_order_asked_for() -> None:
    one = PortDemand((4, 2), (1.0, 0.5), 3.0)
    other = PortDemand((7,), (1.0,), 2.0)
    table = DemandTable()
    numbers = table.numbers([other, one, other])
    uses = table.uses(numbers)
    assert uses.port.tolist() == [7, 4, 2, 7]
    assert uses.weight.tolist() == [1.0, 1.0, 0.5, 1.0]
    assert uses.flow.tolist() == [0, 1, 1, 2]
    assert table.rates(numbers).tolist() == [2.0, 3.0, 2.0]


def test_a_table_whose_transfers_have_left_becomes_small_again() -> None:
    demand = PortDemand((0,), (1.0,), 1.0)
    flows = [ActiveFlow([], demand, (0, 1), 0, 100, 50) for _ in range(1000)]
    table = ProgressTable()
    table.enter(flows)
    for flow in flows[1:]:
        table.leave(flow)

    table.enter([ActiveFlow([], demand, (0, 1), 0, 70, 50)])

    assert len(table.end) < 100
    assert [flow.cost_ns for flow in table.flows if flow is not None] == [100, 70]
    assert table.next_end() == 70
