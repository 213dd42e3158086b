"""Loading a causal language model of transformers with our attention in every layer.

Every returned model is verified: its paged forward agrees with transformers' own eager attention on
the same weights, or with that of `engine.model.llama`, which is identical to the bit. A model that
cannot be served raises a ModelError of one sentence with the model and the reason. Only hub names
(`org/name`) are downloaded; the built-in pair and folders never use the network.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import register
from engine.config import DraftQuantizationName, DTypeName, QuantizationName, Role, folder_of
from engine.cpu.decoder import Quantised, compiled_decoder, obstacle_to_bfloat16, quantised
from engine.cpu.fused import fused_decoder, packed_decoder
from engine.errors import ModelError
from engine.hub import refuse_unreachable
from engine.model.checkpoint import (
    length_limit,
    quietly,
    read_config,
    read_weights,
    refuse_unservable,
    stored_in,
)
from engine.model.llama import read_llama
from engine.model.loaded import Call, LoadedModel, ModuleCall
from engine.model.precision import is_quantized, named_dtype, pick_dtype, placement
from engine.model.proof import failure, forward_of, is_proven, probe_layers, prove, reference
from engine.model.rope import keep_frequencies
from engine.progress import report
from engine.sampling.triton_draws import has_kernels

logger = logging.getLogger(__name__)


def load_model(
    path: str,
    *,
    role: Role,
    revision: str | None = None,
    dtype: DTypeName = "auto",
    quantization: DraftQuantizationName = "none",
    device: str = "auto",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load and verify a model. `path`: a folder or a hub name; `dtype` auto: see
    `engine.model.precision`; `max_model_len` None: the model's own; `batch_invariant`: a row's bits
    must not depend on other rows. Raises ModelError."""
    kind: QuantizationName = "none" if quantization == "auto" else quantization
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    source = _Source(path, role, kind, pick_device(device), max_model_len, hub, batch_invariant)
    if kind != "none":
        return source.load("bfloat16" if dtype == "auto" else dtype, lossy=False)
    loaded = source.load(dtype, lossy=quantization == "auto")
    chosen = dtype == "auto" and loaded.device.type == "cpu" and loaded.dtype == torch.bfloat16
    if chosen and loaded.compiled is None:
        logger.info("%s runs in float32: compiled code does not run it in bfloat16", source.name)
        loaded = source.load("float32", lossy=False)
    if batch_invariant and not loaded.has_batch_invariant_rows:
        raise ModelError(
            f"{source.name} cannot be served with target.batch_invariant: on a CPU compiled code"
            " would have to run all of its rows, in bfloat16, and does not"
        )
    return loaded


@dataclass(frozen=True, slots=True)
class _Source:
    """The arguments of `load_model`; `hub` are arguments of `from_pretrained`."""

    path: str
    role: Role
    quantization: QuantizationName
    device: torch.device
    max_model_len: int | None
    hub: dict[str, Any]
    batch_invariant: bool

    @property
    def name(self) -> str:
        return f"the {self.role} model {self.path!r}"

    def load(self, dtype: DTypeName, *, lossy: bool) -> LoadedModel:
        """Load and verify. `lossy`: compiled code may hold weights in 8 bits. Raises ModelError."""
        name, where, hub, role = self.name, self.device, self.hub, self.role
        folder = folder_of(self.path, role)
        report(f"loading the {role}" if folder else f"fetching and loading the {role}")
        llama = read_llama(folder, role) if folder is not None and where.type == "cpu" else None
        if llama is not None:
            make = self._facts(llama.config, dtype, folder)
            llama = llama.to(make.keywords["dtype"]).eval().requires_grad_(False)
            int8 = self._quantised(llama)
            return _verified(make, llama, reference(llama, name), name, lossy=lossy, int8=int8)
        register()
        if folder is None:
            refuse_unreachable(self.path, hub["revision"])
        with quietly(f"loading the {role}"):
            config = read_config(str(folder or self.path), name, hub)
            refuse_unservable(config, name, has_remote_code=hub["trust_remote_code"])
            make = self._facts(config, dtype, folder)
            how = {"config": config, "dtype": make.keywords["dtype"], **hub}
            stored = stored_in(config)
            if stored:
                how |= placement(where)
            whole = f"{name} (stored in {stored})" if stored else name
            model = read_weights(str(folder or self.path), whole, how)
            model = model.eval().requires_grad_(False)
            keep_frequencies(model)
            int8 = self._quantised(model)
            model = model if is_quantized(model) else model.to(where)
            expected = reference(model, name)
        same = {"batch_invariant": self.batch_invariant and where.type == "cuda"}
        return _verified(make, model, expected, name, lossy=lossy, int8=int8, **same)

    def _quantised(self, model: Any) -> Quantised | None:
        """Return a CPU's weights for compiled code; on CUDA the model itself holds them."""
        if self.quantization == "none":
            return None
        if has_kernels(self.device):
            from engine.model.fused_layers import quantize_layers

            quantize_layers(model, self.device, self.quantization)
            return ()
        return quantised(model)

    def _obstacle(self, config: Any, dtype: torch.dtype) -> str | None:
        """Why our code does not run the model with quantized weights, or None."""
        if stored := stored_in(config):
            return f"it is stored in {stored} already: set its quantization to 'none'"
        if has_kernels(self.device):
            from engine.model.fused_layers import obstacle_to_quantization

            return obstacle_to_quantization(config, dtype)
        if self.device.type == "cuda":
            return "Triton is not installed or does not support the device"
        reason = obstacle_to_bfloat16(config, every_row=self.role == "target", int8=True)
        if self.quantization != "int8":
            return "it needs a CUDA device" + ("" if reason else "; on a CPU use int8")
        if reason or dtype == torch.bfloat16:
            return reason
        return "compiled code runs it in bfloat16: set its dtype to 'auto' or 'bfloat16'"

    def _facts(self, config: Any, dtype: DTypeName, folder: Path | None) -> partial[LoadedModel]:
        """Return LoadedModel with the facts known from the configuration. Raises ModelError."""
        role, where = self.role, self.device
        kind = named_dtype(dtype, where)
        if self.quantization != "none" and (reason := self._obstacle(config, kind)):
            raise _refusal(self, reason)
        limit = length_limit(config, self.max_model_len, self.name)
        if self.quantization == "none":
            kind = pick_dtype(dtype, where, config=config, folder=folder, role=role)
        return partial(
            LoadedModel, config=config, path=self.path, folder=folder, role=role, dtype=kind,
            device=where, max_model_len=limit, quantization=self.quantization,
        )  # fmt: skip


