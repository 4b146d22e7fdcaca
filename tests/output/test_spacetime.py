"""Messages in space and time, rounds as a strip, bytes from rank to rank, memory over a step, sweeps as
curves; and ranks that are not there.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from distsim.common.errors import UsageError
from distsim.operations.core.algorithms import ALGORITHMS
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.render import PictureInput, render_picture
from distsim.output.pictures.sweep_plot import pareto_front, sweep_svg
from distsim.output.pictures.views.algorithm import algorithm_svg
from distsim.output.pictures.views.memory import memory_svg
from distsim.output.pictures.views.spacetime import MAX_LINES, spacetime_svg
from distsim.output.pictures.views.traffic import traffic_svg
from distsim.output.trace_data.lanes import RankRows
from distsim.output.trace_data.memory_over_time import activation_curve
from distsim.output.trace_data.messages import alternative_matches, matched_messages
from distsim.output.trace_data.selection import RunSelection, absent_ranks_text, parse_selection
from distsim.output.trace_data.traffic_matrix import algorithm_transfers, measure_traffic
from distsim.planning.sweep.run_sweep import SweepRequest, run_sweep
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import Simulation, simulate
from tests.support.views_made import made, recv, send, wait, work

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SVG = "{http://www.w3.org/2000/svg}"


def of(name: str) -> Simulation:
    return simulate(load(str(SCENARIOS / f"{name}.yaml")), with_verdict=False, with_values=False)


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def arrows(svg: str) -> list[tuple[float, ...]]:
    """Lines with a head, but for that of the legend."""
    lines = [
        line for line in ElementTree.fromstring(svg).iter(f"{SVG}line") if line.get("marker-end")
    ]
    found = [tuple(float(line.get(k, "0")) for k in ("x1", "y1", "x2", "y2")) for line in lines]
    return [one for one in found if one[1] > 100]


class TestSpaceTime:
    def test_a_message_goes_from_sender_to_receiver_and_never_back_in_time(self):
        _, run = made(3, {0: [work(), send(2)], 1: [work(ms=5)], 2: [recv(0), work()]})
        found = [a for a in arrows(spacetime_svg(run.trace)) if a[3] - a[1] > 60]

        assert len(found) == 1
        x1, y1, x2, y2 = found[0]
        assert x2 >= x1 > 156
        assert y2 - y1 == pytest.approx(2 * 56 - 10)

    def test_message_labels_lie_above_the_lines_and_folded_lanes_name_their_messages(
        self,
    ):
        """A ring of 16 whose odd ranks are slow: words stand at least 14 points from a lane, behind
        all lines of the text.
        """
        calls = {
            r: [
                work(),
                send((r + 1) % 16, "isend", handle="s"),
                recv((r - 1) % 16),
                wait("s"),
                work(ms=1 + r % 2),
            ]
            for r in range(16)
        }
        svg = spacetime_svg(made(16, calls)[1].trace)
        places = [
            (float(t.get("y", "0")), t.text or "")
            for t in ElementTree.fromstring(svg).iter(f"{SVG}text")
        ]
        lanes = [y for y, text in places if text.startswith("rank")]

        assert all(
            abs(y - 4 - lane) > 5 for y, text in places if text.endswith(" B") for lane in lanes
        )
        assert "only messages of each lane's first rank are drawn" not in svg
        folded = spacetime_svg(
            made(64, {r: [work(), send(r ^ 1) if r % 2 else recv(r ^ 1)] for r in range(64)})[
                1
            ].trace
        )
        assert "only messages of each lane's first rank are drawn" in folded.replace(
            "&apos;", "'"
        ).replace("&#39;", "'").replace("&#x27;", "'")

    def test_a_wildcard_receive_has_a_diamond_and_dashed_lines_to_alternative_sends(
        self,
    ):
        """Ranks 1 and 2 send at once; the first receive may take either, the second takes what is
        left: no choice any more.
        """
        calls = {0: [recv(None), recv(None)], 1: [send(0)], 2: [send(0)]}
        _, run = made(3, calls)
        found = alternative_matches(run.trace, matched_messages(run.trace, run.trace.makespan_ns))

        assert len(found) == 1
        taken = {
            int(run.trace["rank"][s])
            for s, r in zip(*matched_messages(run.trace, 0)[4:], strict=True)
            if r == found[0].recv
        }
        assert {int(run.trace["rank"][found[0].send])} | taken == {1, 2}
        svg = spacetime_svg(run.trace)
        assert svg.count("receive from any source<") == 2  # the key and the mark
        assert 'stroke-dasharray="6 4"' in svg

    def test_a_message_caused_by_the_receive_or_later_from_the_same_sender_is_no_alternative(self):
        """Rank 2 sends only after rank 0 sends it a message; rank 1 sends twice, and its messages don't
        overtake each other.
        """
        told = {
            0: [recv(None), send(2), recv(None), recv(None)],
            1: [send(0), send(0)],
            2: [recv(0), send(0)],
        }
        _, run = made(3, told)
        found = alternative_matches(run.trace, matched_messages(run.trace, run.trace.makespan_ns))
        first = int(np.flatnonzero((run.trace["rank"] == 0) & run.trace.ops("recv"))[0])

        assert first not in {choice.recv for choice in found}

    def test_an_unmatched_call_is_red_and_waits(self):
        program, run = made(2, {0: [recv(1)], 1: [recv(0)]})
        shown = render_picture("spacetime", "svg", PictureInput(program, run))

        assert "unmatched send or receive" in words(str(shown))
        assert str(shown).count("unmatched recv") == 2

    def test_a_thousand_ranks_fold_into_few_lanes_and_few_lines(self):
        """A ring of 256 with 40 turns: ten thousand messages, all drawn, none cut off."""
        turn = [send(1, "isend", handle="s"), recv(None, "irecv", handle="r"), wait("s", "r")]
        n = 256
        calls = {
            r: [
                {**c, "peer": (r + 1) % n if c.get("op") == "isend" else (r - 1) % n}
                if "peer" in c
                else c
                for c in turn
            ]
            * 40
            for r in range(n)
        }
        svg = spacetime_svg(made(n, calls)[1].trace)

        assert "ranks 0-255" in words(svg)
        assert len(svg) < 400_000
        assert len(arrows(svg)) <= MAX_LINES

    def test_a_run_without_messages_is_refused_with_a_reason(self):
        with pytest.raises(UsageError, match="no rank sends"):
            spacetime_svg(made(2, {r: [work()] for r in range(2)})[1].trace)


class TestRounds:
    @pytest.mark.parametrize("n", [2, 3, 5, 8])
    def test_a_ring_takes_two_n_minus_two_rounds_and_ends_with_all_data_everywhere(self, n: int):
        shown = words(algorithm_svg(OPERATIONS["all_reduce"], range(n)))

        assert f"round {2 * (n - 1)}" in shown
        assert f"round {2 * n - 1}" not in shown
        assert any(f"{2 * (n - 1)} rounds = 2(n − 1)" in word for word in shown)
        assert shown[-n * n - n :].count("all") == n * n  # the last frame

    def test_a_subgroup_is_drawn_with_its_own_ranks_for_any_algorithm(self):
        shown = words(algorithm_svg(OPERATIONS["broadcast"], (1, 3, 5), "chain"))

        assert {"rank 1", "rank 3", "rank 5"} <= set(shown)
        assert "rank 0" not in shown
        with pytest.raises(UsageError, match="no algorithm `ringg`"):
            algorithm_svg(OPERATIONS["all_reduce"], range(4), "ringg")
        assert "rank 5" in str(
            render_picture("operation", "dot", PictureInput(op="gather", members=(1, 3, 5)))
        )
        for subject in (
            PictureInput(op="all_reduce", ranks=9),
            PictureInput(op="all_reduce", ranks=1),
        ):
            with pytest.raises(UsageError, match="2 to 8 ranks"):
                render_picture("algorithm", "svg", subject)

    @pytest.mark.parametrize("name", ["send", "irecv", "compute"])
    def test_an_operation_without_rounds_is_refused_with_a_reason(self, name: str):
        with pytest.raises(UsageError, match=f"(?s){name} .*no algorithm.*--view operation"):
            algorithm_svg(OPERATIONS[name], range(4))

    @pytest.mark.parametrize(
        "name", [name for name, row in OPERATIONS.items() if row.algorithms and row.kind != "p2p"]
    )
    def test_every_operation_with_rounds_can_be_drawn(self, name: str):
        for algorithm in OPERATIONS[name].algorithms:
            if OPERATIONS[name].algorithms[algorithm].rounds(4, 0) is not None:
                assert algorithm_svg(OPERATIONS[name], range(4), algorithm).startswith("<svg")


class TestTraffic:
    def test_the_table_has_the_bytes_of_messages_and_of_collectives_by_algorithm(self):
        """A ring all_reduce of 16 bytes on 4 ranks: 2(n - 1) chunks of 4 bytes to the next; and a
        message of 16 bytes.
        """
        calls = {
            r: [{"op": "all_reduce", "numel": 4}]
            + ([send(3)] if r == 0 else [recv(0)] if r == 3 else [])
            for r in range(4)
        }
        found = measure_traffic(made(4, calls)[1].trace)

        expected = np.zeros((4, 4), dtype=int)
        for r in range(4):
            expected[r, (r + 1) % 4] = 24
        expected[0, 3] += 16
        assert found.sent.tolist() == expected.tolist()
        assert found.by == {"all_reduce": "ring"}

    def test_the_bytes_between_blocks_are_the_sums_over_their_ranks(self):
        calls = {
            r: [{"op": "all_reduce", "numel": 4}]
            + ([send(3)] if r == 0 else [recv(0)] if r == 3 else [])
            for r in range(4)
        }
        trace = made(4, calls)[1].trace
        by_rank = measure_traffic(trace).sent

        by_node = by_rank.reshape(2, 2, 2, 2).sum(axis=(1, 3))
        assert measure_traffic(trace, block=2).sent.tolist() == by_node.tolist()

    def test_rotations_give_the_same_pairs_as_the_rounds(self):
        """Of every algorithm, those that a cluster may choose too."""
        every = {(of, name): one for of, named in ALGORITHMS.items() for name, one in named.items()}
        assert sum(algorithm.rotations is not None for algorithm in every.values()) >= 7
        for op, algorithm in every.items():
            for n in (2, 3, 4, 7, 8):
                count, short = np.zeros((n, n), dtype=int), np.zeros((n, n), dtype=int)
                for t in (t for round_ in algorithm.rounds(n, 0) for t in round_):
                    count[t.src, t.dst] += 1
                source, target, chunks = algorithm_transfers(algorithm, n)
                np.add.at(short, (source, target), chunks)
                assert short.tolist() == count.tolist(), (op, n)

    def test_a_thousand_ranks_are_a_table_of_nodes_and_a_selection_is_a_table_of_ranks(self):
        calls = {r: [{"op": "all_reduce", "numel": 1024}] for r in range(1024)}
        _, run = made(1024, calls, nodes=128)
        svg, shown = (
            traffic_svg(run.trace),
            words(traffic_svg(run.trace, parse_selection(ranks="7-9"))),
        )

        assert len(svg) < 200_000
        assert any("1024 ranks" in word for word in words(svg))
        assert {"rank 7", "rank 8", "rank 9"} <= set(shown)
        with pytest.raises(UsageError, match="whole run"):
            traffic_svg(run.trace, parse_selection(steps="0"))
        with pytest.raises(UsageError, match="no rank sends"):
            traffic_svg(made(2, {r: [work()] for r in range(2)})[1].trace)


TRAINED = """
world: 2
backend: gloo
memory:
  model: {parameters: 1 GiB, gradients: 1 GiB, optimizer: 6 GiB, activations: 4 GiB}
  tail: {ranks: rank == 1, activations: 2 GiB, gathered: 1 GiB}
