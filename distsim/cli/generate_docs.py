"""The generated pages of the manual: `python -m distsim.cli.generate_docs` writes them into docs/.

A test compares the pages in docs/ with what this module would write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cli.shared.console import note, write_file

if TYPE_CHECKING:
    from distsim.operations.core.operation_base import Operation

GENERATED_NOTICE = (
    "<!-- Written by `python -m distsim.cli.generate_docs`; change the source, not this page. -->"
)


def cli_page() -> str:
    """docs/cli.md: the --help of each command, in 80 columns."""
    from typer.main import get_command

    from distsim.cli.application import application

    app = get_command(application())
    parts = ["# The command line", GENERATED_NOTICE, _help_block(app, "distsim")]
    for name, command in app.commands.items():  # type: ignore[attr-defined]  # this app is a group
        parts += [f"## distsim {name}", _help_block(command, f"distsim {name}")]
    return "\n\n".join(parts) + "\n"


def _help_block(command: Any, name: str) -> str:
    context = command.make_context(
        name, [], resilient_parsing=True, terminal_width=80, max_content_width=80
    )
    return f"```text\n{context.get_help().strip()}\n```"


def findings_page() -> str:
    """docs/findings.md: for each code its meaning, consequence, remedy and an example."""
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
    """docs/operations.md: every operation with its description."""
    return "\n\n".join(_operation_lines()) + "\n"


def _operation_lines() -> Iterator[str]:
    from distsim.operations.registry import OPERATIONS

    yield from (
        "# Operations",
        GENERATED_NOTICE,
        "Names and arguments are those of torch.distributed. "
        "`distsim explain all_gather` prints the same.",
    )
    for name, operation in OPERATIONS.items():
        words = operation.words
        yield f"## {name}"
        yield _signature_line(operation)
        descriptions = {"Before": words.before, "After": words.after, "Who waits": words.waits}
        yield from (f"**{title}.** {text}" for title, text in descriptions.items() if text)
        yield from words.notes
        yield _torch_argument_text(operation)
        yield f"In the file, and in torch:\n\n```yaml\n{words.example.rstrip()}\n```"
        yield f"```python\n{words.torch}\n```"
        pictured = name if name in PICTURED_OPERATIONS else PICTURE_OF_OPERATION.get(name)
        if pictured is not None:
            alt_text = f"{pictured}: what each rank holds before and after"
            yield f"![{alt_text}](../viz/{pictured}_op.svg)"


def _signature_line(operation: type[Operation]) -> str:
    signature = f"`{operation.words.signature}`"
    if not operation.aliases:
        return signature
    aliases = ", ".join(f"`{alias}`" for alias in operation.aliases)
    return f"{signature} (also written {aliases})"


#: Operations with a picture of their own in the gallery.
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
#: Operations with the same picture as another one.
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


def _torch_argument_text(operation: type[Operation]) -> str:
    """A table of the fields, each with the argument of torch if that has another name."""
    from distsim.operations.core.field_help import torch_argument_names
    from distsim.scenario.format.schema.key_reference import format_keys

    fields = {info.alias or key for key, info in operation.model_fields.items()}
    if not fields:
        return "It has no fields."
    torch_names: dict[str, str] = {}
    for argument, field in torch_argument_names(operation.op, fields).items():
        if argument in operation.words.signature:
            torch_names.setdefault(field, argument)
    lines = ["| field | torch | meaning | default |", "|---|---|---|---|"]
    for field in fields_in_order(operation):
        key = format_keys()[f"{operation.op}.{field}"]
        torch_name = torch_names.get(field)
        if torch_name is None and _is_torch_argument(operation, field):
            torch_name = field
        torch_cell = f"`{torch_name}`" if torch_name else ""
        default = f"`{key.default}`" if key.default else ""
        if key.required:
            default = "required"
        lines.append(f"| `{field}` | {torch_cell} | {key.about} | {default} |")
    return "\n".join(lines)


def _is_torch_argument(operation: type[Operation], field: str) -> bool:
    """Whether the function of torch has an argument with the name of the field."""
    if operation.kind in ("local", "batch"):
        return False
    signature = operation.words.signature
    return f"{field}=" in signature or f"{field}," in signature


def fields_in_order(operation: type[Operation]) -> list[str]:
    """The names of the fields in the file, required ones first."""
    fields = sorted(operation.model_fields.items(), key=lambda item: not item[1].is_required())
    return [info.alias or key for key, info in fields]


def backends_manual() -> str:
    """docs/backends.md: the support table."""
    from distsim.output.text.explain.operation_pages import backends_page

    return (
        f"# Backends\n\n{GENERATED_NOTICE}\n\n"
        "`distsim explain backends` prints the same.\n\n"
        f"```text\n{backends_page()}\n```\n"
    )


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


def glossary_manual() -> str:
    """docs/reference/glossary.md: the terms of reports and documentation."""
    from distsim.output.text.explain.glossary import glossary_page

    title, *rest = glossary_page()
    return "\n\n".join((title, GENERATED_NOTICE, *rest)) + "\n"


def python_page() -> str:
    """docs/python.md: the public functions and their results."""
    from distsim.api.reference import python_reference

    title, _, rest = python_reference().partition("\n")
    return f"{title}\n\n{GENERATED_NOTICE}\n{rest}"


#: A file in docs/ -> the function that writes its text.
PAGES: dict[str, Callable[[], str]] = {
    "backends.md": backends_manual,
    "cli.md": cli_page,
    "findings.md": findings_page,
    "format.md": format_page,
    "operations.md": operations_page,
    "python.md": python_page,
    "reference/glossary.md": glossary_manual,
    "scenario.schema.json": schema_text,
}


def main(folder: Path) -> None:
    """Write every page into a folder."""
    for name, page in PAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, page())
        note(f"wrote {folder / name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
