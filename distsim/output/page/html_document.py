"""Writes the self-contained HTML file: data, script and style.

The content security policy in its head forbids every request. It allows only scripts with the
listed digests, so no text of a run can become a script.
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
    """The page of one run, or of two runs with their comparison.

    The same runs give the same text. The content security policy allows only the embedded scripts,
    by their digests: texts of an untrusted trace can run nothing, and the page loads nothing.
    """
    scripts = [read_asset("vendor", "uPlot.iife.min.js"), bundled_script()]
    digests = " ".join(map(_csp_digest, scripts))
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {digests}"
    styles = f"{read_asset('vendor', 'uPlot.min.css')}\n{read_asset('web', 'style.css')}"
    title = " and ".join(_short_name(run.name) for run in runs)
    labels = ["A", "B"] if len(runs) > 1 else [""]
    headers = [_header_html(run, label) for run, label in zip(runs, labels, strict=True)]
    data = page_data(runs, comparison)
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{_escaped_text(title)}: {_escaped_text(headline(runs[0]))}</title>\n",
            f'<link rel="icon" href="data:,">\n<style>\n{styles}</style>\n',
            "</head>\n<body>\n",
            '<section class="outcomes" aria-label="Outcome">\n',
            *headers,
            "</section>\n",
            '<main id="page" tabindex="-1"></main>\n',
            _no_script_html(runs),
            f'<script type="application/octet-stream" id="data">{data}</script>\n',
            *(f"<script>{text}</script>\n" for text in scripts),
            "</body>\n</html>\n",
        ]
    )


def _csp_digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _short_name(name: str) -> str:
    return name if len(name) <= _MAX_TITLE_LENGTH else name[: _MAX_TITLE_LENGTH - 1] + "…"


def _escaped_text(text: str) -> str:
    """A text of a run as HTML. Control characters, also those for text direction, are escaped."""
    return escape(escape_control_characters(text, one_line=True))


def _header_html(report_run: ReportRun, side: str) -> str:
    """Outcome and verdict. They are visible before any script runs."""
    verdict = f"; {verdict_text(report_run.verdict)}" if report_run.verdict is not None else ""
    good = report_run.outcome == "completes" and (
        report_run.verdict is None or report_run.verdict.verdict in ("ok", "leak")
    )
    mark, state = ("✓", "good") if good else ("✕", "bad")
    tag = f'<span class="side">{side}</span> ' if side else ""
    return (
        f'<header class="verdict {state}"><div class="mark" aria-hidden="true">{mark}</div><div>'
        f'<h1 dir="auto">{tag}<bdi>{_escaped_text(_short_name(report_run.name))}</bdi></h1>'
        f'<p class="outcome"><strong>{_escaped_text(headline(report_run))}</strong>'
        f"{_escaped_text(verdict)}</p></div></header>\n"
    )


def _no_script_html(runs: Sequence[ReportRun]) -> str:
    """The text report, for browsers without scripts."""
    parts = []
    for run in runs:
        if run.simulation is not None:
            text = escape(escape_control_characters(simulation_report_text(run.simulation)))
            parts.append(
                '<details class="plain"><summary>Text report</summary>'
                f"<pre>{text}</pre></details>\n"
            )
    # A landmark, so that screen readers find the text.
    return f'<section aria-label="Text report">\n{"".join(parts)}</section>\n' if parts else ""


# --- the script of the page: the modules of `web/` joined in the order of their imports ---
#: Imports of modules are lines of the form `import { a, b } from "./other.js";`; exports are
#: `export` before a declaration.
_IMPORT_LINE = re.compile(r'^import \{[^}]*\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT_KEYWORD = re.compile(r"^export (?=(?:async )?(?:function|const|class) )", re.MULTILINE)
ENTRY_MODULE = "app"


def read_asset(folder: str, name: str) -> str:
    """The text of a file in a folder next to this module."""
    return files("distsim.output.page").joinpath(folder, name).read_text(encoding="utf-8")


def bundled_script() -> str:
    """All modules that `app.js` needs, as one function, so that no name becomes global."""
    texts: dict[str, str] = {}
    _load_module(ENTRY_MODULE, texts)
    body = "\n".join(_EXPORT_KEYWORD.sub("", _IMPORT_LINE.sub("", text)) for text in texts.values())
    return f'(function () {{\n"use strict";\n{body}\n}})();\n'


def _load_module(name: str, texts: dict[str, str]) -> None:
    """Load a module after the modules that it imports."""
    if name in texts:
        return
    text = read_asset("web", f"{name}.js")
    for needed in _IMPORT_LINE.findall(text):
        _load_module(needed, texts)
    texts[name] = text
