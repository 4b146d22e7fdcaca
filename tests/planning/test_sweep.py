"""Sweeps: every point once, kept as it comes, the same table after a crash, on one core, on several
and on a Dask cluster.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.planning.sweep.evaluate_point import table_columns
from distsim.planning.sweep.grid import (
    GridPoint,
    grid_points,
    parse_grid,
    point_key,
    propose_points,
)
from distsim.planning.sweep.result_table import ResultTable
from distsim.planning.sweep.run_sweep import SweepRequest, ranked_rows, run_sweep
from distsim.planning.sweep.worker_pool import run_tasks
from tests.support.harness import LIMIT_S, ROOT, Cli, draws

TEXT = "world: 2\njitter: 0.2\nvars: {n: 1}\nprogram:\n  - repeat: {times: n, steps: [{compute: {time: 1 ms}}, barrier]}\n"
_NAMES = st.lists(
    st.sampled_from(["n", "seed", "jitter", "backend"]), min_size=1, max_size=3, unique=True
)
_VALUES = st.lists(st.text("abc.0123", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


@settings(max_examples=draws(50))
@given(
    _NAMES.flatmap(lambda names: st.fixed_dictionaries(dict.fromkeys(names, _VALUES))),
    st.lists(_VALUES, max_size=1),
)
def test_a_grid_has_every_combination_once_in_order(
    grid: dict[str, list[str]], more: list[list[str]]
) -> None:
    clusters = more[0] if more else []
    found = grid_points(
        parse_grid(f"{name}={','.join(values)}" for name, values in grid.items()), clusters
    )

    assert len(set(found)) == len(found) == prod(map(len, grid.values())) * max(len(clusters), 1)
    assert [
        tuple(value for _, value in one.values) for one in found[: prod(map(len, grid.values()))]
    ] == list(product(*grid.values()))


def test_commas_in_brackets_and_quotes_do_not_separate() -> None:
    assert parse_grid(["mesh={a: 1, b: [2, 3]},{a: 2}", "name='x,y',z"]) == {
        "mesh": ("{a: 1, b: [2, 3]}", "{a: 2}"),
        "name": ("'x,y'", "z"),
    }
    for wrong in ("n", "n=", "=1", "n=1,,2"):
        with pytest.raises(UsageError):
            parse_grid([wrong])


def test_points_are_distinguished_by_their_evaluated_values(tmp_path: Path) -> None:
    """The name says nothing; a value spelt otherwise neither; another cluster file's content
    does.
    """
    cluster, file = tmp_path / "c.yaml", str(tmp_path / "f.yaml")
    cluster.write_text("preset: dgx-a100\n", encoding="utf-8")
    first = point_key(TEXT, file, GridPoint((("n", "1"),), "c.yaml"))

    assert point_key("name: other\n" + TEXT, file, GridPoint((("n", "1"),), "c.yaml")) == first
    assert point_key(TEXT, file, GridPoint((("n", " 1"),), "c.yaml")) == first
    assert point_key(TEXT, file, GridPoint((("n", "2"),), "c.yaml")) != first
    assert point_key(TEXT, file, GridPoint((("n", "1"),))) != first
    cluster.write_text("preset: dgx-h100\n", encoding="utf-8")
    assert point_key(TEXT, file, GridPoint((("n", "1"),), "c.yaml")) != first


def test_equal_points_are_computed_once_and_each_has_its_row(tmp_path: Path) -> None:
    counts: list[int] = []
    asked = SweepRequest(
        TEXT, "f.yaml", {"n": ("2", "3"), "name": ("a", "b")}, output=tmp_path / "t.csv", jobs=1
    )
    found = run_sweep(asked, lambda done, whole: counts.append(whole))

    assert set(counts) == {2}
    assert [(row["n"], row["name"]) for row in found.rows] == [
        ("2", "a"),
        ("2", "b"),
        ("3", "a"),
        ("3", "b"),
    ]
    assert (
        found.rows[0]["makespan_ns"] == found.rows[1]["makespan_ns"] != found.rows[2]["makespan_ns"]
    )
    assert len(list(csv.DictReader((tmp_path / "t.csv").open(encoding="utf-8")))) == 4
    assert run_sweep(asked).known == 2


def test_an_impossible_point_is_a_row_with_its_reason() -> None:
    found = run_sweep(
        SweepRequest(TEXT, "f.yaml", {"backend": ("gloo", "nope"), "n": ("-1", "1")}, jobs=1)
    )
    order = [row["status"] for _, row in ranked_rows(found)]

    assert order == ["ok", "refused", "refused", "refused"] or order == [
        "ok",
        "ok",
        "refused",
        "refused",
    ]
    assert all(row["reason"] for row in found.rows if row["status"] == "refused")
    with pytest.raises(UsageError):
        run_sweep(SweepRequest(TEXT, "f.yaml", {"worlds": ("2",)}, jobs=1))


GRID = ("--grid", "seed=" + ",".join(map(str, range(12))), "--grid", "n=100,200")


def wait_for_group(group: int) -> None:
    """Until no process of a group is left."""
    end = time.monotonic() + LIMIT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.01)


def test_a_killed_sweep_resumes_to_the_same_table(cli: Cli, tmp_path: Path) -> None:
    """At a moment that chance chooses, and with its last row cut in two."""
    file = tmp_path / "f.yaml"
    file.write_text(TEXT, encoding="utf-8")
    assert cli("sweep", file, *GRID, "-o", tmp_path / "whole.csv", "-j", "1").returncode == 0
    whole, cut = (tmp_path / "whole.csv").read_text(encoding="utf-8"), tmp_path / "cut.csv"
    wanted = random.randrange(1, 18)
    words = [sys.executable, "-m", "distsim", "sweep", file, *GRID, "-o", cut, "-j", "1"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and process.poll() is None:
            if cut.exists() and cut.read_text(encoding="utf-8").count("\n") > wanted:
                break
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)  # the command and the process that watches it
    wait_for_group(process.pid)
    rows = cut.read_text(encoding="utf-8")
    assert rows.count("\n") > wanted
    cut.write_text(rows + rows.splitlines()[1][:20], encoding="utf-8")
    done = cli("sweep", file, *GRID, "-o", cut, "-j", "1")

    assert done.returncode == 0
    assert "taken from the output file" in done.stdout
    assert cut.read_text(encoding="utf-8") == whole


def test_the_table_of_another_sweep_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    ResultTable(file, ("a", "b")).release()
    before = file.read_text(encoding="utf-8")

    for name, columns in (
        (file, ("a",)),
        (tmp_path / "t.txt", ("a",)),
        (tmp_path / "no" / "t.csv", ("a",)),
    ):
        with pytest.raises(UsageError):
            ResultTable(name, columns)
    assert file.read_text(encoding="utf-8") == before


def test_a_table_that_another_sweep_is_writing_is_refused(cli: Cli, tmp_path: Path) -> None:
    scenario, file = tmp_path / "f.yaml", tmp_path / "t.csv"
    scenario.write_text(TEXT, encoding="utf-8")
    columns = table_columns(("n",), ())
    table = ResultTable(file, columns)
    table.add("a key", {"n": "7"})

    refused = cli("sweep", scenario, "--grid", "n=1,2", "-o", file, "-j", "1")
    table.release()

    assert refused.returncode == 2
    assert f"another command is writing {file}" in refused.stderr.replace("\n  ", " ")
    assert cli("sweep", scenario, "--grid", "n=1,2", "-o", file, "-j", "1").returncode == 0
    assert len(list(csv.DictReader(file.open(encoding="utf-8")))) == 3  # no row was lost
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.yaml", "t.csv"]


def test_the_lock_of_a_killed_sweep_blocks_no_later_one(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    (tmp_path / "t.csv.lock").touch()

    table = ResultTable(file, ("a",))
    table.add("a key", {"a": 1})
    table.release()

    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_link_to_a_table_shares_its_lock(tmp_path: Path) -> None:
    (tmp_path / "link.csv").symlink_to(tmp_path / "t.csv")
    table = ResultTable(tmp_path / "t.csv", ("a",))

    with pytest.raises(UsageError, match="another command is writing"):
        ResultTable(tmp_path / "link.csv", ("a",))
    table.release()


def test_a_mapping_by_rank_with_else_can_be_swept(cli: Cli, tmp_path: Path) -> None:
    scenario = tmp_path / "f.yaml"
    scenario.write_text(
        "world: 2\ntensors: {x: {shape: [{0: 8, else: 5}]}}\nprogram: [barrier]\n",
        encoding="utf-8",
    )

    assert cli("sweep", scenario, "--grid", "backend=gloo,nccl").returncode == 0


def test_a_number_and_its_text_as_keys_are_different_points() -> None:
    text = "world: 2\nvars: {n: {%s: 8, else: 5}}\nprogram: [barrier]\n"

    assert point_key(text % "0", "f", GridPoint(())) != point_key(text % "'0'", "f", GridPoint(()))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_numbers_that_json_lacks_are_texts_of_a_refused_point(
    cli: Cli, tmp_path: Path, value: str
) -> None:
    scenario = tmp_path / "f.yaml"
    scenario.write_text(TEXT, encoding="utf-8")

    done = cli("sweep", scenario, "--grid", f"world={value}", "--format", "json")

    (point,) = json.loads(done.stdout)["points"]
    assert (point["world"], point["status"]) == (value, "refused")
    assert "the number of ranks" in point["reason"]


def test_parquet_has_the_same_rows_with_numbers_and_can_be_resumed(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    asked = SweepRequest(TEXT, "f.yaml", {"n": ("1", "2", "3")}, output=file, jobs=1)
    first = run_sweep(asked)
    kept = parquet.read_table(file)

    assert kept.column("makespan_ns").to_pylist() == [int(row["makespan_ns"]) for row in first.rows]
    assert kept.column("outcome").to_pylist() == ["completes"] * 3
    again = run_sweep(
        SweepRequest(TEXT, "f.yaml", {"n": ("1", "2", "3", "4")}, output=file, jobs=1)
    )
    assert (again.known, again.computed, again.rows[:3]) == (3, 1, first.rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.parquet"]


def test_two_processes_give_the_same_result_as_one() -> None:
    pytest.importorskip("joblib")
    grid = {"seed": tuple(map(str, range(6)))}

    assert (
        run_sweep(SweepRequest(TEXT, "f.yaml", grid, jobs=2)).rows
        == run_sweep(SweepRequest(TEXT, "f.yaml", grid, jobs=1)).rows
    )


def test_workers_of_a_dask_cluster_give_the_same_result() -> None:
    """A scheduler and two workers, processes of their own, on this machine."""
    distributed = pytest.importorskip("distributed")
    pytest.importorskip("joblib")
    grid = {"seed": ("1", "2", "3", "4")}
    with distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        host="127.0.0.1",
        silence_logs=50,
    ) as cluster:
        found = run_sweep(SweepRequest(TEXT, "f.yaml", grid, address=cluster.scheduler_address))
        workers = {
            pid for _, pid in run_tasks(_where, list(range(8)), address=cluster.scheduler_address)
        }

    assert found.rows == run_sweep(SweepRequest(TEXT, "f.yaml", grid, jobs=1)).rows
    assert os.getpid() not in workers


def _where(task: int) -> int:
    return os.getpid()


def test_an_invalid_address_and_one_without_a_scheduler_are_reported() -> None:
    pytest.importorskip("joblib")
    with pytest.raises(UsageError, match="Dask scheduler"):
        list(run_tasks(_where, [1, 2], address="node0"))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(EnvironmentFault, match="optuna is not installed") as fault:
        next(propose_points({"a": ("1",)}, 1, 0, lambda _: 0.0))
    assert "[sweep]" in fault.value.remedy


def test_a_guided_search_is_repeatable_keeps_its_budget_and_beats_chance() -> None:
    pytest.importorskip("optuna")
    space = {name: tuple(map(str, range(10))) for name in "xy"}

    def tried(seed: int) -> list[dict[str, str]]:
        return list(
            propose_points(
                space, 40, seed, lambda c: float(abs(int(c["x"]) - 7) + abs(int(c["y"]) - 2))
            )
        )

    first = tried(1)
    assert first == tried(1)
    assert len({tuple(c.values()) for c in first}) == len(first) == 40
    best = [
        min(abs(int(c["x"]) - 7) + abs(int(c["y"]) - 2) for c in tried(seed)) for seed in range(3)
    ]
    assert max(best) <= 2


class TestCommand:
    def test_the_grid_in_the_file_is_run_and_shown_fastest_first_in_80_columns(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        file = tmp_path / "f.yaml"
        file.write_text(
            TEXT + "sweep: {grid: {n: [3, 1, 2]}, cluster: [cpu-10gbe, cpu-25gbe]}\n",
            encoding="utf-8",
        )
        done = cli("sweep", file, "-j", "1")
        lines = [line.split() for line in done.stdout.splitlines()]

        assert done.returncode == 0
        assert [line[0] for line in lines if line[2:3] == ["completes"]] == [
            "1",
            "1",
            "2",
            "2",
            "3",
            "3",
        ]
        assert max(map(len, done.stdout.splitlines())) <= 80

    @pytest.mark.parametrize(
        ("words", "status"),
        [((), 2), (("--grid", "n=1"), 0), (("--grid", "n=-1"), 1), (("--grid", "nn=1"), 2)],
    )
    def test_a_sweep_exits_with_1_if_no_point_completes_and_with_2_if_there_is_none(
        self, cli: Cli, tmp_path: Path, words: tuple[str, ...], status: int
    ) -> None:
        file = tmp_path / "f.yaml"
        file.write_text(TEXT, encoding="utf-8")

        assert cli("sweep", file, *words).returncode == status

    def test_ctrl_c_ends_a_sweep_at_once_and_leaves_whole_rows(self, tmp_path: Path) -> None:
        file, table = tmp_path / "f.yaml", tmp_path / "t.csv"
        file.write_text(TEXT, encoding="utf-8")
        words = [sys.executable, "-m", "distsim", "sweep", file, *GRID, "-o", table, "-j", "1"]
        with subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            end = time.monotonic() + LIMIT_S
            while (
                time.monotonic() < end
                and process.poll() is None
                and not (table.exists() and table.read_text().count("\n") > 2)
            ):
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=LIMIT_S)[1]

        assert (process.returncode, "Traceback" in told) == (130, False)
        assert (
            len({len(line) for line in csv.reader(table.read_text(encoding="utf-8").splitlines())})
            == 1
        )
