"""The generated pages of the manual: `python -m distsim.cli.generate_docs` writes them into docs/.

A test compares the pages in docs/ with what this module would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distsim.cli.generated_docs.layout import GENERATED_NOTICE, wrapped
from distsim.cli.generated_docs.operation_pages import operation_pages
from distsim.cli.generated_docs.scenario_pages import scenario_pages
from distsim.cli.shared.console import note, write_file


def cli_page() -> str:
    """docs/reference/cli.md: the --help of each command, in 80 columns."""
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
    """docs/reference/findings.md: for each code its meaning, consequence, remedy and an example."""
    return "\n\n".join(_finding_lines()) + "\n"


def _finding_lines() -> Iterator[str]:
    from distsim.findings.codes import CODES

    yield from (
        "# Findings",
        GENERATED_NOTICE,
        (
            "`distsim explain DS301` prints the section of one code. "
            "Some findings set no verdict. If a report contains only such findings, the "
            "verdict is `ok`, even if a rank raises (DS802), because all calls match."
        ),
    )
    for info in CODES.values():
        verdict = f"verdict `{info.verdict}`" if info.verdict else "sets no verdict"
        yield f"## {info.code}: {info.title}"
        yield f"{info.severity.capitalize()}, {verdict}."
        yield wrapped(info.what)
        yield wrapped(f"**Consequence.** {info.why}")
        yield wrapped(f"**Remedy.** {info.remedy}")
        yield f"```{'python' if info.of_scripts else 'yaml'}\n{info.example.rstrip()}\n```"


def backends_manual() -> str:
    """docs/reference/backends.md: the support table."""
    from distsim.output.text.explain.operation_pages import backends_page

    return (
        f"# Backends\n\n{GENERATED_NOTICE}\n\n"
        "`distsim explain backends` prints the same.\n\n"
        f"```text\n{backends_page()}\n```\n"
    )


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
    """docs/reference/python.md: the public functions and their results."""
    from distsim.api.reference import python_reference

    title, _, rest = python_reference().partition("\n")
    return f"{title}\n\n{GENERATED_NOTICE}\n{rest}"


def all_pages() -> dict[str, str]:
    """Path in docs/ -> text, of every generated file."""
    return {
        "reference/backends.md": backends_manual(),
        "reference/cli.md": cli_page(),
        "reference/findings.md": findings_page(),
        "reference/glossary.md": glossary_manual(),
        "reference/python.md": python_page(),
        **scenario_pages(),
        **operation_pages(),
        "scenario.schema.json": schema_text(),
    }


def main(folder: Path) -> None:
    """Write every page into a folder, and delete generated pages that no longer exist."""
    pages = all_pages()
    for generated in ("reference/scenario", "reference/operations"):
        for old in sorted((folder / generated).rglob("*.md")):
            if old.relative_to(folder).as_posix() not in pages:
                old.unlink()
    for name, text in pages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / name, text)
    note(f"wrote {len(pages)} files into {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
