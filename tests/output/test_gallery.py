"""The pictures in viz/ are those that distsim draws today."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

VIZ = Path(__file__).resolve().parents[2] / "viz"


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("viz_make", VIZ / "make.py")
    if spec is None or spec.loader is None:
        pytest.fail("viz/make.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = maker()


@pytest.mark.parametrize(
    "shown", sorted(MAKE.PICTURES, key=lambda shown: shown.of), ids=lambda shown: shown.file
)
def test_gallery_pictures_are_up_to_date(shown):
    """When this fails after a change that was meant: `python viz/make.py`, and look at the
    picture.
    """
    sources = json.loads((VIZ / "sources.json").read_text(encoding="utf-8"))

    assert (VIZ / shown.file).is_file()
    assert sources[shown.file] == MAKE.digest(shown)


def test_the_gallery_page_shows_every_picture_and_there_is_no_other():
    assert (VIZ / "README.md").read_text(encoding="utf-8") == MAKE.readme()
    assert {path.name for path in VIZ.glob("*.svg")} == {shown.file for shown in MAKE.PICTURES}
