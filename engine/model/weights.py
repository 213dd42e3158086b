"""The weights of a model, read by transformers with our attention in every layer.

It is imported where it is needed: that takes seconds, and plain Llamas do without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from engine.attention.interface import NAME
from engine.config import QuantizationName
from engine.errors import ModelError
from engine.model.proof import one_line
from engine.model.quantization import quantization_config


def read_weights(source: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """`arguments` of `from_pretrained`. Raises ModelError, also for weights that are missing or of
    another shape than the configuration says."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # its stubs know one return value
    try:
        model, report = auto.from_pretrained(
            source,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **arguments,
        )
    except Exception as error:  # transformers raises what it likes
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


def quantized(kind: QuantizationName, where: torch.device, name: str) -> dict[str, Any]:
    """Further arguments of `from_pretrained`. On CUDA weights are packed where they will lie.
    Raises ModelError."""
    config = quantization_config(kind, where, name)
    if config is None:
        return {}
    place = {"device_map": {"": str(where)}} if where.type == "cuda" else {}
    return {"quantization_config": config, **place}


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars, no advice: the operator reads our lines. Restored afterwards."""
    from transformers.utils import logging

    quiet: Any = logging  # untyped
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
