"""Remedies name the command that works for this installation."""

import importlib.metadata

import pytest

from distsim.common import installation


class InstalledDistribution:
    """The metadata of an installed distribution, with or without the record of its origin."""

    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.origin


def test_a_checkout_is_installed_from_its_directory():
    assert installation.install_command("real") == "pip install -e '.[real]'"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ('{"dir_info": {}, "url": "file:///home/me/clone"}', "pip install -e '.[real]'"),
        (None, "pip install 'torch-distsim[real]'"),
    ],
)
def test_an_installation_is_extended_from_its_origin(monkeypatch, origin, command):
    monkeypatch.setattr(installation, "_is_checkout", lambda: False)
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda name: InstalledDistribution(origin)
    )

    assert installation.install_command("real") == command


def test_a_package_without_metadata_is_installed_by_name(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installation, "_is_checkout", lambda: False)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)

    assert installation.install_command("calibrate") == "pip install 'torch-distsim[calibrate]'"
