"""What every test of the gpu tier stands under."""

from __future__ import annotations

import pytest
import torch

# torch imports its compiler at the first compilation, and parts of that warn of each other.
WARNINGS = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.")
ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    WARNINGS,
]
