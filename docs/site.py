"""Builds the site: `python docs/site.py [FOLDER]`, site/ if none is named. Needs the extra `docs`.

The pages of docs/, the README as the first one, pictures and the files that pages point to are laid
out in a folder of their own, and Zensical makes HTML of them, strictly: a link that leads nowhere
fails. Search works from the disk, and nothing is fetched to read it.

Zensical is what the makers of mkdocs-material work on since that one is only kept running; it reads
the same Markdown.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")
#: More room for outputs of 80 columns; pictures keep the paper that they are drawn on.
_CSS = """.md-grid { max-width: 76rem; }
.md-typeset pre > code { font-size: .68rem; }
.md-typeset img { background: #fff; border-radius: .2rem; }
.md-typeset table:not([class]) code { white-space: nowrap; }
"""
#: The chapters, and the pages of each in their order; one that is not there yet is left out.
CHAPTERS = {
    "Learn": (
        "learn/index",
        "learn/ranks",
        "learn/startup",
        "learn/messages",
        "learn/collectives",
        "learn/reductions",
        "learn/groups",
        "learn/machines",
        "learn/data_parallel",
        "learn/ddp",
        "learn/fsdp",
        "learn/hybrid",
        "learn/pipeline",
        "learn/deadlocks",
    ),
    "Diagnose": (
        "diagnose",
        "check",
        "capture",
        "doctor",
        "report",
        "testing",
        "real",
        "traces",
        "sharing",
    ),
    "Plan": (
        "plan",
        "planning",
        "strategies",
        "same_calls",
        "transformer",
        "clusters",
        "performance",
    ),
    "Reference": (
        "look_up",
        "scenario",
        "format",
        "startup",
        "operations",
        "findings",
        "backends",
        "cli",
    ),
    "How it works": ("architecture", "semantics", "extending", "matrix"),
}
_CONFIG = """[project]
site_name = "distsim"
site_description = "Will it hang, how long does a step take, and is the answer true"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
extra_css = ["site.css"]
nav = [{nav}]

[project.theme]
font = false
features = ["navigation.tabs", "navigation.footer", "content.code.copy", "toc.follow"]

[[project.theme.palette]]
media = "(prefers-color-scheme)"
toggle = {icon = "lucide/sun-moon", name = "As the system has it; now light"}

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle = {icon = "lucide/sun", name = "Light; now dark"}

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle = {icon = "lucide/moon", name = "Dark; now as the system has it"}

[project.plugins.search]

[project.plugins.offline]

[project.markdown_extensions.tables]

[project.markdown_extensions.toc]
permalink = true

[project.markdown_extensions.pymdownx.highlight]

[project.markdown_extensions.pymdownx.superfences]
"""


def lay_out(folder: Path) -> list[str]:
    """Pages and all that they point to, below ``folder``/pages. Returns the pages that no chapter
    names.
    """
    pages = folder / "pages"
    sources = {ROOT / "README.md": pages / "index.md"}
    sources |= {path: pages / path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))}
    for source, target in sources.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_linked(source, target, sources, pages), encoding="utf-8")
    (pages / "site.css").write_text(_CSS, encoding="utf-8")
    known = {page for chapter in CHAPTERS.values() for page in chapter}
    names = [
        path.relative_to(DOCS).with_suffix("").as_posix()
        for path in sources
        if path != ROOT / "README.md"
    ]
    return [name for name in names if name not in known]


def _linked(source: Path, target: Path, sources: dict[Path, Path], pages: Path) -> str:
    """A page's text, its links leading to pages of the site or to copies of the project's files."""

    def link(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match[2]):
            return match[0]
        found = (source.parent / match[2]).resolve()
        if found in sources:
            return f"{match[1]}{_way(target, sources[found])}{match[3]}"
        if not found.is_file():
            return match[0] if not found.is_dir() else match[1].removesuffix("](").lstrip("![")
        copy = pages / "files" / found.relative_to(ROOT)
        if copy.suffix not in (".svg", ".png"):
            copy = copy.with_name(copy.name + ".txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, copy)
        return f"{match[1]}{_way(target, copy)}{match[3]}"

    return _LINK.sub(link, source.read_text(encoding="utf-8"))


def _way(page: Path, to: Path) -> str:
    return (
        Path(*[".."] * (len(page.parent.parts) - _common(page.parent, to)))
        .joinpath(*to.parts[_common(page.parent, to) :])
        .as_posix()
    )


def _common(a: Path, b: Path) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a.parts, b.parts, strict=False)) if x != y),
        min(len(a.parts), len(b.parts)),
    )


def config() -> str:
    """Zensical's settings, with the chapters."""
    chapters: list[str] = []
    for name, listed in CHAPTERS.items():
        pages = [f'"{page}.md"' for page in listed if (DOCS / f"{page}.md").exists()]
        chapters.append(f'{{"{name}" = [{", ".join(pages)}]}}')
    return _CONFIG.replace("{nav}", ", ".join(['{"distsim" = "index.md"}', *chapters]))


def main(target: Path) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if left := lay_out(folder):
            sys.exit(f"no chapter has {', '.join(left)}: give it a place in CHAPTERS")
        (folder / "zensical.toml").write_text(config(), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
            cwd=folder,
            check=False,
        )
        if done.returncode == 0:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder / "site", target)
        return done.returncode


if __name__ == "__main__":
    if len(sys.argv) > 2 or any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit((__doc__ or "").partition("\n")[0])
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")))
