"""Every command line in README, CONTRIBUTING, docs/ and the help of the commands, with its page.

A frame without a language, or of `text`, `sh` or `console`, holds lines; so does a span of code in
a sentence that begins with `distsim `. In spans, words in capitals are
placeholders.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_FRAME = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`(distsim [a-z]+(?: [^`]*)?)`")
#: First words of a command line.
_TOOL = re.compile(
    r"(?:\$ |  Example: )?((?:distsim|python3?|\.venv/bin/\w+|traces/\w+\.sh)(?: .*)?)$"
)


class Line(NamedTuple):
    """A command line: its page, its words as a shell has them, and whether it stands in a
    sentence.
    """

    page: str
    text: str
    span: bool = False

    @property
    def words(self) -> list[str]:
        """Without a comment, what follows `>` or `|`, and the shell's own words."""
        found = shlex.split(self.text, comments=True)
        ends = [k for k, word in enumerate(found) if word in (">", "|", "&&")]
        return found[: ends[0]] if ends else found


def frames() -> list[Line]:
    """The lines that stand in frames of their own, each text once, in the order of the pages."""
    found: dict[str, Line] = {}
    for page in PAGES:
        for kind, body in _FRAME.findall(page.read_text(encoding="utf-8")):
            lines = (
                {"console": body.splitlines()[:1]}.get(kind, _joined(body))
                if kind in ("", "text", "sh", "console")
                else []
            )
            for line in lines:
                match = _TOOL.match(line)
                if match and not line.startswith("distsim: "):
                    found.setdefault(
                        match[1].split("  #")[0].strip(),
                        Line(page.name, match[1].split("  #")[0].strip()),
                    )
    return list(found.values())


def spans() -> list[Line]:
    """The commands that sentences speak of, each once."""
    found: dict[str, Line] = {}
    for page in PAGES:
        for text in _SPAN.findall(_FRAME.sub("", page.read_text(encoding="utf-8"))):
            found.setdefault(text, Line(page.name, text, span=True))
    return list(found.values())


def _joined(body: str) -> list[str]:
    return body.replace("\\\n", " ").splitlines()


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for one in [*frames(), *spans()]:
        sys.stdout.write(f"{one.page:20} {'…' if one.span else ' '} {one.text}\n")
