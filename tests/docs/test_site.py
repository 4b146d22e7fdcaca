"""The website of the documentation (docs/site.py): it builds, loads nothing from the network, and its
search works from disk.

Building needs the extra `docs`; searching by hand needs a browser. Without a browser, the search
index is checked instead.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import browser

ROOT = Path(__file__).resolve().parents[2]
PHRASE = "gradient accumulation"
#: A tag that makes the browser load something.
_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*>")
_FROM_NETWORK = re.compile(r"""(?:src|href)=["']?(?:https?:)?//""")
#: Links to other sites for readers, which load nothing.
_HARMLESS = re.compile(r"""rel=["']?(?:canonical|edit|next|prev)""")
#: The results of the search dialog, which lives in a shadow root.
_RESULTS = """[...document.querySelectorAll("*")]
    .filter(element => element.shadowRoot)
    .flatMap(element => [...element.shadowRoot.querySelectorAll("a")])"""


def site_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("needs the extra `docs`")
    target = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "site.py", target],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_page_is_in_one_chapter():
    module = site_module()
    pages = list(module.page_sources().values())
    in_chapters = [page for chapter in module.navigation(pages).values() for page in chapter]

    assert sorted(in_chapters) == sorted(pages)


def test_every_page_that_a_chapter_lists_first_exists_or_is_generated():
    module = site_module()
    listed = {page for _, first in module.CHAPTERS.values() for page in first}

    assert listed - set(module.page_sources().values()) <= {"reference/cli.md"}


def test_no_page_loads_anything_from_the_network(site: Path):
    loaded = [
        (path.name, tag)
        for path in site.rglob("*.html")
        for tag in _LOADED.findall(path.read_text(encoding="utf-8"))
        if _FROM_NETWORK.search(tag)
    ]

    assert [entry for entry in loaded if not _HARMLESS.search(entry[1])] == []


def test_no_style_loads_anything_from_the_network(site: Path):
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]

    assert styles
    assert [text for text in styles if re.search(r"url\([\"']?https?:|@import", text)] == []


def test_the_search_index_finds_gradient_accumulation(site: Path):
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    hits = [entry for entry in index["items"] if PHRASE in json.dumps(entry).lower()]

    assert hits


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_the_search_works_from_disk_without_a_network(site: Path, tmp_path: Path, width: int):
    if browser.browser() is None:
        pytest.skip("no browser")
    with browser.page(tmp_path) as page:
        page.send(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        page.size(width, 844)
        page.open(site / "index.html", ready="document.readyState === 'complete'")
        page.wait("document.querySelector('.md-search')")
        page.key("/")
        page.wait("document.activeElement.shadowRoot")
        page.type(PHRASE)
        page.wait(f"{_RESULTS}.length")
        shown = page.run(f"{_RESULTS}.map(link => link.textContent).join('\\n')")

        assert "accumulation" in shown.lower()
        assert [url for url in page.requests if url.startswith("http")] == []
