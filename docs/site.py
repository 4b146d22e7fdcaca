"""Builds the documentation as a website: `python docs/site.py [FOLDER]` (default: site/).

Needs the extra `docs`. The pages of docs/, the README as the first page, the gallery, the changelog
and every file that a page links to are laid out in a temporary folder. Zensical turns them into
HTML and fails on a broken link.

The site works from disk without a network, search included. Zensical's offline search loads the
script iframe-worker from a public CDN; `assets/iframe-worker.js` is a copy of it that the pages load
instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")
#: The target of a picture in HTML, which the gallery uses for its thumbnails.
_HTML_LINK = re.compile(r'((?:href|src)=")([^"#:]+)(")')
#: More room for outputs of 80 columns; pictures keep the white paper that they are drawn on.
_CSS = """.md-grid { max-width: 76rem; }
.md-typeset pre > code { font-size: .68rem; }
.md-typeset img { background: #fff; border-radius: .2rem; }
.md-typeset table:not([class]) code { white-space: nowrap; }
"""

#: Files outside docs/ that are pages of the site -> their path in the site.
OUTSIDE_PAGES = {
    "README.md": "index.md",
    "viz/README.md": "gallery.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
}
#: Chapter -> its folder, and the pages that come first, in this order. The other pages of the folder
#: follow in alphabetical order, so that generated pages need no entry here.
CHAPTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Start": (
        "",
        ("index.md", "installation.md", "faq.md", "gallery.md", "changelog.md"),
    ),
    "Tutorials": (
        "learn",
        (
            "learn/index.md",
            "learn/ranks.md",
            "learn/startup.md",
            "learn/messages.md",
            "learn/collectives.md",
            "learn/reductions.md",
            "learn/groups.md",
            "learn/machines.md",
            "learn/data_parallel.md",
            "learn/ddp.md",
            "learn/fsdp.md",
            "learn/hybrid.md",
            "learn/pipeline.md",
            "learn/deadlocks.md",
        ),
    ),
    "How-to guides": (
        "how-to",
        (
            "how-to/index.md",
            "how-to/find-a-hang.md",
            "how-to/slow.md",
            "how-to/capture-a-script.md",
            "how-to/flight-recorder.md",
            "how-to/hang-in-ci.md",
            "how-to/ddp-uneven-inputs.md",
            "how-to/fsdp-out-of-memory.md",
            "how-to/pipeline-schedule.md",
            "how-to/compare-layouts.md",
            "how-to/sweep.md",
            "how-to/describe-a-cluster.md",
            "how-to/calibrate.md",
            "how-to/run-and-compare.md",
        ),
    ),
    "Reference": ("reference", ("reference/scenario-file.md", "reference/cli.md")),
    "Explanation": (
        "explanation",
        (
            "explanation/verdicts.md",
            "explanation/semantics.md",
            "explanation/cost-model.md",
            "explanation/accuracy.md",
            "explanation/limits.md",
            "explanation/capture.md",
            "explanation/doctor.md",
            "explanation/performance.md",
            "explanation/reliability.md",
            "explanation/comparison.md",
        ),
    ),
    "Contributing": (
        "contributing",
        ("contributing/index.md", "explanation/architecture.md", "contributing/extending.md"),
    ),
}
_CONFIG = """[project]
site_name = "distsim"
site_description = "Find hangs and predict step times of distributed PyTorch programs, without a cluster"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
extra_css = ["site.css"]
nav = [{nav}]

[project.extra]
polyfills = ["assets/iframe-worker.js"]

[project.theme]
font = false
features = ["navigation.tabs", "navigation.footer", "content.code.copy", "toc.follow"]

[[project.theme.palette]]
media = "(prefers-color-scheme)"
toggle = {icon = "lucide/sun-moon", name = "System theme; switch to light"}

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle = {icon = "lucide/sun", name = "Light theme; switch to dark"}

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle = {icon = "lucide/moon", name = "Dark theme; switch to the system theme"}

[project.plugins.search]

[project.plugins.offline]

[project.markdown_extensions.tables]

[project.markdown_extensions.md_in_html]

[project.markdown_extensions.toc]
permalink = true

[project.markdown_extensions.pymdownx.highlight]

[project.markdown_extensions.pymdownx.superfences]
"""


def page_sources() -> dict[Path, str]:
    """Every page of the site: its source file -> its path below the site's root."""
    sources = {ROOT / name: target for name, target in OUTSIDE_PAGES.items()}
    for path in sorted(DOCS.rglob("*.md")):
        sources[path] = path.relative_to(DOCS).as_posix()
    return sources


def navigation(pages: list[str]) -> dict[str, list[str]]:
    """Chapter -> its pages. Pages of docs/ itself that no chapter lists belong to Reference."""
    listed = {page for _, first in CHAPTERS.values() for page in first}
    chapters: dict[str, list[str]] = {}
    for chapter, (folder, first) in CHAPTERS.items():
        chapters[chapter] = [page for page in first if page in pages]
        for page in sorted(set(pages) - listed):
            top = page.partition("/")[0] if "/" in page else "reference"
            if top == folder:
                chapters[chapter].append(page)
    return chapters


def lay_out(folder: Path) -> None:
    """Write the pages, and copies of all files that they link to, below ``folder``/pages."""
    pages = folder / "pages"
    sources = page_sources()
    targets = {source: pages / target for source, target in sources.items()}
    for source, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_with_site_links(source, targets, pages), encoding="utf-8")
    (pages / "site.css").write_text(_CSS, encoding="utf-8")
    shutil.copytree(DOCS / "assets", pages / "assets")


def _with_site_links(source: Path, targets: dict[Path, Path], pages: Path) -> str:
    """A page's text with links to pages of the site, or to copies of the project's files."""
    target = targets[source]

    def relative(to: Path) -> str:
        return Path(os.path.relpath(to, target.parent)).as_posix()

    def link(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match[2]):
            return match[0]
        found = (source.parent / match[2]).resolve()
        if found in targets:
            return f"{match[1]}{relative(targets[found])}{match[3]}"
        if found.is_dir():
            # A folder has no page: keep the text of the link alone.
            return match[1].removesuffix("](").lstrip("![")
        if not found.is_file():
            return match[0]
        return f"{match[1]}{relative(_copied(found, pages))}{match[3]}"

    def html_link(match: re.Match[str]) -> str:
        found = (source.parent / match[2]).resolve()
        if not found.is_file():
            return match[0]
        return f"{match[1]}{relative(_copied(found, pages))}{match[3]}"

    text = source.read_text(encoding="utf-8")
    return _HTML_LINK.sub(html_link, _LINK.sub(link, text))


def _copied(file: Path, pages: Path) -> Path:
    """The copy of a project file in the site. Browsers show it as text unless it is a picture."""
    copy = pages / "files" / file.relative_to(ROOT)
    if copy.suffix not in (".svg", ".png"):
        copy = copy.with_name(copy.name + ".txt")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)
    return copy


def config() -> str:
    """Zensical's settings, with the navigation."""
    pages = list(page_sources().values())
    chapters: list[str] = []
    for name, listed in navigation(pages).items():
        quoted = ", ".join(f'"{page}"' for page in listed)
        chapters.append(f'{{"{name}" = [{quoted}]}}')
    return _CONFIG.replace("{nav}", ", ".join(chapters))


def build(target: Path) -> int:
    """Build the site into ``target``, replacing what is there; returns Zensical's exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lay_out(folder)
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
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")))
