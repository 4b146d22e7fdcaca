"""What a key of the scenario file is, and what may stand where: from the reference of the
format.
"""

from __future__ import annotations

from collections.abc import Iterator

from distsim.output.text_layout import page_width, table_lines, wrapped_lines
from distsim.scenario.format.schema.key_reference import FormatKey, format_keys

#: Words of expressions -> where they are known, and what they are.
EXPRESSION_NAMES: tuple[tuple[str, str, str], ...] = (
    ("rank world_size node local_rank", "everywhere", "of the rank that runs the step"),
    ("an axis, <axis>_size", "everywhere", "the rank's coordinate, and the length of the axis"),
    ("a var", "after its definition", "its value"),
    ("the index of a repeat", "inside it", "the index of the iteration, from 0"),
    ("iteration", "in program", "the index of the training iteration, from 0"),
    (
        "group_rank group_size",
        "next to group:",
        "the rank's number in that group, and the group's size",
    ),
    ("index", "in value:", "the index of the element in the flattened tensor"),
    ("copy", "in value: of a tensor with copies", "the index of the copy"),
)


def key_page(key: FormatKey) -> str:
    """One key: what it means, its type, unit, default and example, and the keys inside it."""
    rows = [(word, value) for word, value in _key_facts(key) if value]
    lines = [key.path, *wrapped_lines(key.about, "  "), ""]
    for word, value in rows:
        lines += wrapped_lines(f"{word:<9}{value}", "  ", " " * 11)
    inside = [inner for inner in format_keys().values() if _is_direct_child(inner.path, key.path)]
    if inside:
        lines += ["", "Keys inside", *_key_lines(inside)]
    return "\n".join(lines)


def _key_facts(key: FormatKey) -> tuple[tuple[str, str], ...]:
    default = "required" if key.required else key.default or "omitted"
    return (
        ("type", key.kind.replace("`", "")),
        ("unit", key.unit),
        ("default", default),
        ("example", f"{key.name}: {key.example}"),
    )


def _is_direct_child(path: str, outer: str) -> bool:
    rest = path.removeprefix(outer) if path.startswith(outer) else ""
    rest = rest.removeprefix("[]").removeprefix(".NAME")
    return rest.startswith(".") and "." not in rest[1:]


def _key_lines(found: list[FormatKey]) -> list[str]:
    most = max(len(key.name) for key in found)
    return [
        line
        for key in found
        for line in wrapped_lines(f"{key.name.ljust(most)}  {key.about}", "  ", " " * (most + 4))
    ]


def scenario_page() -> str:
    """The top level of the file, key by key."""
    top = [key for key in format_keys().values() if "." not in key.path]
    return "\n".join(
        [
            "scenario: the file",
            *wrapped_lines(
                "One YAML file describes the ranks and what each rank does. Its keys:", "  "
            ),
            "",
            *_key_lines(top),
            "",
            *wrapped_lines(
                "`distsim explain world.nodes` explains one key, "
                "`distsim explain all_reduce.op` a field of a step, and "
                "`distsim explain expressions` the expressions in numbers."
            ),
        ]
    )


def expressions_page() -> str:
    """The page of `distsim explain expressions`."""
    rows = table_lines(("name", "where", "value"), EXPRESSION_NAMES, left=(0, 1, 2))
    if max(map(len, rows)) > page_width():
        rows = [
            line
            for words in EXPRESSION_NAMES
            for line in wrapped_lines(f"{words[0]} ({words[1]}): {words[2]}", "  ", "    ")
        ]
    return "\n".join(
        [
            "expressions",
            *wrapped_lines(
                "A number, a quantity or a condition may be an expression with "
                "+ - * // %, comparisons, and or not, "
                "a if c else b, min and max. They mean the same as in Python.",
                "  ",
            ),
            *wrapped_lines(
                "A number with its unit is a quantity: `(rank + 1) * 1 ms`, "
                "`4 B * width * width`, `2 * 25 GB/s`. Units are checked: only "
                "quantities of the same unit are added or compared. A var may be a quantity.",
                "  ",
            ),
            "",
            "Names",
            *rows,
        ]
    )


# --- the manual's page ---
def format_manual() -> Iterator[str]:
    """docs/format.md, paragraph by paragraph."""
    yield "# Every key of a scenario file"
    yield (
        "This page is generated from the models that read the file, like `distsim schema` and "
        "`distsim explain world.nodes`. The fields of steps are listed below and explained in "
        "[operations.md](operations.md). "
        "`NAME` is a name that you choose; `[]` is an item of a list."
    )
    top = [key for key in format_keys().values() if "." not in key.path]
    yield _markdown_table("The file", top)
    for key in top:
        inside = [
            k
            for k in format_keys().values()
            if k.path.startswith((f"{key.path}.", f"{key.path}[]"))
        ]
        if inside:
            yield _markdown_table(key.path, inside)
    steps: dict[str, list[FormatKey]] = {}
    known = {key.path for key in top}
    for key in format_keys().values():
        owner = key.path.partition(".")[0].removesuffix("[]")
        if "." in key.path and owner not in known:
            steps.setdefault(owner, []).append(key)
    yield "## Fields of steps"
    for owner, found in steps.items():
        yield _markdown_table(owner, found, "###")


def _markdown_table(title: str, found: list[FormatKey], level: str = "##") -> str:
    lines = [
        f"{level} {title}",
        "",
        "| key | meaning | type | unit | default | example |",
        "|---|---|---|---|---|---|",
    ]
    for key in found:
        default = "required" if key.required else f"`{key.default}`" if key.default else ""
        cells = (f"`{key.path}`", key.about, key.kind, key.unit, default, f"`{key.example}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


__all__ = ["expressions_page", "format_manual", "key_page", "scenario_page"]
