"""One source for the format: every key has its words in the model, and schema, pages, hover texts
and `distsim explain` say the same.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from distsim.cli.commands.explain import explain_page
from distsim.cli.generate_docs import all_pages
from distsim.cli.generated_docs.layout import GENERATED_NOTICE
from distsim.operations.registry import OPERATIONS
from distsim.scenario import json_schema
from distsim.scenario.format.models.top_level import SECTION_MODELS, ScenarioFileFields
from distsim.scenario.format.schema.generate import hover_text
from distsim.scenario.format.schema.key_reference import find_key, format_keys
from distsim.scenario.strategies import STRATEGIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = all_pages()
OPERATIONS_TEXT = "\n".join(
    text for path, text in PAGES.items() if path.startswith("reference/operations/")
)
REFERENCE_TEXT = "\n".join(PAGES.values())


def test_every_key_has_a_description_a_type_and_an_example() -> None:
    found = format_keys()

    assert {
        "world.nodes",
        "tensors.NAME.copies",
        "faults[].kind",
        "all_reduce.async",
        "program[].ranks",
        "cluster.nics.bandwidth",
    } <= found.keys()
    assert [
        key.path
        for key in found.values()
        if not (key.about and key.kind and (key.example or key.path.startswith("cluster.measured")))
    ] == []
    assert [key.path for key in found.values() if not key.about.endswith(".")] == []


def test_every_quantity_states_its_units() -> None:
    assert [
        key.path for key in format_keys().values() if "with its unit" in key.kind and not key.unit
    ] == []
    assert format_keys()["sleep.time"].unit == "ns us µs ms s min h"


def test_schema_pages_and_explain_agree_with_the_models() -> None:
    """The description of each Pydantic field, word for word."""
    schema, manual = json_schema(), REFERENCE_TEXT
    owners = [("", ScenarioFileFields, schema["properties"])]
    owners += [
        (f"{name}.", part, schema["$defs"][part.__name__]["properties"])
        for name, part in SECTION_MODELS.items()
    ]
    steps = {**OPERATIONS, **STRATEGIES}
    owners += [
        (f"{name}.", row, schema["$defs"][f"{name}_fields"]["then"]["properties"])
        for name, row in steps.items()
    ]
    for prefix, model, properties in owners:
        for field, info in model.model_fields.items():
            written = info.alias or field
            key = find_key(f"{prefix}{written}")
            assert key is not None, f"{prefix}{written}"
            assert info.description == key.about
            bare = {**properties[written], "description": info.description}
            assert properties[written]["description"] == hover_text(written, bare)
            assert info.description.replace("|", "\\|") in manual
            told = explain_page(key.path)
            if key.path in told.split("\n")[0]:
                assert " ".join(info.description.split()) in " ".join(told.split())


def test_generated_pages_are_up_to_date() -> None:
    """`python -m distsim.cli.generate_docs` writes them."""
    stale = [
        path
        for path, text in PAGES.items()
        if not (DOCS / path).exists() or (DOCS / path).read_text(encoding="utf-8") != text
    ]
    assert stale == []


def test_no_generated_page_is_left_over() -> None:
    """A page below docs/reference is generated, or a person has written it."""
    pages = (DOCS / "reference").rglob("*.md")
    generated = {
        path.relative_to(DOCS).as_posix()
        for path in pages
        if GENERATED_NOTICE in path.read_text(encoding="utf-8")
    }
    assert generated <= PAGES.keys()


def test_the_reference_is_short() -> None:
    """Readers asked for less text: at most 21 300 words on all pages together, without code."""
    pages = [text for path, text in PAGES.items() if path.endswith(".md")]
    prose = [re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for text in pages]
    assert sum(len(text.split()) for text in prose) <= 21_300


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("SCENARIO.world.nodes", "world.nodes"),
        ("scenario.faults[0].kind", "faults[].kind"),
        ("tensors.grad.shape", "tensors.NAME.shape"),
        ("program[3].steps[1].send.dst", "send.dst"),
        ("program[0].repeat.times", "program[].repeat.times"),
        ("all_gather_single.output", "all_gather_into_tensor.output"),
        ("expect.makespan.at_most", "expect.makespan.at_most"),
    ],
)
def test_a_key_is_found_by_the_path_that_a_person_writes(written: str, path: str) -> None:
    key = find_key(written)

    assert key is not None
    assert key.path == path


def test_each_operation_page_shows_the_torch_call_next_to_the_form_of_the_file() -> None:
    """The call is Python that torch takes, makes the operation that the file's example makes, and
    every argument fits its signature.
    """
    dist = pytest.importorskip("torch.distributed")
    page = OPERATIONS_TEXT
    for name, code in ((name, row.words.torch) for name, row in OPERATIONS.items()):
        assert code, name
        chapter = page[page.index(f"\n## {name}\n") :].split("\n## ")[1]
        assert (
            f"```yaml\n{OPERATIONS[name].words.example.rstrip()}\n```\n\n```python\n{code}\n```"
            in chapter
        )
        calls = [
            node
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        made = [
            (node, node.func.attr)
            for node in calls
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "dist"
        ]
        for node, called in made:
            inspect.signature(getattr(dist, called)).bind(
                *node.args, **{one.arg: one.value for one in node.keywords if one.arg}
            )
        if (
            OPERATIONS[name].kind in ("p2p", "collective", "group")
            and "coalesced" not in name
            and not OPERATIONS[name].signals
        ):
            assert name in [called for _, called in made]


def test_every_operation_that_moves_data_has_a_picture() -> None:
    page, gallery = OPERATIONS_TEXT, DOCS.parent / "viz"
    for name, row in OPERATIONS.items():
        chapter = page[page.index(f"\n## {name}\n") :].split("\n## ")[1]
        drawn = re.findall(r"\(((?:\.\./)+viz/\w+\.svg)\)", chapter)
        assert bool(drawn) == (
            row.kind in ("p2p", "collective", "batch") and "barrier" not in name and not row.signals
        ), name
        assert all((gallery / Path(one).name).exists() for one in drawn)
