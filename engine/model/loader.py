"""Loading a causal language model of transformers with our attention in every layer.

Promises a model that is proven: before it is handed out, its paged forward was compared with
transformers' own eager attention on the same weights. What cannot be served is refused with a
ModelError of one sentence that names the model and the reason. Downloads only when the operator
gave a hub name (`org/name`); the built-in pair and folders never touch the network.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as transformers_logging

from engine.attention.interface import NAME, LayerShape, register
from engine.config import DTypeName, QuantizationName
from engine.errors import ModelError
from engine.model.call import Call, choose_call
from engine.model.compiled import CompiledDecoder, compiled_decoder, is_for_bfloat16
from engine.model.layers import exchange_layers
from engine.model.packed import packed_decoder
from engine.model.proof import (
    forward_of,
    is_proven,
    one_line,
    probe_layers,
    prove,
    reference,
    sample_tokens,
    whole_sequence,
)
from engine.model.quantization import is_quantized, quantization_config

log = logging.getLogger(__name__)

Role = Literal["target", "draft"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SERVED_LAYERS = {"full_attention", "sliding_attention"}
GROWING_ROPES = {"dynamic", "longrope"}  # rotation depends on the longest sequence in the forward


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model and the facts discovered about it. `folder` is where its files are, if local."""

    model: Any
    config: PretrainedConfig
    path: str
    folder: Path | None
    role: Role
    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # columns of the logits
    max_model_len: int
    eos_ids: tuple[int, ...]
    layers: tuple[LayerShape, ...]
    logits: Call  # one forward: (input_ids, positions, keep, prepared) -> [kept, vocab]
    quantization: QuantizationName = "none"
    compiled: CompiledDecoder | None = None  # the same for a few rows, when it is at hand

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def exact(self) -> bool:
        """Whether a token's logits are promised to be the same in any company: to all digits that
        matter in float32, to the bit where compiled code runs every row."""
        return self.dtype == torch.float32 or (
            self.compiled is not None and self.compiled.takes_all_rows
        )

    @property
    def device_name(self) -> str:
        return str(self.device)


