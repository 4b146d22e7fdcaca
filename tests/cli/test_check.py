"""`distsim check`: many files, their verdicts in every format, and the exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.cli.commands import check as check_command
from distsim.cli.shared import console, progress
from distsim.common.errors import ScenarioErrors
from distsim.output.text.check_results import check_json
from distsim.scenario import loads
from distsim.simulation.check_scenario import CheckResult, check_file, check_scenario
from tests.support.check_programs import HANG, LEAK, OK, ORDER
from tests.support.harness import Cli

KEYS = [
    "file",
    "verdict",
    "complete",
    "explored",
    "depends_on",
    "ranks",
    "core",
    "readings",
    "stuck_sets",
    "schedule",
    "culprits",
    "profiles",
    "findings",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "hang": HANG,
        "leak": LEAK,
        "ok": OK,
        "order": ORDER,
        "bad": "world: 2\nprogram:\n  - sned: {}\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def as_json(cli: Cli, *args: object) -> Any:
    return json.loads(cli("check", *args, "--format", "json").stdout)


def test_json_has_the_documented_keys_in_order(cli: Cli, folder: Path) -> None:
    found = as_json(cli, folder / "hang.yaml")

    assert (found["schema_version"], len(found["files"])) == (1, 1)
    (one,) = found["files"]
    assert list(one) == KEYS
    assert (one["verdict"], one["depends_on"], one["ranks"], one["core"]) == (
        "deadlock",
        "buffering",
        [0, 1],
        [0, 1],
    )
    assert one["readings"] == {
        "rendezvous": "always",
        "early": "always",
        "buffered": "never",
        "mixed": "sometimes",
    }
    assert (one["stuck_sets"], one["schedule"], one["culprits"], one["complete"]) == (
        [[0, 1]],
        None,
        [],
        True,
    )
    assert list(one["profiles"]) == list(BACKEND_PROFILES)
    assert one["profiles"]["gloo"] == {"outcome": "hangs", "possible": ["hangs"], "ranks": [0, 1]}
    assert set(one["profiles"]["nccl"]["variants"]) == {"lazy", "eager"}
    assert (one["profiles"]["mpi"]["outcome"], one["profiles"]["mpi"]["flips_at_nbytes"]) == (
        "completes",
        4096,
    )
    finding = one["findings"][0]
    assert (finding["code"], finding["severity"], finding["ranks"]) == ("DS301", "error", [0, 1])
    assert finding["places"][0] == {
        "rank": 0,
        "file": str(folder / "hang.yaml"),
        "line": 5,
        "column": 5,
        "op": "send",
    }


def test_an_unreadable_file_is_reported_and_the_others_are_checked(cli: Cli, folder: Path) -> None:
    done = cli("check", folder, folder / "gone.yaml", "--format", "json")
    files = {Path(one["file"]).name: one for one in json.loads(done.stdout)["files"]}

    assert done.returncode == 2
    assert list(files) == [
        "bad.yaml",
        "hang.yaml",
        "leak.yaml",
        "ok.yaml",
        "order.yaml",
        "gone.yaml",
    ]
    (error,) = files["bad.yaml"]["errors"]
    assert (error["line"], error["column"]) == (3, 5)
    assert "send" in error["message"] or "sned" in error["message"]
    assert list(files["gone.yaml"]) == ["file", "errors"]
    assert files["ok.yaml"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("names", "more", "status"),
    [
        (["ok"], [], 0),
        (["hang"], [], 1),
        (["ok", "hang"], [], 1),
        (["leak"], [], 0),
        (["leak"], ["--strict"], 1),
        (["leak"], ["--backend", "gloo"], 1),  # the request is dropped, and gloo cancels it
        (["hang", "bad"], [], 2),
        (["ok"], ["--set", "nothing.at.all=3"], 2),
    ],
)
def test_exit_status_follows_the_worst_finding(
    cli: Cli, folder: Path, names: list[str], more: list[str], status: int
) -> None:
    assert cli("check", *(folder / f"{name}.yaml" for name in names), *more).returncode == status


def test_text_fits_80_columns_and_states_what_is_not_covered(cli: Cli, root: Path) -> None:
    findings = sorted((root / "scenarios" / "findings").glob("*.yaml"))
    some = {*findings[::6], root / "scenarios" / "findings" / "ds301_repaired.yaml"}
    done = cli("check", *(file.relative_to(root) for file in sorted(some)), "scenarios/hybrid.yaml")

    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Not covered:\n  - kernels of several communicators" in done.stdout
    assert "scenarios/findings/ds301_repaired.yaml: verdict ok" in done.stdout


def test_simulate_replays_the_schedule_of_a_check(cli: Cli, folder: Path) -> None:
    """With its own times the program completes, because rank 1 comes late. In the order that the
    check found, rank 0 raises.
    """
    file, order = folder / "order.yaml", folder / "order.json"
    found = cli("check", file, "--format", "json").stdout
    (one,) = json.loads(found)["files"]
    assert (one["verdict"], one["depends_on"]) == ("deadlock", "schedule")
    order.write_text(found, encoding="utf-8")

    free = json.loads(cli("simulate", file, "--format", "json").stdout)
    led = json.loads(cli("simulate", file, "--event-order", order, "--format", "json").stdout)

    assert (free["outcome"], led["outcome"]) == ("completes", "raises")
    order.write_text(json.dumps(one["schedule"]), encoding="utf-8")
    assert (
        json.loads(cli("simulate", file, "--event-order", order, "--format", "json").stdout)[
            "outcome"
        ]
        == "raises"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda s: s.update(
                choices=[
                    {"receive": {"rank": 9, "position": 0}, "takes": {"rank": 1, "position": 0}}
                ]
            ),
            "does not exist",
        ),
        (
            lambda s: s["choices"][0].update(takes={"rank": 2, "position": 7, "part": -1}),
            "does not exist",
        ),
        (lambda s: s.update(reading="loud"), "no schedule"),
    ],
)
def test_a_schedule_that_does_not_match_is_bad_input(
    cli: Cli, folder: Path, change: Any, says: str
) -> None:
    file, order = folder / "order.yaml", folder / "order.json"
    schedule = as_json(cli, file)["files"][0]["schedule"]
    change(schedule)
    order.write_text(json.dumps(schedule), encoding="utf-8")
    done = cli("simulate", file, "--event-order", order)

    assert done.returncode == 2
    assert says in done.stderr


def test_github_annotations_are_escaped_and_placed_at_the_first_line(
    cli: Cli, folder: Path
) -> None:
    lines = cli(
        "check", folder / "hang.yaml", folder / "bad.yaml", "--format", "github"
    ).stdout.splitlines()
    file = str(folder / "hang.yaml").replace("%", "%25").replace(":", "%3A").replace(",", "%2C")

    assert lines[0].startswith(
        f"::error file={file},line=5,col=5,title=DS301 ranks wait for each other in a cycle::ranks 0 → 1 → 0"
    )
    assert "%0A" in lines[0]
    assert all(line.startswith("::") for line in lines)
    assert any("title=cannot be read::" in line and "line=3,col=5" in line for line in lines)


@pytest.mark.parametrize("patience_s", [0.0, 86_400.0])
def test_a_progress_bar_appears_only_on_a_terminal_and_only_for_long_checks(
    patience_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes to standard error, and all items come through, in order."""
    monkeypatch.setattr(console, "uses_colour", lambda stream: True)
    monkeypatch.setattr(console, "PROGRESS_DELAY_S", patience_s)
    monkeypatch.setenv("FORCE_COLOR", "1")

    def slowly() -> list[int]:
        return [
            (item, time.sleep(0.05))[0] for item in progress.with_progress_bar(range(8), "checking")
        ]

    assert slowly() == list(range(8))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("checking" in shown.err) == (patience_s == 0.0)


