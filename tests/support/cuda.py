"""Marks of every test of the gpu tier."""

from __future__ import annotations

import pytest
import torch

# torch imports its compiler at the first compilation, and parts of it use deprecated others.
WARNINGS = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.")
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    WARNINGS,
]
