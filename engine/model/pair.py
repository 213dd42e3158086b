"""The models that an engine serves with, and the KV cache with the planes of both.

Loading is separate from the engine, so that one loaded pair can serve several configurations (the
benchmark, the tests).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llguidance import LLTokenizer

from engine.attention.interface import FP8
from engine.config import (
    DraftModelConfig,
    EagleConfig,
    EngineConfig,
    MedusaConfig,
    ModelConfig,
    Role,
    SelfConfig,
    folder_of,
    model_folder,
)
from engine.errors import ConfigError, ModelError
from engine.grammar.translation import Translation
from engine.grammar.vocabulary import load_vocabulary
from engine.model.attention_choice import attention_for
from engine.model.eagle_head import EagleHead, Target, load_eagle
from engine.model.early_exit import best_exit, early_exit
from engine.model.fit import Vocabulary, check_lengths, compare, compare_files, warn_of_slow
from engine.model.graphs import CudaRecorder
from engine.model.kv_cache import KVCache, bytes_per_token
from engine.model.loaded import LoadedModel, name_of_layers
from engine.model.loader import load_model, pick_device
from engine.model.medusa_heads import MedusaHeads, load_heads
from engine.model.memory import device_limit, reserve_of, table_bytes, weights_of
from engine.model.precision import named_dtype
from engine.model.proof import waits_for_device
from engine.model.runner import ForeignRunner, Graphs, ModelRunner
from engine.progress import report
from engine.scheduling.memory import (
    GIB,
    MemoryPlan,
    plan_memory,
    refuse_heavy_weights,
    weight_bytes_in,
)
from engine.scheduling.scheduler import MOST_SCORED
from engine.scheduling.segment import HiddenRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the models of its proposer on the same device: a draft, which may consist of the
    target's own layers, or heads."""

    target: LoadedModel
    draft: LoadedModel | None = None
    translation: Translation | None = None  # if the draft has another tokenizer
    heads: MedusaHeads | None = None
    eagle: EagleHead | None = None


def load_pair(config: EngineConfig, target: LoadedModel | None = None) -> Pair:
    """Load the models of a configuration. `target`: if already loaded. Raises ModelError if a model
    is missing, corrupt or unsupported or the two do not fit each other, and MemoryPlanError if the
    weights alone do not fit the device."""
    model_config, proposer = config.target, config.speculation.proposer
    models: dict[Role, ModelConfig | DraftModelConfig] = {"target": model_config}
    if isinstance(proposer, DraftModelConfig):
        models["draft"] = proposer
    device = pick_device(config.device)
    warn_of_slow(models, device.type)
    refuse_weights(config, models)
    use_device(device)
    if isinstance(proposer, DraftModelConfig):
        return _load_two(config, proposer, target)
    target = target or _load(config, model_config, "target")
    match proposer:
        case SelfConfig(layers="auto"):
            return Pair(target, best_exit(target, config.speculation.k_max))
        case SelfConfig(layers=int(layers)):
            return Pair(target, early_exit(target, layers))
        case MedusaConfig() as heads:
            return Pair(target, heads=_load_heads(heads, target))
        case EagleConfig() as head:
            return Pair(target, eagle=_load_eagle(head, target))
    return Pair(target)


def _load_two(config: EngineConfig, proposer: DraftModelConfig, target: LoadedModel | None) -> Pair:
    """Load both; compares vocabularies again if they differ from the files'. Raises ModelError."""
    ours, theirs, translation = compare_files(config.target, proposer)
    draft = load_draft(config, proposer)  # first, because a refusal of it then comes soonest
    target = target or _load(config, config.target, "target")
    check_lengths(target, draft)
    found = Vocabulary.of(target, ours), Vocabulary.of(draft, theirs)
    return Pair(target, draft, translation if found == (ours, theirs) else compare(*found))


def load_draft(config: EngineConfig, proposer: DraftModelConfig) -> LoadedModel:
    """Load a draft, without checks against the target. Raises ModelError."""
    draft = _load(config, proposer, "draft")
    if config.cache.dtype != "auto":  # compiled code cannot read an FP8 cache
        draft = replace(draft, compiled=None)
    return draft


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one: events, streams and captures use that, by default the
    first."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _load(
    config: EngineConfig, model_config: ModelConfig | DraftModelConfig, role: Role
) -> LoadedModel:
    is_target = role == "target"
    return load_model(
        model_folder(model_config.path, role),
        role=role,
        revision=model_config.revision,
        dtype=model_config.dtype,
        quantization=model_config.quantization,
        device=config.device,
        max_model_len=config.target.max_model_len if is_target else None,
        trust_remote_code=model_config.trust_remote_code,
        batch_invariant=is_target and config.target.batch_invariant,
    )


