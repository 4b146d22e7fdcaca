"""docs/reference/operations: an index, and a page for each family of operations.

Fields that several operations share are described once, on the index page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distsim.cli.generated_docs.layout import (
    bullet,
    default_text,
    markdown_table,
    page,
    short_type,
    wrapped,
)
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.torch_arguments import torch_argument_names
from distsim.operations.registry import OPERATIONS
from distsim.scenario.format.schema.key_reference import FormatKey, format_keys

FOLDER = "reference/operations"
#: A field is common if so many operations have it with the same meaning.
_COMMON_AFTER = 3
#: File name of each family -> title.
_FAMILIES = {
    "messages": "Messages",
    "collectives": "Collectives",
    "coalesced": "Coalesced collectives",
    "one_sided": "One-sided operations and signals",
    "groups": "Process groups",
    "local": "Local operations",
}
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


def operation_pages() -> dict[str, str]:
    """Path in docs/ -> text."""
    by_family: dict[str, list[str]] = defaultdict(list)
    for name, operation in OPERATIONS.items():
        by_family[_family(operation)].append(name)
    found = {f"{FOLDER}/index.md": _index_page(by_family)}
    for family, title in _FAMILIES.items():
        paragraphs: list[str] = []
        for name in by_family[family]:
            paragraphs += _operation_section(name)
        found[f"{FOLDER}/{family}.md"] = page(title, *paragraphs)
    return found


def _family(operation: type[Operation]) -> str:
    if operation.signals or operation.kind == "remote":
        return "one_sided"
    if operation.coalesces is not None:
        return "coalesced"
    families = {"p2p": "messages", "batch": "messages", "collective": "collectives"}
    return families.get(operation.kind, "groups" if operation.kind == "group" else "local")


def _index_page(by_family: dict[str, list[str]]) -> str:
    rows = [
        (f"[`{name}`]({family}.md#{name})", OPERATIONS[name].words.after)
        for family in _FAMILIES
        for name in by_family[family]
    ]
    common = sorted(_common_fields().values(), key=lambda key: key.name)
    common_rows = [
        (f"`{key.name}`", key.about, short_type(key.kind), default_text(key)) for key in common
    ]
    return page(
        "Operations",
        wrapped(
            "Names and arguments are those of torch.distributed. [Backends](../backends.md) lists "
            "what each backend supports. Object collectives (such as all_gather_object), batches "
            "of collectives and checkpoints are "
            "[strategies](../scenario/strategies/composite_calls.md)."
        ),
        markdown_table(("operation", "result"), rows),
        "## Common fields",
        markdown_table(("field", "meaning", "type", "default"), common_rows),
    )


def _fields(name: str) -> list[FormatKey]:
    """The fields of an operation in a file, required ones first."""
    keys = [key for key in format_keys().values() if key.path.startswith(f"{name}.")]
    return sorted(keys, key=lambda key: not key.required)


def _identity(key: FormatKey) -> tuple[str, ...]:
    return (key.name, key.about, key.kind, key.default, str(key.required))


def _common_fields() -> dict[tuple[str, ...], FormatKey]:
    """(name, meaning, type, default) -> the field, for those that several operations share."""
    found: dict[tuple[str, ...], list[FormatKey]] = defaultdict(list)
    for name in OPERATIONS:
        for key in _fields(name):
            found[_identity(key)].append(key)
    return {k: keys[0] for k, keys in found.items() if len(keys) >= _COMMON_AFTER}


def _operation_section(name: str) -> Iterator[str]:
    operation = OPERATIONS[name]
    words = operation.words
    yield f"## {name}"
    yield _signature_line(operation)
    descriptions = {"Before": words.before, "After": words.after, "Waiting": words.waits}
    yield from (wrapped(f"**{title}.** {text}") for title, text in descriptions.items() if text)
    if words.notes:
        yield "\n".join(bullet(note) for note in words.notes)
    yield from _field_paragraphs(operation)
    yield f"```yaml\n{words.example.rstrip()}\n```"
    yield f"```python\n{words.torch}\n```"
    pictured = name if name in PICTURED_OPERATIONS else PICTURE_OF_OPERATION.get(name)
    if pictured is not None:
        yield f"![{pictured}: data before and after](../../../viz/{pictured}_operation.svg)"


def _signature_line(operation: type[Operation]) -> str:
    signature = f"`{operation.words.signature}`"
    if not operation.aliases:
        return signature
    aliases = ", ".join(f"`{alias}`" for alias in operation.aliases)
    return f"{signature} (alias: {aliases})"


def _field_paragraphs(operation: type[Operation]) -> Iterator[str]:
    """A table of the operation's own fields, and the names of the common ones."""
    common = _common_fields()
    keys = _fields(operation.op)
    torch_names = _torch_names(operation, [key.name for key in keys])
    rows = []
    for key in keys:
        if _identity(key) not in common:
            torch_name = torch_names.get(key.name, "")
            torch_cell = f"`{torch_name}`" if torch_name and torch_name != key.name else ""
            kind = short_type(key.kind)
            rows.append((f"`{key.name}`", torch_cell, key.about, kind, default_text(key)))
    if rows:
        yield markdown_table(("field", "in torch", "meaning", "type", "default"), rows)
    shared = [key.name for key in keys if _identity(key) in common]
    if shared:
        listed = ", ".join(f"`{field}`" for field in shared)
        yield wrapped(f"[Common fields](index.md#common-fields): {listed}.")
    if not keys:
        yield "No fields."


def _torch_names(operation: type[Operation], fields: list[str]) -> dict[str, str]:
    """Field -> argument of torch, where the signature has it under another name."""
    found: dict[str, str] = {}
    for argument, field in torch_argument_names(operation.op, set(fields)).items():
        if argument in operation.words.signature:
            found.setdefault(field, argument)
    return found


__all__ = ["operation_pages"]
