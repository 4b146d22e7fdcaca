"""`distsim schema`: the JSON Schema of scenario files and of command output; editor settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import choice_option


class SchemaKind(StrEnum):
    """The things that have a schema."""

    scenario = "scenario"
    simulate = "simulate"
    check = "check"
    plan = "plan"
    sweep = "sweep"
    run = "run"
    replay = "replay"
    compare = "compare"
    doctor = "doctor"
    slow = "slow"
    capture = "capture"
    bench = "bench"
    calibrate = "calibrate"


SchemaKindOption = Annotated[
    SchemaKind,
    choice_option(
        SchemaKind,
        "--of",
        help="Print the schema of scenario files (`scenario`), or of a command's output with "
        "--format json (for example `check`).",
        metavar="NAME",
    ),
]
InstallOption = Annotated[
    bool,
    typer.Option("--install", help="Write the schema and editor settings into FOLDER."),
]
FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="Folder for --install. [default: the current one]",
        show_default=False,
    ),
]


def command(
    folder: FolderArgument = ".",
    of: SchemaKindOption = SchemaKind.scenario,
    install: InstallOption = False,
) -> None:
    """Print the JSON Schema of scenario files or of a command's output; --install sets up editors.

    \b
    Example: distsim schema > distsim.schema.json
    Example: distsim schema --install
    Example: distsim schema --of simulate
    """
    from distsim.common.errors import UsageError
    from distsim.scenario import json_schema

    if install:
        if of is not SchemaKind.scenario:
            raise UsageError("--install supports only the schema of scenario files", "omit --of")
        return _install_schema(Path(folder))
    if folder != ".":
        is_command = folder in list(SchemaKind)
        raise UsageError(
            f"{folder}: a folder is valid only with --install",
            f"use `distsim schema --of {folder}`"
            if is_command
            else "use `distsim schema > FILE`, or add --install",
        )
    if of is SchemaKind.scenario:
        return console.out(console.to_json(json_schema()))
    from distsim.output.json.output_schemas import output_schema

    console.out(console.to_json(output_schema(of.value)))


def _install_schema(folder: Path) -> None:
    """Write the schema under .distsim/ and enter it in the settings of VS Code.

    Readers are the extension redhat.vscode-yaml and other users of yaml-language-server.
    """
    import json

    from distsim.common.errors import UsageError
    from distsim.scenario import json_schema

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", "name the folder of your scenarios")
    (folder / ".distsim").mkdir(exist_ok=True)
    (folder / ".vscode").mkdir(exist_ok=True)
    target = folder / ".distsim" / "scenario.schema.json"
    console.write_file(target, json.dumps(json_schema(), ensure_ascii=False) + "\n")
    settings = folder / ".vscode" / "settings.json"
    console.write_file(settings, _merged_settings(settings))
    console.note(f"wrote {target} and {settings}")
    console.note(
        "other editors: `# yaml-language-server: $schema=.distsim/scenario.schema.json` "
        "as the first line of a file"
    )


def _merged_settings(settings: Path) -> str:
    """The settings with an entry for the schema added; all others stay.

    Raises UsageError if they cannot be read.
    """
    import json

    from distsim.common.errors import UsageError

    try:
        content = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        schemas = content.setdefault("yaml.schemas", {})
    except (ValueError, AttributeError):
        entry = '"yaml.schemas": {".distsim/scenario.schema.json": "scenarios/**/*.yaml"}'
        raise UsageError(
            f"{settings} is not plain JSON (perhaps it has comments), so it was not changed",
            f"add `{entry}` manually",
        ) from None
    schemas.setdefault("./.distsim/scenario.schema.json", ["scenarios/**/*.yaml", "*.distsim.yaml"])
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
