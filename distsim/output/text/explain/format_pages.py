"""What a key of the scenario file is, and what may stand where: from the reference of the
format.
"""

from __future__ import annotations

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
    default = "required" if key.required else key.default or "none"
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


__all__ = ["expressions_page", "key_page", "scenario_page"]
