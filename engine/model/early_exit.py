"""A draft made of the target's first layers, with its norm and head (early exit, arXiv:2404.16710).

It has no weights of its own: modules, merged and packed weights are shared with the target. It has
its own KV cache plane, like any draft.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.cpu.fused import FusedDecoder
from engine.errors import ModelError
from engine.model.kv_cache import KVCache, Plane
from engine.model.loaded import Call, LoadedModel, ModuleCall, name_of_layers, with_parts
from engine.model.proof import Forward, forward_of, is_proven, probe_layers, prove, reference
from engine.scheduling.segment import Segment

logger = logging.getLogger(__name__)

TEXTS, LENGTH = 4, 32  # texts that the target generates, and tokens of each
MOST_TRIED = 8  # exits to try, up to half of the layers: later ones cost too much
REPEATS = 5  # of a timed forward
_BLOCK = 16
_TEXT_BLOCKS = -(-(LENGTH + 32) // _BLOCK)  # KV blocks of a text and of the rows after it

Timed = Callable[[LoadedModel, int], float]  # seconds of a forward of so many rows


def early_exit(target: LoadedModel, count: int) -> LoadedModel:
    """Return the draft of the first `count` layers. Raises ModelError if there is none."""
    refused = f"the target model {target.path!r} cannot draft with its own first layers"
    if count >= len(target.layers):
        raise ModelError(
            f"{refused}: it has {len(target.layers)}, and speculation.proposer.layers is {count}; "
            "a draft needs fewer"
        )
    name = f"the draft of the first {count} layers of {target.path!r}"
    model = _shortened(target.model, count)
    draft = replace(
        target, model=model, role="draft", layers=probe_layers(model, name),
        logits=_shortened_call(target, count), batch_invariant=False, borrows=True,
        compiled=None if target.compiled is None else target.compiled.first(count),
    )  # fmt: skip
    expected = reference(model, name)
    prove(draft, expected, name)
    if draft.compiled and not is_proven(draft.compiled, draft.layers, expected, model):
        raise ModelError(f"{name} gives different logits in compiled code")
    return draft


def _shortened_call(target: LoadedModel, count: int) -> Call:
    if isinstance(target.logits, FusedDecoder):
        return target.logits.first(count)
    assert isinstance(target.logits, ModuleCall)
    return ModuleCall(_shortened(target.logits.model, count))


def _shortened(model: Any, count: int) -> Any:
    """Return a model, in its own or its fused form, with only its first `count` layers. Raises
    ModelError as `name_of_layers`."""
    body, name = model.base_model, name_of_layers(model)
    layers = list(getattr(body, name)[:count])
    if hasattr(layers[-1], "following"):  # a fused layer, which also computes the next norm
        layers[-1] = copy(layers[-1])
        layers[-1].following = body.norm.norm
    body = with_parts(body, **{name: nn.ModuleList(layers)})
    return with_parts(model, **{getattr(model, "base_model_prefix", "model"): body})


class _Exit(NamedTuple):
    """One exit. `seconds`: of a draft step; `gain`: expected tokens per second with the best K,
    divided by those of the target alone."""

    draft: LoadedModel
    agreement: float
    seconds: float
    gain: float


@torch.inference_mode()
def best_exit(target: LoadedModel, k_max: int, timed: Timed | None = None) -> LoadedModel:
    """Return the draft with the most expected tokens per second. Measured here: the acceptance
    rate of its draws on texts that the target generates, and the time of a step of both, by `timed`
    if given. A later exit agrees more and costs more. Raises ModelError as `early_exit`."""
    timed = timed or _seconds
    texts, expected = _generated(target)
    one, more = timed(target, 1), timed(target, 1 + max(k_max, 1))
    row = max(more - one, 0.0) / max(k_max, 1)
    found: list[_Exit] = []
    total = len(target.layers)
    for count in sorted({max(total * i // (2 * MOST_TRIED), 1) for i in range(1, MOST_TRIED + 1)}):
        draft = early_exit(target, count)
        agreement = _agreement(expected, _log_probs(draft, texts))
        seconds = timed(draft, 1)
        gain = max(
            sum(agreement**i for i in range(k + 1)) * one / (k * seconds + one + k * row)
            for k in range(1, max(k_max, 1) + 1)
        )
        found.append(_Exit(draft, agreement, seconds, gain))
    best = max(found, key=lambda each: each.gain)
    logger.log(
        logging.INFO if best.gain > 1 else logging.WARNING,
        "self-speculation with the first %d of %d layers: acceptance %.0f %%, a draft step takes"
        " %.0f %% of a target step, expected speed-up %.2f",
        len(best.draft.layers), total, 100 * best.agreement, 100 * best.seconds / one, best.gain,
    )  # fmt: skip
    return best.draft


def _generated(target: LoadedModel) -> tuple[list[list[int]], Tensor]:
    """Return texts sampled at temperature 1 after an EOS token, and log-probabilities `[texts,
    LENGTH, vocab]` of the token after each token."""
    texts = [[min(target.eos_ids, default=0)] for _ in range(TEXTS)]
    forward, plane = _forward_and_plane(target)
    generator, rows = torch.Generator().manual_seed(0), list[Tensor]()
    for at in range(LENGTH):
        segments = [Segment([text[-1]], at, _blocks(i), 1) for i, text in enumerate(texts)]
        rows.append(forward(segments, plane).log_softmax(-1))
        drawn = torch.multinomial(rows[-1].exp().cpu(), 1, generator=generator)
        for text, token in zip(texts, drawn[:, 0].tolist(), strict=True):
            text.append(token)
    return [text[:LENGTH] for text in texts], torch.stack(rows, 1)


def _log_probs(draft: LoadedModel, texts: list[list[int]]) -> Tensor:
    """Return the draft's log-probabilities for given texts, in the shape of `_generated`."""
    forward, plane = _forward_and_plane(draft)
    segments = [Segment(text, 0, _blocks(i), LENGTH) for i, text in enumerate(texts)]
    return forward(segments, plane).log_softmax(-1).view(TEXTS, LENGTH, -1)


def _agreement(target: Tensor, draft: Tensor) -> float:
    """Return a lower bound on how often draws with the same noise agree, averaged over rows: a
    function of the total variation distance of the two distributions (arXiv:2408.07978)."""
    shared = torch.minimum(target.exp(), draft.exp()).sum(-1).clamp(max=1.0)
    return float((shared / (2 - shared)).mean())


def _seconds(model: LoadedModel, rows: int) -> float:
    """Return the median seconds of a forward of so many rows after a text."""
    forward, plane = _forward_and_plane(model)
    tokens = [row % model.vocab_size for row in range(rows)]  # equal tokens share experts
    segment, taken = Segment(tokens, LENGTH, _blocks(0), 1), list[float]()
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        forward([segment], plane).cpu()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _forward_and_plane(model: LoadedModel) -> tuple[Forward, Plane]:
    """Return the model's forward, and a KV plane for all texts."""
    cache = KVCache((TEXTS + 1) * _TEXT_BLOCKS, _BLOCK, model.device)
    return model.compiled or forward_of(model), cache.add_plane("exit", model.layers, model.dtype)


def _blocks(text: int) -> list[int]:
    return list(range(text * _TEXT_BLOCKS, (text + 1) * _TEXT_BLOCKS))
