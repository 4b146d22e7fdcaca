"""Proposals for ranks that skip calls, exit early or destroy a group early; none is checked here."""

from __future__ import annotations

from distsim.repair.fix_groups import destroy_after_block, exit_after_block
from distsim.repair.fix_missing import add_skipped_calls
from distsim.repair.scenario_data import ScenarioData


def _skipping(ranks: object) -> ScenarioData:
    """Ranks 0 to 2 make three collectives; the others skip the first two."""
    calls = [{"all_reduce": {"tensor": "a"}}, {"broadcast": {"tensor": "b", "src": 0}}, "barrier"]
    return {
        "world": 5,
        "program": [{"ranks": [0, 1, 2], "steps": calls}, {"ranks": ranks, "steps": ["barrier"]}],
    }


def test_skipped_collectives_are_inserted_once_into_the_steps_that_two_ranks_share() -> None:
    data = _skipping([3, 4])

    words, changed = next(add_skipped_calls(data))

    assert words == "call all_reduce and broadcast on ranks 3 and 4 too, as the other ranks do"
    assert changed["program"][0] == data["program"][0]
    assert changed["program"][1] == {"ranks": [3, 4], "steps": data["program"][0]["steps"]}


def test_skipped_collectives_are_inserted_into_the_steps_of_each_rank_if_they_have_their_own() -> (
    None
):
    data = _skipping(3)
    data["program"].append({"ranks": 4, "steps": ["barrier"]})

    _, changed = next(add_skipped_calls(data))

    calls = data["program"][0]["steps"]
    assert [block["steps"] for block in changed["program"]] == [calls, calls, calls]


def test_no_skipped_collective_is_proposed_without_a_majority() -> None:
    data = _skipping([3, 4])
    data["program"][0]["ranks"] = [0, 1]
    data["world"] = 4
    data["program"][1]["ranks"] = [2, 3]

    assert list(add_skipped_calls(data)) == []


def test_an_exit_at_the_end_of_a_block_moves_behind_the_last_call_or_is_removed() -> None:
    block = {"ranks": 1, "steps": [{"compute": "1 ms"}, {"exit": 0}]}
    data: ScenarioData = {"world": 2, "program": [block, "barrier", {"compute": "1 ms"}]}

    (moved, later), (removed, without) = exit_after_block(data)

    rest = {"ranks": 1, "steps": [{"compute": "1 ms"}]}
    assert moved == "move exit out of this block, after the last call"
    assert [*later["program"][:2], *later["program"][3:]] == [rest, "barrier", {"compute": "1 ms"}]
    assert later["program"][2]["ranks"] == 1
    assert "exit" in later["program"][2]
    assert removed == "remove exit, so that the process goes on"
    assert without["program"] == [rest, "barrier", {"compute": "1 ms"}]


def test_a_destroy_that_no_use_follows_stays_in_its_block() -> None:
    block = {"ranks": 0, "steps": ["barrier", "destroy_process_group"]}

    assert list(destroy_after_block({"world": 2, "program": [block, {"compute": "1 ms"}]})) == []
