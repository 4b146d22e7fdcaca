"""The rules of the house that a machine can check (CONTRIBUTING.md): one test a rule, which lists
all places that break it.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.source_trees import MODULES, PACKAGE, ROOT, nodes

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SIMPLE = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Return,
    ast.Expr,
    ast.Raise,
    ast.Assert,
    ast.Delete,
)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill"}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every function, its docstring not counted."""
    for node in nodes(path):
        if isinstance(node, FUNCTION):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                doc = node.body[0]
                lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            yield node.name, lines


def taken(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """All parameters but `self`."""
    held = function.args
    named = [
        *held.posonlyargs,
        *held.args,
        *held.kwonlyargs,
        *(one for one in (held.vararg, held.kwarg) if one is not None),
    ]
    return named[1:] if named and named[0].arg in ("self", "cls") else named


def parameters(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of every function."""
    return ((node.name, len(taken(node))) for node in nodes(path) if isinstance(node, FUNCTION))


def hints(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [
        hint
        for hint in (*(one.annotation for one in taken(function)), function.returns)
        if hint is not None
    ]


def is_any(hint: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(hint))


def called_names(path: Path) -> set[str]:
    return {
        node.func.id
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def imported_modules(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def where(found: dict[Path, object]) -> dict[str, object]:
    """What is wrong, by the file's name in the project; files with nothing wrong are left out."""
    return {str(path.relative_to(ROOT)): wrong for path, wrong in found.items() if wrong}


def test_the_rules_cover_the_whole_package():
    assert PACKAGE / "cli" / "process.py" in MODULES


def code_lines(path: Path) -> int:
    """Lines of code, without blank lines, comments and docstrings."""
    lines: set[int] = set()
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type not in NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(path):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def expressions_of(statement: ast.AST) -> list[ast.AST]:
    """A simple statement, or the expression at the head of a compound one."""
    if isinstance(statement, SIMPLE):
        return [statement]
    if isinstance(statement, ast.If | ast.While):
        return [statement.test]
    if isinstance(statement, ast.For | ast.AsyncFor):
        return [statement.iter]
    if isinstance(statement, ast.With):
        return [item.context_expr for item in statement.items]
    return []


def decisions(statement: ast.AST) -> int:
    """Conditional expressions, parts of comprehensions, and operands of `and` and `or`."""
    count = 0
    for expression in expressions_of(statement):
        for node in ast.walk(expression):
            if isinstance(node, ast.IfExp):
                count += 1
            elif isinstance(node, ast.comprehension):
                count += 1 + len(node.ifs)
            elif isinstance(node, ast.BoolOp):
                count += len(node.values) - 1
    return count


def words_of(name: str) -> list[str]:
    """``LinkFault`` -> Link, Fault."""
    return re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name.strip("_"))


def test_a_file_has_at_most_480_lines_of_code_and_a_function_at_most_70() -> None:
    """400 and 60 are the aim; a little more is better than a file cut where no border is."""
    # Few files are so long that their lines of code have to be counted, which takes long.
    long_files = [path for path in MODULES if len(path.read_bytes().splitlines()) > 480]
    assert where({path: n for path in long_files if (n := code_lines(path)) > 480}) == {}
    assert (
        where({path: [(name, n) for name, n in functions(path) if n > 70] for path in MODULES})
        == {}
    )


def test_few_statements_make_three_or_more_decisions() -> None:
    """At most 8 of 1 000, as in pydantic, networkx and hypothesis."""
    counts = [decisions(node) for path in MODULES for node in nodes(path) if expressions_of(node)]
    packed = [count for count in counts if count >= 3]

    assert 1000 * len(packed) / len(counts) <= 8


def test_class_names_are_descriptive_and_belong_to_one_module() -> None:
    """At most a quarter are a single word, and at most one in fifty is defined twice."""
    modules_of_class: dict[str, set[Path]] = {}
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                modules_of_class.setdefault(node.name, set()).add(path)
    single = [name for name in modules_of_class if len(words_of(name)) == 1]
    twice = [name for name, paths in modules_of_class.items() if len(paths) > 1]

    assert len(single) <= 0.25 * len(modules_of_class), sorted(single)
    assert len(twice) <= 0.02 * len(modules_of_class), sorted(twice)


def test_a_function_has_at_most_8_parameters():
    """Two exceptions: `Group.call` of a capture has the arguments of torch's own calls, and the
    keyword-only parameters of the public functions are their options.
    """
    public = PACKAGE / "api" / "functions.py"
    capture = PACKAGE / "script_capture" / "rank" / "process_group.py"

    assert (
        where(
            {
                path: [
                    (name, n) for name, n in parameters(path) if n > (11 if path == capture else 8)
                ]
                for path in MODULES
                if path != public
            }
        )
        == {}
    )


def test_parameters_of_program_operation_and_rule_functions_are_typed():
    """No `Any` in a signature of these rooms."""
    typed = [
        path
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] in ("semantics", "program", "operations", "hardware")
    ]

    assert (
        where(
            {
                path: [
                    f.name
                    for f in nodes(path)
                    if isinstance(f, FUNCTION) and any(map(is_any, hints(f)))
                ]
                for path in typed
            }
        )
        == {}
    )


def test_only_the_command_line_prints():
    assert (
        where(
            {
                path: "print" in called_names(path)
                for path in MODULES
                if PACKAGE / "cli" not in path.parents
            }
        )
        == {}
    )


def test_nothing_is_evaluated_executed_or_unpickled():
    assert where({path: FORBIDDEN_CALLS & called_names(path) for path in MODULES}) == {}
    assert (
        where(
            {
                path: FORBIDDEN_MODULES & {name.split(".")[0] for name in imported_modules(path)}
                for path in MODULES
            }
        )
        == {}
    )


def test_the_code_contains_no_todo():
    words = re.compile(r"\b(?:TODO|FIXME|XXX|raise NotImplementedError)\b")

    assert where({path: words.findall(path.read_text(encoding="utf-8")) for path in MODULES}) == {}


def test_every_module_states_its_purpose():
    trees = {path: nodes(path)[0] for path in MODULES}

    assert (
        where(
            {
                path: isinstance(t, ast.Module) and bool(t.body) and ast.get_docstring(t) is None
                for path, t in trees.items()
            }
        )
        == {}
    )


def test_no_module_keeps_mutable_state():
    """`global` is how a function writes to its module; two simulations side by side would share
    it.
    """
    assert (
        where(
            {path: [n.lineno for n in nodes(path) if isinstance(n, ast.Global)] for path in MODULES}
        )
        == {}
    )


def test_ci_runs_the_test_command_of_the_readme_and_constrains_every_torch_install():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [
        *readme.splitlines(),
        *(ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines(),
    ]
    installs = [
        line for line in lines if "pip install" in line and ("real" in line or "torch" in line)
    ]

    assert len(re.findall(r"^python3 -m venv .* -m pytest.*$", readme, re.MULTILINE)) == 1
    assert [line for line in installs if "-c constraints.txt" not in line] == []
