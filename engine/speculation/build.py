"""Builds the proposers from the configuration, one `case` per kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.config import (
    AnyProposer,
    DraftModelConfig,
    EagleConfig,
    LookaheadConfig,
    MedusaConfig,
    NgramConfig,
    NoProposerConfig,
    SelfConfig,
    SpeculationConfig,
    SuffixConfig,
)
from engine.model.eagle_head import EagleHead
from engine.model.foreign_runner import ForeignRunner
from engine.model.kv_cache import KVCache
from engine.model.medusa_heads import MedusaHeads
from engine.model.runner import ModelRunner
from engine.sampling.logits import LogitsProcessor
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.eagle import EagleProposer
from engine.speculation.foreign_draft import ForeignDraftProposer
from engine.speculation.grammar import GrammarProposer
from engine.speculation.lookahead import LookaheadProposer
from engine.speculation.medusa import MedusaProposer
from engine.speculation.prediction import PredictionProposer
from engine.speculation.proposal import FreeProposer, NoProposer, Proposer
from engine.speculation.suffix import SuffixProposer

_LONGEST = 16  # tokens of a match; `suffix` ranks longer ones equally


def build_free(config: SpeculationConfig) -> list[FreeProposer]:
    """Return the proposers without a model. Without remembered replies they cost nothing until a
    request uses them."""
    suffix = _suffix(config.remembered_tokens)
    return [GrammarProposer(), PredictionProposer(), suffix, _ngram(NgramConfig())]


def _ngram(config: NgramConfig) -> SuffixProposer:
    return SuffixProposer("ngram", remembered=0, shortest=config.n_min, longest=config.n_max)


def _suffix(remembered: int) -> SuffixProposer:
    shortest = NgramConfig().n_min
    return SuffixProposer("suffix", remembered=remembered, shortest=shortest, longest=_LONGEST)


def build_proposer(
    config: AnyProposer,
    *,
    remembered: int = 0,
    draft_runner: ModelRunner | None,
    processor: LogitsProcessor,
    vocab_size: int,
    clock: Callable[[], float],
    heads: MedusaHeads | None = None,
    eagle: EagleHead | None = None,
    cache: KVCache | None = None,
    **drafting: Any,
) -> Proposer:
    """Return the main proposer. `drafting`: further options of DraftModelProposer; `cache`: the
    target's; `remembered`: tokens of earlier replies for `suffix`; `vocab_size`: the target's."""
    match config:
        case NoProposerConfig():
            return NoProposer()
        case NgramConfig():
            return _ngram(config)
        case SuffixConfig():
            return _suffix(remembered)
        case LookaheadConfig():
            return LookaheadProposer(config)
        case MedusaConfig():
            assert heads is not None
            choices = config.choices or heads.choices
            return MedusaProposer(heads, processor, choices=choices, clock=clock)
        case EagleConfig(depth=depth):
            assert eagle is not None
            assert cache is not None
            sizes = {"depth": depth, "vocab_size": vocab_size}
            return EagleProposer(eagle, processor, cache, clock=clock, **sizes)
        case DraftModelConfig() | SelfConfig():
            assert draft_runner is not None
            drafting |= {"processor": processor, "vocab_size": vocab_size, "name": config.kind}
            if isinstance(draft_runner, ForeignRunner):
                return ForeignDraftProposer(draft_runner, **drafting)
            return DraftModelProposer(draft_runner, **drafting)