def _load_heads(medusa: MedusaConfig, target: LoadedModel) -> MedusaHeads:
    """Load Medusa heads in the target's dtype. Raises ModelError if they do not fit."""
    path, words = model_folder(medusa.path, "medusa"), target.model.get_output_embeddings().weight
    heads = load_heads(
        path, folder_of(path, "medusa"), words, most=medusa.heads, revision=medusa.revision
    )
    deepest = max(map(len, medusa.choices)) if medusa.choices else 0
    if deepest > len(heads.vocabulary):
        raise ModelError(
            f"speculation.proposer.choices has a path of {deepest} ranks; the Medusa heads"
            f" {path!r} are {len(heads.vocabulary)}"
        )
    return heads


def _load_eagle(eagle: EagleConfig, target: LoadedModel) -> EagleHead:
    """Load an EAGLE head, with the target's embedding if it has none. Raises ModelError."""
    model = target.model
    name_of_layers(model)
    words, width = (
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight.shape[1],
    )
    fits = Target(words, target.vocab_size, width, len(target.layers))
    return load_eagle(eagle.path, folder_of(eagle.path, "eagle"), fits, revision=eagle.revision)


def build_cache(
    config: EngineConfig, pair: Pair, given: KVCache | None = None, *, later: bool = False
) -> tuple[KVCache, MemoryPlan]:
    """Return a cache without planes, and its memory plan, which is logged. With a cache `given`,
    return that and a plan of its own blocks. `later`: see KVCache. Raises MemoryPlanError."""
    plan = memory_plan(config, pair, given)
    for line in plan.lines():
        logger.info("%s", line)
    if given is not None:
        assert (plan.blocks, config.cache.block_size) == (len(given.blocks), given.block_size)
        return given, plan
    return _empty_cache(plan.blocks, config, pair, later=later), plan


def shared_cache(config: EngineConfig, pair: Pair) -> KVCache:
    """Return a cache of `cache.num_blocks` blocks without planes, to be divided among several
    engines. Raises MemoryPlanError; on a CPU only if the system refuses the memory."""
    assert config.cache.num_blocks is not None
    if pair.target.device.type == "cuda":
        memory_plan(config, pair)
    return _empty_cache(config.cache.num_blocks, config, pair)


def _empty_cache(
    num_blocks: int, config: EngineConfig, pair: Pair, *, later: bool = False
) -> KVCache:
    device, dtype = pair.target.device, _kept_in(config, pair)
    padding_block = device.type == "cuda"  # for the padding rows of graphs
    size = config.cache.block_size
    return KVCache(num_blocks, size, device, padding_block=padding_block, dtype=dtype, later=later)


def _kept_in(config: EngineConfig, pair: Pair) -> torch.dtype | None:
    """The dtype of keys and values, or None for the models' own. Raises ConfigError."""
    if config.cache.dtype == "auto":
        return None
    if pair.target.compiled is not None:
        raise ConfigError(
            "cache.dtype is 'fp8', but compiled code runs the target and does not support it: set"
            " target.dtype to 'float32' or cache.dtype to 'auto'"
        )
    return FP8


def runner_of(
    config: EngineConfig,
    model: LoadedModel,
    cache: KVCache,
    clock: Callable[[], float] = time.perf_counter,
    hidden: HiddenRows | None = None,
    translation: Translation | None = None,
    *,
    ready: bool = True,
) -> ModelRunner:
    """Return a runner over the plane of the model's role, with graphs on CUDA unless the
    configuration disables them. `hidden`: see ModelRunner; `translation`: if the draft has another
    tokenizer. Unless `ready`, call `warm_up` later. Raises ConfigError, see `choose_attention`."""
    graphs = _graphs_of(config, model)
    how: dict[str, Any] = {"attention": config.attention, "graphs": graphs, "clock": clock}
    if model.role == "draft" and isinstance(config.speculation.proposer, DraftModelConfig):
        how["window"] = config.speculation.proposer.sliding_window
    if translation is None:
        runner = ModelRunner(model, cache, model.role, hidden=hidden, **how)
    else:
        runner = ForeignRunner(translation, model, cache, **how)
    if runner.attention == "compiled" and config.attention not in ("auto", "compiled"):
        what = "attention is %r, but compiled code runs the %s model, with attention of its own"
        logger.warning(what, config.attention, model.role)
    for number, _ in enumerate(warm_up(config, runner, cache) if ready else ()):
        report(f"preparing the {model.role}'s forwards", number)
    return runner


