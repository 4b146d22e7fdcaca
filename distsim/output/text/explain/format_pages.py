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
    ("an axis, <axis>_size", "everywhere", "the rank's coordinate, and the axis' length"),
    ("a var", "everywhere after it", "its value"),
    ("the index of a repeat", "inside it", "the round, from 0"),
    ("iteration", "in program", "the round of the file's iterations, from 0"),
    (
        "group_rank group_size",
        "beside a group:",
        "the rank's place in that group, and the group's size",
    ),
    ("index", "in value:", "the number of the element, flat"),
    ("copy", "in value: of a tensor with copies", "the number of the copy"),
)


def key_page(key: FormatKey) -> str:
    """One key: what it means, its type, unit, default and example, and the keys inside it."""
    rows = [(word, value) for word, value in _key_facts(key) if value]
    lines = [key.path, *wrapped_lines(key.about, "  "), ""]
    for word, value in rows:
        lines += wrapped_lines(f"{word:<9}{value}", "  ", " " * 11)
    inside = [inner for inner in format_keys().values() if _is_direct_child(inner.path, key.path)]
    if inside:
        lines += ["", "Inside it", *_key_lines(inside)]
    return "\n".join(lines)


def _key_facts(key: FormatKey) -> tuple[tuple[str, str], ...]:
    default = "needed" if key.required else key.default or "left out"
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
                "One YAML file says who is there and what each rank does. Its keys:", "  "
            ),
            "",
            *_key_lines(top),
            "",
            *wrapped_lines(
                "`distsim explain world.nodes` and the like say more, "
                "`distsim explain all_reduce.op` of a step's field, "
                "`distsim explain expressions` of what may stand for a number."
            ),
        ]
    )


def expressions_page() -> str:
    """What an expression may be."""
    rows = table_lines(("word", "known", "is"), EXPRESSION_NAMES, left=(0, 1, 2))
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
                "Wherever a number, a quantity or a condition may stand: "
                "+ - * // %, comparisons, and or not, "
                "a if c else b, min and max, with Python's meaning.",
                "  ",
            ),
            *wrapped_lines(
                "A number with its unit is a quantity: `(rank + 1) * 1 ms`, "
                "`4 B * width * width`, `2 * 25 GB/s`. Units are checked: only "
                "equals are added and compared. A var may be a quantity.",
                "  ",
            ),
            "",
            "Words",
            *rows,
        ]
    )


# --- the manual's page ---
def format_manual() -> Iterator[str]:
    """docs/format.md, paragraph by paragraph."""
    yield "# Every key of a scenario file"
    yield (
        "Made from the models that read the file, as are `distsim schema` and "
        "`distsim explain world.nodes`. Fields of steps are in "
        "[operations.md](operations.md) and, one by one, below. "
        "`NAME` is a name of yours; `[]` an item of a list."
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
        "| key | says | type | unit | default | example |",
        "|---|---|---|---|---|---|",
    ]
    for key in found:
        default = "needed" if key.required else f"`{key.default}`" if key.default else ""
        cells = (f"`{key.path}`", key.about, key.kind, key.unit, default, f"`{key.example}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


__all__ = ["expressions_page", "format_manual", "key_page", "scenario_page"]
