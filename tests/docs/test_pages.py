"""The reference pages of transformers and of the scenario file: their examples run, their lists are
complete, and their tables agree with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distsim.scenario import loads
from distsim.scenario.format.models.entries import (
    GROUP_NAMES,
    ITERATION_INDEX,
    RANK_NAMES,
    VALUE_NAMES,
)
from distsim.scenario.format.models.sections import MEMORY_PARTS
from distsim.scenario.format.models.top_level import TOP_LEVEL_KEYS
from distsim.scenario.strategies.training_step.architecture_fields import ArchitectureFields
from distsim.scenario.strategies.training_step.presets import PRESETS
from distsim.scenario.strategies.training_step.transformer import Transformer
from distsim.simulation.simulate_scenario import simulate

DOCS = Path(__file__).resolve().parents[2] / "docs"
TRANSFORMER = DOCS / "reference" / "transformer.md"
SCENARIO = DOCS / "reference" / "scenario-file.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def rows(page: Path, head: str) -> dict[str, list[str]]:
    """The table under the line that starts with ``head``: first cell without its backticks -> the
    other cells.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(head)) + 2
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *rest = [cell.strip() for cell in line.strip("|").split("|")]
        found[first.strip("`")] = rest
    return found


@pytest.mark.parametrize("text", examples(TRANSFORMER) + examples(SCENARIO))
def test_every_example_completes_and_meets_its_expectations(text):
    scenario = loads(text)
    done = simulate(scenario)

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    for name, value in scenario.expect.values.items() if scenario.expect else ():
        assert all(done.values.agrees(rank, name, value) for rank in range(done.program.world_size))


def test_every_field_of_the_strategy_is_on_the_page():
    page = DOCS / "reference" / "scenario" / "strategies" / "training_step.md"
    section = (
        page.read_text(encoding="utf-8").partition("\n## transformer\n")[2].partition("\n## ")[0]
    )
    own_fields = re.findall(r"^\|`(\w+)`\|", section, re.MULTILINE)
    common_fields = re.findall(r"`(\w+)`", section.partition("[Common fields]")[2])

    assert {*own_fields, *common_fields} == set(Transformer.model_fields)


def test_every_model_size_and_part_of_memory_is_on_the_page():
    text = TRANSFORMER.read_text(encoding="utf-8")
    sizes = text[text.index("### Sizes of a model") : text.index("| preset |")]

    assert [name for name in ArchitectureFields.model_fields if f"`{name}`" not in sizes] == []
    assert list(rows(TRANSFORMER, "| part | bytes")) == list(MEMORY_PARTS)


def test_the_table_of_presets_matches_the_code():
    found = rows(TRANSFORMER, "| preset | layers")
    numbers = [
        [str(n) for n in (p.layers, p.hidden, p.heads, p.kv_heads, p.ffn, p.vocabulary, p.sequence)]
        for p in PRESETS.values()
    ]

    assert list(found) == list(PRESETS)
    assert [row[:7] for row in found.values()] == numbers
    for row, preset in zip(found.values(), PRESETS.values(), strict=True):
        assert float(row[7].split()[0]) == pytest.approx(preset.parameters / 1e9, abs=0.05)
        assert row[8].partition(",")[0] in preset.source


def test_every_key_of_a_scenario_and_name_of_expressions_is_on_the_page():
    keys = [word for cell in rows(SCENARIO, "| key | content") for word in cell.split()]
    words = [word.strip("`") for cell in rows(SCENARIO, "| name | where") for word in cell.split()]

    assert sorted(keys) == sorted(TOP_LEVEL_KEYS)
    assert [
        word
        for word in (*RANK_NAMES, *GROUP_NAMES, *VALUE_NAMES, ITERATION_INDEX)
        if word not in words
    ] == []
