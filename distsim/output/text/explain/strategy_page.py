"""The page of `distsim explain STRATEGY`: its fields, and an example that the scenario reader
accepts.
"""

from __future__ import annotations

from distsim.output.text_layout import wrapped_lines
from distsim.scenario.format.schema.key_reference import format_keys
from distsim.scenario.strategies.base import Strategy

#: Fields that are optional by themselves, but one of several must be given: strategy -> the field
#: of the shortest form, and the alternative.
_ONE_OF_SEVERAL: dict[str, tuple[str, str]] = {
    "pipeline": ("backward", "or backward_input and backward_weight"),
    "tensor_parallel": ("forward", "or backward, or both"),
    "context_parallel": ("forward", "or backward, or both"),
    "ulysses": ("forward", "or backward, or both"),
    "expert_parallel": ("forward", "or backward, or both"),
}


def strategy_page(row: type[Strategy]) -> str:
    """What a strategy does, its required and optional fields, and an example."""
    required = required_fields(row)
    optional = [name for name in _field_names(row) if name not in required]
    lines = [
        f"{row.name}  (training strategy: expands into plain operations)",
        *wrapped_lines(row.about, "  "),
    ]
    if required:
        lines += ["", "Required fields", *_required_field_lines(row, required)]
    if optional:
        lines += ["", "Optional fields", *wrapped_lines(", ".join(optional), "  ")]
    lines += ["", "In a scenario", *example_lines(row), ""]
    lines += wrapped_lines(
        f"`distsim explain {row.name}.FIELD` explains a field. "
        "`distsim expand FILE` prints the operations of a scenario's strategies.",
        "",
    )
    return "\n".join(lines)


def required_fields(row: type[Strategy]) -> list[str]:
    """The fields that the shortest entry of a strategy has."""
    names = [info.alias or key for key, info in row.model_fields.items() if info.is_required()]
    if row.name in _ONE_OF_SEVERAL:
        names.append(_ONE_OF_SEVERAL[row.name][0])
    return names


def example_lines(row: type[Strategy]) -> list[str]:
    """The shortest entry of a strategy, as YAML; the values are the examples of its fields."""
    required = required_fields(row)
    if not required:
        return [f"  - {row.name}: {{}}"]
    keys = format_keys()
    fields = [f"      {name}: {keys[f'{row.name}.{name}'].example}" for name in required]
    return [f"  - {row.name}:", *fields]


def _field_names(row: type[Strategy]) -> list[str]:
    return [info.alias or key for key, info in row.model_fields.items()]


def _required_field_lines(row: type[Strategy], required: list[str]) -> list[str]:
    """Each field with its meaning, wrapped with a hanging indent."""
    width = max(map(len, required))
    one_of_several, alternative = _ONE_OF_SEVERAL.get(row.name, ("", ""))
    lines: list[str] = []
    for name in required:
        about = format_keys()[f"{row.name}.{name}"].about
        if name == one_of_several:
            about = f"{about.rstrip('.')} ({alternative})."
        lines += wrapped_lines(f"{name.ljust(width)}  {about}", "  ", " " * (width + 4))
    return lines
