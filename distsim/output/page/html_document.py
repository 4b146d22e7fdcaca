"""One HTML file that holds its data, its script and its style, and asks nobody for anything.

The policy in its head forbids every request; scripts run only with the digests that stand there, so
no text of a run can become one.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from distsim.analysis.run_comparison import RunComparison
from distsim.common.file_io import escape_control_characters
from distsim.output.page.payload import page_data
from distsim.output.page.report_run import ReportRun
from distsim.output.page.run_summary import headline
from distsim.output.text.finding_list import verdict_text
from distsim.output.text.simulation_report import simulation_report_text

#: Characters of a name in a title.
_MAX_TITLE_LENGTH = 80


def report_html(runs: Sequence[ReportRun], comparison: RunComparison | None = None) -> str:
    """The page of a run, or of two beside each other with what `compare` says of them. The same
    runs give the same text.
    """
    scripts = [read_asset("vendor", "uPlot.iife.min.js"), bundled_script()]
    title = " and ".join(_short_name(told.name) for told in runs)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {' '.join(_csp_digest(s) for s in scripts)}"
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n',
            f"<title>{_escaped_text(title)}: {_escaped_text(headline(runs[0]))}</title>\n",
            f'<link rel="icon" href="data:,">\n<style>\n{read_asset("vendor", "uPlot.min.css")}\n{read_asset("web", "style.css")}</style>\n',
            "</head>\n<body>\n",
            *(_header_html(told, "AB"[i] if len(runs) > 1 else "") for i, told in enumerate(runs)),
            '<div id="page"></div>\n',
            _no_script_html(runs),
            f'<script type="application/octet-stream" id="data">{page_data(runs, comparison)}</script>\n',
            *(f"<script>{text}</script>\n" for text in scripts),
            "</body>\n</html>\n",
        ]
    )


def _csp_digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _short_name(name: str) -> str:
    return name if len(name) <= _MAX_TITLE_LENGTH else name[: _MAX_TITLE_LENGTH - 1] + "…"


def _escaped_text(text: str) -> str:
    """A text of a run as HTML: what turns the direction of writing is shown, not obeyed."""
    return escape(escape_control_characters(text, one_line=True))


def _header_html(told: ReportRun, side: str) -> str:
    """Outcome and verdict, there before any script runs."""
    verdict = f"; {verdict_text(told.verdict)}" if told.verdict is not None else ""
    good = told.outcome == "completes" and (
        told.verdict is None or told.verdict.verdict in ("ok", "leak")
    )
    mark, state = ("✓", "good") if good else ("✕", "bad")
    tag = f'<span class="side">{side}</span> ' if side else ""
    return (
        f'<header class="verdict {state}"><div class="mark" aria-hidden="true">{mark}</div><div>'
        f'<h1 dir="auto">{tag}<bdi>{_escaped_text(_short_name(told.name))}</bdi></h1>'
        f'<p class="outcome"><strong>{_escaped_text(headline(told))}</strong>{_escaped_text(verdict)}</p></div></header>\n'
    )


def _no_script_html(runs: Sequence[ReportRun]) -> str:
    """The report as text, for whoever runs no script."""
    texts = [
        simulation_report_text(told.simulation) for told in runs if told.simulation is not None
    ]
    return "".join(
        f'<details class="plain"><summary>The report as text</summary><pre>{escape(escape_control_characters(t))}</pre></details>\n'
        for t in texts
    )


# --- the page's own script: the modules of `web/` as one, in the order in which they need each other ---
#: What a module may say of others: `import { a, b } from "./other.js";` on lines of its own,
#: `export` before a declaration.
_IMPORT_LINE = re.compile(r'^import \{[^}]*\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT_KEYWORD = re.compile(r"^export (?=(?:async )?(?:function|const|class) )", re.MULTILINE)
ENTRY_MODULE = "app"


def read_asset(folder: str, name: str) -> str:
    """The text of a file beside this one."""
    return files("distsim.output.page").joinpath(folder, name).read_text(encoding="utf-8")


def bundled_script() -> str:
    """All modules that `app.js` needs, as one function that leaves no name behind."""
    texts: dict[str, str] = {}
    _load_module(ENTRY_MODULE, texts)
    body = "\n".join(_EXPORT_KEYWORD.sub("", _IMPORT_LINE.sub("", text)) for text in texts.values())
    return f'(function () {{\n"use strict";\n{body}\n}})();\n'


def _load_module(name: str, texts: dict[str, str]) -> None:
    """A module behind those that it needs."""
    if name in texts:
        return
    text = read_asset("web", f"{name}.js")
    for needed in _IMPORT_LINE.findall(text):
        _load_module(needed, texts)
    texts[name] = text
