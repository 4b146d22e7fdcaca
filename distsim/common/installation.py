"""How to install an optional part of distsim: the command that a remedy recommends.

The distribution is called `torch-distsim`. The name `distsim` on the public Python index belongs to
an unrelated project, so no text may recommend installing `distsim`.
"""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "torch-distsim"


def install_command(extra: str) -> str:
    """The command that installs an extra: in the clone if distsim comes from one, else by name."""
    if _is_checkout() or _was_installed_from_a_folder():
        return f"pip install -e '.[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def _is_checkout() -> bool:
    return (Path(__file__).parents[2] / "pyproject.toml").is_file()


def _was_installed_from_a_folder() -> bool:
    """Whether pip installed this package from a folder, as PEP 610 (direct_url.json) records."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return False
    return origin is not None and "dir_info" in origin
