"""`python -m engine.lab.plan` is `foredraft plan`. Exit code 0; 2 for a mistake of the caller."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.arguments import exit_code, show
from engine.config import BUILTIN
from engine.errors import ConfigError
from engine.lab.files import write_json
from engine.lab.picture import check_results
from engine.lab.plan.arguments import build_parser
from engine.lab.plan.card import card, device_line, model_line
from engine.lab.plan.device import CUSTOM, DEVICES, choose_device
from engine.lab.plan.examples import examples
from engine.lab.plan.find_model import find_model
from engine.lab.plan.outcome import Settings, work_out
from engine.lab.plan.plots import draw
from engine.lab.plan.presets import PRESETS


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was asked for; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    parsed = parser.parse_args(given)
    if (parsed.list or parsed.examples) and len(given) > 1:
        parser.error("--list and --examples stand alone: nothing else is read beside them")
    return exit_code("foredraft plan", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; files are written on the way. Raises EngineError."""
    if parsed.list:
        return presets()
    if parsed.examples:
        return examples()
    models = [name for name in (parsed.target, parsed.draft) if name and os.path.exists(name)]
    reads = [*models, *(Path(name, "config.json") for name in models)]
    check_results(parsed.json, parsed.plot, reads=reads)
    outcome = work_out(settings(parsed))
    if parsed.plot is not None:
        draw(outcome, parsed.plot)
    if parsed.json is not None:
        write_json(parsed.json, outcome.as_json())
    return card(outcome)


def settings(parsed: argparse.Namespace) -> Settings:
    """What the options mean. Raises EngineError."""
    if parsed.target is None:
        raise ConfigError("say which model with --target (--list shows the presets), or --examples")
    device = parsed.device
    if device is None and None not in (parsed.bandwidth, parsed.tflops):
        device = CUSTOM
    if device is None:
        raise ConfigError(
            f"say where with --device ({', '.join(DEVICES)}), or with --bandwidth and --tflops"
        )
    return Settings(
        target=find_model(parsed.target, "target"),
        draft=None if parsed.draft is None else find_model(parsed.draft, "draft"),
        device=choose_device(
            device,
            bandwidth=parsed.bandwidth,
            tflops=parsed.tflops,
            memory=parsed.memory,
            count=parsed.devices,
        ),
        precisions=parsed.precision,
        draft_precision=parsed.draft_precision,
        kv=parsed.kv,
        launch=parsed.launch_overhead * 1e-6,
        acceptance=parsed.acceptance,
        batches=parsed.batch,
        contexts=parsed.context,
        k_max=parsed.k_max,
    )


def presets() -> str:
    """Models and devices that can be named."""
    models = [model_line(find_model(name, "target")) for name in PRESETS]
    models.append(f"{BUILTIN}: the built-in target as --target, the built-in draft as --draft")
    devices = [device_line(device) for device in DEVICES.values()]
    return "\n".join(["models", *models, "", "devices", *devices])


if __name__ == "__main__":
    sys.exit(main())