def warm_up(config: EngineConfig, runner: ModelRunner, cache: KVCache) -> Iterator[None]:
    """Capture graphs and compile kernels on CUDA, so that no request waits for them; yields after
    each graph. Writes to the cache's blocks."""
    yield from runner.capture()
    if runner.model.device.type == "cuda":
        runner.warm(config.schedule.max_step_tokens, cache.blocks, cache.block_size)


def _graphs_of(config: EngineConfig, model: LoadedModel) -> Graphs | None:
    """Return what captures need, or None; logs why a model on CUDA has no graphs."""
    if not config.graphs or model.device.type != "cuda":
        return None
    if place := waits_for_device(model):
        what = "the %s model %r runs without CUDA graphs: its forward waits for the device"
        logger.info(f"{what} (in %s)", model.role, model.path, place)
        return None
    most_steps = config.speculation.k_max if model.role == "draft" else 0
    return Graphs(CudaRecorder(model.device), config.schedule.max_step_tokens, most_steps)


def memory_plan(config: EngineConfig, pair: Pair, given: KVCache | None = None) -> MemoryPlan:
    """Return the plan for the memory left after loading: only weights and a `given` cache may be
    allocated yet. Raises MemoryPlanError."""
    models = [pair.target] + ([pair.draft] if pair.draft else [])
    schedule, device = config.schedule, pair.target.device
    on_cuda, in_fp8 = device.type == "cuda", config.cache.dtype == "fp8"
    head = pair.heads or pair.eagle
    own, states = head.parts(schedule) if head is not None else ((), ())
    weights = (*map(weights_of, models), *own)
    rows, nodes = schedule.max_step_tokens, config.speculation.k_max + config.speculation.branches
    kept, token_bytes = _kept_in(config, pair), dict[str, int]()
    for model in models:
        token_bytes[model.role] = bytes_per_token(model.layers, kept or model.dtype)
    if (eagle := pair.eagle) is not None:  # on CUDA, each proposal gathers a copy of its cache
        token_bytes["EAGLE head"] = bytes_per_token((eagle.shape,) * (1 + on_cuda), eagle.dtype)
    graphs = on_cuda and config.graphs
    attention = [attention_for(config.attention, model, in_fp8=in_fp8) for model in models]
    tables = [
        table_bytes(model.role, name, rows=rows, k_max=nodes)
        for model, name in zip(models, attention, strict=True)
    ]
    loaded = sum(part.size for part in weights) + (given.nbytes if given else 0)
    reserved = reserve_of(
        models, attention, rows=rows, sequences=schedule.max_sequences, graphs=graphs,
        logit_rows=min(rows, schedule.max_sequences * (nodes + 1) + MOST_SCORED),
    )  # fmt: skip
    return plan_memory(
        config.cache,
        schedule,
        device=str(device),
        weights=weights,
        reserved=states + reserved,
        token_bytes=token_bytes,
        table_bytes=sum(tables) if graphs else 0,
        max_model_len=pair.target.max_model_len,
        limit=device_limit(config.cache, str(device))[0] + loaded,
        kv_limit=None if on_cuda else int(config.cache.cpu_memory_gib * GIB),
    )


def refuse_weights(
    config: EngineConfig, models: Mapping[Role, ModelConfig | DraftModelConfig]
) -> None:
    """Raises MemoryPlanError if the weights exceed the device's present memory limit, by the
    headers of local files."""
    sizes: dict[str, int] = {}
    for role, model in models.items():
        item = named_dtype(model.dtype, pick_device(config.device)).itemsize
        size = weight_bytes_in(Path(model_folder(model.path, role)), item)
        if size is not None and model.quantization in ("none", "auto"):
            sizes[role] = size
    refuse_heavy_weights(sizes, *device_limit(config.cache, config.device))


def vocabulary_of(config: EngineConfig, target: LoadedModel) -> LLTokenizer:
    """Return the target's vocabulary for grammars, as wide as its logits. Raises ModelError."""
    model_config = config.target
    return load_vocabulary(
        model_folder(model_config.path, "target"),
        revision=model_config.revision,
        trust_remote_code=model_config.trust_remote_code,
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
    )
