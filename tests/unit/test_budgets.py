"""Line budgets: they bound complexity, so every addition must be worth its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lines of production Python and of the web page. A budget rises only in a commit that adds a
# capability and says why; every commit that makes a part smaller lowers it.
BUDGETS = {
    "engine/control": 1_499,
    "engine/cpu": 3_346,
    "lab": 7_519,  # engine/lab and server/lab
    "serving": 30_050,  # everything else but what trained the built-in pair
    "all": 44_300,
    "page": 1_768,  # scripts, style sheet and markup, not in "all"
}
TRAINING = ("engine/demo/", "engine/lab/demo/")


def room(path: Path) -> str:
    """Return the budget that a file counts toward."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith(TRAINING):
        return "training"
    if name.startswith(("engine/lab/", "server/lab/")):
        return "lab"
    for own in ("engine/control", "engine/cpu"):
        if name.startswith(own + "/"):
            return own
    return "serving"


def lines() -> dict[str, int]:
    found = dict.fromkeys([*BUDGETS, "training"], 0)
    for top in ("engine", "server"):
        for path in (ROOT / top).rglob("*.py"):
            count = len(path.read_text(encoding="utf-8").splitlines())
            found[room(path)] += count
            found["all"] += count
    for path in (ROOT / "server" / "pages").iterdir():
        found["page"] += len(path.read_text(encoding="utf-8").splitlines())
    return found


@pytest.mark.parametrize("name", BUDGETS)
def test_lines_stay_within_their_budget(name: str) -> None:
    assert lines()[name] <= BUDGETS[name]
