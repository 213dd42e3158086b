"""A condition of the GPU tests that is checked without a device."""

from __future__ import annotations

import importlib

from tests.support.cuda import WARNINGS


@WARNINGS
def test_torch_may_warn_of_itself() -> None:
    """Bug: warnings are errors, and torch's compiler imports this module with a warning, so every
    compilation failed."""
    name = "torch.utils.mkldnn"
    importlib.reload(importlib.import_module(name))
