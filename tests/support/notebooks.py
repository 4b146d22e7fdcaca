"""Runs the example notebooks without Jupyter: `python -m tests.support.notebooks` runs them and
stores their outputs.

A notebook is JSON (https://nbformat.readthedocs.io). Its cells run in one namespace, in the folder
of the notebook; the value of a last expression becomes a result with the forms that Jupyter shows.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
#: The methods that Jupyter asks for, and the type of what they return.
_FORMS = {"_repr_html_": "text/html", "_repr_svg_": "image/svg+xml"}


def notebooks() -> list[Path]:
    """The example notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def outputs_of_cells(file: Path) -> list[list[dict[str, Any]]]:
    """Run a notebook: the outputs of each code cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [
        cell
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    with contextlib.chdir(file.parent):
        return [
            _outputs("".join(cell["source"]), namespace, f"{file.name}, cell {number}", number)
            for number, cell in enumerate(cells, 1)
        ]


def _outputs(
    source: str, namespace: dict[str, Any], name: str, number: int
) -> list[dict[str, Any]]:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)  # noqa: S102  the repository's own notebook
        if last is not None:
            expression = ast.Expression(last.value)
            value = eval(compile(expression, name, "eval"), namespace)  # noqa: S307  as above
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        forms = {"text/plain": repr(value)}
        for method, kind in _FORMS.items():
            text_of_form = getattr(value, method, lambda: None)()
            if text_of_form is not None:
                forms[kind] = text_of_form
        data = {kind: text.splitlines(keepends=True) for kind, text in forms.items()}
        found.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": data,
            }
        )
    return found


def refresh(file: Path) -> None:
    """Run a notebook and store its outputs in it."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, outputs_of_cells(file), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, outputs
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for path in notebooks():
        refresh(path)
        print(path.name)
