"""An installation contains every data file that the code reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
# Descriptions of folders for readers of the code; all other files are data.
MAPS = {"engine/README.md", "engine/cpu/README.md", "server/README.md"}


@pytest.mark.parametrize("top", ["engine", "server"])
def test_every_file_that_is_no_code_is_packed(top: str) -> None:
    """Bug: a page or a model file that exists in a clone but is missing from a wheel."""
    packed = {
        file
        for package, patterns in PACKED.items()
        for pattern in patterns
        for file in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    found = {
        file
        for file in (ROOT / top).rglob("*")
        if file.is_file() and file.suffix != ".py" and "__pycache__" not in file.parts
    }
    left_out = {file.relative_to(ROOT).as_posix() for file in found - packed}
    assert left_out <= MAPS
    assert found & packed
