"""Line numbers of a changed text, and those of the same lines before the change."""

from __future__ import annotations

from distsim.repair.text_patch import line_numbers_before


def test_lines_behind_an_added_line_keep_their_former_numbers() -> None:
    assert line_numbers_before("a\nb\nc\n", "a\nnew\nb\nc\n") == {1: 1, 3: 2, 4: 3}


def test_a_changed_line_keeps_its_number_and_a_moved_line_has_that_of_its_former_place() -> None:
    assert line_numbers_before("a\nsend\nc\n", "a\nisend\nwait\nc\n") == {1: 1, 2: 2, 4: 3}
    assert line_numbers_before("a\nb\nc\n", "b\nc\n  a\n") == {1: 2, 2: 3, 3: 1}
