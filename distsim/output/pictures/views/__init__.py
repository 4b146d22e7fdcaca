"""The views: each module in this folder is one, and goes by the module's name. Its `VIEW` says all
that others need to know.
"""

from pkgutil import iter_modules


def view_names() -> tuple[str, ...]:
    """All views."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))
