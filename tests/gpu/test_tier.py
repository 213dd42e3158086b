"""What the tier stands on, held without a device: it runs where nobody watches."""

from __future__ import annotations

import importlib

from tests.support.cuda import WARNINGS


@WARNINGS
def test_torch_may_warn_of_itself() -> None:
    """Bug: warnings are errors, and torch's compiler imports this with one: every compilation
    failed with it."""
    name = "torch.utils.mkldnn"
    importlib.reload(importlib.import_module(name))
