"""Expressions mean what Python means, also over all ranks at once, and take nothing else."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.expressions import MAX_LENGTH, MAX_NUMBER, ExpressionError, parse_expression
from tests.support.harness import draws

ARRAYS: dict[str, Any] = {
    "a": np.array([0, 1, 2, 3]),
    "b": np.array([True, False, True, False]),
    "c": np.array([0.5, -1.0, 0.0, 7.0]),
}
SCALARS: dict[str, Any] = {"d": 5, "f": True, "e": -2.5}

_leaf = st.sampled_from(
    ["a", "b", "c", "d", "e", "f", "0", "1", "2", "3", "True", "False", "2.5", "-1"]
)


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    three = st.tuples(inner, inner, inner)
    return st.one_of(
        st.tuples(
            two,
            st.sampled_from(
                ["+", "-", "*", "//", "%", "<", "<=", "==", "!=", ">", ">=", "and", "or"]
            ),
        ).map(lambda t: f"({t[0][0]} {t[1]} {t[0][1]})"),
        three.map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        three.map(lambda t: f"({t[0]} < {t[1]} <= {t[2]})"),
        three.map(lambda t: f"({t[0]} and {t[1]} or {t[2]})"),
        st.tuples(two, st.sampled_from(["min", "max"])).map(
            lambda t: f"{t[1]}({t[0][0]}, {t[0][1]})"
        ),
        inner.map(lambda t: f"(not {t})"),
        inner.map(lambda t: f"(-{t})"),
    )


texts = st.recursive(_leaf, _combine, max_leaves=12).filter(lambda t: len(t) <= MAX_LENGTH)


def _python(text: str, row: dict[str, Any]) -> Any:
    try:
        return eval(text, {}, row)  # noqa: S307 - Python itself is the reference here
    except ZeroDivisionError:
        return "division"


def _ours(text: str, env: dict[str, Any]) -> Any:
    try:
        return parse_expression(text).evaluate(env)
    except ExpressionError:
        return "division"


@settings(max_examples=draws(300), deadline=None)
@given(texts)
def test_every_rank_gets_the_value_that_python_computes(text: str) -> None:
    """One rank at a time: value and type. All ranks at once: the values; an error if any rank has
    one.
    """
    rows = [{k: v[i].item() for k, v in ARRAYS.items()} | SCALARS for i in range(4)]
    expected = [_python(text, row) for row in rows]

    assert [repr(_ours(text, row)) for row in rows] == [repr(e) for e in expected]
    together = _ours(text, ARRAYS | SCALARS)
    if "division" in expected:
        assert isinstance(together, str)
    else:
        assert np.broadcast_to(np.asarray(together), (4,)).tolist() == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("abs(rank)", "a call of abs"),
        ("rank.real", "an attribute (`rank.real`)"),
        ("x[0]", "a subscript (`x[0]`)"),
        ("rank ** 2", "a power"),
        ("rank / 2", "a division with `/` (write `//`)"),
        ("lambda: 1", "a lambda"),
        ("'x'", "a string"),
        ("f'{x}'", "a string"),
        ("[1]", "a list"),
        ("(1, 2)", "a tuple"),
        ("{}", "a mapping"),
        ("(x := 1)", "an assignment"),
        ("~1", "`~`"),
        ("1 | 2", "`|` (write `or`)"),
        ("x is 1", "`is` (write `==`)"),
        ("1 in x", "`in`"),
        ("None", "`None`"),
        ("1j", "`1j`"),
        ("rank # one", "`#`"),
        ("__import__('os')", "a call of __import__"),
        ("().__class__", "an attribute"),
    ],
)
def test_refused_syntax_is_named_with_what_is_allowed(text: str, named: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text)

    assert str(caught.value).startswith(named)
    assert "min and max" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "  ", "1 +", "(1", "a b", "1;2", "import os", "010", "😀", "\x00", "= 1", "min"]
)
def test_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, object()])
def test_wrong_operand_types_are_refused(value: object) -> None:
    with pytest.raises(ExpressionError, match="expected a number or an expression"):
        parse_expression(value)


@pytest.mark.parametrize(
    "value",
    [
        "1+" * 300 + "1",
        "not " * 120 + "1",
        "-" * 400 + "1",
        "(" * 240 + "1" + ")" * 240,
        "9" * 400,
        "1e999",
        2**60,
        float("nan"),
    ],
)
def test_length_nesting_and_numbers_are_bounded(value: object) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(value)


def test_results_are_bounded_for_one_rank_and_for_all() -> None:
    assert parse_expression("x * 1").evaluate({"x": MAX_NUMBER}) == MAX_NUMBER
    for x in (MAX_NUMBER, np.array([1, MAX_NUMBER])):
        with pytest.raises(ExpressionError, match="too large"):
            parse_expression("x * x").evaluate({"x": x})
    with pytest.raises(ExpressionError, match="too large"):
        parse_expression("x * 1e308").evaluate({"x": 1e308})


def test_division_by_zero_counts_only_on_ranks_that_evaluate_it() -> None:
    assert parse_expression("0 if x == 0 else 6 // x").evaluate(
        {"x": np.array([0, 2, 3])}
    ).tolist() == [0, 3, 2]
    assert parse_expression("x != 0 and 6 % x == 0").evaluate(
        {"x": np.array([0, 2, 4])}
    ).tolist() == [False, True, False]
    with pytest.raises(ExpressionError, match="division by zero"):
        parse_expression("1 // 0")


def test_an_error_points_at_its_character() -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression("rank + ü.x")
    assert caught.value.offset == 7

    assert dict(parse_expression("ö + rank").offsets) == {"ö": 0, "rank": 4}


def test_constants_and_names_are_found_without_evaluation() -> None:
    assert parse_expression("2 * (3 + 4)").constant == 14
    assert parse_expression("true and not False").constant is True
    assert parse_expression("rank + pp").names == {"rank", "pp"}
    assert parse_expression("rank").constant is None


def test_expressions_compare_by_value() -> None:
    assert parse_expression("rank + 1") == parse_expression(" rank + 1 ")
    assert parse_expression(1) != parse_expression(True)
    assert parse_expression(1) != parse_expression(1.0)
    assert parse_expression(1) != parse_expression("1")
    assert len({parse_expression("a"), parse_expression("a"), parse_expression("b")}) == 2
    assert pickle.loads(pickle.dumps(parse_expression("rank + 1"))) == parse_expression("rank + 1")  # noqa: S301 - our own bytes


def test_an_unknown_name_has_no_value() -> None:
    with pytest.raises(ExpressionError, match="m has no value here"):
        parse_expression("m + 1").evaluate({})
