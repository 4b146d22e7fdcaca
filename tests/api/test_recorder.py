"""`distsim.recorder`: windows of steps, without a change of the training loop."""

from __future__ import annotations

import pytest

import distsim.recorder
from distsim.trace.recordings.readers.kineto_file import read_profile

torch = pytest.importorskip("torch")


def train(steps: int, *others: object) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for other in others:
            other.step()


@pytest.fixture(autouse=True)
def stopped():
    yield
    distsim.recorder.stop()


def test_windows_of_steps_are_recorded_and_the_recorder_then_removes_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    distsim.recorder.start(tmp_path, steps=2, first=1, every=6, windows=2)
    (recorder,) = distsim.recorder._active
    train(12, other)

    # The second optimizer of a step ends no step.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1", "step7"]
    profile = read_profile(tmp_path / "step7" / "rank3.json.gz")
    assert (profile.rank, len(profile.steps)) == (3, 2)
    assert recorder._handle is None
    assert [path.name for path in (tmp_path / "step1").iterdir()] == ["rank3.json.gz"]


def test_a_recording_that_cannot_be_written_does_not_stop_the_training(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    distsim.recorder.start(file, steps=1, first=0, windows=2)
    (recorder,) = distsim.recorder._active

    with pytest.warns(UserWarning, match="recorder stopped"):
        train(8)
    assert recorder._handle is None
    assert file.read_text() == ""


def test_an_incomplete_window_is_dropped(tmp_path):
    distsim.recorder.start(tmp_path, steps=5, first=0)
    train(3)
    distsim.recorder.stop()

    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="steps=0; use 1 or more"):
        distsim.recorder.start(tmp_path, steps=0)
