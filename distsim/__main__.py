"""The command `distsim`, and `python -m distsim`."""

from __future__ import annotations

try:
    from distsim.cli.process import main
except KeyboardInterrupt:  # in the first moments, while modules load
    import os

    os.write(2, b"interrupted\n")
    os._exit(130)

if __name__ == "__main__":
    main()
