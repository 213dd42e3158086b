"""Where a model's config.json is: a preset, the built-in pair, a file, a folder, the hub's cache.

Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from engine.config import BUILTIN, HUB_NAME, model_folder
from engine.errors import ModelError
from engine.lab.plan.presets import PRESETS
from engine.lab.plan.read_config import model_shape
from engine.lab.plan.shape import ModelShape

LARGEST_FILE = 2**22  # characters that are read: any file can be named, endless ones too


def find_model(name: str, role: Literal["target", "draft"]) -> ModelShape:
    """The shape of the model that `name` means. Raises ModelError."""
    if name in PRESETS:
        return model_shape(PRESETS[name], name)
    path = model_folder(name, role)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    # os.path, unlike Path, says False of a name that no file can have.
    file = Path(path) if os.path.exists(path) else _cached(name, role)
    if not file.is_file():  # whoever opens a pipe waits for a writer
        raise ModelError(f"--{role} {name}: {file} is no regular file")
    try:
        with file.open(encoding="utf-8") as opened:
            fields = json.loads(opened.read(LARGEST_FILE))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    return model_shape(fields, f"{BUILTIN}-{role}" if name == BUILTIN else name)


def _cached(name: str, role: str) -> Path:
    """The config.json of a hub model that was downloaded before."""
    hint = f"presets: {', '.join([BUILTIN, *PRESETS])}"
    if not HUB_NAME.fullmatch(name):
        raise ModelError(
            f"--{role} {name} is neither a preset nor a config.json, nor a folder with one; {hint}"
        )
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ModelError(
            f"--{role} {name} is no preset, no file or folder, and no model in the hub's local "
            f"cache, and plan downloads nothing: download its config.json first, or use {hint}"
        )
    return Path(found)
