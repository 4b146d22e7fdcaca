"""The distribution is called torch-distsim: `distsim` on the public index is another project."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: `pip install … distsim …` or `'distsim[extra]'`, but not `torch-distsim`.
_WRONG_INSTALL = re.compile(
    r"(?:pip|uv|pipx|poetry|conda)\s+(?:pip\s+)?(?:install|add|tool install)[^\n&|;`]*(?<![\w/.-])distsim(?![\w/.-])"
    r"|(?<![\w/-])distsim\[\w+\]"
)


def _tracked_texts():
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in names.decode().split("\0"):
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".js")
            and path.is_file()
        ):
            yield name, path.read_text(encoding="utf-8", errors="replace")


def test_no_text_recommends_installing_the_unrelated_project_called_distsim():
    found = {
        name: hits
        for name, text in _tracked_texts()
        if name != "tests/packaging/test_name.py"
        and (hits := [match[0] for match in _WRONG_INSTALL.finditer(text)])
    }

    assert found == {}


def test_the_pattern_of_this_test_finds_wrong_installs():
    assert _WRONG_INSTALL.search("pip install 'distsim[real]'")
    assert _WRONG_INSTALL.search("pip install distsim")
    assert not _WRONG_INSTALL.search("pip install 'torch-distsim[real]'")
    assert not _WRONG_INSTALL.search("pip install -e '.[real]' && distsim run")
