"""Which files count as the user's, as a library's, and as forwarding calls."""

from __future__ import annotations

import pytest

from distsim.script_capture.rank import call_sites


def test_a_library_below_a_folder_named_distsim_still_names_the_origin_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clone is usually named distsim, and has its environment inside."""
    packages = "/home/someone/distsim/.venv/lib/site-packages/"
    monkeypatch.setattr(call_sites, "library_folders", lambda: (packages,))
    finder = call_sites.CallSiteFinder()

    assert finder._kind(f"{packages}torch/nn/parallel/distributed.py") == "library"
    assert finder._kind("/home/someone/distsim/train.py") == "user"
    assert finder._kind(f"{packages}torch/distributed/distributed_c10d.py") == "forwarding"
