"""The report that one opens in a browser: a run, or two, in one HTML file that asks nobody for anything (docs/report.md)."""

from distsim.report.page import report_page
from distsim.report.subject import Told, told_of, told_of_trace

__all__ = ["Told", "report_page", "told_of", "told_of_trace"]
