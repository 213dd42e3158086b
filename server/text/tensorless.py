"""A front end without torch, which transformers would bring in for a tokenizer.

transformers imports torch wherever it is installed, whatever it is asked for. Tokenizers do without
it, and a process that holds no tensors is ready seconds earlier and 250 MB smaller.
"""

from __future__ import annotations

import logging
import sys
from typing import Any


def forget_torch() -> None:
    """For the rest of this process torch is not installed, unless it has been imported already. To
    be called before transformers is imported; its word that there will be no models is not told."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # the import system's way to say that there is none
    logging.getLogger("transformers").addFilter(_is_no_lament)


def _is_no_lament(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
