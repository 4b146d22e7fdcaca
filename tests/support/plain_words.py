"""Finds wording that readers stumble over: `python -m tests.support.plain_words [PATH…]`.

Reads the Markdown pages (without code frames), every string and comment of the Python modules, the
`about` texts and comments of the scenarios, and the recorded outputs of scenarios. Prints each banned phrase and each long sentence
with its place and a better wording. The list comes from an edit of all user-visible texts; a phrase
is banned because readers had to read it twice, not because it is wrong.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distsim.common.records import gc_paused

ROOT = Path(__file__).resolve().parents[2]

#: A regular expression, and the words to use instead.
BANNED: tuple[tuple[str, str], ...] = (
    (r"\bbeside\b", "compared with, next to, alongside, in addition to"),
    (r"\bleft out\b|\bleaves? out\b|\bleaving out\b", "omitted, default, skips"),
    (r"\bnobody\b|\bno one\b", "no rank, none"),
    (r"\bwhom\b", "which rank"),
    (r"\bst(?:an|oo)ds? still\b|\bstandstills?\b", "hang, blocked"),
    (r"\btold\b", "reported, shown, predicted"),
    (r"\btells\b", "reports, shows"),
    (r"\balike\b", "the same"),
    (r"\bback ends?\b", "backend"),
    (r"\bprices?\b|\bpriced\b", "cost"),
    (r"\bguilty\b|\baccus(?:e|es|ed|ing)\b|\bculprits?\b", "blamed, the cause"),
    (r"\btime-outs?\b", "timeout"),
    (r"\bmisfits?\b", "mismatch"),
    (r"\banew\b", "again"),
    (r"\bis gone\b|\bare gone\b", "has exited"),
    (r"\bin place of the file's\b", "overrides the scenario"),
    (r"\bhold(?:s|ing)? for (?:all|every)\b", "applies to all"),
    (r"\bas people\b", "as users"),
    (r"\bwithout leave\b", "without permission"),
    (r"\bthe like\b", "similar"),
    (
        r"\bought to\b|\blest\b|\bwhence\b|\bwherein\b|\bwhereof\b|\bthereof\b|\bsave for\b",
        "plain words",
    ),
    (r"\bof one's own\b|\bof its own accord\b", "by itself"),
    (r"(?<!ere )\bis no (?:number|text|trace|message|loop|file|folder|integer)\b", "is not a"),
    (r"\bas --\w", "for example --option"),
    (r"\bnever c(?:o|a)mes?\b", "never arrives"),
    (r"\bwhose rules hold\b|\bwhat it costs\b", "rules that apply, cost"),
    (r"\b(?:and|but) nothing else is\b|\bnothing else does\b", "name the thing"),
    (r"\bput right\b|\bmade small\b|\bcomes to on\b", "repaired, reduced, outcome"),
)
#: Internal words, banned only from what users read: pages of the manual, help, findings, scenarios.
BANNED_FOR_USERS: tuple[tuple[str, str], ...] = (
    (r"\bcontracts?\b", "rules of torch.distributed"),
    (r"\b(?:every|all|each|these|four) readings?\b", "assumption about sends"),
    (r"\bunder every reading\b", "with and without buffered sends"),
    (r"(?<!/)\bmeets?\b|\bmet\b", "is matched with, connects"),
    (r"\bknots?\b", "wait-for cycle"),
    (r"\bunder way\b", "in flight, still running"),
    (r"\bstands? for\b|\bstood\b", "represents, means"),
    (r"\bstrangers?\b", "rank that is not a member"),
    (r"\bcounterparts?\b", "matching call"),
    (r"\bno verdict of its own\b", "does not change the verdict"),
    (r"\bdepends on the schedule\b|\bdepends on schedule\b", "depends on the order of events"),
    (r"\bhas a choice\b|\bmade to agree\b", "plain words"),
    (r"\btake(?:s|n)? the place of\b|\bin place of\b", "replaces, instead of"),
    (r"\bgoes on\b|\bgo on\b|\bgoing on\b", "continues"),
)
#: (file, first words of the phrase): why it may stay.
ALLOWED: dict[tuple[str, str], str] = {
    ("distsim/hang_doctor/readers/tool_lines.py", "Culprit"): "a word in torch's own output",
    ("distsim/planning/result_rows.py", "left out"): "a value of the JSON key `status`",
    ("distsim/real/launch/monitor.py", "standstill"): "a value of the JSON key `reason`",
    ("distsim/real/results/real_run.py", "standstill"): "a value of the JSON key `reason`",
    ("distsim/trace/model.py", "culprits"): "a key of trace headers",
    ("distsim/output/pictures/drawing/svg.py", "<defs><marker"): "SVG code",
    ("distsim/script_capture/cuda/build_extension.py", "import ctypes,"): "a Python program",
    ("distsim/script_capture/protocol/message_types.py", "token of"): "a table of fields",
    ("distsim/script_capture/protocol/message_types.py", "send a"): "a table of messages",
}
_PATTERN = re.compile("|".join(f"({pattern})" for pattern, _ in BANNED), re.IGNORECASE)
_USER_PATTERN = re.compile(
    "|".join(f"({pattern})" for pattern, _ in (*BANNED, *BANNED_FOR_USERS)), re.IGNORECASE
)
#: Pages and modules for people who change distsim; internal words may occur there.
_FOR_DEVELOPERS = ("docs/contributing/", "docs/explanation/architecture.md", "CONTRIBUTING.md")
MOST_WORDS = 32
_FRAME = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n(?=\s*[-*|#])|\|")


class Complaint(NamedTuple):
    """One phrase that should be reworded."""

    path: str
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase!r}: {self.advice}"


class Passage(NamedTuple):
    """A text and the line of the file where it begins."""

    line: int
    text: str


def passages_of_page(source: str) -> Iterator[Passage]:
    """The prose of a Markdown page: code frames and inline code become blanks."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    yield Passage(1, re.sub(r"`[^`\n]+`", "`x`", _FRAME.sub(blank, source)))


def passages_of_module(source: str) -> Iterator[Passage]:
    """Every string constant and comment of a Python module."""
    with gc_paused():
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Passage(node.lineno, re.sub(r"`[^`\n]+`", "`x`", node.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Passage(token.start[0], token.string)


def passages_of_scenario(source: str) -> Iterator[Passage]:
    """The `about` lines and the comments of a scenario file."""
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("about:"):
            yield Passage(number, line)
        elif " #" in line or line.startswith("#"):
            yield Passage(number, line[line.index("#") :])


def passages_of_output(source: str) -> Iterator[Passage]:
    """The lines of a recorded output; its tables are not sentences."""
    for number, line in enumerate(source.splitlines(), start=1):
        yield Passage(number, line)


def complaints_about(path: Path) -> Iterator[Complaint]:
    """Every complaint about one file."""
    source = path.read_text(encoding="utf-8")
    readers = {
        ".md": passages_of_page,
        ".py": passages_of_module,
        ".out": passages_of_output,
    }
    passages = readers.get(path.suffix, passages_of_scenario)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    for passage in passages(source):
        yield from _complaints_about_passage(name, passage)


def _is_for_users(name: str) -> bool:
    """Whether users of distsim read this file; text that a command printed always counts."""
    return not name.endswith(".py") and not name.startswith(_FOR_DEVELOPERS)


def _complaints_about_passage(name: str, passage: Passage) -> Iterator[Complaint]:
    pattern = _USER_PATTERN if _is_for_users(name) else _PATTERN
    for match in pattern.finditer(passage.text):
        line = passage.line + passage.text.count("\n", 0, match.start())
        assert match.lastindex is not None
        advice = (*BANNED, *BANNED_FOR_USERS)[match.lastindex - 1][1]
        yield Complaint(name, line, match[0], advice)
    yield from _long_sentences(name, passage)


def _long_sentences(name: str, passage: Passage) -> Iterator[Complaint]:
    position = 0
    for sentence in _SENTENCE_END.split(passage.text):
        start = passage.text.find(sentence, position)
        position = start + len(sentence)
        if len(sentence) <= 2 * MOST_WORDS:
            continue  # too short for so many words and the gaps between them
        words = re.findall(r"[\w'’-]+", sentence)
        if len(words) > MOST_WORDS:
            line = passage.line + passage.text.count("\n", 0, start)
            opening = " ".join(sentence.split()[:6])
            yield Complaint(name, line, f"{opening} …", f"{len(words)} words; split the sentence")


def is_allowed(complaint: Complaint) -> bool:
    """Whether `ALLOWED` has a reason for a phrase."""
    return any(
        complaint.path == path and complaint.phrase.startswith(words) for path, words in ALLOWED
    )


def complaints_without_reason(paths: list[str]) -> list[Complaint]:
    """The complaints about files and folders that `ALLOWED` does not contain."""
    found = (complaint for path in files_to_read(paths) for complaint in complaints_about(path))
    return [complaint for complaint in found if not is_allowed(complaint)]


def complaints_about_text(name: str, text: str) -> list[Complaint]:
    """The complaints about a text that a command printed."""
    return list(_complaints_about_passage(name, Passage(1, re.sub(r"`[^`\n]+`", "`x`", text))))


def files_to_read(paths: list[str]) -> Iterator[Path]:
    """The named files and folders, or everything that users and engineers read."""
    for name in paths or ["README.md", "CONTRIBUTING.md", "docs", "distsim", "scenarios"]:
        path = (ROOT / name).resolve()
        if path.is_file():
            yield path
            continue
        for suffix in ("*.md", "*.py", "*.yaml", "*.out"):
            yield from sorted(path.rglob(suffix))


def main(paths: list[str]) -> int:
    """Prints all complaints; the exit status is 1 if there are any."""
    complaints = complaints_without_reason(paths)
    for complaint in complaints:
        print(complaint)
    print(f"{len(complaints)} complaints", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", help="Files or folders to read. [default: all]")
    sys.exit(main(parser.parse_args().paths))
