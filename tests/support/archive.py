"""Record what distsim prints for every scenario, and compare two recordings: the safety net of a
refactoring.

    python -m tests.support.archive record FOLDER           # run every command over every scenario, with the distsim of this checkout
    python -m tests.support.archive compare FOLDER FOLDER   # show the differences; exit status 1 if there are any
    python -m tests.support.archive record FOLDER --every 7 # a sample: every seventh scenario

A recording is one JSON file per command, which maps the command's arguments to its output and exit
status. Commands go through the command line, so a recording does not depend on how the package is
organised inside. Each command runs in a fork of a process that has imported distsim. Recordings are
not committed: they hold the text of one version.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from pathlib import Path

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file()
)
sys.path.insert(0, str(ROOT))

#: Outputs beyond this length are kept as a digest with their beginning.
LONGEST_OUTPUT = 200_000
#: A command may take this long; commands that take longer are recorded as such.
LIMIT_S = 120
#: Views of a scenario, with the format in which a layout engine has not yet touched them.
VIEWS = {
    "dataflow": "dot",
    "wait-for": "dot",
    "groups": "dot",
    "startup": "dot",
    "timeline": "svg",
    "spacetime": "svg",
    "schedule": "svg",
    "memory": "svg",
    "traffic": "svg",
    "bandwidth": "svg",
}
#: Commands for every scenario file.
PER_SCENARIO = (
    ("simulate", "FILE"),
    ("simulate", "FILE", "--format", "json"),
    ("check", "FILE"),
    ("check", "FILE", "--format", "json"),
)
#: Further commands for every fourth scenario file.
PER_FOURTH_SCENARIO = (
    ("simulate", "FILE", "--what-if"),
    ("check", "FILE", "--format", "sarif"),
    ("check", "FILE", "--format", "github"),
    ("check", "FILE", "--diff"),
    ("expand", "FILE"),
    ("run", "FILE"),
    ("shrink", "FILE"),
    ("report", "FILE", "-o", "OUT.html"),
    ("simulate", "FILE", "--trace", "OUT.json"),
    ("simulate", "FILE", "--trace", "OUT.jsonl"),
    *(("render", "FILE", "--view", view, "--format", form) for view, form in VIEWS.items()),
)
#: Commands of their own.
SINGLE = (
    ("--help",),
    ("clusters",),
    ("clusters", "dgx-h100"),
    ("schema",),
    ("test", "scenarios"),
    ("plan", "llama3-8b", "--gpus", "16", "--cluster", "dgx-h100", "--global-batch", "128"),
    (
        "plan",
        "llama3-8b",
        "--gpus",
        "16",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "128",
        "--format",
        "json",
    ),
    ("sweep", "scenarios/hybrid.yaml", "--cluster", "dgx-a100,dgx-h100"),
    ("render", "--view", "operation", "--op", "all_gather", "--format", "dot"),
    (
        "render",
        "--view",
        "algorithm",
        "--op",
        "all_reduce",
        "--algorithm",
        "ring",
        "--format",
        "svg",
    ),
    ("learn",),
)
COMMANDS = (
    "simulate",
    "check",
    "run",
    "replay",
    "compare",
    "bench",
    "calibrate",
    "capture",
    "doctor",
    "shrink",
    "plan",
    "sweep",
    "report",
    "render",
    "explain",
    "learn",
    "test",
    "new",
    "clusters",
    "schema",
    "expand",
)


def scenario_files() -> list[str]:
    folders = ("scenarios", "benchmarks", "tests/data")
    return sorted(
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.yaml")
    )


def explained_names() -> list[str]:
    """Finding codes and operations, from the generated reference pages."""
    findings = re.findall(
        r"\bDS\d{3}\b", (ROOT / "docs" / "reference" / "findings.md").read_text(encoding="utf-8")
    )
    folder = ROOT / "docs" / "reference" / "operations"
    pages = [page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md"))]
    operations = re.findall(r"^## (\w+)$", "\n".join(pages), re.MULTILINE)
    return sorted({*findings, *operations})


def commands(every: int) -> Iterator[tuple[str, ...]]:
    for place, file in enumerate(scenario_files()):
        if place % every:
            continue
        chosen = PER_SCENARIO + (PER_FOURTH_SCENARIO if place % (4 * every) == 0 else ())
        for command in chosen:
            yield tuple(file if word == "FILE" else word for word in command)
    for trace in sorted((ROOT / "traces").rglob("*.jsonl")):
        name = str(trace.relative_to(ROOT))
        yield ("replay", name)
        yield ("replay", name, "--cluster", "dgx-h100", "--format", "json")
        yield ("render", name, "--view", "timeline", "--format", "svg")
        yield ("compare", name, name)
    for folder in sorted((ROOT / "tests" / "data" / "doctor").iterdir()):
        yield ("doctor", str(folder.relative_to(ROOT)))
        yield ("doctor", str(folder.relative_to(ROOT)), "--format", "json")
    yield from (("explain", name) for name in explained_names())
    yield from ((name, "--help") for name in COMMANDS)
    yield from SINGLE


def run(words: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The output of one command, in a child process; ``OUT.x`` stands for a file whose content
    counts as output.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as out:
            out.write(_in_child(words))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if len(text) > LONGEST_OUTPUT:
        text = (
            f"{text[:2000]}\n… {len(text)} characters, sha256 {sha256(text.encode()).hexdigest()}"
        )
    return words, text


def _in_child(words: tuple[str, ...]) -> str:
    import signal

    from distsim.__main__ import main

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    output, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(output), redirect_stderr(errors):
        written = [Path(folder) / word for word in words if word.startswith("OUT.")]
        sys.argv = [
            "distsim",
            *(str(Path(folder) / word) if word.startswith("OUT.") else word for word in words),
        ]
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        except TimeoutError:
            return "took too long"
        except BaseException:
            status = traceback.format_exc()
        files = "".join(
            path.read_text(encoding="utf-8", errors="replace") for path in written if path.is_file()
        )
        text = f"{output.getvalue()}\n--- stderr\n{errors.getvalue()}\n--- files\n{files}\n--- status {status}\n"
    return text.replace(folder, "TMP")


def record(folder: Path, every: int, only: list[str]) -> None:
    os.chdir(ROOT)
    os.environ.update(COLUMNS="80", NO_COLOR="1", PYTHONHASHSEED="0")
    for words in (
        ("simulate", "scenarios/hybrid.yaml"),
        ("check", "scenarios/hybrid.yaml"),
        ("report", "scenarios/hybrid.yaml", "-o", "OUT.html"),
    ):
        _in_child(words)  # imports what most commands need, before the forks
    import signal

    signal.alarm(0)
    wanted = [words for words in commands(every) if not only or words[0] in only]
    outputs: dict[str, dict[str, str]] = {}
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for words, text in pool.imap_unordered(run, wanted, chunksize=4):
            outputs.setdefault(words[0].strip("-"), {})[" ".join(words)] = text
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in outputs.items():
        (folder / f"{name}.json").write_text(
            json.dumps(texts, indent=0, sort_keys=True, ensure_ascii=False), encoding="utf-8"
        )
    print(f"{len(wanted)} outputs of {len(outputs)} commands in {folder}")


def compare(before: Path, after: Path, shown: int) -> int:
    """Outputs that both recordings have and that differ, and outputs that only the second one
    lacks.
    """
    differing = compared = 0
    for path in sorted(after.glob("*.json")):
        new = json.loads(path.read_text(encoding="utf-8"))
        old = (
            json.loads((before / path.name).read_text(encoding="utf-8"))
            if (before / path.name).is_file()
            else {}
        )
        for words in sorted(new):
            if words not in old:
                print(f"only in {after}: {words}")
                continue
            compared += 1
            if old[words] == new[words]:
                continue
            differing += 1
            if differing <= shown:
                print(f"\n=== distsim {words}")
                lines = difflib.unified_diff(
                    old[words].splitlines(),
                    new[words].splitlines(),
                    "before",
                    "after",
                    "",
                    "",
                    0,
                    "",
                )
                print("\n".join(line[:300] for line, _ in zip(lines, range(20), strict=False)))
    print(f"{differing} of {compared} outputs differ")
    return int(differing > 0 or compared == 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--every", type=int, default=1, help="take every Nth scenario")
    recording.add_argument(
        "--only", nargs="*", default=[], metavar="COMMAND", help="only these commands"
    )
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--shown", type=int, default=10)
    given = parser.parse_args()
    if given.action == "record":
        record(given.folder.resolve(), given.every, given.only)
    else:
        sys.exit(compare(given.before, given.after, given.shown))


if __name__ == "__main__":
    main()
