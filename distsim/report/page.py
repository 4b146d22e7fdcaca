"""One HTML file that holds its data, its script and its style, and asks nobody for anything.

The policy in its head forbids every request; scripts run only with the digests that stand there, so no text of a run can become one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from distsim.compare import Comparison
from distsim.files import visible
from distsim.report.data import page_data
from distsim.report.facts import headline
from distsim.report.subject import Told
from distsim.views.findings import verdict_words
from distsim.views.text import report

#: Characters of a name in a title.
_MOST_TITLE = 80


def report_page(runs: Sequence[Told], comparison: Comparison | None = None) -> str:
    """The page of a run, or of two beside each other with what `compare` says of them. The same runs give the same text."""
    scripts = [read("vendor", "uPlot.iife.min.js"), script()]
    title = " and ".join(_short(told.name) for told in runs)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(_digest(s) for s in scripts)}"
    return "".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n',
        f"<title>{_text(title)}: {_text(headline(runs[0]))}</title>\n",
        f'<link rel="icon" href="data:,">\n<style>\n{read("vendor", "uPlot.min.css")}\n{read("web", "style.css")}</style>\n',
        "</head>\n<body>\n", *(_head(told, "AB"[i] if len(runs) > 1 else "") for i, told in enumerate(runs)),
        '<div id="page"></div>\n', _without_script(runs),
        f'<script type="application/octet-stream" id="data">{page_data(runs, comparison)}</script>\n',
        *(f"<script>{text}</script>\n" for text in scripts), "</body>\n</html>\n",
    ])  # fmt: skip


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _short(name: str) -> str:
    return name if len(name) <= _MOST_TITLE else name[: _MOST_TITLE - 1] + "…"


def _text(text: str) -> str:
    """A text of a run as HTML: what turns the direction of writing is shown, not obeyed."""
    return escape(visible(text, one_line=True))


def _head(told: Told, side: str) -> str:
    """Outcome and verdict, there before any script runs."""
    verdict = f"; {verdict_words(told.verdict)}" if told.verdict is not None else ""
    good = told.outcome == "completes" and (told.verdict is None or told.verdict.verdict in ("ok", "leak"))
    mark, state = ("✓", "good") if good else ("✕", "bad")
    tag = f'<span class="side">{side}</span> ' if side else ""
    return (
        f'<header class="verdict {state}"><div class="mark" aria-hidden="true">{mark}</div><div>'
        f'<h1 dir="auto">{tag}<bdi>{_text(_short(told.name))}</bdi></h1>'
        f'<p class="outcome"><strong>{_text(headline(told))}</strong>{_text(verdict)}</p></div></header>\n'
    )


def _without_script(runs: Sequence[Told]) -> str:
    """The report as text, for whoever runs no script."""
    texts = [report(told.simulation) for told in runs if told.simulation is not None]
    return "".join(
        f'<details class="plain"><summary>The report as text</summary><pre>{escape(visible(t))}</pre></details>\n' for t in texts
    )


# --- the page's own script: the modules of `web/` as one, in the order in which they need each other ---
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
