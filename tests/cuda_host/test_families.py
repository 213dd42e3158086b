"""Which families of models can be served with captured forwards, by FlexAttention."""

from __future__ import annotations

import json

import pytest

from tests.cuda_host.build import LIMIT, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

CAPTURED = (
    "llama", "llama, rope of Llama 3", "qwen2", "qwen3", "qwen3, batch-invariant", "mistral",
    "gemma2", "gemma3", "phi3, long rope", "olmo2", "granite",
)  # fmt: skip
WITHOUT_GRAPHS = ("llama, dynamic rope",)  # it starts, and says so in the log


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What `tests.cuda_host.families` heard against each."""
    found: dict[str, list[str]] = json.loads(run("-m", "tests.cuda_host.families"))
    return found


@pytest.mark.parametrize("family", [*CAPTURED, *WITHOUT_GRAPHS])
def test_an_engine_starts_and_captures_nothing_forbidden(
    said: dict[str, list[str]], family: str
) -> None:
    """Law: nor is a forward of two layers more kernels than ours would be. Bugs: a soft cap was a
    number that changes to the compiler, which could not lower it; a rope that asks the device how
    long the sequence is died in the capture."""
    assert said[family] == []
