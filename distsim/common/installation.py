"""How to install an optional part of distsim: the command that a remedy recommends.

The distribution is called `torch-distsim`. The name `distsim` on the public Python index belongs to
an unrelated project, so no text may recommend installing `distsim`.
"""

from __future__ import annotations

from pathlib import Path

DISTRIBUTION = "torch-distsim"


def install_command(extra: str) -> str:
    """The command that installs an extra: from the checkout if this is one, else from the index."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
