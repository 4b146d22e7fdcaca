"""The reference page of the Python interface (docs/reference/python.md).

It is made from signatures and docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from distsim.api import functions, results

_INTRODUCTION = """\
# Python interface

```python
import distsim

answer = distsim.simulate("scenarios/hybrid.yaml")
print(answer.outcome, answer.verdict, answer.makespan_ns)
answer.to_pandas()                      # one row per rank; needs pandas
distsim.render("scenarios/hybrid.yaml", view="timeline").save("hybrid.svg")
```

A scenario is a path, YAML text, or what `distsim.load` returns. Every result has a short `repr`,
`to_text()`, `to_json()`, and an HTML form for notebooks (`_repr_html_()`); results with rows have
`to_pandas()`.

**What is public.** The names in `distsim.__all__`, the parameters of these functions and the
documented members of their results keep their meaning within a minor version; CHANGELOG.md
announces changes. `raw` and all other modules may change at any time.

User errors raise a subclass of `distsim.DistsimError`: `ScenarioErrors` (all problems of a file),
`UsageError` (an argument), or an error of the environment (for example, torch is not installed).
Its text names the place, the cause and the remedy.
"""


def python_reference() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION, "## Functions\n"]
    parts += [_function_section(function) for function in functions.FUNCTIONS]
    parts.append("## Results\n")
    parts += [_class_section(result) for result in _result_classes()]
    return "\n".join(parts)


def _function_section(function: Callable[..., object]) -> str:
    code = _signature(function)
    return f"### {function.__name__}\n\n```python\n{code}\n```\n\n{inspect.getdoc(function)}\n"


def _signature(function: Callable[..., object]) -> str:
    """On one line, or one parameter per line if that is longer than 100 characters."""
    signature = inspect.signature(function)
    parameters = list(_parameter_texts(signature))
    name, result = f"distsim.{function.__name__}", signature.return_annotation
    line = f"{name}({', '.join(parameters)}) -> {result}"
    if len(line) <= 100:
        return line
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{lines}) -> {result}"


def _parameter_texts(signature: inspect.Signature) -> Iterator[str]:
    """Annotations are strings already, because the module postpones their evaluation."""
    seen_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            seen_star = True
            yield f"*{parameter.name}: {parameter.annotation}"
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            seen_star = True
            yield "*"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"{parameter.name}: {parameter.annotation}{default}"


def _result_classes() -> list[type]:
    """The result classes in the order in which they are defined."""
    public = [
        value
        for name, value in vars(results).items()
        if inspect.isclass(value) and value.__module__ == results.__name__ and name[0] != "_"
    ]
    return [value for value in public if value is not results.Answer]


def _class_section(result: type) -> str:
    lines = [f"### {result.__name__}\n", f"{inspect.getdoc(result)}\n"]
    members = {name: value for name, value in vars(result).items() if not name.startswith("_")}
    for name, member in members.items():
        documented = inspect.getdoc(member)
        if isinstance(member, property):
            lines.append(f"- `{name}`{_suffix(documented)}")
        elif inspect.isfunction(member) and name not in ("to_text", "to_json"):
            lines.append(f"- `{name}()`{_suffix(documented)}")
    return "\n".join(lines) + "\n"


def _suffix(documented: str | None) -> str:
    return f": {' '.join(documented.split())}" if documented else ""
