"""The command `distsim`, and `python -m distsim`."""

from __future__ import annotations

try:
    from distsim.cli.process import main
except KeyboardInterrupt:  # in the first moments, while modules load
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
