"""Texts of the gallery's pictures, measured by a browser: none is cut off, none lies over another.
Skipped where no chromium is.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

VIZ = Path(__file__).resolve().parents[2] / "viz"
BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)

#: Boxes of texts, shrunk by a pixel for the room that fonts leave above and below their letters.
MEASURE = """
<meta charset="utf-8"><body>%s<pre id="found"></pre><script>
const found = {};
for (const holder of document.querySelectorAll("div")) {
  const svg = holder.querySelector("svg"), page = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]).filter(([word, b]) => word.trim() && b.width);
  const wrong = [];
  boxes.forEach(([word, b], i) => {
    if (b.left < page.left - 1 || b.right > page.right + 1 || b.top < page.top - 1 || b.bottom > page.bottom + 1)
      wrong.push("cut off: " + word);
    for (const [other, o] of boxes.slice(0, i))
      if (Math.min(b.right, o.right) - Math.max(b.left, o.left) > 1.5 && Math.min(b.bottom, o.bottom) - Math.max(b.top, o.top) > 3.5)
        wrong.push("over each other: " + word + " | " + other);
  });
  found[holder.id] = [boxes.length, wrong];
}
document.getElementById("found").textContent = JSON.stringify(found);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_no_text_of_the_gallery_is_cut_off_or_overlaps_another(tmp_path: Path):
    """No text leaves the page; no two texts share more than a pixel and a half to the side and
    three and a half upwards.
    """
    pictures = sorted(VIZ.glob("*.svg"))
    found = measured(pictures, tmp_path)

    assert len(found) == len(pictures) > 20
    assert min(count for count, _ in found.values()) > 3
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_the_check_detects_cut_off_and_overlapping_texts(tmp_path: Path):
    texts = '<text x="10" y="20">one</text><text x="14" y="22">two</text><text x="95" y="60">three</text><text x="10" y="90">four</text>'
    (tmp_path / "bad.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100" height="100">{texts}</svg>'
    )
    found = measured([tmp_path / "bad.svg"], tmp_path)

    assert found == {"bad.svg": [4, ["over each other: two | one", "cut off: three"]]}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_no_text_is_cut_off_or_overlaps_at_4_64_and_1024_ranks(tmp_path: Path):
    """The pictures of `viz/look.py`: every view at each size."""
    spec = importlib.util.spec_from_file_location("viz_look", VIZ / "look.py")
    assert spec is not None
    assert spec.loader is not None
    look = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(look)
    for one in look.looks():
        (tmp_path / f"{one.file}.svg").write_text(
            str(look.render(one.view, "svg", one.subject)), encoding="utf-8"
        )
    found = measured(sorted(tmp_path.glob("*.svg")), tmp_path)

    assert len(found) > 40
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}


def measured(pictures: list[Path], folder: Path) -> dict[str, tuple[int, list[str]]]:
    """By picture: how many texts it has, and what is wrong with them."""
    shown = "".join(f'<div id="{path.name}">{_svg(path)}</div>' for path in pictures)
    page = folder / "page.html"
    page.write_text(MEASURE % shown, encoding="utf-8")
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    made = subprocess.run(
        [str(BROWSER), *arguments], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    match = re.search(r'<pre id="found">(.*?)</pre>', made, re.S)
    assert match is not None
    found: dict[str, tuple[int, list[str]]] = json.loads(unescape(match[1]))
    return found


def _svg(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]
