"""Which model families are served with captured forwards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

FAMILIES = (
    "llama", "llama, rope of Llama 3", "llama, dynamic rope", "qwen2", "qwen3", "mistral", "gemma2",
    "gemma3", "phi3, long rope", "olmo2", "granite", "mixtral", "mixtral in float32", "qwen3_moe",
    "gpt_oss", "qwen3, batch-invariant",
)  # fmt: skip
# These start without graphs and log it: in float32, the host reads the number of tokens of each
# expert.
WITHOUT_GRAPHS = ("llama, dynamic rope", "mixtral in float32")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Return the results of `tests.cuda_host.families`, by family."""
    by_family: dict[str, dict[str, Any]] = json.loads(run("-m", "tests.cuda_host.families"))
    return by_family


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_starts_and_captures_nothing_forbidden(
    found: dict[str, dict[str, Any]], family: str
) -> None:
    """Law: a forward of two layers also needs no more kernels than our own layers would. Bug: a
    rope that asks the device for the sequence length failed during the capture."""
    result = found[family]
    assert result["errors"] == []
    assert result["graphs"] == (family not in WITHOUT_GRAPHS)
