"""A training program that is killed in its third step and continues with --resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.lab.train import program as shared


def same_weights_after_a_kill(
    program: ModuleType,
    words: Callable[[Path], list[str]],
    folder: Path,
    weights: str,
    patch: pytest.MonkeyPatch,
) -> None:
    """Assert that two runs of four steps, one of them killed, leave the same `weights` (a file
    name). They save a checkpoint after each step. `words(output)`: the command line."""
    whole, parts = folder / "whole", folder / "parts"
    assert program.main([*words(whole), "--steps", "4"]) == 0
    taken, follow = 0, program.follow

    def stopping(*given: Any) -> float:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise SystemError("killed")
        loss: float = follow(*given)
        return loss

    patch.setattr(program, "follow", stopping)
    patch.setattr(shared, "CHECKPOINT", 0.0)
    run = [*words(parts), "--steps", "4"]
    with pytest.raises(SystemError):
        program.main(run)
    assert not parts.exists()
    assert program.main([*run, "--resume"]) == 0
    assert taken == 3 + 2
    ours, theirs = (load_file(each / weights) for each in (whole, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
