"""Parsers of containers report every wrong part, each with the path to it."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationInfo

from distsim.common.expressions import parse_expression
from distsim.common.field_parsing import (
    FieldError,
    FieldErrors,
    FieldHelp,
    FieldParser,
    ParsedFieldType,
    PerRank,
    describe_fields,
    expected_error,
    expression_field,
    list_of,
    one_of,
    one_or_list_of,
    per_rank,
    single_errors,
)


def even(value: object) -> int:
    """A parser that knows at which character a number is odd."""
    if not isinstance(value, int):
        raise expected_error("an even number", value)
    if value % 2:
        raise FieldError(f"{value} is odd", (), len(str(value)) - 1)
    return value * 10


def errors_of(parse: FieldParser[Any], value: object) -> list[tuple[object, ...]]:
    """(path, message, offset) of the errors with which a parser refuses a value."""
    with pytest.raises(ValueError) as caught:
        parse(value)
    return [
        (getattr(e, "path", ()), str(e), getattr(e, "offset", None))
        for e in single_errors(caught.value)
    ]


NO_NUMBER = "expected an even number, found 'x'"
NO_KEY = "expected a rank or `else` as the key of a per-rank mapping, found"


@pytest.mark.parametrize(
    ("parse", "value", "parsed"),
    [
        (list_of(even), [2, 4], (20, 40)),
        (list_of(even), (), ()),
        (list_of(list_of(even)), [[2], []], ((20,), ())),
        (one_or_list_of(even), 2, 20),
        (one_or_list_of(even), [2, 4], (20, 40)),
        (per_rank(even), 2, 20),
        (per_rank(even), {0: 2, "else": 4}, PerRank(((0, 20),), 40)),
        (per_rank(even), {3: 2}, PerRank(((3, 20),))),
        (per_rank(even), {"else": 2}, PerRank((), 20)),
        (per_rank(even), PerRank(((0, 1),)), PerRank(((0, 1),))),
        (per_rank(even, "rest"), {"rest": 2}, PerRank((), 20)),
        (one_of(["a", "b"]), "b", "b"),
        (expression_field, "rank + 1", parse_expression("rank + 1")),
        (expression_field, True, parse_expression(True)),
        (expression_field, parse_expression(2), parse_expression(2)),
    ],
)
def test_a_container_is_parsed_part_by_part(
    parse: FieldParser[Any], value: object, parsed: object
) -> None:
    assert parse(value) == parsed


@pytest.mark.parametrize(
    ("parse", "value", "errors"),
    [
        (list_of(even), 2, [((), "expected a list, found 2", None)]),
        (list_of(even), [2, "x", 13], [((1,), NO_NUMBER, None), ((2,), "13 is odd", 1)]),
        (list_of(list_of(even)), [[2], [2, 4, 7]], [((1, 2), "7 is odd", 0)]),
        (one_or_list_of(even), "x", [((), NO_NUMBER, None)]),
        (one_or_list_of(even), ["x"], [((0,), NO_NUMBER, None)]),
        (
            per_rank(even),
            {0: "x", -1: 2, True: 2, "els": 2, "else": 3},
            [
                ((0,), NO_NUMBER, None),
                ((-1,), f"{NO_KEY} -1", None),
                ((True,), f"{NO_KEY} true", None),
                (("els",), f"{NO_KEY} 'els'", None),
                (("else",), "3 is odd", 0),
            ],
        ),
        (
            per_rank(even, "rest"),
            {"else": 2},
            [(("else",), "the key `else` has a new name: write `rest`", None)],
        ),
        (
            per_rank(even),
            {},
            [((), "expected at least one rank or `else` in a per-rank mapping, found none", None)],
        ),
        (one_of(["aa", "bb"]), "x", [((), "unknown value 'x'; expected one of aa, bb", None)]),
        (one_of(["aa", "bb"]), 1, [((), "expected one of aa, bb, found 1", None)]),
        (expression_field, [], [((), "expected a number or an expression, found a list", None)]),
    ],
)
def test_each_wrong_part_is_an_error_with_its_path(
    parse: FieldParser[Any], value: object, errors: list[tuple[object, ...]]
) -> None:
    assert errors_of(parse, value) == errors


def test_several_errors_are_one_text_and_an_offset_moves_with_its_text() -> None:
    first = FieldError("a", ("k", 1), 3)

    assert str(FieldErrors((first, FieldError("b")))) == "a; b"
    further = [FieldError.further(e, 4) for e in (first, FieldError("b"), ValueError("c"))]
    assert [(str(e), e.path, e.offset) for e in further] == [
        ("a", (), 7),
        ("b", (), None),
        ("c", (), None),
    ]


def test_a_mapping_of_ranks_is_looked_up_and_written_back() -> None:
    some, all_ranks = PerRank(((0, 5), (2, 6))), PerRank(((1, 5),), 7)

    assert [some.get(rank) for rank in range(4)] == [5, None, 6, None]
    assert [all_ranks.get(rank) for rank in range(3)] == [7, 5, 7]
    assert some.written(str) == {0: "5", 2: "6"}
    assert all_ranks.written(str) == {1: "5", "else": "7"}
    assert all_ranks.written(str, "rest") == {1: "5", "rest": "7"}


def test_a_field_type_parses_writes_and_describes_itself() -> None:
    def tripled(value: object, info: ValidationInfo) -> int:
        return even(value) * 3 + len(info.data)

    plain = ParsedFieldType(even, {"type": "integer"}, lambda value: value // 10)
    informed = ParsedFieldType(tripled, {"type": "number"}, lambda value: value // 30, True)

    class Model(BaseModel):
        a: Annotated[int, plain]
        b: Annotated[int, informed] = 0

    model = Model.model_validate({"a": 2, "b": 4})
    assert (model.a, model.b) == (20, 121)
    assert model.model_dump() == {"a": 2, "b": 4}
    kinds = {k: v["type"] for k, v in Model.model_json_schema()["properties"].items()}
    assert kinds == {"a": "integer", "b": "number"}


def test_help_for_one_model_precedes_its_own_and_that_precedes_general_help() -> None:
    class Model(BaseModel):
        bare: int = 0
        own: int = Field(0, description="its own", examples=[1])
        both: int = Field(0, description="its own")
        odd: int = Field(0, alias="else", json_schema_extra={"x-kind": "k"})
        unknown: int = 0

    general = {key: FieldHelp(f"general {key}", 2, "ms") for key in ("bare", "own", "both", "odd")}
    special = {f"m.{key}": FieldHelp(f"special {key}", 3) for key in ("both",)}
    unit = {"m.else": FieldHelp("special else", 4, "B")}
    describe_fields(Model, {**general, **special, **unit}, "m")

    fields = Model.model_fields
    assert {k: (f.description, f.examples, f.json_schema_extra) for k, f in fields.items()} == {
        "bare": ("general bare", [2], {"x-unit": "ms"}),
        "own": ("its own", [1], None),
        "both": ("special both", [3], None),
        "odd": ("special else", [4], {"x-kind": "k", "x-unit": "B"}),
        "unknown": (None, None, None),
    }
