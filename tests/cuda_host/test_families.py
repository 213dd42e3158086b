"""Which model families are served with captured forwards, and what their steps ask of a device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cuda_host.build import LIMIT, missing, run
from tests.cuda_host.limits import STEPS

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.cuda_host, pytest.mark.timeout(LIMIT)]

FAMILIES = (
    "llama", "llama, rope of Llama 3", "llama, dynamic rope", "qwen2", "qwen3", "mistral", "gemma2",
    "gemma3", "phi3, long rope", "olmo2", "granite", "mixtral", "mixtral in float32", "qwen3_moe",
    "gpt_oss", "deepseek_v3", "qwen3, batch-invariant",
)  # fmt: skip
# Starts without graphs and logs it: in float32, the host reads the number of tokens of each expert.
WITHOUT_GRAPHS = ("mixtral in float32",)


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


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*WITHOUT_GRAPHS}))
def test_a_step_stays_under_the_same_ceilings(
    found: dict[str, dict[str, Any]], family: str
) -> None:
    """Law: with four sequences and a draft of the family, each step of a cycle stays under the
    ceilings of limits.py that do not depend on the number of sequences: one wait, three copies, two
    launches outside graphs, no allocation."""
    most = found[family]["most"]
    assert most["tokens"] == 5  # of each sequence: its whole proposal was accepted
    for step in STEPS:
        if len({*step.ceilings}) == 1:
            assert most[step.name] <= step.ceilings[0], step.name