def test_json_of_a_file_is_printed_before_the_next_file_is_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed piece by piece is the one document that the interface promises."""
    shown: list[str] = []

    def one_by_one() -> Iterator[CheckResult]:
        for name in ("ok", "bad", "hang"):
            shown.append(capsys.readouterr().out)
            yield check_file(folder / f"{name}.yaml")

    files = ["ok", "bad", "hang"]
    status = check_command._stream_json(one_by_one(), check_command.CheckArguments([]), files)
    shown.append(capsys.readouterr().out)

    assert status == 2
    assert ['"file"' in piece for piece in shown] == [False, True, True, True]
    whole = check_json([check_file(folder / f"{name}.yaml") for name in ("ok", "bad", "hang")])
    assert "".join(shown) == console.to_json(whole) + "\n"


def test_an_incomplete_search_is_no_success_if_a_backend_may_hang_or_all_are_requested(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """The same bound is a success where every order that was not looked at could only complete."""
    free = tmp_path / "free.yaml"
    free.write_text(ORDER.replace(", src: 1", ""), encoding="utf-8")
    asked: list[tuple[object, ...]] = [(folder / "order.yaml",), (free,), (free, "--strict")]
    bounded = [cli("check", *words, "--max-states", "1") for words in asked]

    assert [done.returncode for done in bounded] == [1, 0, 1]
    assert [
        "Not a success: the search stopped at its limit" in done.stdout for done in bounded
    ] == [True, False, True]
    assert cli("check", free, "--strict").returncode == 0


@pytest.mark.parametrize("where", ["groups: {all: [0, 1]}", "mesh: {all: 2}", "new_group"])
def test_a_group_may_be_named_all_alongside_a_wait_for_all(where: str) -> None:
    made = "  - new_group: {name: all, ranks: [0, 1]}\n" if where == "new_group" else ""
    text = f"world: 2\n{'' if made else where}\ntensors: {{x: {{shape: [4]}}}}\nprogram:\n{made}"
    text += "  - all_reduce: {tensor: x, group: all, async: true, as: h}\n  - wait: all\n"

    found = check_scenario(loads(text))

    assert found.verdict is not None
    assert (found.verdict.verdict, found.status()) == ("ok", 0)
    with pytest.raises(ScenarioErrors, match="`all` cannot be the name of a handle"):
        loads(text.replace("as: h", "as: all"))


def test_bad_files_do_not_stop_the_check_of_many_files(tmp_path: Path, cli: Cli) -> None:
    for i in range(30):
        (tmp_path / f"{i:04}.yaml").write_text(OK if i % 10 else "world: [", encoding="utf-8")
    files = as_json(cli, tmp_path)["files"]

    assert len(files) == 30
    assert sum("errors" in one for one in files) == 3
    assert sum(one.get("verdict") == "ok" for one in files) == 27


def test_an_invalid_call_is_not_also_reported_as_refused(tmp_path: Path, cli: Cli) -> None:
    """Rank -1 does not exist; a receive from it is not a receive from any source."""
    file = tmp_path / "minus.yaml"
    file.write_text(
        "world: 2\nbackend: nccl\ntensors: {x: {shape: [4]}}\nprogram:\n  - recv: {tensor: x, src: -1}\n    ranks: 1\n"
    )

    done = cli("check", file)

    assert done.returncode == 1
    assert "DS101" in done.stdout
    assert "DS701" not in done.stdout


def test_an_error_in_a_trace_names_its_file_once(tmp_path: Path, cli: Cli) -> None:
    gone = tmp_path / "gone.jsonl"

    assert cli("check", gone).stderr.startswith(f"{gone}: cannot be read: No such file")
