"""SARIF 2.1.0: what the standard requires of a log, read from the standard's own tables (section 3)
and held by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from distsim.findings.codes import CODES
from distsim.output.json.sarif import check_sarif, file_uri
from distsim.scenario import loads
from distsim.simulation.check_scenario import NOT_COVERED, CheckResult, check_file, check_scenario

LEVELS = {"none", "note", "warning", "error"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenarios of the findings, and a file that can't be read."""
    bad = tmp_path_factory.mktemp("bad") / "two words.yaml"
    bad.write_text("world: 2\nprogram:\n  - sned: {}\n", encoding="utf-8")
    files = [*sorted((ROOT / "scenarios" / "findings").glob("*.yaml")), bad]
    plain: dict[str, Any] = json.loads(
        json.dumps(check_sarif([check_file(path) for path in files], "1.2.3", NOT_COVERED))
    )
    return plain


def physical(location: dict[str, Any]) -> None:
    """3.29 physicalLocation: an artifact (3.4) with a URI reference, a region (3.30) that counts
    from 1.
    """
    place = location["physicalLocation"]
    assert urlparse(place["artifactLocation"]["uri"]).scheme in ("", "file")
    assert " " not in place["artifactLocation"]["uri"]
    assert set(place) <= {"artifactLocation", "region"}
    if "region" in place:
        assert place["region"]["startLine"] >= 1
        assert place["region"]["startColumn"] >= 1


def test_the_sarif_log_has_the_required_properties(log: dict[str, Any]) -> None:
    """3.13 sarifLog: version and runs; 3.14 run: tool; 3.19 toolComponent: name; 3.20 invocation:
    executionSuccessful.
    """
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["semanticVersion"]) == ("distsim", "1.2.3")
    assert all(what in driver["fullDescription"]["text"] for what in NOT_COVERED)
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")


def test_every_rule_links_its_page_as_help(log: dict[str, Any]) -> None:
    """3.49 reportingDescriptor: id; 3.11 multiformatMessageString: text."""
    rules = log["runs"][0]["tool"]["driver"]["rules"]

    assert [rule["id"] for rule in rules] == sorted({rule["id"] for rule in rules})
    for rule in rules:
        info = CODES[rule["id"]]
        assert rule["help"]["text"] == info.remedy
        assert info.what in rule["help"]["markdown"]
        assert rule["shortDescription"]["text"] == info.title
        assert rule["defaultConfiguration"]["level"] == info.severity
        assert rule["name"].isalnum()


def test_every_result_names_its_rule_level_and_place(log: dict[str, Any]) -> None:
    """3.27 result: message is required; ruleIndex points at the rule of ruleId; related locations
    have ids of their own.
    """
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]

    assert len(run["results"]) > 50
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in LEVELS
        assert result["message"]["text"]
        assert len(result["locations"]) == 1
        related = result.get("relatedLocations", [])
        for location in [*result["locations"], *related]:
            physical(location)
        assert len({location["id"] for location in related}) == len(related)


def test_an_unreadable_file_is_a_notification_of_a_failed_execution(
    log: dict[str, Any],
) -> None:
    """3.58 notification: message is required."""
    (invocation,) = log["runs"][0]["invocations"]
    (notification,) = invocation["toolExecutionNotifications"]

    assert invocation["executionSuccessful"] is False
    assert notification["level"] == "error"
    assert notification["message"]["text"]
    physical(notification["locations"][0])
    assert notification["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith(
        "two%20words.yaml"
    )


def test_a_clean_check_is_a_log_without_results() -> None:
    clean: CheckResult = check_scenario(loads("world: 2\nprogram:\n  - barrier\n", file="a.yaml"))
    (run,) = check_sarif([clean], "1.0.0")["runs"]

    assert run["results"] == []
    assert run["invocations"][0]["executionSuccessful"] is True


@pytest.mark.parametrize(
    ("path", "expected"), [("a/b c.yaml", "a/b%20c.yaml"), ("/x/y.yaml", "file:///x/y.yaml")]
)
def test_paths_become_uri_references(path: str, expected: str) -> None:
    assert file_uri(path) == expected
