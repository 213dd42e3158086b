"""The models an engine serves with, and the KV cache that holds both of their planes.

Loading is apart from the engine so that one loaded pair can serve several configurations (the
benchmark, the tests).
"""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLTokenizer

from engine.config import DraftModelConfig, EngineConfig, model_folder
from engine.model.kv_cache import KVCache, bytes_per_token, free_bytes, plan_blocks
from engine.model.loader import LoadedModel, load_model
from engine.model.pair import check_pair
from engine.sampling.vocabulary import load_vocabulary


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and, if the proposer is a draft model, its draft, on one device."""

    target: LoadedModel
    draft: LoadedModel | None = None


def load_pair(config: EngineConfig) -> Pair:
    """Raises ModelError when a model is missing, corrupt or unsupported, or the two do not fit."""
    said = config.target
    target = load_model(
        model_folder(said.path, "target"),
        role="target",
        revision=said.revision,
        dtype=said.dtype,
        device=config.device,
        max_model_len=said.max_model_len,
        trust_remote_code=said.trust_remote_code,
    )
    proposer = config.speculation.proposer
    if not isinstance(proposer, DraftModelConfig):
        return Pair(target)
    draft = load_model(
        model_folder(proposer.path, "draft"),
        role="draft",
        revision=proposer.revision,
        dtype=proposer.dtype,
        device=config.device,
        trust_remote_code=proposer.trust_remote_code,
    )
    check_pair(target, draft)
    return Pair(target, draft)


def build_cache(config: EngineConfig, pair: Pair) -> tuple[KVCache, int]:
    """An empty cache, planes not yet added, and its number of blocks. Raises MemoryPlanError."""
    models = [pair.target] + ([pair.draft] if pair.draft else [])
    num_blocks = plan_blocks(
        config.cache,
        config.schedule,
        token_bytes=sum(bytes_per_token(model.layers, model.dtype) for model in models),
        max_model_len=pair.target.max_model_len,
        granted=free_bytes(config.cache, pair.target.device),
    )
    return KVCache(num_blocks, config.cache.block_size, pair.target.device), num_blocks


def vocabulary_of(config: EngineConfig, target: LoadedModel) -> LLTokenizer:
    """The target's tokens as bytes, as wide as its logits. Raises ModelError."""
    said = config.target
    return load_vocabulary(
        model_folder(said.path, "target"),
        revision=said.revision,
        trust_remote_code=said.trust_remote_code,
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
    )
