"""docs/reference/scenario: a page for each top-level key and for each family of strategies.

Fields that several strategies share are described once, on the index page of the strategies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from distsim.cli.generated_docs.layout import key_facts, key_table, markdown_table, page, wrapped
from distsim.common import units
from distsim.scenario.format.schema.key_reference import FormatKey, format_keys
from distsim.scenario.strategies import STRATEGIES

FOLDER = "reference/scenario"
#: A field is common if so many strategies have it with the same meaning.
_COMMON_AFTER = 3
#: Package of `distsim.scenario.strategies` -> title of the page.
_FAMILY_TITLES = {
    "ddp": "DataParallel and DistributedDataParallel",
    "fsdp": "Fully sharded data parallelism",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron",
    "pipeline": "Pipelines",
    "intra_layer": "Tensor, context and expert parallelism",
    "training_step": "Whole training steps",
    "torchft": "Fault-tolerant training",
    "serving": "Inference and weight transfer",
    "composite_calls": "Composite calls",
}
_TYPES = (
    ("expression", "a number or an expression over rank, world_size and variables"),
    ("boolean", "`true` or `false`"),
    ("ranks", "a rank, a list of ranks, or a condition such as `stage == 0`"),
    ("reference", "`name` or `name@index`"),
    ("tensor", "a reference, or an inline `{shape, dtype}`"),
    ("…, by rank", "one value, or one for each rank: `{0: 3, else: 2}`"),
)


def scenario_pages() -> dict[str, str]:
    """Path in docs/ -> text."""
    found = {f"{FOLDER}/index.md": _index_page()}
    for key in _top_level_keys():
        found[f"{FOLDER}/{key.path}.md"] = _key_page(key)
    found[f"{FOLDER}/strategies/index.md"] = _strategies_index()
    for family, names in _families().items():
        found[f"{FOLDER}/strategies/{family}.md"] = _family_page(family, names)
    return found


def _top_level_keys() -> list[FormatKey]:
    return [key for key in format_keys().values() if "." not in key.path]


def _index_page() -> str:
    rows = [
        (f"[`{key.path}`]({key.path}.md)", key.about, "yes" if key.required else "")
        for key in _top_level_keys()
    ]
    return page(
        "Scenario file",
        wrapped(
            "A scenario is one YAML file. `distsim explain world.nodes` describes a single key, "
            "and `distsim schema` prints a JSON Schema for editors."
        ),
        markdown_table(("key", "meaning", "required"), rows),
        wrapped(
            "Entries of `program` are [operations](../operations/index.md), "
            "[strategies](strategies/index.md), blocks and repeats."
        ),
        "## Types",
        markdown_table(("type", "accepts"), [*_TYPES, *_quantity_rows()]),
    )


def _quantity_rows() -> Iterator[tuple[str, str]]:
    """Types with a unit, each with its units."""
    kinds = defaultdict(list)
    for name, unit in units.UNIT_BY_NAME.items():
        # The Greek letter is the same unit as the micro sign.
        if not name.startswith("μ"):
            kinds[unit.kind].append(f"`{name}`")
    for kind, names in kinds.items():
        short = {"a duration": "duration", "a size": "size", "a bandwidth": "bandwidth"}.get(
            kind, "FLOP rate" if "rate" in kind else "FLOP count"
        )
        yield short, f"a number with a unit ({', '.join(names)}), or an expression with units"


def _key_page(key: FormatKey) -> str:
    prefix = f"{key.path}."
    inside = [
        inner
        for inner in format_keys().values()
        if inner.path.startswith((prefix, f"{key.path}[]"))
    ]
    paragraphs = [wrapped(key.about), key_facts(key)]
    if inside:
        paragraphs += ["## Keys inside", *_path_notes(inside), key_table(inside)]
    return page(f"`{key.path}`", *paragraphs)


def _path_notes(keys: list[FormatKey]) -> Iterator[str]:
    """What the placeholders in the paths mean, if there are any."""
    if any("NAME" in key.path for key in keys):
        yield "`NAME` is a name of your choice."
    if any("[]" in key.path for key in keys):
        yield "`[]` is an item of a list."


# --- strategies ---
def _families() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, row in STRATEGIES.items():
        _, _, inside = row.__module__.partition(".strategies.")
        found[inside.partition(".")[0]].append(name)
    return dict(found)


def _fields(name: str) -> list[FormatKey]:
    return [key for key in format_keys().values() if key.path.startswith(f"{name}.")]


def _common_fields() -> dict[tuple[str, ...], FormatKey]:
    """(name, meaning, type, default) -> the field, for those that several strategies share."""
    found: dict[tuple[str, ...], list[FormatKey]] = defaultdict(list)
    for name in STRATEGIES:
        for key in _fields(name):
            found[_identity(key)].append(key)
    return {k: keys[0] for k, keys in found.items() if len(keys) >= _COMMON_AFTER}


def _identity(key: FormatKey) -> tuple[str, ...]:
    return (key.name, key.about, key.kind, key.default, str(key.required))


def _strategies_index() -> str:
    rows = [
        (f"[`{name}`]({family}.md#{name})", STRATEGIES[name].about)
        for family, names in _families().items()
        for name in names
    ]
    common = [
        key._replace(path=key.name)
        for key in sorted(_common_fields().values(), key=lambda k: k.name)
    ]
    return page(
        "Strategies",
        wrapped(
            "A strategy is an entry of `program` that expands into plain operations. "
            "`distsim expand FILE` prints them."
        ),
        markdown_table(("strategy", "meaning"), rows),
        "## Common fields",
        "Several strategies share these fields. Each page lists the ones that apply.",
        key_table(common),
    )


def _family_page(family: str, names: list[str]) -> str:
    title = _FAMILY_TITLES.get(family, family.replace("_", " ").capitalize())
    paragraphs: list[str] = []
    for name in names:
        paragraphs += _strategy_section(name)
    return page(title, *paragraphs)


def _strategy_section(name: str) -> Iterator[str]:
    common = _common_fields()
    own = [key for key in _fields(name) if _identity(key) not in common]
    shared = [key.name for key in _fields(name) if _identity(key) in common]
    yield f"## {name}"
    yield wrapped(STRATEGIES[name].about)
    if own:
        yield key_table(own, f"{name}.")
    if shared:
        listed = ", ".join(f"`{field}`" for field in shared)
        yield wrapped(f"[Common fields](index.md#common-fields): {listed}.")


__all__ = ["scenario_pages"]
