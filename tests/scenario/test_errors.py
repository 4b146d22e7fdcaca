"""What can't be read: every problem of a file at once, each with its place, its line, a caret and
what was expected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors, ScenarioProblem, UserError
from distsim.scenario import load, loads
from tests.support.harness import draws

HEAD = "name: t\nworld: 4\ntensors: {x: {shape: [4]}, y: {shape: [2, 2]}}\nprogram:\n"


def problems(text: str) -> list[ScenarioProblem]:
    with pytest.raises(ScenarioErrors) as caught:
        loads(text, "f.yaml")
    return list(caught.value.problems)


def only(text: str) -> ScenarioProblem:
    found = problems(text)
    assert len(found) == 1, [p.render() for p in found]
    return found[0]


def at(problem: ScenarioProblem) -> str:
    """The part of the source line that the caret points at."""
    return problem.source_line[problem.column - 1 :]


#: text, what the caret points at, what the message says, what the hint says
CASES: dict[str, tuple[str, str, str, str]] = {
    "unknown key": ("wrld: 3\n" + HEAD + "  - barrier\n", "wrld", "unknown key wrld", "world"),
    "unknown step": (
        HEAD + "  - sned: {tensor: x, dst: 1}\n",
        "sned",
        "unknown step 'sned'; did you mean send?",
        "",
    ),
    "unknown word as a step": (HEAD + "  - barier\n", "barier", "did you mean barrier?", ""),
    "unknown field": (
        HEAD + "  - send: {tensr: x, dst: 1}\n",
        "tensr",
        "unknown field tensr in send",
        "",
    ),
    "a root": (HEAD + "  - broadcast: {tensor: x, root: 0}\n", "root: 0", "did you mean src?", ""),
    "missing field": (HEAD + "  - send: {dst: 1}\n", "send", "send needs `tensor`", ""),
    "unknown backend of a group": (
        HEAD + "  - new_group: {name: g, ranks: [0, 1], backend: ncll}\n",
        "ncll",
        "unknown value 'ncll'; did you mean 'nccl'?",
        "",
    ),
    "unknown backend of a device": (
        HEAD + "  - init_process_group: {backend: 'cpu:gloo,cuda:ncll'}\n",
        "'cpu:gloo,cuda:ncll'",
        "unknown value 'ncll'",
        "",
    ),
    "wrong type": (
        HEAD + "  - send: {tensor: x, dst: [1]}\n",
        "[1]",
        "expected a number or an expression, found a list",
        "",
    ),
    "a text for a flag": (
        HEAD + "  - all_reduce: {tensor: x, async: yes}\n",
        "yes",
        "expected true or false, found 'yes'",
        "",
    ),
    "a list for a mapping": (
        HEAD + "  - send: [x]\n",
        "[x]",
        "expected the fields of send as a mapping",
        "its fields: tensor",
    ),
    "missing unit": (
        HEAD + "  - sleep: 3\n",
        "3",
        "expected a duration with a unit, such as `3 ms`, found 3",
        "",
    ),
    "wrong unit": (HEAD + "  - compute: {time: 3 Ms}\n", "3 Ms", "did you mean ms?", ""),
    "unknown tensor": (
        HEAD + "  - send: {tensor: xx, dst: 1}\n",
        "xx",
        "unknown tensor xx; declared tensors: x, y; did you mean x?",
        "",
    ),
    "unknown tensor in a list": (
        HEAD + "  - compute: {time: 1 ms, reads: [x, z]}\n",
        "z]",
        "unknown tensor z",
        "",
    ),
    "unknown tensor of assign": (
        HEAD + "  - assign: {tensor: x, value: 2 * z}\n",
        "z}",
        "unknown name z",
        "",
    ),
    "unknown group": (
        HEAD + "  - barrier: {group: dp}\n",
        "dp",
        "unknown group dp; known groups: world",
        "",
    ),
    "unknown axis": (
        HEAD + "  - barrier: {group: [dp, cp]}\nmesh: {dp: 4}\n",
        "cp",
        "unknown axis cp; axes of the mesh: dp",
        "",
    ),
    "unknown handle": (
        HEAD + "  - isend: {tensor: x, dst: 1, as: hh}\n  - wait: h\n",
        "h",
        "unknown handle h",
        "",
    ),
    "unknown variable": (
        HEAD + "  - send: {tensor: x, dst: 1 + rnk}\n",
        "rnk}",
        "unknown name rnk in an expression",
        "",
    ),
    "unknown variable in an index": (
        HEAD + "  - send: {tensor: x@(m + 1), dst: 1}\n",
        "m + 1",
        "unknown name m",
        "",
    ),
    "group_rank without a group": (
        HEAD + "  - send: {tensor: x, dst: group_rank}\n",
        "group_rank",
        "in a step with `group:`",
        "",
    ),
    "index outside a value": (
        HEAD + "  - send: {tensor: x, dst: index}\n",
        "index}",
        "only available in `value:`",
        "",
    ),
    "mesh": (
        "mesh: {a: 2, b: 3}\n" + HEAD + "  - barrier\n",
        "{a: 2",
        "has 2 * 3 = 6 ranks, but the world has 4",
        "",
    ),
    "a call": (
        HEAD + "  - send: {tensor: x, dst: abs(rank)}\n",
        "abs",
        "a call of abs is not allowed",
        "",
    ),
    "an attribute": (
        HEAD + "  - send: {tensor: x, dst: rank.real}\n",
        "rank.real",
        "an attribute (`rank.real`) is not",
        "",
    ),
    "a subscript": (
        HEAD + "  - send: {tensor: x, dst: 'rank[0]'}\n",
        "rank[0]",
        "a subscript (`rank[0]`) is not",
        "",
    ),
    "a power": (
        HEAD + "  - send: {tensor: x, dst: 2 ** rank}\n",
        "2 **",
        "a power (`**`) is not allowed",
        "",
    ),
    "a string": (
        HEAD + "  - send: {tensor: x, dst: \"'a'\"}\n",
        "'a'",
        "a string is not allowed",
        "",
    ),
    "repeat": (
        HEAD + "  - repeat: {times: 1000000000000, steps: [barrier]}\n",
        "1000000000000",
        "at most 1000000 repetitions",
        "",
    ),
    "repeat by vars": (
        HEAD + "  - repeat: {times: n * n, steps: [barrier]}\nvars: {n: 1000000}\n",
        "n * n",
        "found 1000000000000",
        "",
    ),
    "nested repeats": (
        HEAD
        + "  - repeat: {times: 1000000, steps: [{repeat: {times: 1000000, steps: [barrier]}}]}\n",
        "1000000, steps: [barrier]",
        "at most 10000000",
        "",
    ),
    "a negative repeat": (
        HEAD + "  - repeat: {times: -1, steps: [barrier]}\n",
        "-1",
        "a number of repetitions, 0 or more",
        "",
    ),
    "iterations": (
        HEAD + "  - barrier\niterations: 1000000000000\n",
        "1000000000000",
        "from 1 to 1000000",
        "",
    ),
    "unquoted comma": (
        HEAD + "  - send: {tensor: x, dst: min(rank + 1, 3)}\n",
        "min(rank",
        'quote an expression that contains a comma: "min(rank + 1, 3)"',
        "",
    ),
    "unquoted comma in a list": (
        HEAD + "  - all_to_all_single: {input: x, output: x, input_splits: [min(1, 2), 3]}\n",
        "min(1",
        "quote an expression",
        "",
    ),
    "missing dash": (
        HEAD + "  - send: {tensor: x, dst: 1}\n    recv: {tensor: x, src: 0}\n",
        "recv",
        "this entry has two operations, send and recv: put a dash before recv",
        "",
    ),
    "missing blank": (
        HEAD + "  - send: {tensor: x, dst:1}\n",
        ":1",
        "a space is missing after the colon: write `dst: 1`",
        "",
    ),
    "missing blank after a word": (HEAD + "  - sleep:3 ms\n", ":3 ms", "write `sleep: 3 ms`", ""),
    "missing blank before a brace": (
        HEAD + "  - send:{tensor: x, dst: 1}\n",
        ":{tensor",
        "a space is missing",
        "write `send: {`",
    ),
    "fields beside the step": (
        HEAD + "  - barrier:\n    group: world\n",
        "group",
        "group is a field of barrier",
        "indent group further",
    ),
    "an empty step list": (
        HEAD + "  - ranks: 0\n    steps:\n",
        "",
        "expected a list of entries",
        "",
    ),
    "a selector that is a number": (
        HEAD + "  - barrier:\n    ranks: rank\n",
        "rank",
        "must be true or false, but rank is",
        "",
    ),
    "a quoted rank": (
        HEAD + "  - barrier:\n    ranks: '0'\n",
        "'0'",
        "write a rank without quotes",
        "",
    ),
    "mean": (HEAD + "  - all_reduce: {tensor: x, op: mean}\n", "mean", "did you mean 'avg'?", ""),
    "as without async": (
        HEAD + "  - all_reduce: {tensor: x, as: h}\n",
        "{tensor",
        "`as` needs `async: true`",
        "",
    ),
    "the handle all": (
        HEAD + "  - isend: {tensor: x, dst: 1, as: all}\n",
        "all}",
        "`all` cannot be the name of a handle",
        "",
    ),
    "a send in a batch": (
        HEAD + "  - batch_isend_irecv: {ops: [send: {tensor: x, dst: 1}]}\n",
        "send: {tensor",
        "a batch may contain only isend and irecv",
        "",
    ),
    "a var called like an axis": (
        "mesh: {a: 4}\nvars: {a: 1}\n" + HEAD + "  - barrier\n",
        "a: 1",
        "a is already an axis",
        "",
    ),
    "a var called like an axis' size": (
        "mesh: {a: 4}\nvars: {a_size: 1}\n" + HEAD + "  - barrier\n",
        "a_size",
        "the size of",
        "",
    ),
    "a reserved word": (
        "vars: {rank: 1}\n" + HEAD + "  - barrier\n",
        "rank: 1",
        "rank is already a built-in name of expressions",
        "",
    ),
    "a var of further down": (
        "vars: {a: b, b: 1}\n" + HEAD + "  - barrier\n",
        "b, b",
        "variables are evaluated in order",
        "",
    ),
    "an index twice": (
        HEAD
        + "  - repeat: {times: 2, index: i, steps: [{repeat: {times: 2, index: i, steps: []}}]}\n",
        "i, steps: []",
        "already the index",
        "",
    ),
    "a group outside the world": (
        "groups: {g: [0, 4]}\n" + HEAD + "  - barrier\n",
        "[0, 4]",
        "rank 4 of the group g is outside",
        "",
    ),
    "a tensor like itself": (
        "world: 2\ntensors: {a: {like: a}}\nprogram: []\n",
        "a}}",
        "a refers to itself through `like`",
        "",
    ),
    "a tensor like none": (
        "world: 2\ntensors: {a: {like: b}}\nprogram: []\n",
        "b}}",
        "unknown tensor b",
        "",
    ),
    "no shape": (
        "world: 2\ntensors: {a: {dtype: int8}}\nprogram: []\n",
        "{dtype",
        "expected `shape`",
        "",
    ),
    "an unknown dtype": (
        "world: 2\ntensors: {a: {shape: [1], dtype: float23}}\nprogram: []\n",
        "float23",
        "did you mean 'float32'?",
        "",
    ),
    "ragged values": (
        "world: 2\ntensors: {a: {value: [[1], [1, 2]]}}\nprogram: []\n",
        "[[1]",
        "different lengths",
        "",
    ),
    "an unknown preset": (
        "cluster: dgx-a10\n" + HEAD + "  - barrier\n",
        "dgx-a10",
        "did you mean dgx-a100?",
        ".yaml",
    ),
    "an inline cluster": (
        "cluster: {preset: dgx-a100, nics: {cout: 4}}\n" + HEAD + "  - barrier\n",
        "4}}",
        "count",
        "",
    ),
    "an unknown option": (
        "options: {buffsiz: 4 MiB}\n" + HEAD + "  - barrier\n",
        "buffsiz",
        "did you mean buffsize?",
        "",
    ),
    "an unknown backend": (
        "backend: ncl\n" + HEAD + "  - barrier\n",
        "ncl",
        "did you mean 'nccl'?",
        "",
    ),
    "a fault of nobody": (
        HEAD + "  - barrier\nfaults: [{kind: kill}]\n",
        "{kind",
        "expected one of `rank`, `ranks` and `link`",
        "",
    ),
    "a fault outside the world": (
        HEAD + "  - barrier\nfaults: [{rank: 4, kind: kill}]\n",
        "4,",
        "outside the world of 4",
        "",
    ),
    "a fault's kind": (
        HEAD + "  - barrier\nfaults: [{rank: 1, kind: kil}]\n",
        "kil}",
        "did you mean 'kill'?",
        "",
    ),
    "slow by how much": (
        HEAD + "  - barrier\nfaults: [{rank: 1, kind: slow}]\n",
        "{rank",
        "needs its `factor`",
        "",
    ),
    "an expected verdict": (
        HEAD + "  - barrier\nexpect: {verdict: deadlok}\n",
        "deadlok",
        "did you mean 'deadlock'?",
        "",
    ),
    "an expected tensor": (
        HEAD + "  - barrier\nexpect: {values: {z: 1}}\n",
        "z: 1",
        "unknown tensor z",
        "",
    ),
    "an expected duration": (
        HEAD + "  - barrier\nexpect: {makespan: {at_most: 3}}\n",
        "3}}",
        "with a unit",
        "",
    ),
    "no per-rank key": (
        HEAD + "  - send: {tensor: x, dst: {0: 1, a: 2}}\n",
        "2}",
        "as the key of a per-rank",
        "",
    ),
    "no world": ("program: []\n", "program", "`world` is missing", "world: 4"),
    "no program": ("world: 4\n", "world", "`program` is missing", "program: []"),
    "no ranks": ("world: 0\nprogram: []\n", "0", "from 1 to 1000000, found 0", ""),
    "a world of words": ("world: four\nprogram: []\n", "four", "found 'four'", ""),
    "not finite": (
        HEAD + "  - assign: {tensor: x, value: .nan}\n",
        ".nan",
        "expected a finite number, found nan",
        "",
    ),
    "too large": (
        HEAD + "  - send: {tensor: x, dst: 9007199254740993}\n",
        "9007",
        "integers go up to 2**53",
        "",
    ),
    "division by zero": (
        "vars: {a: 1 // 0}\n" + HEAD + "  - barrier\n",
        "1 // 0",
        "division by zero",
        "",
    ),
    "a long expression": (
        HEAD + f"  - send: {{tensor: x, dst: {'1+' * 300}1}}\n",
        "1+1",
        "at most 500",
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_error_is_one_problem_at_its_place(name: str) -> None:
    text, pointed, message, hint = CASES[name]
    problem = only(text)

    assert problem.file == "f.yaml"
    assert problem.source_line == text.splitlines()[problem.line - 1]
    assert at(problem).startswith(pointed), problem.render()
    assert message in problem.message
    assert hint in problem.hint + problem.message


def test_a_rendered_problem_has_place_line_caret_and_help() -> None:
    problem = only(HEAD + "  - send: {tensor: xx, dst: 1}\n")

    assert problem.render().splitlines() == [
        "f.yaml:5:20: unknown tensor xx; declared tensors: x, y; did you mean x?",
        "    - send: {tensor: xx, dst: 1}",
        "                     ^",
        "  help: write `x`",
    ]


def test_duplicate_keys_are_refused_at_any_depth() -> None:
    found = problems(HEAD + "  - send: {tensor: x, dst: 1, dst: 2}\nname: u\n")

    assert [(p.line, p.column, p.message) for p in found] == [
        (5, 31, "the key dst is listed twice; first in line 5"),
        (6, 1, "the key name is listed twice; first in line 1"),
    ]


def test_all_problems_are_reported_at_once_in_order_of_place() -> None:
    text = "world: 4\nmesh: {a: 3}\ntensors: {x: {shape: [4]}}\nprogram:\n"
    text += (
        "  - send: {tensor: z, dst: foo(1)}\n"
        "  - sleep: 3\n"
        "  - wiat: h\n"
        "  - wait: h\n"
        "options: {init: lzy}\n"
        "foo: 1\n"
    )
    found = problems(text)

    assert [p.line for p in found] == [2, 5, 5, 6, 7, 8, 9, 10]
    assert [p for p in found if p.hint == "" and not p.message] == []


def test_an_unreadable_step_causes_no_further_problems() -> None:
    """Its handle and its group are still known to the steps after it."""
    text = HEAD + "  - isend: {tensor: z, dst: 1, as: h}\n  - wait: h\n"
    text += "  - new_group: {name: g, ranks: foo(1)}\n  - barrier: {group: g}\n"

    assert len(problems(text)) == 2


def test_names_under_a_misspelt_section_cause_no_further_problems() -> None:
    text = "world: 2\ntensor: {x: {shape: [4]}}\ngroup: {g: [0, 1]}\nprogram:\n"
    found = problems(text + "  - all_reduce: {tensor: x, group: g}\n")

    assert [(p.line, p.message.partition(";")[0]) for p in found] == [
        (2, "unknown key tensor"),
        (3, "unknown key group"),
    ]


def test_a_missing_declaration_is_reported_once_and_each_typing_mistake() -> None:
    steps = "".join(f"  - send: {{tensor: {name}, dst: 1}}\n" for name in ("w", "w", "xx", "xx"))

    assert [p.line for p in problems(HEAD + steps)] == [5, 7, 8]


def test_one_problem_is_reported_once() -> None:
    text = HEAD + "  - &a {send: {tensor: z, dst: 1}}\n  - *a\n  - *a\n"

    assert "unknown tensor z" in only(text).message


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("name: [a\nworld: 4\n", 1, 7, "`[` is not closed"),
        ("name: 'a\n", 1, 7, "the quote ' is not closed"),
        ("a: b: c\n", 1, 5, "two keys on one line, a and b"),
        ("name: x\nworld:\n\tnodes: 1\n", 3, 1, "cannot start any token"),
        ("name: *x\n", 1, 7, "undefined alias"),
        ("a: 1\n---\nb: 2\n", 2, 1, "contains one document"),
        ("name: a\x01b\n", 1, 8, "U+0001"),
        ("name: @\n", 1, 7, "cannot start any token"),
    ],
)
def test_invalid_yaml_is_reported_with_a_place(
    text: str, line: int, column: int, message: str
) -> None:
    problem = only(text)

    assert (problem.line, problem.column) == (line, column)
    assert message in problem.message


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("a: b: c\n", "write `a: {b: c}`"),
        ("a: b, c: d\n", "write `a: b`, and `c: d` on its own line"),
    ],
)
def test_two_keys_on_one_line_get_a_hint_to_split_them(text: str, remedy: str) -> None:
    assert only(text).hint == remedy


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_an_empty_file_is_reported_as_empty(text: str) -> None:
    problem = only(text)

    assert (problem.line, problem.column) == (1, 1)
    assert problem.message == "the file is empty; expected a scenario"
    assert "distsim new" in problem.hint


@pytest.mark.parametrize("text", ["~\n", "abc\n", "12\n", "- a\n", "[1, 2]\n", "''\n"])
def test_a_file_without_a_mapping_is_no_scenario(text: str) -> None:
    assert "expected a scenario" in only(text).message


def test_an_alias_bomb_is_refused() -> None:
    text = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    for k in range(9):
        text += f"{chr(98 + k)}: &{chr(98 + k)} [{', '.join(['*' + chr(97 + k)] * 9)}]\n"
    found = problems(text)

    assert "aliases (`*name`) expand to more than" in found[0].message
    assert found[0].line > 0


def test_a_recursive_alias_is_refused() -> None:
    assert "is inside the part that it repeats" in only("a: &a [*a]\n").message


@pytest.mark.parametrize("text", ["a: " + "[" * 5000, "- " * 5000, "{a: " * 500, "? " * 5000])
def test_deep_nesting_is_refused(text: str) -> None:
    problem = only(text)

    assert problem.message == "nested deeper than 100 levels"
    assert problem.line == 1


def test_keys_that_are_no_strings_are_refused() -> None:
    found = problems("[1, 2]: 3\n? {a: b}\n: 4\ntrue: 1\n~: 2\n1.5: 3\n")
    keys = [
        p.message.rpartition("found ")[2] for p in found if p.message.startswith("a key must be")
    ]

    assert keys == ["a sequence", "a mapping", "true", "nothing", "1.5"]


def test_tags_and_merge_keys_are_refused() -> None:
    found = problems(
        "name: !!python/object:os.system x\nworld: 4\nprogram: []\nvars: {<<: {a: 1}}\n"
    )

    assert (found[0].line, found[0].column) == (1, 7)
    assert "a tag" in found[0].message
    assert "merge keys" in found[1].message


def test_huge_numbers_are_refused() -> None:
    assert "too large" in only(f"world: {'9' * 5000}\nprogram: []\n").message


def test_a_missing_file_is_named_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "ring.yaml").write_text("world: 2\nprogram: []\n", encoding="utf-8")
    with pytest.raises(ScenarioErrors) as caught:
        load(tmp_path / "rnig.yaml")
    problem = caught.value.problems[0]

    assert problem.message == "no such file"
    assert problem.hint == f"did you mean {tmp_path / 'ring.yaml'}?"
    assert str(caught.value).startswith(str(tmp_path / "rnig.yaml"))


def test_a_directory_is_no_scenario(tmp_path: Path) -> None:
    with pytest.raises(ScenarioErrors, match="the path is a directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0", "the file is binary"),
        (b"name: a\nabout: \xff\xfe\n", "the byte 0xff is not valid UTF-8"),
        (b"x" * (17 << 20), "larger than 16 MiB"),
    ],
)
def test_a_binary_file_is_no_scenario(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(data)
    with pytest.raises(ScenarioErrors) as caught:
        load(file)

    assert message in caught.value.problems[0].message


def test_undecodable_text_is_reported_with_a_place(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"name: a\nabout: \xff\n")
    with pytest.raises(ScenarioErrors) as caught:
        load(file)

    assert (caught.value.problems[0].line, caught.value.problems[0].column) == (2, 8)


def test_windows_line_endings_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"\xef\xbb\xbfname: a\r\nworld: 2\r\nprogram: []\r\n")

    assert load(file).name == "a"


def test_a_long_line_is_cut_around_the_caret() -> None:
    text = (
        "world: 2\nprogram: []\nvars: {"
        + ", ".join(f"v{k}: {k}" for k in range(200))
        + ", bad: q}\n"
    )
    lines = only(text).render().splitlines()

    assert len(lines[1]) < 110
    assert lines[1][lines[2].index("^") :].startswith("q}")


def test_a_scenario_built_in_python_uses_paths_as_places() -> None:
    from distsim import Scenario

    with pytest.raises(ScenarioErrors) as caught:
        Scenario(
            name="s",
            world=2,
            tensors={"x": {"shape": [1]}},
            program=[{"send": {"tensor": "z", "dst": "rank +"}}],
            expct=1,
        )
    places = [(p.line, p.path) for p in caught.value.problems]

    assert places == [(0, "expct"), (0, "program[0].send.dst"), (0, "program[0].send.tensor")]
    assert "program[0].send.tensor: unknown tensor z" in str(caught.value)


HYBRID = (Path(__file__).resolve().parents[2] / "scenarios" / "hybrid.yaml").read_text(
    encoding="utf-8"
)
PIECES = [
    "[",
    "]",
    "{",
    "}",
    ":",
    ": ",
    "- ",
    "\n",
    "  ",
    "'",
    '"',
    "*",
    "&a ",
    "*a",
    "null",
    "true",
    "3",
    "-1",
    "1e9",
    ".nan",
    "rank",
    "x",
    "@",
]
PIECES += [
    "(",
    ")",
    "ranks",
    "steps",
    "repeat",
    "?",
    "!",
    "|",
    ">",
    "%",
    "#",
    "\t",
    "0x",
    "~",
    "[]",
    "{}",
    "1.5",
    "else",
    "<<",
    "all",
    "world",
]


@settings(max_examples=draws(300), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(HYBRID)), st.integers(0, 9), st.sampled_from(PIECES)),
        min_size=1,
        max_size=3,
    )
)
def test_a_damaged_file_is_read_or_refused_without_a_traceback(
    damages: list[tuple[int, int, str]],
) -> None:
    text = HYBRID
    for start, length, piece in damages:
        text = text[:start] + piece + text[start + length :]
    try:
        told = str(loads(text).world.size)
    except UserError as error:
        told = str(error)

    assert told
