"""Reading a transformers model: its configuration, refused if it shows that the model cannot be
served, and its weights, with our attention in every layer.

transformers is imported inside functions: the import takes seconds, and plain Llamas need none.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.attention.interface import NAME
from engine.errors import ModelError, one_line
from engine.hub import refuse_unreachable
from engine.model.proof import failure
from engine.model.rope import served_positions
from engine.progress import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

SERVED_LAYERS = {"full_attention", "sliding_attention"}
# Files of weights, in the order in which transformers looks for them.
_FILES = ("model.safetensors", "model*-of-*.safetensors",
          "pytorch_model.bin", "pytorch_model*-of-*.bin")  # fmt: skip
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
SHORTEST = 2  # tokens of a sequence: one of a prompt, one of a reply


def read_config(source: str, name: str, hub: Mapping[str, Any]) -> PretrainedConfig:
    """Read the configuration; `hub`: arguments of `from_pretrained`. Raises ModelError."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, **hub)
    except Exception as error:  # transformers raises any class; the operator gets one line
        raise ModelError(f"{name} has no usable configuration: {failure(error)}") from error
    stored = getattr(config, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4":
        logger.info("%s is stored in MXFP4 and held in 16 bits, four times as large", name)
        stored["dequantize"] = True  # transformers would download its MXFP4 kernels at first use
    return config


def stored_in(config: PretrainedConfig) -> str | None:
    """The quantization method of a checkpoint (`gptq`, `awq`, `fp8`, ...), or None."""
    stored = getattr(config, "quantization_config", None)
    return str(stored.get("quant_method", "parts")) if isinstance(stored, Mapping) else None


def refuse_unservable(config: PretrainedConfig, name: str, *, has_remote_code: bool) -> None:
    """Raises ModelError if the configuration alone shows that the model cannot be served."""
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


def length_limit(config: PretrainedConfig, max_model_len: int | None, name: str) -> int:
    """Return the longest sequence in tokens. Raises ModelError if it is unknown or out of range."""
    positions = served_positions(
        getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    )
    if positions is not None and max_model_len is not None and max_model_len > positions:
        raise ModelError(f"max_model_len is {max_model_len}, but {name} has {positions} positions")
    limit = max_model_len or positions
    if limit is None:
        raise ModelError(f"{name} does not say how many positions it has; set max_model_len")
    if limit < SHORTEST:
        raise ModelError(f"{name} has {limit} positions; a prompt and its reply take {SHORTEST}")
    return limit


def read_weights(source: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """Load the model; `arguments` go to `from_pretrained`. Raises ModelError, also if weights are
    missing, or their shapes or types contradict the configuration."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # its stubs do not know `output_loading_info`
    try:
        model, report = auto.from_pretrained(
            source,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **arguments,
        )
        coded = [] if stored_in(arguments["config"]) else _coded(source, arguments, model)
    except Exception as error:  # transformers raises any class
        raise ModelError(f"{name} could not be loaded: {why_unreadable(error)}") from error
    if absent := sorted(report.get("missing_keys") or []):
        raise ModelError(
            f"{name} lacks {len(absent)} of its weights, among them {', '.join(absent[:3])}"
        )
    if mismatched := report.get("mismatched_keys"):
        weight, found, expected = min(mismatched)
        raise ModelError(
            f"{name} has {len(mismatched)} weights whose shape contradicts its config.json, "
            f"among them {weight}: {list(found)} in the file, {list(expected)} by the configuration"
        )
    if coded:
        raise ModelError(
            f"{name} has {len(coded)} weights that are not floats of 16 bits or more, and its "
            f"config.json names no quantization; among them is {min(coded)}"
        )
    if model.config._attn_implementation != NAME:
        raise ModelError(f"{name} does not accept a custom attention function")
    return model


def _coded(source: str, hub: Mapping[str, Any], model: Any) -> list[str]:
    """Return names and types of stored weights that transformers would cast to floats as if they
    were numbers: integers and floats of 8 bits, which are codes that need a scale."""
    from transformers.modeling_utils import load_state_dict
    from transformers.utils.hub import cached_file

    folder = Path(str(cached_file(source, "config.json", revision=hub.get("revision")))).parent
    files = next(filter(None, (sorted(folder.glob(each)) for each in _FILES)), [])
    known = model.state_dict()
    return [
        f"{weight}: {str(each.dtype).removeprefix('torch.')}"
        for file in files
        for weight, each in load_state_dict(file, map_location="meta").items()
        if each.dtype not in _FLOATS
        and (known[weight].dtype in _FLOATS if weight in known else weight.endswith(".weight"))
    ]


def why_unreadable(error: Exception) -> str:
    """Why a file of weights cannot be read. Replaces torch's message about pickles, which advises
    the user to load the file with its code."""
    if "weights_only" not in str(error):
        return failure(error)
    code = re.search(r"GLOBAL (\S+)", str(error))  # how torch's message names the rejected code
    return f"it holds code ({code[1]}), which is not run" if code else "it is not tensors alone"


@contextmanager
def quietly(stage: str = "loading") -> Iterator[None]:
    """Silence transformers' progress bars and warnings in the block. Its progress is reported as
    our own instead (`engine.progress`), under the name `stage`."""
    from transformers.utils import logging

    def bar(make: Any, given: Any, named: Any) -> Any:
        sized = given and isinstance(given[0], Collection)
        return counted(stage, given[0]) if sized else make(*given, **named)

    quiet: Any = logging  # untyped
    hook = quiet.set_tqdm_hook(bar)
    verbosity = quiet.get_verbosity()
    bars = quiet.is_progress_bar_enabled()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()  # the hub's bars too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        quiet.set_tqdm_hook(hook)
        quiet.set_verbosity(verbosity)
        if bars:
            quiet.enable_progress_bar()


def model_file(path: str, folder: Path | None, file: str, revision: str | None) -> Path | None:
    """Return a file in a local `folder`, or if that is None of the hub repository `path`,
    downloaded or cached; None if there is no such file. Raises ModelError."""
    if folder is not None:
        return folder / file if (folder / file).is_file() else None
    from transformers.utils.hub import cached_file

    refuse_unreachable(path, revision)
    try:
        with quietly():
            found = cached_file(
                path, file, revision=revision, _raise_exceptions_for_missing_entries=False
            )
    except Exception as error:  # transformers raises any class; the operator gets one line
        raise ModelError(
            f"{path!r} cannot be downloaded from the hub: {one_line(error)}"
        ) from error
    return None if found is None else Path(found)


def rotary_of(fields: Mapping[str, Any]) -> Any:
    """Return the rotary embedding of a Llama's config.json: a function of `(like, positions [1,
    rows])` that returns cosines and sines `[1, rows, dim]`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    ropes = ("rope_theta", "rope_scaling", "rope_parameters")
    rotary: Any = LlamaRotaryEmbedding  # untyped
    return rotary(LlamaConfig(**{key: fields[key] for key in (*names, *ropes) if fields.get(key)}))
