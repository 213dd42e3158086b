"""What the tier stands on, held without a device: it runs where nobody watches."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from engine.model.attention_choice import FLEX_HEAD
from tests.support.cuda import WARNINGS


def test_flex_attention_knows_the_pair_s_heads(tiny_target: str, tiny_draft: str) -> None:
    """Bug: heads of 12, with which no kernel of FlexAttention was compiled: most of the tier would
    have failed on the first device."""
    for folder in (tiny_target, tiny_draft):
        config = json.loads((Path(folder) / "config.json").read_text())
        assert config["head_dim"] >= FLEX_HEAD


@WARNINGS
def test_torch_may_warn_of_itself() -> None:
    """Bug: warnings are errors, and torch's compiler imports this with one: every compilation of
    FlexAttention failed with it."""
    name = "torch.utils.mkldnn"
    importlib.reload(importlib.import_module(name))
