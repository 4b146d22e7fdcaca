"""Line numbers of a changed text, and those of the same lines before the change."""

from __future__ import annotations

from distsim.repair.text_patch import line_numbers_before, patched_text
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector


def test_lines_behind_an_added_line_keep_their_former_numbers() -> None:
    assert line_numbers_before("a\nb\nc\n", "a\nnew\nb\nc\n") == {1: 1, 3: 2, 4: 3}


def test_a_changed_line_keeps_its_number_and_a_moved_line_has_that_of_its_former_place() -> None:
    assert line_numbers_before("a\nsend\nc\n", "a\nisend\nwait\nc\n") == {1: 1, 2: 2, 4: 3}
    assert line_numbers_before("a\nb\nc\n", "b\nc\n  a\n") == {1: 2, 2: 3, 3: 1}


def test_comments_on_and_between_replaced_lines_are_kept() -> None:
    text = "program:\n  - send: x  # first\n  # then\n  - recv: y  # second\n  - barrier\n"
    document = YamlDocument("program.yaml", text)
    document.node = compose(document)
    document.root = construct(document, document.node, ProblemCollector(document))

    changed = patched_text(document, {"program": [{"batch": [1]}, "barrier"]})

    for comment in ("# first", "# then", "# second"):
        assert comment in changed
