"""The HTML report of one or two runs: a self-contained file for a browser
(docs/how-to/share-a-report.md).
"""

from distsim.output.page.html_document import report_html
from distsim.output.page.report_run import (
    ReportRun,
    report_run_from_simulation,
    report_run_from_trace,
    report_runs,
)

__all__ = [
    "ReportRun",
    "report_html",
    "report_run_from_simulation",
    "report_run_from_trace",
    "report_runs",
]