program:
  - repeat: {times: 2, steps: [{compute: {name: forward, time: 1 ms}}]}
  - repeat: {times: 2, steps: [{compute: {name: backward, time: 2 ms}}]}
"""


class TestMemory:
    def test_activations_rise_in_forward_passes_fall_in_backward_passes_and_peak_where_stated(
        self,
    ):
        done = simulate(loads(TRAINED, "a.yaml", ()), with_verdict=False, with_values=False)
        trace = done.run.trace
        found = activation_curve(trace, RankRows(trace)(0))

        assert found is not None
        assert np.interp(
            [0, 1e6, 2e6, 4e6, 6e6], found.at_ns, found.share
        ).tolist() == pytest.approx([0, 0.5, 1, 0.5, 0])
        shown = words(memory_svg(done.scenario, done.program, trace, 80 * 2**30))
        assert any(word.startswith("rank 0: 12 GiB at the peak, 15 %") for word in shown)
        assert any(word.startswith("rank 1: 15 GiB at the peak") for word in shown)
        assert {"parameters", "gradients", "optimizer", "activations", "gathered"} <= set(shown)

    def test_the_second_half_of_a_split_backward_pass_frees_memory(self):
        _, run = made(1, {0: [work("forward"), work("backward input"), work("backward weights")]})
        found = activation_curve(run.trace, RankRows(run.trace)(0))

        assert found is not None
        assert np.interp([1e6, 2e6, 3e6], found.at_ns, found.share).tolist() == pytest.approx(
            [1, 1, 0]
        )

    def test_a_file_or_recording_without_memory_is_refused_with_a_reason(self):
        done = of("hybrid")
        with pytest.raises(UsageError, match="does not state any memory"):
            render_picture(
                "memory",
                "svg",
                PictureInput(done.program, done.run, cost=done.cost, scenario=done.scenario),
            )
        with pytest.raises(UsageError, match="recording"):
            render_picture("memory", "svg", PictureInput(trace=done.run.trace))


SWEPT = """
world: 2
backend: gloo
vars: {ms: 8}
program:
  - compute: {name: step, time: ms * 1 ms / world_size}
