"""Builds the proposers from the configuration, one `case` per kind."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.config import (
    DraftModelConfig,
    EagleConfig,
    EngineConfig,
    LookaheadConfig,
    MedusaConfig,
    NgramConfig,
    NoProposerConfig,
    SelfConfig,
    SpeculationConfig,
    SuffixConfig,
)
from engine.model.draws import Draws
from engine.model.kv_cache import KVCache
from engine.model.pair import Pair
from engine.model.runner import ForeignRunner, ModelRunner
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
    config: EngineConfig,
    pair: Pair,
    draft: ModelRunner | None,
    *,
    processor: LogitsProcessor,
    draws: Draws,
    cache: KVCache,
    clock: Callable[[], float],
    keeps_drafting: Callable[[Seq[Seq[float]]], bool] | None = None,
    compares: Callable[[], bool] = lambda: True,
) -> Proposer:
    """Return the main proposer. `draft`: the runner of a draft model; `cache`: the target's."""
    speculation, vocab = config.speculation, pair.target.vocab_size
    match speculation.proposer:
        case NoProposerConfig():
            return NoProposer()
        case NgramConfig() as ngram:
            return _ngram(ngram)
        case SuffixConfig():
            return _suffix(speculation.remembered_tokens)
        case LookaheadConfig() as lookahead:
            return LookaheadProposer(lookahead, compares=compares)
        case MedusaConfig(choices=choices):
            assert (heads := pair.heads) is not None
            return MedusaProposer(heads, processor, choices=choices or heads.choices, clock=clock)
        case EagleConfig(depth=depth):
            assert (eagle := pair.eagle) is not None
            return EagleProposer(
                eagle, processor, cache, compares, depth=depth, vocab_size=vocab, clock=clock
            )
        case DraftModelConfig(kind=name) | SelfConfig(kind=name):
            assert draft is not None
            is_foreign = isinstance(draft, ForeignRunner)
            return (ForeignDraftProposer if is_foreign else DraftModelProposer)(
                draft, processor=processor, draws=draws, vocab_size=vocab, name=name,
                max_step_tokens=config.schedule.max_step_tokens, keeps_drafting=keeps_drafting,
                compares=compares,
            )  # fmt: skip