def load_model(
    path: str,
    *,
    role: Role,
    revision: str | None = None,
    dtype: DTypeName = "auto",
    quantization: QuantizationName = "none",
    device: str = "auto",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load, refuse or prove. `path` is a folder or a hub name; `dtype` auto is bfloat16 on CUDA,
    and on a CPU where compiled code runs all of a model whose weights are that; else float32.
    `max_model_len` defaults to the model's own. Raises ModelError."""
    register()
    name = f"the {role} model {path!r}"
    where = pick_device(device)
    folder = _folder(path, name)
    source = str(folder) if folder else path
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _quietly():
        config = _config(source, name, hub)
        refuse_unservable(config, name, has_remote_code=trust_remote_code)
        limit = _limit(config, max_model_len, name)
        kind = pick_dtype(dtype, where, config if quantization == "none" else None)
        how = {"config": config, "dtype": kind, **_quantized(quantization, where, name)}
        model = _weights(source, name, {**hub, **how})
        model = model.to(where).eval().requires_grad_(False)
        expected = reference(model, name)
    said = _Said(config, path, folder, role, kind, where, limit, quantization)
    loaded = _proven(model, expected, said, name)
    chosen = dtype == "auto" and quantization == "none" and where.type == "cpu"
    if chosen and not loaded.exact:  # the compiled code failed
        return load_model(
            path, role=role, revision=revision, dtype="float32", device=device,
            max_model_len=max_model_len, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    return loaded


def adopt(model: Any, *, role: Role, name: str) -> LoadedModel:
    """A model that was made and not read, on the device where it lies. Raises ModelError."""
    register()
    config = model.config
    with _quietly():
        refuse_unservable(config, name, has_remote_code=False)
        expected = reference(model, name)
    limit = _limit(config, None, name)
    said = _Said(config, name, None, role, model.dtype, model.device, limit, "none")
    return _proven(model, expected, said, name)


class _Said(NamedTuple):
    """What is known of a model before it is looked at."""

    config: PretrainedConfig
    path: str
    folder: Path | None
    role: Role
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    quantization: QuantizationName


def _proven(model: Any, expected: Tensor, said: _Said, name: str) -> LoadedModel:
    """With layers exchanged and the shortest call chosen. Raises ModelError."""
    plain = not is_quantized(model)
    if plain:
        exchange_layers(model)
    layers = probe_layers(model, name)
    loaded = LoadedModel(
        model=model,
        **said._asdict(),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        eos_ids=_eos_ids(model),
        layers=layers,
        logits=choose_call(model, whole_sequence(layers, model), sample_tokens(model), fuse=plain),
    )
    prove(loaded, expected, name)
    return _quickened(loaded, expected) if plain else loaded


def _quickened(loaded: LoadedModel, expected: Tensor) -> LoadedModel:
    """With compiled code for few rows, where there is some and the same proof holds for it."""
    model, layers = loaded.model, loaded.layers
    if loaded.role == "draft" or is_for_bfloat16(loaded.config, loaded.dtype):
        compiled = compiled_decoder(model, positions=loaded.max_model_len)
        if compiled is not None and is_proven(compiled, layers, expected, model):
            return replace(loaded, compiled=compiled)
    packed = packed_decoder(model, loaded.logits)
    if packed is not None:
        quick = replace(loaded, logits=packed)
        if is_proven(forward_of(quick), layers, expected, model):
            return quick
    return loaded


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA when there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is {device!r}, but no CUDA device is available; use 'cpu'")
    return torch.device(device)


def pick_dtype(
    dtype: DTypeName, device: torch.device, config: PretrainedConfig | None = None
) -> torch.dtype:
    if dtype == "auto":
        rounded = device.type != "cpu" or (config is not None and is_for_bfloat16(config))
        return torch.bfloat16 if rounded else torch.float32
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[dtype]


def _folder(path: str, name: str) -> Path | None:
    """The local folder, or None when `path` can only be a hub name."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name} has no config.json in its folder")
        return folder
    if HUB_NAME.fullmatch(path) and not folder.exists():
        return None
    raise ModelError(f"{name} was not found: give a folder with config.json, or org/name of a hub")


def _config(source: str, name: str, hub: Mapping[str, Any]) -> PretrainedConfig:
    file = Path(source) / "config.json"
    if file.is_file():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ModelError(f"{name} has a config.json that cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{name} has a config.json that is not a JSON object")
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


def _limit(config: PretrainedConfig, wanted: int | None, name: str) -> int:
    """The longest sequence. Ropes that change with length keep to the length they start from."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in GROWING_ROPES:
        own = rope.get("original_max_position_embeddings") or own
    if own is not None and wanted is not None and wanted > own:
        raise ModelError(f"max_model_len is {wanted}, but {name} has {own} positions")
    limit = wanted or own
    if limit is None:
        raise ModelError(f"{name} does not say how many positions it has; set max_model_len")
    return limit


def _weights(source: str, name: str, arguments: Mapping[str, Any]) -> Any:
    auto: Any = AutoModelForCausalLM  # its stubs know one return value
    try:
        model, report = auto.from_pretrained(
            source,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **arguments,
        )
    except Exception as error:  # as above
        raise ModelError(f"{name} could not be loaded: {one_line(error)}") from error
    absent = sorted(report.get("missing_keys") or [])
    if absent:
        raise ModelError(
            f"{name} lacks {len(absent)} of its weights, among them {', '.join(absent[:3])}"
        )
    if mismatched := report.get("mismatched_keys"):
        weight, found, wanted = min(mismatched)
        raise ModelError(
            f"{name} has {len(mismatched)} weights of a shape that its config.json does not say, "
            f"among them {weight}: {list(found)} in the file, {list(wanted)} by the configuration"
        )
    if model.config._attn_implementation != NAME:
        raise ModelError(f"{name} does not accept an attention function of ours")
    return model


def _quantized(kind: QuantizationName, where: torch.device, name: str) -> dict[str, Any]:
    """Further arguments of `from_pretrained`. On CUDA weights are packed where they will lie."""
    config = quantization_config(kind, where, name)
    if config is None:
        return {}
    place = {"device_map": {"": str(where)}} if where.type == "cuda" else {}
    return {"quantization_config": config, **place}


def _eos_ids(model: Any) -> tuple[int, ...]:
    """From the generation config, else the config; an int or a list in either."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(int(i) for i in (eos if isinstance(eos, list | tuple) else [eos]))
    return ()


@contextmanager
def _quietly() -> Iterator[None]:
    """No progress bars, no advice: the operator reads our lines. Restored afterwards."""
    quiet: Any = transformers_logging  # untyped
    verbosity = quiet.get_verbosity()
    bars = quiet.is_progress_bar_enabled()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()  # the hub's bars too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        quiet.set_verbosity(verbosity)
        if bars:
            quiet.enable_progress_bar()
