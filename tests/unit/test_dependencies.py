"""The versions of other packages that pyproject.toml allows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]
ALLOWED = {
    requirement.name: requirement.specifier
    for requirement in map(Requirement, PROJECT["dependencies"] + OPTIONAL["ray"])
}
LOCKED = dict(
    line.split("==")
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    if "==" in line
)


@pytest.mark.parametrize(
    "name", ["fastapi", "llguidance", "numba", "ray", "torch", "transformers", "uvicorn"]
)
def test_packages_whose_internals_are_used_have_an_upper_bound(name: str) -> None:
    """Law: no later version than the tested ones is installed."""
    assert any(each.operator in ("<", "<=", "==", "~=") for each in ALLOWED[name])


@pytest.mark.parametrize("name", sorted(ALLOWED.keys() & LOCKED.keys()))
def test_the_locked_versions_are_allowed(name: str) -> None:
    assert ALLOWED[name].contains(LOCKED[name])
