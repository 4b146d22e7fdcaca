"""Nothing that stands where a file is written is destroyed, and no stream makes a command fail as
if distsim were wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.harness import Cli

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = "scenarios/send_one.yaml"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="files and streams as POSIX has them")


def shell(command: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """A command line with its redirections; `distsim` stands for this project's."""
    start = (
        f"{sys.executable} -m distsim" if env or "&-" in command else warm.tool()[0]
    )  # a closed stream can't be handed over
    words = command.replace("distsim", start, 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **env}
    return subprocess.run(
        ["sh", "-c", words],
        capture_output=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
        check=False,
    )


# --- files ---
def test_dev_stdout_writes_to_the_pipe_or_file_of_standard_output(tmp_path: Path):
    piped = shell("distsim render scenarios/send_one.yaml --view groups -o /dev/stdout | cat")
    into = shell(
        f"distsim render scenarios/send_one.yaml --view groups -o /dev/stdout > {tmp_path}/f; echo more >> {tmp_path}/f"
    )

    assert b"</svg>" in piped.stdout
    assert into.returncode == 0
    assert (tmp_path / "f").read_bytes().endswith(b"</svg>\nmore\n")


@pytest.mark.parametrize(
    "command",
    [
        f"simulate {SCENARIO} --trace OUT.json",
        f"simulate {SCENARIO} --trace OUT.jsonl",
        f"render {SCENARIO} -o OUT.svg",
        f"render {SCENARIO} --format png -o OUT.png",
        f"compare {SCENARIO} {SCENARIO} -o OUT.svg",
        "new OUT.yaml",
        "replay traces/ring_gloo_4.jsonl --trace OUT.jsonl",
    ],
)
def test_every_command_writes_through_a_link_to_a_device(cli: Cli, tmp_path: Path, command: str):
    word = next(word for word in command.split() if "OUT" in word)
    place = tmp_path / word
    place.symlink_to("/dev/null")
    found = cli(*command.replace(word, str(place)).split())

    assert found.returncode == 0, found.stderr
    assert place.is_symlink()
    assert [p.name for p in tmp_path.iterdir()] == [word]


# --- streams ---
@pytest.mark.parametrize("command", [f"simulate {SCENARIO}", "--help", "schema"])
@pytest.mark.parametrize("streams", [">&-", ">/dev/full", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"])
def test_unwritable_standard_output_is_an_environment_error(command: str, streams: str):
    found = shell(f"distsim {command} {streams}")

    assert found.returncode == 4
    assert b"Traceback" not in found.stderr
    assert b"Exception ignored" not in found.stderr
    assert ("2>" in streams) or b"help:" in found.stderr


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "<&-"])
def test_unwritable_standard_error_changes_nothing(streams: str):
    found = shell(f"distsim simulate {SCENARIO} {streams}")

    assert found.returncode == 0
    assert b"completes" in found.stdout


def test_closed_standard_input_contains_no_scenario():
    found = shell("distsim simulate - <&-")

    assert found.returncode == 2
    assert b"<stdin>:1:1: the file is empty" in found.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "ascii:strict"])
def test_other_encodings_get_ascii_characters(encoding: str):
    found = shell("distsim check scenarios/ring_of_four.yaml", PYTHONIOENCODING=encoding)

    assert found.returncode == 1
    assert b"ranks 0 -> 1 -> 2 -> 3 -> 0 wait" in found.stdout
    assert found.stdout.isascii()


def test_a_c_locale_gets_ascii_characters():
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = shell("distsim check scenarios/ring_of_four.yaml", **plain)

    assert (found.returncode, found.stdout.isascii()) == (1, True)


