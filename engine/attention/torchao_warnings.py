"""Silences warnings about torchao. transformers imports it wherever it is installed, and torchao
and torch then warn about extensions for other devices and about how it registers its types."""

from __future__ import annotations

import logging


def silence() -> None:
    """Call before transformers is imported; leaves only errors of these two loggers."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
