"""The JSON that a command prints after the output of the script that it runs."""

from __future__ import annotations

import json
from typing import Any


def printed_json(output: str) -> dict[str, Any] | None:
    """The last JSON object that begins at the start of a line; None if there is none."""
    start = output.rfind("\n{\n") + 1
    try:
        data = json.loads(output[start:])
    except ValueError:
        return None
    return data if isinstance(data, dict) else None
