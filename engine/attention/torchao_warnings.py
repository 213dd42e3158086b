"""transformers imports torchao where it is installed, used or not, and both torchao and torch then
warn about its internals: extensions for other devices, and how it registers its types."""

from __future__ import annotations

import logging


def silence() -> None:
    """Call before transformers is imported: only errors of these two loggers remain."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
