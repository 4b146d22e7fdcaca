"""The views. Each module in this folder is one view, and its `VIEW` describes it.

The name of a view is the name of its module, with `-` for `_`.
"""

from pkgutil import iter_modules


def view_names() -> tuple[str, ...]:
    """The names of all views, sorted."""
    return tuple(sorted(module.name.replace("_", "-") for module in iter_modules(__path__)))
