"""The command `distsim`, and `python -m distsim`."""

from __future__ import annotations

from distsim.cli.main import main

if __name__ == "__main__":
    main()
