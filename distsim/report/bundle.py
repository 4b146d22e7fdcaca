"""The page's own script: the modules of `web/` as one, in the order in which they need each other."""

from __future__ import annotations

import re
from importlib.resources import files

#: What a module may say of others: `import { a, b } from "./other.js";` on lines of its own, `export` before a declaration.
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) )", re.MULTILINE)
FIRST = "app"


def read(folder: str, name: str) -> str:
    """The text of a file beside this one."""
    return files("distsim.report").joinpath(folder, name).read_text(encoding="utf-8")


def script() -> str:
    """All modules that `app.js` needs, as one function that leaves no name behind."""
    texts: dict[str, str] = {}
    _load(FIRST, texts)
    body = "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts.values())
    return f'(function () {{\n"use strict";\n{body}\n}})();\n'


def _load(name: str, texts: dict[str, str]) -> None:
    """A module behind those that it needs."""
    if name in texts:
        return
    text = read("web", f"{name}.js")
    for needed in _IMPORT.findall(text):
        _load(needed, texts)
    texts[name] = text