def _refusal(of: _Source | LoadedModel, reason: str) -> ModelError:
    """Return the error for a quantization that our own code does not run."""
    name = f"the {of.role} model {of.path!r}"
    return ModelError(f"{name} cannot be loaded as {of.quantization}: {reason}")


def _verified(
    make: partial[LoadedModel],
    model: Any,
    expected: Tensor,
    name: str,
    *,
    lossy: bool,
    int8: Quantised | None,
    batch_invariant: bool = False,
) -> LoadedModel:
    """Verify the model and choose its fastest call, or a batch-invariant one. Raises ModelError."""
    report(f"checking the {make.keywords['role']}")
    loaded = make(
        model=model,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        eos_ids=_eos_ids(model, name),
        layers=probe_layers(model, name),
        logits=ModuleCall(model),
    )
    prove(loaded, expected, name)
    if batch_invariant:
        return _batch_invariant(loaded, expected, name)
    return loaded if is_quantized(model) else _fastest(loaded, expected, lossy=lossy, int8=int8)


def _fastest(
    loaded: LoadedModel, expected: Tensor, *, lossy: bool, int8: Quantised | None
) -> LoadedModel:
    """Return the model with faster code of ours, if there is some that passes the same check."""
    model = loaded.model
    if has_kernels(loaded.device):
        found = _with_kernels(loaded, expected)
        if int8 is not None and found is loaded:
            raise _refusal(loaded, "its fused layers fail")
        return found
    loaded = _with_call(loaded, fused_decoder(model), expected)
    every_row = loaded.role == "target"  # its text must not depend on the batch
    for bits in (True, False) if lossy else (False,):
        compiled = compiled_decoder(
            model, positions=loaded.max_model_len, every_row=every_row, lossy=bits, int8=int8
        )
        if compiled is not None and is_proven(compiled, loaded.layers, expected, model):
            return replace(loaded, compiled=compiled)
    if int8 is not None:
        raise _refusal(loaded, "compiled code does not support a feature of this model")
    return _with_call(loaded, packed_decoder(model), expected)


def _with_kernels(loaded: LoadedModel, expected: Tensor) -> LoadedModel:
    from engine.model.fused_layers import FEW, fused_layers, make_batch_invariant

    found = loaded
    try:
        fused = fused_layers(loaded.model, loaded.layers)
        if fused is not None and loaded.dtype.itemsize == 2:
            make_batch_invariant(fused, FEW)
        found = _with_call(loaded, None if fused is None else ModuleCall(fused), expected)
    except Exception as error:  # a missing compiler, for example; the model runs without
        logger.warning("the %s model runs without fused layers: %s", loaded.role, failure(error))
    for module in loaded.model.modules():
        if found is loaded and type(module) is torch.nn.Linear:
            vars(module).pop("forward", None)  # fused layers share this module with the model
    return found


def _batch_invariant(loaded: LoadedModel, expected: Tensor, name: str) -> LoadedModel:
    """Return the model with batch-invariant layers and products. Raises ModelError."""
    refused = f"{name} cannot be served with target.batch_invariant"
    if not has_kernels(loaded.device) or is_quantized(loaded.model):
        raise ModelError(f"{refused}: it needs a GPU that Triton supports, and a plain checkpoint")
    from engine.model.fused_layers import fused_layers, make_batch_invariant

    fused = fused_layers(loaded.model, loaded.layers)
    if fused is None:
        raise ModelError(f"{refused}: there are no fused layers for its model type")
    if reason := make_batch_invariant(fused):
        raise ModelError(f"{refused}: {reason}")
    found = replace(loaded, logits=ModuleCall(fused), batch_invariant=True)
    if not is_proven(forward_of(found), loaded.layers, expected, loaded.model):
        raise ModelError(f"{refused}: its batch-invariant layers fail the logits check")
    logger.warning("%s is batch-invariant: slower in steps of over 64 rows", name)
    return found


def _with_call(loaded: LoadedModel, call: Call | None, expected: Tensor) -> LoadedModel:
    """Return the model with this call, if there is one and it passes the check."""
    if call is None:
        return loaded
    found = replace(loaded, logits=call)
    if is_proven(forward_of(found), loaded.layers, expected, loaded.model):
        return found
    logger.warning(
        "the %s model uses its own forward: fused layers fail the check of logits", loaded.role
    )
    return loaded


def pick_device(device: str) -> torch.device:
    """Return the device; `auto` is CUDA if available. Raises ModelError if CUDA is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device is {device!r}, but no CUDA device is available; use 'cpu'")
    return torch.device(device)


def _eos_ids(model: Any, name: str) -> tuple[int, ...]:
    """Return the EOS ids of the generation config, or else of the config; either may have an int or
    a list. Raises ModelError if they are no ints."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
            if not all(type(i) is int for i in ids):
                raise ModelError(f"{name} has an eos_token_id that is no token id: {eos!r:.100}")
            return ids
    return ()
