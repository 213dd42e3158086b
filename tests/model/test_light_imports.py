"""What CUDA graphs and the kernels for GPUs use is imported without the compiler of CPU code."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "engine.attention.flashinfer",
    "engine.attention.triton",
    "engine.model.chain_graphs",
    "engine.model.graphs",
    "engine.model.triton_layers",
    "engine.model.triton_products",
    "engine.sampling.device_draws",
    "engine.sampling.triton_draws",
)
LOADS = "import sys, {}; print(*sorted({{'numba', 'llvmlite'}} & sys.modules.keys()))"


@pytest.mark.parametrize("module", MODULES)
def test_the_parts_for_cuda_load_without_numba(module: str) -> None:
    """Law: in a fresh interpreter, importing the module loads no compiler of CPU code."""
    if "triton" in module:
        pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")
    program = [sys.executable, "-c", LOADS.format(module)]
    done = subprocess.run(program, timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", f"{module} loads {done.stdout}"
