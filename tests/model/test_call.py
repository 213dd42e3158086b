"""Shortcuts for calling a model are taken only where they give the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cpu.fused import FusedDecoder, fused_decoder
from engine.model import loader
from engine.model.llama import Output, read_llama
from engine.model.loaded import ModuleCall
from engine.model.loader import load_model
from engine.model.proof import sample_tokens
from tests.support import tiny
from tests.support.whole_sequence import whole_sequence


@pytest.mark.parametrize(
    ("family", "maker"),
    [
        ("llama", FusedDecoder),
        ("mistral", ModuleCall),
        ("qwen3", ModuleCall),
        ("gemma2", ModuleCall),
    ],
)
def test_which_way_is_taken(family: str, maker: Callable[..., object], tmp_path: Path) -> None:
    """Law: anything but a plain Llama is called as transformers calls it; this Mistral has a
    sliding window."""
    loaded = load_model(tiny.save(tiny.FAMILIES[family](), tmp_path), role="target", device="cpu")
    assert way(loaded.logits).startswith(maker.__name__)


def way(call: object) -> str:
    """Return the name of the function that made `call`, or of its class."""
    return str(getattr(call, "__qualname__", type(call).__name__))


def test_scaled_logits_are_noticed(tiny_target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the way is chosen by comparing logits, not by the family's name; here the logits are
    scaled after the head, as in Granite and Cohere."""
    model: Any = read_llama(Path(tiny_target))

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(self, **named: object) -> object:
            return Output(super().forward(**named).logits * 2)

    model.__class__ = Scaled
    monkeypatch.setattr(loader, "read_llama", lambda *_: model)
    loaded = load_model(tiny_target, role="target", device="cpu")
    assert loaded.model is model
    assert way(loaded.logits).startswith("ModuleCall")
    assert loaded.compiled is None


def test_all_ways_keep_the_same_rows(tiny_target: str) -> None:
    """Law: an int keeps that many trailing rows, a tensor the rows it names, an empty one none."""
    loaded = load_model(tiny_target, role="target", device="cpu")
    prepared = whole_sequence(loaded)
    ids = torch.tensor([sample_tokens(loaded.model)])
    positions = torch.arange(ids.shape[1])[None]
    whole = loaded.logits(ids, positions, ids.shape[1], prepared())
    keeps: list[tuple[int | Tensor, Tensor]] = [
        (3, whole[-3:]),
        (torch.tensor([0, 5]), whole[[0, 5]]),
        (torch.tensor([], dtype=torch.int64), whole[:0]),
    ]
    for keep, expected in keeps:
        for make in (ModuleCall, fused_decoder):
            call = make(loaded.model)
            assert call
            with torch.inference_mode():
                found = call(ids, positions, keep, prepared())
            torch.testing.assert_close(found, expected)
