"""A model's configuration: found, read, and refused where it shows what cannot be served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.model.proof import one_line
from engine.model.rope import served_positions

if TYPE_CHECKING:  # it takes seconds to be imported, and plain Llamas do without it
    from transformers import PretrainedConfig

SERVED_LAYERS = {"full_attention", "sliding_attention"}
SHORTEST = 2  # tokens of a sequence: one of a prompt, one of a reply


def read_config(source: str, name: str, hub: Mapping[str, Any]) -> PretrainedConfig:
    """Of a folder or a hub name; `hub` are arguments of `from_pretrained`. Raises ModelError."""
    file = Path(source) / "config.json"
    if file.is_file():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise ModelError(f"{name} has a config.json that cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{name} has a config.json that is not a JSON object")
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, **hub)
    except Exception as error:  # transformers raises what it likes; the operator gets one line
        raise ModelError(f"{name} has no usable configuration: {one_line(error)}") from error
    return config


def refuse_unservable(config: PretrainedConfig, name: str, *, has_remote_code: bool) -> None:
    """Refuse what the configuration alone shows to be out of reach. Raises ModelError."""
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    name = f"{name} ({architecture})"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; only decoder-only models are served")
    if config.get_text_config() is not config:
        raise ModelError(f"{name} is multimodal; only text models are served")
    from transformers import AutoModelForCausalLM

    custom = has_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if not custom:
        mapping = AutoModelForCausalLM._model_mapping
        if type(config) not in mapping:
            raise ModelError(f"{name} is not a causal language model of transformers")
        model_class = mapping[type(config)]
        if getattr(model_class, "_is_stateful", False) or "mamba" in config.model_type:
            raise ModelError(
                f"{name} keeps a recurrent state; only attention with a KV cache is served"
            )
        if not getattr(model_class, "_supports_attention_backend", False):
            raise ModelError(
                f"{name} does not support exchangeable attention in this version of transformers"
            )
    kinds = set(getattr(config, "layer_types", None) or SERVED_LAYERS) - SERVED_LAYERS
    if kinds:
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}; "
            f"served are {', '.join(sorted(SERVED_LAYERS))}"
        )


def length_limit(config: PretrainedConfig, wanted: int | None, name: str) -> int:
    """The longest sequence, in tokens. Raises ModelError."""
    own = served_positions(
        getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    )
    if own is not None and wanted is not None and wanted > own:
        raise ModelError(f"max_model_len is {wanted}, but {name} has {own} positions")
    limit = wanted or own
    if limit is None:
        raise ModelError(f"{name} does not say how many positions it has; set max_model_len")
    if limit < SHORTEST:
        raise ModelError(f"{name} has {limit} positions; a prompt and its reply take {SHORTEST}")
    return limit