def test_json_and_pictures_do_not_depend_on_the_encoding_of_the_stream(tmp_path: Path):
    file = tmp_path / "n.yaml"
    file.write_text("name: né→∀\nworld: 2\nprogram: [barrier]\n", encoding="utf-8")
    found = shell(f"distsim simulate {file} --format json", PYTHONIOENCODING="ascii")
    picture = shell(f"distsim render {file} --view timeline", PYTHONIOENCODING="ascii")

    assert "né→∀" in found.stdout.decode("ascii").encode().decode("unicode_escape")
    assert json.loads(found.stdout)
    assert picture.stdout.decode("utf-8").rstrip().endswith("</svg>")


# --- texts ---
EVIL = r"""
name: "evil\e[31m\n::error file=x::pwned"
about: "prose\e]0;title\a\n::warning::hello ##[error]boo \x9b31m"
world: 2
tensors: {x: {shape: [4], value: rank}}
program:
  - compute: {name: "c\e[2J\n::error::c", time: 1 ms}
  - all_reduce: {tensor: x}
  - fail: "bad\e[31m\n::error::fail\u202Eevil"
"""
COMMANDS = (
    "simulate",
    "simulate --format json",
    "check",
    "check --format json",
    "check --format sarif",
    "check --format github",
    "render --view timeline",
    "render --view dataflow --format dot",
    "render --view groups --format mermaid",
    "expand",
    "run",
    "test",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "more", ["", '  - "bro\\e[1m\\n::error::ken": 3\n'], ids=["read", "refused"]
)
def test_text_of_a_file_cannot_control_the_terminal_or_a_ci_job(
    cli: Cli, tmp_path: Path, command: str, more: str
):
    file = tmp_path / "evil.yaml"
    file.write_text(EVIL + more, encoding="utf-8")
    said = sent(cli(*command.split(), file))
    lines = [line.strip() for line in said.splitlines() if line.strip().startswith("::")]

    assert all(line.startswith("::error file=") and str(file) in line for line in lines)
    assert not lines or command.endswith("github")


@pytest.mark.parametrize(
    "command", ["replay TRACE", "compare TRACE TRACE", "replay TRACE --format json"]
)
def test_text_of_a_trace_cannot_control_the_terminal(cli: Cli, tmp_path: Path, command: str):
    text = (ROOT / "traces" / "ring_gloo_4.jsonl").read_text(encoding="utf-8")
    evil = json.dumps("world\x1b[31m\n::error::x")[1:-1]
    file = tmp_path / "evil.jsonl"
    file.write_text(
        text.replace('"ring"', f'"{evil}"').replace("ring.yaml", evil), encoding="utf-8"
    )
    said = sent(cli(*command.replace("TRACE", str(file)).split()))

    assert not [line for line in said.splitlines() if line.strip().startswith("::")]


def sent(found: subprocess.CompletedProcess[str]) -> str:
    """What a command said, which holds no control character."""
    said = found.stdout + found.stderr

    assert found.returncode in (0, 1, 2)
    assert not [
        c
        for c in said
        if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or 0x202A <= ord(c) <= 0x202E
    ]
    assert "##[" not in said
    return said


@pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
@pytest.mark.parametrize("format", ["svg", "png"])
def test_a_picture_is_not_printed_to_a_terminal(format: str) -> None:
    leader, follower = os.openpty()
    words = ["render", "--view", "operation", "--op", "all_gather", "--format", format]
    done = subprocess.run(
        [sys.executable, "-m", "distsim", *words],
        stdout=follower,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(follower)
    os.close(leader)

    assert done.returncode == 2
    assert f"the terminal cannot show {format.upper()} pictures" in done.stderr
    assert f"`-o picture.{format}`" in done.stderr


def test_a_picture_is_printed_to_a_pipe(cli: Cli) -> None:
    done = cli("render", "--view", "operation", "--op", "all_gather")

    assert done.returncode == 0
    assert "<svg" in done.stdout


def test_the_limit_on_the_size_of_files_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    target.write_text("before", encoding="utf-8")
    command = (
        f"ulimit -f 1; {sys.executable} -m distsim simulate scenarios/hybrid.yaml --trace {target}"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 4
    assert "File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert target.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [target]
