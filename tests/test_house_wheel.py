"""What is shipped: the package, with its profiles, and nothing of the repository around it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names of all files in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("galv-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_galv_only(wheel_names: list[str]) -> None:
    """No tests, no configs, no packages named like the links at the root."""
    assert {name.split("/")[0].split("-")[0] for name in wheel_names} == {"galv"}


def test_the_wheel_holds_all_of_galv(wheel_names: list[str]) -> None:
    """Every module, every shipped profile, the mark of typed packages and the licence."""
    files = [path for pattern in ("*.py", "*.json") for path in (ROOT / "galv").rglob(pattern)]

    assert any("library" in str(path) for path in files)
    assert {str(path.relative_to(ROOT)) for path in files} <= set(wheel_names)
    assert "galv/py.typed" in wheel_names
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)
