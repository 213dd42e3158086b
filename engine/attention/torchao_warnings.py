"""Where torchao is installed transformers imports it, asked for or not, and both it and torch warn
of what is its own affair: extensions for other devices, and how it registers its types."""

from __future__ import annotations

import logging


def mute() -> None:
    """Before transformers is imported: errors alone are heard of these two. Says nothing of our own
    loggers."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
