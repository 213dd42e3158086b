"""Find a model by name: a preset, the built-in pair, a config.json, its folder, or the hub's local
cache. Nothing is ever downloaded.

`models.csv` has the presets: the relevant fields of each published config.json; other fields take
transformers' defaults for the family. `qwen2.5` are the instruct models (32k positions without
YaRN), `deepseek-v3` is without its multi-token prediction.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from engine.config import BUILTIN, Role, model_folder
from engine.errors import ModelError, one_line
from engine.lab.plan.shape import ModelShape, model_shape

Fields = dict[str, Any]


def _fields(row: dict[str, str]) -> Fields:
    numbers = {key: json.loads(cell) for key, cell in row.items() if cell and key != "model_type"}
    return {"model_type": row["model_type"], **numbers}


with Path(__file__).with_name("models.csv").open(encoding="utf-8", newline="") as file:
    PRESETS = {row.pop("name"): _fields(row) for row in csv.DictReader(file)}


def find_model(name: str, role: Role) -> ModelShape:
    """Return the shape of the model named `name`. Raises ModelError."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        if name in PRESETS:
            return model_shape(AutoConfig.for_model(**PRESETS[name]), name)
        config = AutoConfig.from_pretrained(
            model_folder(name, role), local_files_only=True, trust_remote_code=False
        )
        return model_shape(config, f"{BUILTIN}-{role}" if name == BUILTIN else name)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"--{role} {name} is neither a preset, a config.json, a folder with"
            " one, or a model in the hub's local cache, and plan downloads nothing; presets: "
            + ", ".join([BUILTIN, *PRESETS])
        ) from error
    except Exception as error:  # transformers raises many types
        reason = one_line(error)
        raise ModelError(f"the config.json of --{role} {name} cannot be used: {reason}") from error