"""


class TestSweeps:
    def test_time_is_drawn_over_the_swept_number_next_to_ideal_scaling(self):
        found = run_sweep(
            SweepRequest(
                SWEPT.replace("ms * 1 ms / world_size", "1 ms"),
                "a.yaml",
                {"world": ("2", "4", "8"), "backend": ("gloo", "nccl")},
                jobs=1,
            )
        )
        shown = words(sweep_svg(found, "a"))

        assert {"2", "4", "8", "backend gloo", "backend nccl"} <= set(shown)
        assert any(word.startswith("perfect strong scaling") for word in shown)
        assert any(word.startswith("perfect weak scaling") for word in shown)
        assert "6 points complete" in shown

    def test_each_curve_has_its_own_dash_pattern(self):
        found = run_sweep(
            SweepRequest(
                SWEPT.replace("ms * 1 ms / world_size", "1 ms"),
                "a.yaml",
                {"world": ("2", "4", "8"), "backend": ("gloo", "nccl", "mpi")},
                jobs=1,
            )
        )
        curves = {
            title.text: path.get("stroke-dasharray", "")
            for path in ElementTree.fromstring(sweep_svg(found)).iter(f"{SVG}path")
            for title in path.iter(f"{SVG}title")
            if (title.text or "").startswith("backend ")
        }

        assert set(curves) == {"backend gloo", "backend nccl", "backend mpi"}
        assert len(set(curves.values())) == 3

    def test_the_front_contains_the_unbeaten_points(self):
        assert pareto_front([(0.5, 10), (0.2, 30), (0.3, 30), (0.9, 9), (0.6, 10), (0.2, 40)]) == [
            1,
            0,
            3,
        ]

    def test_named_points_are_bars_and_a_sweep_of_failures_is_reported(self):
        found = run_sweep(
            SweepRequest(
                SWEPT.replace("ms * 1 ms / world_size", "1 ms"),
                "a.yaml",
                {"backend": ("gloo", "nccl")},
                jobs=1,
            )
        )
        shown = words(sweep_svg(found, "a"))

        assert any("backend gloo" in word for word in shown)
        failed = tuple(row | {"outcome": "hangs"} for row in found.rows)
        from dataclasses import replace

        assert "0 points complete; 2 do not and are not drawn" in words(
            sweep_svg(replace(found, rows=failed))
        )


class TestMissing:
    def test_absent_ranks_are_named_in_the_picture(self):
        assert (
            absent_ranks_text(RunSelection(ranks=tuple(range(10))), 4)
            == "the run has no rank 4-9; its ranks are 0 to 3"
        )
        assert absent_ranks_text(RunSelection(ranks=(0, 3)), 4) == ""
        done = of("hybrid")
        for view in ("timeline", "spacetime", "schedule"):
            svg = str(
                render_picture(
                    view,
                    "svg",
                    PictureInput(done.program, done.run, part=parse_selection(ranks="0-9")),
                )
            )
            assert any("the run has no rank 4-9" in word for word in words(svg)), view
