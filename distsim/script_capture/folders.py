"""Folders of distsim's own files, which are never part of the user's program."""

from __future__ import annotations

import os
from typing import Final

#: With a separator at the end, to be compared with the start of a path.
CAPTURE_FOLDER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
#: distsim as a whole. A script may lie in another folder of the name "distsim".
PACKAGE_FOLDER: Final = os.path.join(os.path.dirname(os.path.dirname(CAPTURE_FOLDER)), "")
