"""A synthetic pair made in a device's memory: nothing is written, nothing is read.

For measuring machines. Its texts mean nothing; draft and target agree as often as asked.
"""

from __future__ import annotations

from argparse import ArgumentTypeError

import torch

from engine.arguments import number
from engine.config import DraftModelConfig, DTypeName, EngineConfig, Role
from engine.errors import ConfigError
from engine.lab.synthetic.pair import (
    LARGEST,
    SMALLEST,
    Shape,
    Text,
    calibrate,
    draft_of,
    random_target,
    shape_of,
)
from engine.model.loader import adopt, pick_device
from engine.model.pair import Pair
from engine.model.precision import pick_dtype

EIGHT_B = Shape(4096, 32, 14336, 32, 8, head_dim=128, vocabulary=128256)  # as Llama 3.1 8B
EIGHT_B_DRAFT = 2  # layers: with the head, it reads some 0.96 G numbers a step
SEQUENCES, LENGTH = 6, 96  # of the text that acceptance is measured on


def shape_named(size: str) -> tuple[Shape, int]:
    """`8b`, or a number of parameters: the target's shape, and the draft's layers. Raises
    ConfigError."""
    if size.lower() == "8b":
        return EIGHT_B, EIGHT_B_DRAFT
    try:
        shape = shape_of(number(SMALLEST, LARGEST)(size))
    except ArgumentTypeError as error:
        raise ConfigError(f"synthetic is {size!r}, but must be 8b or a number: {error}") from error
    return shape, max(1, shape.layers // 12)


def synthetic_pair(size: str, *, acceptance: float, config: EngineConfig, seed: int = 0) -> Pair:
    """Proven, in the precisions and with the eight bits of the draft that the configuration gives
    to a pair that is stored in bfloat16. Raises EngineError."""
    proposer = config.speculation.proposer
    assert isinstance(proposer, DraftModelConfig)
    shape, layers = shape_named(size)
    where = pick_device(config.device)
    kind = _dtype(shape.layers, config.target.dtype, "target", shape, where)
    target = random_target(shape, seed, str(where), kind)
    draft = draft_of(target, layers)
    text = Text(draft, sequences=SEQUENCES, length=LENGTH, seed=seed)
    calibrate(target, layers, text, acceptance)
    del text  # and its logits
    if where.type == "cuda":
        torch.cuda.empty_cache()
    kind = _dtype(layers, proposer.dtype, "draft", shape, where)
    if kind != draft.dtype:
        draft = draft_of(target, layers, kind)
    eight = proposer.quantization == "auto"
    return Pair(
        adopt(target, role="target", name=f"the synthetic target of {size}"),
        adopt(draft, role="draft", name=f"the synthetic draft of {size}", eight=eight),
    )


def _dtype(
    layers: int, dtype: DTypeName, role: Role, shape: Shape, where: torch.device
) -> torch.dtype:
    """What a start would run the model in; its numbers are exact in all that may be picked."""
    stored = shape.config(layers)
    stored.dtype = torch.bfloat16
    return pick_dtype(dtype, where, config=stored, folder=None, role=role)
