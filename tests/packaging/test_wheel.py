"""distsim works from an installed wheel, outside any checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(source: Path, folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the contents of the wheel, as pip would install them."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy of what git tracks: building in the checkout could pick up or leave other files.
    source = folder / "source"
    source.mkdir()
    archive = folder / "source.tar"
    tracked = subprocess.run(
        [
            "git",
            "ls-files",
            "-z",
            "distsim",
            "scenarios",
            "docs/learn",
            "*.toml",
            "*.md",
            "LICENSE",
        ],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    names = [name for name in tracked.decode().split("\0") if name and (ROOT / name).exists()]
    with tarfile.open(archive, "w") as tar:
        for name in names:
            tar.add(ROOT / name, name)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    wheel = build_wheel(source, folder)
    target = folder / "site-packages"
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        archive_of_wheel.extractall(target)
    return target


def test_a_wheel_that_is_built_again_later_is_the_same_byte_for_byte(installed, tmp_path):
    source = installed.parent / "source"
    for path in source.rglob("*.py"):
        os.utime(path, (2_000_000_000, 2_000_000_000))

    (first,) = installed.parent.glob("*.whl")
    assert build_wheel(source, tmp_path).read_bytes() == first.read_bytes()


@pytest.fixture
def run_installed(installed, tmp_path):
    """Runs the installed command in an empty folder; returns its standard output."""

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "distsim", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "80", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


def test_the_wheel_is_called_torch_distsim_and_names_its_urls(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    fields = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))

    assert fields["Name"] == "torch-distsim"
    assert {url.partition(",")[0] for url in fields.get_all("Project-URL")} == {
        "Homepage",
        "Download",
        "Changelog",
    }


def test_the_installed_package_is_imported_not_the_checkout(run_installed, installed):
    text = run_installed("simulate", "ring_of_four")

    assert "distsim/scenarios/ring_of_four.yaml:11" in text.replace(os.sep, "/")


@pytest.mark.parametrize("command", ["simulate", "check"])
def test_installed_scenarios_are_found_by_name(run_installed, command):
    assert "hybrid" in run_installed(command, "hybrid")


def test_a_misspelt_name_of_an_installed_scenario_gets_a_suggestion(cli):
    found = cli("simulate", "hybird")

    assert found.returncode == 2
    assert "did you mean hybrid" in found.stderr


def test_lessons_and_explanations_need_no_checkout(run_installed):
    assert "# Ranks" in run_installed("learn", "ranks")
    assert "DS301" in run_installed("explain", "DS301")
    assert "all_gather" in run_installed("explain", "all_gather")


def test_the_demo_shows_a_hang_a_verified_repair_and_a_report(run_installed, tmp_path):
    text = run_installed("demo")

    assert "verdict deadlock" in text
    assert "+  - batch_isend_irecv" in text
    assert "verdict ok" in text
    assert (
        (tmp_path / "distsim-demo" / "ring.html").read_text(encoding="utf-8").endswith("</html>\n")
    )


def test_the_demo_overwrites_nothing(run_installed, tmp_path):
    folder = tmp_path / "distsim-demo"
    folder.mkdir()
    (folder / "ring.yaml").write_text("mine", encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-m", "distsim", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["ring.yaml"]
