"""`distsim explain` knows the words of reports, and draws what every collective moves."""

from __future__ import annotations

import re

import pytest
import yaml

from distsim.cli.commands.explain import explain_page
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.views.operation import operation_diagram
from distsim.output.text.explain.glossary import GLOSSARY
from distsim.output.text.explain.strategy_page import example_lines, required_fields
from distsim.scenario.strategies import STRATEGIES
from tests.support.harness import Cli

COLLECTIVES = [name for name, row in OPERATIONS.items() if row.kind == "collective"]
#: Words that reports use without explaining them.
WORDS_OF_REPORTS = (
    "busbw", "algbw", "exposed", "makespan", "verdict", "outcome", "deadlock", "mismatch", "bubble",
    "critical path", "straggler", "gloo", "nccl", "mpi", "eager", "rendezvous",
)  # fmt: skip


@pytest.mark.parametrize("word", WORDS_OF_REPORTS)
def test_explain_knows_the_terms_of_reports(word: str) -> None:
    assert explain_page(word).startswith(f"{word}\n")


def test_a_term_may_be_written_with_other_separators() -> None:
    assert explain_page("Critical-Path") == explain_page("critical path")


@pytest.mark.parametrize("term", GLOSSARY.values(), ids=str)
def test_terms_refer_only_to_names_that_explain_knows(term: object) -> None:
    for name in term.see:
        assert name == "backends" or explain_page(name)


def test_a_misspelt_term_gets_a_suggestion(cli: Cli) -> None:
    assert "did you mean straggler?" in cli("explain", "stragler").stderr


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_page_of_a_strategy_has_its_required_fields_and_a_valid_example(
    name: str,
) -> None:
    row = STRATEGIES[name]
    page = explain_page(name)
    (example,) = yaml.safe_load("\n".join(example_lines(row)))

    assert all(field in page for field in required_fields(row))
    assert "\n".join(example_lines(row)) in page
    row.model_validate(example[name])


def test_the_pipeline_page_requires_backward() -> None:
    assert "backward" in required_fields(STRATEGIES["pipeline"])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_page_of_a_collective_draws_the_same_as_its_picture(name: str) -> None:
    """At most 80 columns wide, with every piece of data of the picture."""
    page = explain_page(name)
    table = page.partition("\nBuffers\n")[2].partition("\n\n")[0]
    ranks = len(set(re.findall(r"rank \d", table)))
    picture = operation_diagram(OPERATIONS[name], ranks)
    shown = [
        "+".join(part.text for part in cell.parts) or cell.text
        for node in picture.nodes
        for cells in node.table
        for cell in cells
    ]

    assert max(map(len, table.splitlines())) <= 80
    assert [text for text in shown if text not in table] == []
