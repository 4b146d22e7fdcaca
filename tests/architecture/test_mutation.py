"""The mutants that `tests/support/mutation.py` tries, and the list of equivalent mutants."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import MARKS, insert_marks
from tests.support.mutants import counts_by_size, draw_sample, mutants_of

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = json.loads(
    (ROOT / "tests" / "data" / "equivalent_mutants.json").read_text(encoding="utf-8")
)
SAMPLE = '''"""A module."""

LIMIT = 3


class Box:
    """What holds things."""

    def room(self, n: int, full: bool = False) -> int:
        """How much is left."""
        if full and n < LIMIT:
            raise ValueError(f"{n} is less than {LIMIT + 0}")
        while n != LIMIT:
            n += 1
            break
        return max(n - LIMIT, 0)
'''


def names(text: str, folder: Path) -> list[str]:
    path = folder / "sample.py"
    path.write_text(text, encoding="utf-8")
    return [f"{mutant.name} ({mutant.function})" for mutant in mutants_of(path, folder)]


def loaded(text: str, path: Path) -> Any:
    """A module of this text."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_small_code_change_is_a_mutant_but_changes_of_texts_and_types_are_not(
    tmp_path: Path,
) -> None:
    assert sorted(names(SAMPLE, tmp_path)) == sorted(
        [
            "module: 3 -> 4 (None)",
            "Box.room: False -> True (None)",
            "Box.room: full and n < LIMIT -> full or n < LIMIT (Box.room)",
            "Box.room: full -> not full (Box.room)",
            "Box.room: n < LIMIT -> n <= LIMIT (Box.room)",
            "Box.room: n < LIMIT -> n >= LIMIT (Box.room)",
            "Box.room: raise ValueError(f'{n} is less than {LIMIT + 0}') -> pass (Box.room)",
            "Box.room: n != LIMIT -> n == LIMIT (Box.room)",
            "Box.room: n += 1 -> pass (Box.room)",
            "Box.room: n += 1 -> n -= 1 (Box.room)",
            "Box.room: 1 -> 2 (Box.room)",
            "Box.room: break -> continue (Box.room)",
            "Box.room: return max(n - LIMIT, 0) -> return None (Box.room)",
            "Box.room: max(n - LIMIT, 0) -> min(n - LIMIT, 0) (Box.room)",
            "Box.room: n - LIMIT -> n + LIMIT (Box.room)",
            "Box.room: 0 -> 1 (Box.room)",
        ]
    )


def test_equal_seeds_draw_equal_mutants_and_other_seeds_draw_others(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE, encoding="utf-8")
    found = [
        [mutant.name for mutant in draw_sample(list(mutants_of(path, tmp_path)), count, seed)]
        for count, seed in ((5, 1), (5, 1), (5, 2))
    ]

    assert found[0] == found[1] != found[2]
    assert {len(names) for names in found} == {5}
    assert len(draw_sample(list(mutants_of(path, tmp_path)), 99, 1)) == 16


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ({"a": 600, "b": 300, "c": 100}, 10, {"a": 6, "b": 3, "c": 1}),
        ({"a": 500, "b": 260, "c": 240}, 10, {"a": 5, "b": 3, "c": 2}),
        ({"a": 980, "b": 10, "c": 10}, 10, {"a": 8, "b": 1, "c": 1}),
        ({"a": 980, "b": 10, "c": 10}, 2, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_a_spread_gives_each_part_mutants_by_its_size_and_at_least_one(
    sizes: dict[str, int], count: int, expected: dict[str, int]
) -> None:
    assert counts_by_size(sizes, count) == expected


def test_a_mutant_compiles_changes_only_its_place_and_leaves_the_tree_unchanged(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE, encoding="utf-8")
    mutants = list(mutants_of(path, tmp_path))
    before = [ast.dump(mutant.tree) for mutant in mutants]
    plain = compile(SAMPLE, str(path), "exec", dont_inherit=True)

    assert [mutant.name for mutant in mutants if mutant.code(str(path)) == plain] == []
    assert [ast.dump(mutant.tree) for mutant in mutants] == before


def test_mutants_with_equal_text_are_numbered_to_have_unique_names(
    tmp_path: Path,
) -> None:
    found = names("def f(a):\n    return a + 1, a + 1\n", tmp_path)

    assert len(found) == len(set(found)) == 5
    assert "f: a + 1 -> a - 1 [2] (f)" in found


def test_listed_equivalent_mutants_exist_and_have_a_reason() -> None:
    """If the code of an entry changes, the entry has to be judged again."""
    files = {key.partition(": ")[0] for key in EQUIVALENT}
    there = {
        f"{mutant.path}: {mutant.name}"
        for file in files
        for mutant in mutants_of(ROOT / file, ROOT)
    }

    assert sorted(set(EQUIVALENT) - there) == []
    assert [key for key, reason in EQUIVALENT.items() if len(reason.split()) < 4] == []


def test_line_marks_report_which_lines_a_call_reaches_and_change_nothing_else(
    tmp_path: Path,
) -> None:
    """In branches, loops, handlers, nested functions and generators. A body on the line of its head
    counts as part of the head.
    """
    text = """def f(n):
    \"\"\"A docstring.\"\"\"
    total = sum(
        k for k in range(n))
    if n > 2:
        total += 1
    elif n > 1: total += 2
    else:
        total += 3
    def inner(m):
        return m
    for _ in range(0):
        total = 0
    try:
        inner(1) / total
    except ZeroDivisionError:
        raise
    match n:
        case 1:
            total = inner(total)
        case _:
            total += 0
    return total
"""
    tree = ast.parse(text)
    lines = list(insert_marks(tree, 0))
    marks = bytearray(len(lines))
    plain, marked = (
        loaded(text, tmp_path / "plain.py"),
        loaded(ast.unparse(tree), tmp_path / "marked.py"),
    )
    setattr(marked, MARKS, marks)
    reached = {}
    for n in (1, 2, 3):
        marks[:] = bytes(len(marks))
        assert marked.f(n) == plain.f(n)
        reached[n] = sorted(
            line for mark, of in zip(marks, lines, strict=True) if mark for line in of
        )

    assert marked.f.__doc__ == plain.f.__doc__
    always = {
        3,
        4,
        5,
        10,
        11,
        12,
        14,
        15,
        16,
        18,
        19,
        21,
        23,
    }  # only the head of a handler or case counts as reached
    assert {n: sorted(set(found) - always) for n, found in reached.items()} == {
        1: [7, 8, 9, 20],
        2: [7, 8, 22],
        3: [6, 22],
    }
    assert all(always <= set(found) for found in reached.values())


@pytest.mark.slow
def test_the_command_reports_killed_mutants_and_fails_below_the_limit() -> None:
    """Many tests depend on the node of a rank."""
    command = [
        sys.executable,
        ROOT / "tests" / "support" / "mutation.py",
        "hardware",
        "--only",
        "CostModel.node:",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)

    assert done.returncode == 0, done.stderr
    assert "hardware: 100.0% of 2 noticed" in done.stdout
