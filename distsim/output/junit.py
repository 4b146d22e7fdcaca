"""The results of `distsim test` as JUnit XML, which CI systems show as test reports.

Each file is a test case; a file without `expect` is a skipped one. Format: the JUnit schema as
GitLab, Jenkins and GitHub actions read it (testsuites, testsuite, testcase, failure, error).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from distsim.simulation.expectations import ScenarioTestResult

#: Characters that XML 1.0 cannot contain, not even as references.
_INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def expectations_junit(results: Sequence[ScenarioTestResult]) -> str:
    """The results as one test suite."""
    statuses = Counter(result.status for result in results)
    counts = {
        "tests": str(len(results)),
        "failures": str(statuses["failed"]),
        "errors": str(statuses["unreadable"]),
        "skipped": str(statuses["no expect"]),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "distsim", **counts})
    for result in results:
        _add_case(suite, result)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}'


def _add_case(suite: ElementTree.Element, result: ScenarioTestResult) -> None:
    file = _xml_text(result.file)
    attributes = {"classname": "distsim.scenario", "name": file, "file": file}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if result.status == "failed":
        lines = [_xml_text(str(difference)) for difference in result.differences]
        ElementTree.SubElement(case, "failure", {"message": lines[0]}).text = "\n".join(lines)
    elif result.status == "unreadable":
        text = _xml_text(str(result.error))
        message = text.partition("\n")[0]
        ElementTree.SubElement(case, "error", {"message": message}).text = text
    elif result.status == "no expect":
        ElementTree.SubElement(case, "skipped", {"message": "the scenario has no expect"})


def _xml_text(text: str) -> str:
    """The text with escapes such as ``\\x1b`` for characters that XML cannot contain."""
    return _INVALID_IN_XML.sub(lambda match: ascii(match[0])[1:-1], text)
