"""Files of draft heads in their published form: a folder, or a hub repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ModelError
from engine.model.checkpoint import model_file, why_unreadable

CONFIG = "config.json"


def head_config(path: str, folder: Path | None, revision: str | None, name: str) -> dict[str, Any]:
    """Read config.json. `folder`: None for the hub repository `path`; `name`: first words of an
    error message. Raises ModelError."""
    file = model_file(path, folder, CONFIG, revision)
    if file is None:
        where = "on the hub, or it cannot be reached" if folder is None else "in their folder"
        raise ModelError(f"{name} have no {CONFIG} {where}")
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{name} have a {CONFIG} that is not valid JSON") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name} have a {CONFIG} that is not a JSON object")
    return config


def head_tensors(
    path: str, folder: Path | None, files: Seq[str], revision: str | None, name: str
) -> dict[str, Tensor]:  # fmt: skip
    """Load the tensors of the first of `files` that exists, on the CPU. Never runs code from the
    file. Raises ModelError."""
    each = (model_file(path, folder, file, revision) for file in files)
    file = next((found for found in each if found is not None), None)
    if file is None:
        raise ModelError(f"{name} have neither {' nor '.join(files)}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors, pickle, zip and torch have no common class
        raise ModelError(f"{name}: {file.name} cannot be read: {why_unreadable(error)}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(each, Tensor) for key, each in tensors.items()
    ):
        raise ModelError(f"{name}: {file.name} does not hold named tensors alone")
    for key, each in tensors.items():
        if each.layout is not torch.strided or each.is_nested or each.is_meta:
            raise ModelError(f"{name}: the tensor {key[:100]!r} of {file.name} is not dense")
    return tensors


def save_head(
    folder: Path, file: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write config.json, and to `file` the tensors, floats in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copies = dict[str, Tensor]()
    for key, each in tensors.items():
        kind = torch.bfloat16 if each.is_floating_point() else each.dtype
        copies[key] = each.detach().to("cpu", kind, copy=True)
    save_file(copies, folder / file)


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], name: str, why: str
) -> None:
    """Raises ModelError unless `tensors` are exactly those of `shapes`, all floating-point. `why`:
    what determines the shapes, for the message."""
    for key in sorted(shapes.keys() | tensors.keys()):
        if key not in tensors:
            raise ModelError(f"{name} lack the tensor {key!r}")
        if key not in shapes:
            raise ModelError(f"{name} have a tensor {key[:100]!r} that no head needs")
        given, expected = tuple(tensors[key].shape), shapes[key]
        if given != expected or not tensors[key].is_floating_point():
            kind = str(tensors[key].dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} do not fit the target: the tensor {key!r} is {kind} {list(given)}; {why}"
                f" need floats {list(expected)}"
            )
