"""The generated pages of the manual: `python -m distsim.cli.generate_docs` writes them into docs/;
a test holds them fresh.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.cli.shared.console import note, write_file

if TYPE_CHECKING:
    from distsim.operations.core.operation_base import Operation

GENERATED_NOTICE = (
    "<!-- Written by `python -m distsim.cli.generate_docs`; change the source, not this page. -->"
)


def cli_page() -> str:
    """docs/cli.md: what each command's --help says, in 80 columns."""
    from typer.main import get_command

    from distsim.cli.application import application

    root = get_command(application())
    top = root.make_context(
        "distsim", [], resilient_parsing=True, terminal_width=80, max_content_width=80
    )
    parts = ["# The command line", GENERATED_NOTICE, f"```text\n{top.get_help().strip()}\n```"]
    for name, command in root.commands.items():  # type: ignore[attr-defined]  # a typer app with several commands is a group
        context = command.make_context(
            f"distsim {name}", [], resilient_parsing=True, terminal_width=80, max_content_width=80
        )
        parts += [f"## distsim {name}", f"```text\n{context.get_help().strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def findings_page() -> str:
    """docs/findings.md: every code with what it is, what happens, what to do and a scenario that
    has it.
    """
    return "\n\n".join(_finding_lines()) + "\n"


def _finding_lines() -> Iterator[str]:
    from distsim.findings.codes import CODES

    yield from (
        "# Findings",
        GENERATED_NOTICE,
        "A code never changes its meaning. `distsim explain DS301` prints the same.",
    )
    for info in CODES.values():
        verdict = f"verdict `{info.verdict}`" if info.verdict else "no verdict of its own"
        yield f"## {info.code}: {info.title}"
        yield f"{info.severity.capitalize()}, {verdict}."
        yield from (info.what, f"**What happens.** {info.why}", f"**What to do.** {info.remedy}")
        yield f"```{'python' if info.of_scripts else 'yaml'}\n{info.example.rstrip()}\n```"


def operations_page() -> str:
    """docs/operations.md: every operation with its words, from its row."""
    return "\n\n".join(_operation_lines()) + "\n"


def _operation_lines() -> Iterator[str]:
    from distsim.operations.registry import OPERATIONS

    yield from (
        "# Operations",
        GENERATED_NOTICE,
        "Names and arguments are those of torch.distributed. `distsim explain all_gather` prints the same.",
    )
    for name, row in OPERATIONS.items():
        words = row.words
        yield f"## {name}"
        yield f"`{words.signature}`" + (
            f" (also written {', '.join(f'`{a}`' for a in row.aliases)})" if row.aliases else ""
        )
        yield from (
            f"**{title}.** {text}"
            for title, text in (
                ("Before", words.before),
                ("After", words.after),
                ("Who waits", words.waits),
            )
            if text
        )
        yield from words.notes
        yield _torch_argument_text(row)
        yield f"In the file, and in torch:\n\n```yaml\n{words.example.rstrip()}\n```"
        yield f"```python\n{words.torch}\n```"
        drawn = name if name in PICTURED_OPERATIONS else PICTURE_OF_OPERATION.get(name)
        if drawn is not None:
            yield f"![{drawn}: what each rank holds before and after](../viz/{drawn}_op.svg)"


#: Operations that the gallery has a picture of.
PICTURED_OPERATIONS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
#: Operations that leave the same where another one does.
PICTURE_OF_OPERATION = {
    "recv": "send",
    "isend": "send",
    "irecv": "send",
    "batch_isend_irecv": "send",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}


def _torch_argument_text(row: type[Operation]) -> str:
    """The fields of the file, each with torch's argument where that is called otherwise."""
    from distsim.operations.core.field_help import torch_argument_names
    from distsim.scenario.format.schema.key_reference import format_keys

    fields = {info.alias or key for key, info in row.model_fields.items()}
    if not fields:
        return "It has no fields."
    other: dict[str, str] = {}
    for argument, field in torch_argument_names(row.op, fields).items():
        if argument in row.words.signature:
            other.setdefault(field, argument)
    lines = ["| field | torch | says | default |", "|---|---|---|---|"]
    for field in fields_in_order(row):
        key = format_keys()[f"{row.op}.{field}"]
        own = row.kind not in ("local", "batch") and (
            f"{field}=" in row.words.signature or f"{field}," in row.words.signature
        )
        torch = other.get(field, field if own else "")
        default = "needed" if key.required else f"`{key.default}`" if key.default else ""
        lines.append(f"| `{field}` | {f'`{torch}`' if torch else ''} | {key.about} | {default} |")
    return "\n".join(lines)


def fields_in_order(row: type[Operation]) -> list[str]:
    """What must stand first, then what may."""
    found = sorted(row.model_fields.items(), key=lambda item: not item[1].is_required())
    return [info.alias or key for key, info in found]


def backends_manual() -> str:
    """docs/backends.md: the support table."""
    from distsim.output.text.explain.operation_pages import backends_page

    return f"# Back ends\n\n{GENERATED_NOTICE}\n\n`distsim explain backends` prints the same.\n\n```text\n{backends_page()}\n```\n"


def format_page() -> str:
    """docs/format.md: every key of the scenario file."""
    from distsim.output.text.explain.format_pages import format_manual

    title, *rest = format_manual()
    return "\n\n".join((title, GENERATED_NOTICE, *rest)) + "\n"


def schema_text() -> str:
    """docs/scenario.schema.json: the schema, on one line."""
    import json

    from distsim.scenario import json_schema

    return json.dumps(json_schema(), ensure_ascii=False) + "\n"


#: File in docs/ -> its text.
PAGES: dict[str, Callable[[], str]] = {
    "backends.md": backends_manual,
    "cli.md": cli_page,
    "findings.md": findings_page,
    "format.md": format_page,
    "operations.md": operations_page,
    "scenario.schema.json": schema_text,
}


def main(folder: Path) -> None:
    """Write every page into a folder."""
    for name, page in PAGES.items():
        write_file(folder / name, page())
        note(f"wrote {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
